"""What is refused before the first step: settings, data and models that do not fit each other, or the machine."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from decode.errors import UserError
from distill import ranks
from distill.config.drafts import Iso
from distill.config.training import ModelSettings, TrainingSettings
from distill.data.batches import Schedule, TokenDataset
from distill.data.context import StageContext
from distill.files import Account
from distill.models.layers import kept_layers
from distill.models.loading import (
    check_attention,
    config_of,
    count_layers,
    count_parameters,
    max_positions,
    multiplies_bfloat16,
)
from distill.models.lora import check_base
from distill.models.optimizers import check_optimizer
from distill.responses.server import check_servers
from distill.teacher.store import check_place


@dataclass(frozen=True)
class Plan:
    """Optimiser steps and examples per step of a training."""

    steps: int
    batch_size: int


def plan_reference(training: TrainingSettings, examples: int) -> Plan:
    """Steps and batch of a training on so many examples."""
    steps = training.steps
    if steps is None:
        assert training.epochs is not None
        steps = max(1, round(training.epochs * examples / training.batch_size))
    return Plan(steps, training.batch_size)


def plan_draft(reference: Plan, k: float, iso: Iso) -> Plan:
    """AdaSPEC's steps and batch relative to the reference's.

    - ``steps``: S steps of B/k examples. The same number of selected tokens a step, but 1/k times the examples and
      teacher tokens. The official scripts do this (batch 40 for 16 at k = 0.4, 7.5 epochs for 3).
    - ``epochs``: S steps of B examples. The same passes over the data, steps and teacher tokens; k times the selected
      tokens a step.
    - ``teacher_tokens``: k·S steps of B/k examples. The same data and teacher tokens, the same number of selected
      tokens a step, fewer steps.
    """
    if iso == "epochs":
        return reference
    batch_size = max(1, round(reference.batch_size / k))
    if iso == "steps":
        return Plan(reference.steps, batch_size)
    return Plan(max(1, round(reference.steps * reference.batch_size / batch_size)), batch_size)


def label_tokens(plan: Plan, rows: TokenDataset, schedule: Schedule) -> int:
    """Label tokens of a training whose examples are known beforehand."""
    return sum(rows.labels_of(schedule.batch(step)) for step in range(plan.steps))


def account(plan: Plan, tokens: int, selected: int | None = None, reference: Account | None = None) -> Account:
    """The account of a finished training.

    Args:
        plan: Its steps and batch.
        tokens: Its label tokens.
        selected: Tokens selected in all; None: every label token.
        reference: Account of the reference that the selection needed.
    """
    return Account(
        optimiser_steps=plan.steps,
        examples=plan.steps * plan.batch_size,
        teacher_tokens=tokens,
        selected_tokens=tokens if selected is None else selected,
        cumulative_teacher_tokens=tokens + (reference.teacher_tokens if reference else 0),
    )


def check_inputs(context: StageContext) -> None:
    """Refuses before anything is trained what would be found hours later, or never.

    Raises:
        UserError: a batch larger than the data, positions too few for the examples, or a draft that is not smaller
            than its target; with the key and both values.
    """
    settings, corpus = context.settings, context.corpus
    models = {"target": settings.target, "initial": settings.initial}
    if settings.eagle.enabled:
        del models["initial"]
    check_machine(context, models)
    _check_batches(context, models)
    written = settings.reference.responses.from_target or settings.reference.responses.from_draft
    for name, model in models.items():
        positions = None if model.kind == "cut" else max_positions(model, len(corpus.tokenizer))
        if positions is None or positions >= settings.data.max_length:
            continue
        splits = (TokenDataset.of(split) for split in (corpus.train, corpus.validation))
        longest = settings.data.max_length if written else max(int(split.lengths.max()) for split in splits)
        if positions < longest:
            key = f"{name}.architecture.positions" if model.kind == "scratch" else f"the context of {name}.model"
            raise UserError(
                f"{key} is {positions} tokens and the longest example may have {longest}: lower data.max_length to "
                f"{positions}, or raise it"
            )
    if not settings.eagle.enabled:
        _check_sizes(context)


def _check_batches(context: StageContext, models: Mapping[str, ModelSettings]) -> None:
    settings, whole, distilled = context.settings, len(context.corpus.train), len(context.examples)
    trainer = settings.trainer
    parts = trainer.accumulate * ranks.process_count(trainer.accelerator, trainer.devices, trainer.num_nodes)
    batches = [(f"{n}.training.batch_size", m.training.batch_size, whole) for n, m in models.items() if m.trained]
    reference = plan_reference(settings.reference.training, distilled)
    batches.append(("reference.training.batch_size", reference.batch_size, distilled))
    for draft in (settings.draft, *settings.comparisons):
        size = plan_draft(reference, draft.k, draft.iso).batch_size
        batches.append((f"reference.training.batch_size over k, for {draft.name},", size, distilled))
    for name, size, examples in batches:
        if size > examples:
            raise UserError(
                f"{name} is {size} and there are {examples} training examples: lower it, or use more examples "
                "(data.train_examples, reference.examples)"
            )
        if size < parts:
            raise UserError(
                f"{name} is {size}, and a step is dealt out to {parts} batches ({trainer.accumulate} for each process "
                "of trainer.devices times trainer.num_nodes): raise it, or lower trainer.accumulate or trainer.devices"
            )


def _check_sizes(context: StageContext) -> None:
    settings, vocab = context.settings, len(context.corpus.tokenizer)
    if settings.initial.kind == "cut":
        kept_layers(settings.initial.layers, count_layers(settings.target, vocab))
        return
    target, draft = count_parameters(settings.target, vocab), count_parameters(settings.initial, vocab)
    if draft >= target:
        raise UserError(
            f"the draft has {draft:,} parameters and the target {target:,}: a draft has to be smaller, or there is "
            "nothing to gain. Make initial.architecture smaller, or choose a smaller initial.model"
        )


def check_machine(context: StageContext, models: Mapping[str, ModelSettings]) -> None:
    """Refuses what the machine lacks.

    Args:
        context: Settings, data and device.
        models: The language models of the run, by their sections.

    Raises:
        UserError: with the setting, what is missing, and what to choose instead.
    """
    settings, device = context.settings, context.device
    accelerator = settings.trainer.accelerator
    if accelerator in ("gpu", "cuda") and not torch.cuda.is_available():
        raise UserError(
            f"trainer.accelerator is {accelerator} and PyTorch finds no GPU: set it to auto or cpu, or install one "
            "that was built for CUDA and look at what nvidia-smi shows"
        )
    check_place(settings.target, context.device)
    for section in models.values():
        if section.kind == "lora":
            check_base(section.lora, section.precision or settings.trainer.precision, device)
    if settings.reference.lora is not None:
        check_base(settings.reference.lora, settings.trainer.precision, device)
    responses = settings.reference.responses
    if responses.from_target and not (context.run.work / "responses").exists():
        check_servers(responses.server, started=settings.target.kind == "as_is")
    trainer = settings.trainer
    stacked = settings.target.stacking is not None and settings.target.trained
    if stacked and ranks.process_count(trainer.accelerator, trainer.devices, trainer.num_nodes) > 1:
        raise UserError("target.stacking trains in one process: set trainer.devices to 1, or target.stacking to null")
    half = [
        f"{name} {value}"
        for name, value in {
            "trainer.precision": settings.trainer.precision,
            **{f"{name}.dtype": model.dtype for name, model in models.items() if not model.trained},
            **{f"{name}.precision": model.precision or "" for name, model in models.items() if model.trained},
        }.items()
        if value.startswith(("bf16", "bfloat16"))
    ]
    if half and device.type == "cuda" and not torch.cuda.is_bf16_supported(including_emulation=False):
        raise UserError(
            f"{torch.cuda.get_device_name(device)} has no bfloat16, and {', '.join(half)} asks for it: set "
            "trainer.precision to 16-mixed or 32-true, and a frozen target's dtype to float16 or float32"
        )
    responses, autocast = settings.reference.responses, settings.reference.signal_autocast
    half += ["reference.responses.dtype bfloat16"] * (responses.dtype == "bfloat16")
    half += ["reference.signal_autocast"] * (autocast is True)
    if half and device.type == "cpu" and not multiplies_bfloat16(device):
        context.line(
            f"this processor has no instructions for bfloat16, in which it is several times slower than in float32: "
            f"{', '.join(half)}. Set these to auto, a dtype to float32"
        )
    for model in models.values():
        if model.trained:
            check_optimizer(model.training, device)
        if model.kind != "cut" and settings.trainer.attention != "auto":
            check_attention(config_of(model, len(context.corpus.tokenizer)), settings.trainer.attention)
    check_optimizer(settings.reference.training, device)
    if settings.reference.signal in ("hidden", "topk", "log_probs"):
        _check_disk(context, models["target"])


def _check_disk(context: StageContext, target: ModelSettings) -> None:
    """Refuses a signal that the disk has no room for, where the label tokens are those of the data."""
    reference, corpus = context.settings.reference, context.corpus
    if reference.responses.from_target or not corpus.answered or reference.training.prompt_loss:
        return  # their number is not known yet; the signal is measured before it is made
    folder = context.run.work / "signals"
    if folder.exists():
        return  # written already, or being written
    config = config_of(target, len(corpus.tokenizer)).get_text_config()
    hidden = config.hidden_size * (2 if reference.signal_dtype == "bfloat16" else 4)
    a_token = {"hidden": hidden, "topk": 8 * reference.signal_k, "log_probs": 4 * config.vocab_size}[reference.signal]
    rows, eagle = (context.examples, context.validation), context.settings.eagle
    states = hidden * (1 if eagle.version == 1 else len(eagle.layers) or 3)  # of every token, those of prompts too
    if eagle.enabled and eagle.version == 1 and reference.signal == "hidden":
        a_token = 0  # the states are what logits are made of
    size = sum(a_token * split.label_count + eagle.enabled * states * len(split.ids) for split in rows)
    place = next(path for path in (folder, *folder.parents) if path.exists())
    if size > (free := shutil.disk_usage(place).free):
        raise UserError(
            f"the target's signal ({reference.signal}) will take {size / 1e9:.2f} GB, and {free / 1e9:.2f} GB are free "
            f"in {place}: set reference.signal to auto, use fewer reference.examples, or another output_dir"
        )
