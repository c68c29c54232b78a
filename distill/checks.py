"""What is refused before the first training: settings, data, models and a machine that do not fit each other."""

from __future__ import annotations

import shutil

import torch

from decode.errors import UserError
from distill import ranks
from distill.config.training import ModelSettings
from distill.data.batches import TokenDataset
from distill.data.context import StageContext
from distill.models.layers import kept_layers
from distill.models.loading import (
    check_attention,
    check_base,
    config_of,
    count_parameters,
    multiplies_bfloat16,
)
from distill.models.optimizers import check_optimizer
from distill.responses.server import check_servers
from distill.teacher.store import check_place


def check_inputs(context: StageContext) -> None:
    """Refuse before anything is trained what would be found hours later, or never.

    Raises:
        UserError: With the key, the value seen, and what was expected.
    """
    settings, corpus, trainer, device = context.settings, context.corpus, context.settings.trainer, context.device
    vocab, longest, processes = len(corpus.tokenizer), settings.data.max_length, ranks.process_count(trainer)
    models: dict[str, ModelSettings] = {"target": settings.target}
    if not settings.student.is_head:
        models["student"] = settings.student
    responses = settings.teacher.responses
    if trainer.accelerator in ("gpu", "cuda") and not torch.cuda.is_available():
        raise UserError(
            f"trainer.accelerator is {trainer.accelerator} and PyTorch finds no GPU: set it to auto or cpu, or install "
            "a PyTorch that was built for CUDA and check nvidia-smi"
        )
    check_place(settings.target, device)
    if responses.from_target and not (context.run.work / "responses").exists():
        check_servers(responses.server, started=settings.target.kind == "as_is")
    if settings.target.stacking is not None and settings.target.trained and processes > 1:
        raise UserError("target.stacking trains in one process: set trainer.devices to 1, or target.stacking to null")
    batches = {f"{name}.training": (of.training, len(corpus.train)) for name, of in models.items() if of.trained}
    for draft in settings.drafts:
        batches[f"drafts.{draft.name}.training"] = draft.training_of(settings.training), len(context.examples)
    parts = trainer.accumulate * processes
    for name, (training, examples) in batches.items():
        check_optimizer(training, device)
        if not parts <= training.batch_size <= examples:
            raise UserError(
                f"{name}.batch_size is {training.batch_size}, expected at least {parts} (trainer.accumulate times the "
                f"processes of trainer.devices and trainer.num_nodes) and at most {examples}, the training examples "
                "(data.train_examples, teacher.examples)"
            )
    if not (responses.from_target or settings.on_policy):  # whose lengths are not known yet
        longest = max(int(TokenDataset.of(split).lengths.max()) for split in (corpus.train, corpus.validation))
    for name, model in models.items():
        if model.kind == "lora":
            check_base(model.lora, trainer.precision, device)
        if model.kind == "cut":
            continue
        config = config_of(model, vocab)
        if trainer.attention != "auto":
            check_attention(config, trainer.attention)
        positions: int | None = getattr(config.get_text_config(), "max_position_embeddings", None)
        if positions is not None and positions < longest:
            key = f"{name}.architecture.positions" if model.kind == "scratch" else f"the context of {name}.model"
            raise UserError(
                f"{key} is {positions} tokens and the longest example may have {longest}: lower data.max_length to "
                f"{positions}, or raise it"
            )
    half = [f"trainer.precision {trainer.precision}"] * trainer.precision.startswith("bf16")
    half += [f"{name}.dtype bfloat16" for name, of in models.items() if not of.trained and of.dtype == "bfloat16"]
    if half and device.type == "cuda" and not torch.cuda.is_bf16_supported(including_emulation=False):
        raise UserError(
            f"{torch.cuda.get_device_name(device)} has no bfloat16, and {', '.join(half)} asks for it: set "
            "trainer.precision to 16-mixed or 32-true, and a frozen target's dtype to float16 or float32"
        )
    half += ["teacher.responses.dtype bfloat16"] * (responses.dtype == "bfloat16")
    half += ["teacher.signal_autocast"] * (settings.teacher.signal_autocast is True)
    if half and device.type == "cpu" and not multiplies_bfloat16(device):
        context.line(
            f"this processor has no instructions for bfloat16, in which it is several times slower than in float32: "
            f"{', '.join(half)}. Set these to auto, a dtype to float32"
        )
    if settings.student.kind == "cut":
        kept_layers(settings.student.layers, config_of(settings.target, vocab).get_text_config().num_hidden_layers)
    elif not settings.student.is_head:
        target, student = (count_parameters(model, vocab) for model in models.values())
        if student >= target:
            raise UserError(
                f"the draft has {student:,} parameters and the target {target:,}: a draft has to be smaller, or there "
                "is nothing to gain. Make student.architecture smaller, or choose a smaller student.model"
            )
    _check_disk(context)


def _check_disk(context: StageContext) -> None:
    """Refuse a signal that the disk has no room for, where the label tokens are those of the data."""
    settings, teacher, student = context.settings, context.settings.teacher, context.settings.student
    folder = context.run.work / "signals"
    known = context.corpus.answered and not teacher.responses.from_target and not folder.exists()
    if not known or teacher.signal in ("auto", "online"):
        return
    config = config_of(settings.target, len(context.corpus.tokenizer)).get_text_config()
    hidden = config.hidden_size * (2 if settings.target.dtype == "bfloat16" else 4)
    a_label = {"hidden": hidden, "topk": 8 * teacher.signal_k, "log_probs": 4 * config.vocab_size}[teacher.signal]
    of_block = len(student.block.target_layers) or max(3, student.block.layers)
    states = of_block if student.is_block else {"eagle": 1, "eagle3": 3, "mtp": 1}.get(student.kind, 0)
    a_token = hidden * states
    if student.kind in ("eagle", "mtp") and teacher.signal == "hidden":
        a_label = 0  # the states are what logits are made of
    size = sum(a_label * rows.label_count + a_token * len(rows.ids) for rows in (context.examples, context.validation))
    place = next(path for path in (folder, *folder.parents) if path.exists())
    if size > (free := shutil.disk_usage(place).free):
        raise UserError(
            f"the target's signal ({teacher.signal}) will take {size / 1e9:.2f} GB, and {free / 1e9:.2f} GB are free "
            f"in {place}: set teacher.signal to auto, use fewer teacher.examples, or another output_dir"
        )
