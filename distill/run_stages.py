"""The stages of a run in order: the target and the student are prepared, then each draft is distilled."""

from __future__ import annotations

import time
from collections.abc import Collection
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from transformers import AutoConfig, PreTrainedModel, PreTrainedTokenizerBase

from decode.errors import UserError, read_json
from decode.models.block_head import BlockHead, block_config, mask_token
from decode.models.head_files import save_head
from decode.models.heads import DraftHead, FeatureHead, head_config, output_head
from decode.models.loading import DTYPES, check_tokenizers, gguf_file, load_model, load_tokenizer, stop_ids
from decode.models.mtp import MTP, load_mtp
from decode.models.wrapped import adapter_base
from decode.models.writing import write_texts
from decode.progress import duration, working
from distill import ranks
from distill.checks import check_inputs
from distill.config.drafts import DraftSettings
from distill.config.training import ModelSettings, StudentSettings, TargetSettings, TrainerSettings
from distill.data.batches import TokenDataset, keeps_apart
from distill.data.context import StageContext
from distill.data.loader import DistillDataModule, Schedule, TrainLoader
from distill.files import remove, save_tokenizer
from distill.losses.objective import objective_of
from distill.models.layers import LayerSkip, ProgressiveStacking, cut, start_from_target
from distill.models.lm_head import LMHead, check_head
from distill.models.loading import Adapter, count_parameters, load_or_build, ready_to_save, source_folder
from distill.modules import BlockModule, CausalLMModule, DistillModule, HeadModule, TrainingModule
from distill.responses.on_policy import OnPolicy, Writer, head_texts
from distill.responses.texts import answered_by_original, answered_by_target, fixed_texts
from distill.stages import ACCOUNT, StageRecord, stage_fingerprints
from distill.teacher.blocks import block_outcomes, temperatures
from distill.teacher.store import prepare
from distill.tracking import for_stage
from distill.trainer import fit

ONE_ROW = 1 << 30
"""Tokens of a row that every batch fits into."""


REST = 60_000
"""The part of a training step's time that does not grow with the model, as a number of parameters."""


@dataclass
class StageResult:
    """A finished stage: a model to be saved with its tokenizer, or a folder to be linked to."""

    record: StageRecord
    model: PreTrainedModel | DraftHead | None = None
    tokenizer: PreTrainedTokenizerBase | None = None
    source: Path | None = None

    def save(self, folder: Path) -> None:
        """Write config.json, model.safetensors and the tokenizer, or the link."""
        if self.source is not None:
            folder.symlink_to(self.source.resolve(), target_is_directory=True)
            return
        assert self.model is not None
        assert self.tokenizer is not None
        if isinstance(self.model, DraftHead):
            folder.mkdir(parents=True)
            save_head(self.model, folder)
        else:
            self.model.save_pretrained(folder)
        save_tokenizer(self.tokenizer, folder)


def run_stages(
    context: StageContext, only: Collection[str] | None = None, *, check: bool = True, take_over: bool = True
) -> list[str]:
    """Run the stages that are not up to date.

    Args:
        context: Settings, data and folder.
        only: Stages to run. None: all.
        check: Check data and models before the first training, unless the target alone is wanted.
        take_over: Take stages that another run made from the same inputs.

    Returns:
        The names of the stages that were made.
    """
    settings, run, console, made = context.settings, context.run, context.console, list[str]()
    for stage, (key, made_from) in stage_fingerprints(settings).items():
        if only is not None and stage not in only:
            continue
        if stage in ("target", "initial"):
            title = f"target ({settings.target.kind})" if stage == "target" else f"student ({settings.student.kind})"
        else:
            draft = settings.draft(stage)
            by = f", the {draft.k:.0%} of tokens with the largest dL against {draft.reference}" if draft.selects else ""
            title = f"draft {stage}: {draft.divergence}{by}"
        console.print(f"[bold]{title}[/bold] ({progress(context, stage)})", highlight=False, soft_wrap=True)
        if run.record(stage, key) is not None:
            context.line(f"up to date: {run.path(stage)}")
            if ranks.is_first():
                remove(run.work / f"checkpoints-{stage}")  # a kill may have left them
            continue
        if read_json(run.work / f"{stage}.json").get("fingerprint") == key:
            context.line(f"{run.path(stage)} is not as it was written, and is made again")
        if take_over and (source := run.take_over(stage, key)) is not None:
            context.line(f"taken from {source}, made from the same inputs")
            continue
        if check and not made and only != ("target",):
            with working(console, "checking data and models", bars=False):
                check_inputs(context)
        started = time.monotonic()
        with working(console, title, bars=False):
            if stage == "initial" and settings.student.is_head:
                result = untrained_head(context, key)
            elif stage in ("target", "initial"):
                result = language_model(context, stage, key)
            else:
                result = distil(context, draft, key)
            result.record.made_from = made_from
            run.put(stage, result.record, result.save)
        made.append(stage)
        context.line(f"{run.path(stage)} [dim]{time.monotonic() - started:.1f} s[/dim]")
    return made


def progress(context: StageContext, stage: str | None = None) -> str:
    """Return the number of a stage, the time since the run began, and how long the remaining trainings will take.

    The seconds of finished trainings tell those of the others, whose work is their examples times their parameters. The
    time of the measurement, the last stage, does not follow from these.

    Args:
        context: Settings, data and folder.
        stage: The stage that begins. None: the measurement.
    """
    settings, stages = context.settings, stage_fingerprints(context.settings)
    number = len(stages) if stage is None else list(stages).index(stage)
    said = f"stage {number + 1} of {len(stages) + 1}"
    if number == 0:
        return said
    seconds = done = left = size = 0.0
    for name, (key, _) in stages.items():
        record = read_json(context.run.work / f"{name}.json")
        finished = record.get("fingerprint") == key
        if name in ("target", "initial"):
            model: ModelSettings = settings.target if name == "target" else settings.student
            if finished:
                size = record["parameters"]
            elif model.trained and model.kind != "cut":
                size = count_parameters(model, len(context.corpus.tokenizer))
            if not model.trained:
                continue
            training, rows = model.training, context.corpus.train
        else:
            training, rows = settings.draft(name).training_of(settings.training), context.examples
        work = training.steps_for(len(rows)) * training.batch_size * (size + REST)
        if finished:
            seconds, done = seconds + record["seconds"], done + work
        else:
            left += work
    said += f"; {duration(time.monotonic() - context.started)} so far"
    return said + (f", about {duration(left * seconds / done)} of training left" if left and seconds else "")


# -- the target and the student ---------------------------------------------------------------------------------------


def language_model(context: StageContext, stage: str, key: str) -> StageResult:
    """Return the target or the student: taken as it is, or trained on next tokens."""
    full, tokenizer = context.settings, context.corpus.tokenizer
    settings: ModelSettings = full.target if stage == "target" else full.student
    own = stage == "target" and full.data.tokenizer is None  # the examples' tokenizer is the target's
    if settings.model is not None and not own:  # its tokenizer has to mean the same by every id
        check_tokenizers(tokenizer, load_tokenizer(settings.model, trust_remote_code=settings.trust_remote_code))
    if settings.kind == "as_is":
        assert settings.model is not None
        round_to = settings.round_to if isinstance(settings, TargetSettings) else None
        if not (gguf_file(settings.model) or adapter_base(settings.model) or round_to):
            record = StageRecord(key, parameters=count_parameters(settings, len(tokenizer)))
            return StageResult(record, source=source_folder(settings.model))
        trust = settings.trust_remote_code
        model = load_model(settings.model, device="cpu", dtype=settings.dtype, trust_remote_code=trust)
        if round_to is not None:
            model = model.to(DTYPES[round_to])
        record = StageRecord(key, parameters=model.num_parameters())
        context.line(f"{type(model).__name__}, {record.parameters:,} parameters")
        return StageResult(record, ready_to_save(model, tokenizer), tokenizer)
    offset = ("target", "initial").index(stage)
    if isinstance(settings, StudentSettings) and settings.kind == "cut":
        model = cut(context.load_target("float32", "cpu"), settings.layers)
    else:  # a draft with as many ids as the target's embedding can be served without padding
        vocab = len(tokenizer)
        if stage != "target":
            trust = full.target.trust_remote_code
            config = AutoConfig.from_pretrained(context.run.target, trust_remote_code=trust)
            vocab = int(config.get_text_config().vocab_size)
        model = load_or_build(settings, tokenizer, vocab, full.seed + offset)
    record = StageRecord(key, parameters=model.num_parameters())
    check_head(model.train(), LMHead(model))
    context.line(f"{type(model).__name__}, {record.parameters:,} parameters")
    if not settings.trained:
        return StageResult(record, ready_to_save(model, tokenizer), tokenizer)
    rows, validation = TokenDataset.of(context.corpus.train), context.validation
    if isinstance(settings, TargetSettings) and settings.layerskip.own_answers:
        rows, validation = answered_by_original(context, model.to(context.device))
    elif not context.corpus.answered:
        rows, validation = answered_by_target(context)
    trainer, adapter = full.trainer, None
    if trainer.attention == "auto" and "bf16" in trainer.precision and context.device.type == "cpu":
        trainer = replace(trainer, attention="eager")  # the fused one's gradient takes several times as long there
    if settings.kind == "lora":
        assert settings.model is not None
        trust = settings.trust_remote_code
        load = partial(load_model, settings.model, device=context.device, dtype="float32", trust_remote_code=trust)
        adapter = Adapter(model, settings.lora, full.seed, trainer.precision, context.device, load)
        model = adapter.model
    steps = settings.training.steps_for(len(rows))
    stacking = layerskip = None
    if isinstance(settings, TargetSettings):
        if settings.stacking is not None:  # from scratch
            stacking = ProgressiveStacking(model, settings.stacking, steps)
        if settings.layerskip.enabled:
            layerskip = LayerSkip(model, settings.layerskip, steps, scratch=settings.kind == "scratch")
    module = CausalLMModule(model, settings.training, steps, seed=full.seed, layerskip=layerskip, stacking=stacking)
    of = settings.training
    schedule = Schedule(rows.lengths, of.batch_size, of.length_bucket, full.seed * 10 + offset)
    record.history, record.seconds = _fit(context, stage, key, module, rows, validation, schedule, trainer)
    if layerskip is not None:
        layerskip.remove()
    model = module.model if adapter is None else adapter.merged()
    return StageResult(record, ready_to_save(model, tokenizer), tokenizer)


def untrained_head(context: StageContext, key: str) -> StageResult:
    """Return a head for the target, with its vocabulary; all but EAGLE-1 start from the target's weights or layers."""
    settings = context.settings.student
    target = context.load_target("float32", "cpu")
    head = new_head(target, context.corpus.tokenizer, settings, context.settings.seed)
    config = head.config
    if head.reduced:
        responses = context.settings.teacher.responses
        if responses.from_target and not responses.server.answers:
            rows, _ = answered_by_target(context)  # in the target's own place and number format
        else:
            rows, _, _ = fixed_texts(context, target, stop_ids(target, context.corpus.tokenizer))
        ids, share = frequent(rows, int(config.draft_vocab_size), int(config.vocab_size))
        head.set_vocabulary(ids)
        context.line(f"{len(ids):,} tokens drafted, {share:.1%} of the training labels")
    if settings.version not in (1, MTP):
        left = start_from_target(head, target)
        context.line("starts from the target's last layer" + (f", but for {', '.join(left)}" if left else ""))
    parameters = sum(p.numel() for p in head.parameters())
    context.line(f"{type(head).__name__}, {parameters:,} parameters")
    if parameters >= target.num_parameters() and settings.version != MTP:
        raise UserError(
            f"the head has {parameters:,} parameters and the target {target.num_parameters():,}: a draft has to be "
            "smaller; lower student.draft_vocab"
        )
    return StageResult(StageRecord(key, parameters=parameters), head, context.corpus.tokenizer)


def new_head(
    target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, settings: StudentSettings, seed: int
) -> DraftHead:
    """Return a head with random weights that depend on the seed alone, or the target's own next-token layers.

    Raises:
        UserError: The states between the target's layers, or its output head, are not what such heads read.
    """
    config, block, version = target.config.get_text_config(), settings.block, settings.version
    if version == MTP:
        return load_mtp(target)
    with torch.no_grad():
        ids = torch.zeros(1, 2, dtype=torch.long, device=target.device)
        found = target.base_model(input_ids=ids, use_cache=False, output_hidden_states=True)
    between = found.hidden_states[0].shape
    if between != found.last_hidden_state.shape:
        raise UserError(
            f"{type(target).__name__} keeps several states of a token between its layers ({list(between)}), and heads "
            "read one: train a draft model (student.kind scratch, finetune, lora or cut)"
        )
    if version == 1:
        output_head(target)
    if not isinstance(version, str):
        assert version is not None
        shape = head_config(config, version, draft_vocab=settings.draft_vocab)
    else:
        spark, rows = version == "dspark", target.get_input_embeddings().num_embeddings
        shape = block_config(
            config,
            version,
            layers=block.layers,
            block=block.size,
            mask_id=mask_token(tokenizer, rows, block.mask_token),
            target_layers=block.target_layers,
            draft_vocab=settings.draft_vocab,
            from_anchor=block.from_anchor,
            markov_rank=(64 if spark else 0) if block.markov_rank is None else block.markov_rank,
            markov_kind=block.markov,
            confidence=spark if block.confidence is None else block.confidence,
        )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return BlockHead(shape) if isinstance(version, str) else FeatureHead(shape)


def frequent(rows: TokenDataset, count: int, vocab: int) -> tuple[torch.Tensor, float]:
    """Return the most frequent label tokens (FR-Spec, arXiv 2502.14856), ascending, and their share of all labels.

    Ties are broken by the ids, as is the order of tokens that never occur.
    """
    counts = np.bincount(rows.labels[rows.labels >= 0], minlength=vocab)
    ids = np.sort(np.argsort(-counts, kind="stable")[:count])
    return torch.from_numpy(ids), float(counts[ids].sum() / max(1, counts.sum()))


# -- drafts -----------------------------------------------------------------------------------------------------------


def distil(context: StageContext, draft: DraftSettings, key: str) -> StageResult:
    """Return a draft that starts from the student: by DistillSpec, or with a reference by AdaSPEC."""
    started = time.monotonic()
    full, run = context.settings, context.run
    training = draft.training_of(full.training)
    steps = training.steps_for(len(context.examples))
    seed = full.seed if draft.seed is None else draft.seed
    objective = objective_of(draft, steps)
    module: DistillModule
    if full.student.is_head:
        head = cast(FeatureHead, context.load_head(run.path("initial")).train())
        data = prepare(context, objective, draft.on_policy, head=head, selector=draft.reference)
        given: dict[str, Any] = {"target": data.teacher, "objective": objective, "seed": seed}
        if isinstance(head, BlockHead):
            module = BlockModule(head, training, steps, anchors=full.student.block.anchors, **given)
        else:
            module = HeadModule(head, training, steps, settings=full.student, **given)
        parameters = sum(p.numel() for p in head.parameters())
    else:
        trust = full.student.trust_remote_code
        model = load_model(run.path("initial"), device="cpu", dtype="float32", trust_remote_code=trust).train()
        check_head(model, LMHead(model))
        parameters = model.num_parameters()
        data = prepare(context, objective, draft.on_policy, selector=draft.reference)
        context.line(f"{type(model).__name__}, {parameters:,} parameters")
        module = DistillModule(model, training, steps, target=data.teacher, objective=objective, seed=seed)
    schedule, own = Schedule(data.train.lengths, training.batch_size, training.length_bucket, seed * 10 + 2), None
    if draft.on_policy:
        writer: Writer = partial(write_texts, module.model)
        if full.student.is_head:
            writer = partial(head_texts, module.model, context.load_target("float32"), full.student.steps)
        sampling, limit = full.teacher.responses, full.data.max_length
        options = schedule, steps, sampling, draft.on_policy, seed, limit, data.ends, data.add_signals
        own = OnPolicy(writer, data.train, *options)
    prepared = time.monotonic() - started
    history, seconds = _fit(context, draft.name, key, module, data.train, data.validation, schedule, full.trainer, own)
    steps = int(history[-1]["step"])  # a callback may have ended the training early
    if own is None:
        tokens = sum(data.train.labels_of(schedule.batch(step)) for step in range(steps))
    else:
        tokens = own.label_tokens
    used = together = tokens
    if draft.selects:
        assert draft.reference is not None
        used, together = module.selected, tokens + run.draft_record(draft.reference).account["teacher_tokens"]
    account = dict(zip(ACCOUNT, (steps, steps * training.batch_size, tokens, used, together), strict=True))
    record = StageRecord(key, parameters=parameters, seconds=prepared + seconds, account=account, history=history)
    tokenizer = context.corpus.tokenizer
    if isinstance(module.model, BlockHead) and module.model.confidence_head is not None:
        block = module.model.eval()
        found = temperatures(*block_outcomes(block, data.teacher, data.validation, next(block.parameters()).device))
        block.temperatures = block.config.confidence_temperatures = found
        context.line(f"confidence calibrated by temperatures {', '.join(f'{t:.2f}' for t in found)}")
    trained = module.model.eval().cpu() if full.student.is_head else ready_to_save(module.model, tokenizer)
    return StageResult(record, trained, tokenizer)


def _fit(
    context: StageContext,
    stage: str,
    key: str,
    module: TrainingModule,
    train: TokenDataset,
    validation: TokenDataset,
    schedule: Schedule,
    trainer: TrainerSettings,
    own: OnPolicy | None = None,
) -> tuple[list[dict[str, float]], float]:
    """Train; return the learning curve and the seconds, those before an interruption included."""
    selection = module.objective.selection if isinstance(module, DistillModule) else None
    loader = TrainLoader(
        train,
        schedule,
        module.steps,
        texts=own,
        look_ahead=selection is not None and selection.scope == "global",  # all tokens of a step are needed at once
        row_length=_row_length(context, module),
        workers=context.settings.data.loader_workers,
    )
    history, seconds = fit(
        module,
        DistillDataModule(loader, validation),
        trainer,
        context.run.checkpoints(stage, key),
        name=stage,
        logger=for_stage(context.logger, stage),
        console=context.console,
    )
    seen = loader.seen
    if seen.batches == module.steps * trainer.accumulate:  # not continued from a checkpoint
        context.seen[stage] = seen
    context.line(f"{seen.tokens:,} tokens read, {seen.speed:,.0f} a second, {seen.padding:.1%} padding")
    return history, seconds


def _row_length(context: StageContext, module: TrainingModule) -> int | None:
    """Return the tokens of the rows that examples are packed into; None, with a printed reason, if not packed."""
    wanted = context.settings.trainer.packing
    if wanted is None:
        return None
    models: list[Any] = [module.model, getattr(getattr(module, "target", None), "model", None)]
    if isinstance(module.model, DraftHead):
        reason = "heads read one text a row"
    elif isinstance(module, CausalLMModule) and module.layerskip is not None:
        reason = "LayerSkip drops layers of whole rows"
    elif not all(model is None or keeps_apart(model) for model in models):
        reason = f"the attention of {type(module.model).__name__} does not keep the examples of a row apart"
    else:
        return ONE_ROW if context.settings.trainer.attention.startswith("flash") else wanted
    context.line(f"not packed: {reason}; batches are of similar lengths instead")
    return None
