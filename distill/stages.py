"""The stages of a run in order: the target and the student are prepared, then each draft is distilled."""

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from math import inf
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from datasets import Dataset
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from decode.files import read_json
from decode.models.heads.block_config import mask_token
from decode.models.heads.eagle import DraftHead
from decode.models.heads.files import save_head
from decode.models.huggingface import mask_of
from decode.models.open import DTYPES, check_tokenizers, load_config, load_model, load_tokenizer, stop_ids
from decode.models.sources import gguf_file, located
from decode.progress import working
from decode.writing import write_texts
from distill import ranks
from distill.checks import check_files, check_inputs
from distill.config import DraftSettings, TrainerSettings
from distill.config.models import ModelSettings, StudentSettings, TargetSettings
from distill.data.chat import Ids
from distill.data.dataset import FEATURES, Batch, DistillDataModule, Examples, Expect, Schedule, TrainingBatches
from distill.engine.check import AnswerCheck, NoSamples
from distill.files import fingerprint, link
from distill.fingerprints import stage_fingerprints
from distill.kept import Kept, Shapes, by_tokens
from distill.kinds.base import Draft, reference_losses
from distill.kinds.language_model import cut
from distill.kinds.start import frequent, start_from_head, start_from_target
from distill.losses.divergences import Divergence
from distill.networks.layerskip import LayerSkip
from distill.networks.lm_head import LMHead, check_head
from distill.networks.models import adapted, config_of, load_or_build, ready_to_save, weights_dtype
from distill.responses.on_policy import OnPolicy
from distill.responses.target import answered_texts, examples_of
from distill.results.tracking import for_stage
from distill.run import ACCOUNT, RECORD, Run, StageRecord
from distill.signal.engine import EngineStates, Packed, texts_of
from distill.signal.kept import TOKENS, keep_columns
from distill.signal.target import HIDDEN, INSIDE, TOPK, Signal, States, label_tokens, read_states
from distill.training.modules import CausalLMModule, DistillModule, TrainingModule
from distill.training.trainer import fit


@dataclass
class StageResult:
    """A finished stage: a model to be saved, or the folder of a model that is used as it is."""

    record: StageRecord
    model: PreTrainedModel | DraftHead | Path

    def save(self, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
        """Write config.json, model.safetensors and the tokenizer, or a link to the folder."""
        if isinstance(self.model, Path):
            link(folder, self.model.resolve())
            return
        if isinstance(self.model, DraftHead):
            save_head(self.model, folder)
        else:
            self.model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)


def run_stages(run: Run, only: Collection[str] | None = None, *, check: bool = True) -> list[str]:
    """Run the stages that are not up to date.

    Data and models are checked before the first training, and files alone where no more than the target is wanted.

    Returns:
        The names of the stages that were made.
    """
    created = list[str]()
    try:
        keys = stage_fingerprints(run.settings) if ranks.is_first() else {}  # which reads large files once
        for stage, key in ranks.exchange(keys)[0].items():
            if (only is None or stage in only) and not _up_to_date(run, stage, key):
                if check and not created:
                    with working(run.console, "checking data and models", bars=False):
                        check_files(run.settings.target) if only == ("target",) else check_inputs(run)
                _make(run, stage, key)
                created.append(stage)
        ranks.barrier()  # another process may still ask the engine
    except NoSamples as error:
        if error.kept:
            _forget_answers(run)
        raise
    finally:
        run.close()
    return created


def _forget_answers(run: Run) -> None:
    """Keep the target's answers, and what may have learned from them, where nothing finds them."""
    stages = ("initial", *run.trained)
    places = [run.work / "responses", *map(run.path, stages), *(run.work / f"checkpoints-{stage}" for stage in stages)]
    for old in filter(None, map(run.keep, places if ranks.is_first() else [])):
        (old / RECORD).unlink(missing_ok=True)


def _title(run: Run, stage: str) -> str:
    kinds = {"target": f"target ({run.settings.target.kind})", "initial": f"student ({run.settings.student.kind})"}
    return kinds.get(stage, f"draft {stage}")


def _up_to_date(run: Run, stage: str, key: str) -> bool:
    """Print the title of a stage, and whether it has to be made."""
    title = f"[bold]{_title(run, stage)}[/bold] ({run.progress(stage)})"
    run.console.print(title, highlight=False, soft_wrap=True)
    if ranks.is_first():
        run.bring(run.path(stage), lambda path: run.record(path.name, key) is not None)
    ranks.barrier()
    if run.record(stage, key) is not None:
        run.line(f"up to date: {run.path(stage)}")
        return True
    if before := read_json(run.note(run.path(stage))).get("fingerprint"):
        why = "is not as it was written" if before == key else "was made from other settings or files"
        run.line(f"{run.path(stage)} {why}, and is made again")
    return False


def _make(run: Run, stage: str, key: str) -> None:
    """Make a stage, and put its result in its place."""
    started = time.monotonic()
    with working(run.console, _title(run, stage), bars=False):
        if stage == "initial" and run.settings.student.draft.head:
            result = untrained_head(run, key)
        elif stage in ("target", "initial"):
            result = language_model(run, stage, key)
        else:
            result = distil(run, stage, key)
        run.put(stage, result.record, partial(result.save, run.tokenizer))
    run.line(f"{run.path(stage)} [dim]{time.monotonic() - started:.1f} s[/dim]")


# -- the target and the student ---------------------------------------------------------------------------------------


def language_model(run: Run, stage: str, key: str) -> StageResult:
    """Return the target or the student: taken as it is, or trained on next tokens."""
    full, tokenizer = run.settings, run.tokenizer
    settings: ModelSettings = full.target if stage == "target" else full.student
    gives_tokenizer = stage == "target" and full.data.tokenizer is None  # that of the examples
    trust, drafted = settings.trust_remote_code, None if stage == "target" else full.student.draft_vocab
    if settings.model is not None and not gives_tokenizer:  # its tokenizer has to mean the same by every id
        check_tokenizers(tokenizer, load_tokenizer(settings.model, trust_remote_code=trust))
    several, vocab = isinstance(settings, StudentSettings) and settings.steps > 1, len(tokenizer)
    if stage != "target":  # a draft with as many ids as the target's embedding can be served without padding
        vocab = load_config(run.target, trust_remote_code=full.target.trust_remote_code).vocab_size
    if settings.kind == "as_is":
        assert settings.model is not None
        round_to = settings.round_to if isinstance(settings, TargetSettings) else None
        if not (gguf_file(settings.model) or round_to or several or drafted):
            return StageResult(StageRecord(key), located(settings.model, weights=True))
        model = load_model(settings.model, device="cpu", dtype=settings.dtype, trust_remote_code=trust)
        model = model if round_to is None else model.to(DTYPES[round_to])
    elif isinstance(settings, StudentSettings) and settings.kind == "cut":
        model = cut(run.load_target("float32", "cpu"), settings.layers)
    else:
        model = load_or_build(settings, tokenizer, vocab, full.seed + int(stage != "target"))
    if several and mask_of(model) is None:
        model.config.pard_token = mask_token(tokenizer, min(model.get_input_embeddings().num_embeddings, vocab))
    if drafted:  # its output head keeps all rows, for engines
        vocab = min(len(model.get_output_embeddings().weight), vocab)
        model.config.draft_ids = frequent_ids(run, drafted, vocab).tolist()
    record = new_record(run, key, model)
    if not settings.trained:
        return StageResult(record, ready_to_save(model, tokenizer))
    return train_language_model(run, stage, settings, model, record)


def new_record(run: Run, key: str, model: torch.nn.Module) -> StageRecord:
    """Print how large a stage's model is, and return the stage's record."""
    parameters = sum(weight.numel() for weight in model.parameters())
    run.line(f"{type(model).__name__}, {parameters:,} parameters")
    return StageRecord(key, parameters=parameters)


def train_language_model(
    run: Run, stage: str, settings: ModelSettings, model: PreTrainedModel, record: StageRecord
) -> StageResult:
    """Return a model after its training on next tokens."""
    full, training = run.settings, settings.training
    recipe = settings.layerskip if isinstance(settings, TargetSettings) and settings.layerskip.enabled else None
    check_head(model.train(), LMHead(model))
    if recipe and settings.kind != "scratch" and full.teacher.responses.from_target:
        rows, validation, _ = answered_texts(run, model.to(run.device), original=True)
    elif run.corpus.answered:
        rows, validation = run.corpus.train, run.validation
    else:
        rows, validation, _ = texts_of_run(run)
    trainer = full.trainer
    if trainer.attention == "auto" and "bf16" in trainer.precision and run.device.type == "cpu":
        trainer = replace(trainer, attention="eager")  # the fused one's gradient takes several times as long there
    adapter = adapted(model, settings.lora, full.seed) if settings.kind == "lora" else None
    examples = Examples.of(rows, training.examples)
    steps = training.steps_for(len(examples))
    layerskip = LayerSkip(model, recipe, steps, scratch=settings.kind == "scratch") if recipe else None
    module = CausalLMModule(model, training, steps, seed=full.seed, layerskip=layerskip)
    seed = full.seed * 10 + int(stage != "target")
    schedule = Schedule(examples.lengths, training.batch_size, training.length_bucket, seed)
    batches = TrainingBatches(examples, schedule, steps, workers=full.data.loader_workers)
    _fit(run, stage, record, module, batches, Examples.of(validation), trainer)
    if layerskip is not None:
        layerskip.remove()
    model = module.model if adapter is None else adapter.merge_and_unload()
    return StageResult(record, ready_to_save(model, run.tokenizer))


def frequent_ids(run: Run, count: int, vocab: int) -> torch.Tensor:
    """Return so many of the first ``vocab`` ids, which the draft will draft."""
    ids, share = frequent(Examples.of(texts_of_run(run)[0]), count, vocab)
    run.line(f"{len(ids):,} tokens drafted, {share:.1%} of the training labels")
    return ids


def untrained_head(run: Run, key: str) -> StageResult:
    """Return a head for the target, with its vocabulary: from a given one, or the target's weights (not EAGLE-1)."""
    settings, target, seed = run.settings.student, run.target_parts(), run.settings.seed
    head: DraftHead
    if settings.model is not None:
        head, new = start_from_head(settings, target, run.captured_layers, seed)
        run.line(f"starts from the head in {settings.model}" + (f", with a new {', '.join(new)}" if new else ""))
        return StageResult(new_record(run, key, head), head)
    head = settings.draft.create(target, run.tokenizer, settings, seed)
    if head.reduced:
        head.set_vocabulary(frequent_ids(run, int(head.config.draft_vocab_size), int(head.config.vocab_size)))
    if settings.draft.from_target:
        left = start_from_target(head, target)
        run.line("starts from the target's last layer" + (f", but for {', '.join(left)}" if left else ""))
    return StageResult(new_record(run, key, head), head)


# -- drafts -----------------------------------------------------------------------------------------------------------


def open_draft(run: Run, path: Path, *, accepted_only: bool = False, dtype: str = "float32") -> Draft:
    """Return the draft in a folder, in training mode."""
    student = run.settings.student
    if student.draft.head:
        model: Any = run.load_head(path)
    else:
        model = load_model(path, device="cpu", dtype=dtype, trust_remote_code=student.trust_remote_code)
    opened: Draft = student.draft.draft(model.train(), student, accepted_only=accepted_only)
    return opened


@dataclass
class DistillData:
    """Examples with the columns of frozen models."""

    signal: Signal  # the target's distributions, and the features that a head reads
    train: Examples  # if the draft writes texts itself, without columns
    validation: Examples  # for comparing checkpoints
    complete: Callable[[Batch], Batch]  # computes the same columns of a batch with texts that were just written
    expect: Expect | None  # is told which batches will be trained on, where their states are asked for meanwhile


def texts_of_run(run: Run) -> tuple[Dataset, Dataset, str]:
    """Return what `answered_texts` does; an engine's states of its answers are kept as they come."""
    teacher = run.settings.teacher
    keeps = teacher.served and teacher.in_engine and teacher.engine.keep

    def arrivals(texts: str) -> Packed:
        signal, states = target_signal(run, None)
        return Packed(signal, states(), shards(run, texts, signal, run.settings.student.kind, signal.columns))

    @cache
    def first() -> tuple[AnswerCheck, Signal]:
        return run.answer_check(kept=False), target_signal(run, None)[0]

    def check(answers: Sequence[tuple[Ids, Ids]]) -> None:
        looks, signal = first()
        rows = examples_of(answers)
        for numbers in () if looks.told else by_tokens(rows.lengths, TOKENS):
            batch = rows.batch(numbers)
            looks.add(signal.all_ids, signal.source(batch)[0], label_tokens(batch), len(numbers))
        looks.judge()

    return answered_texts(run, arrivals=arrivals if keeps else None, check=check)


def target_signal(run: Run, draft: Any) -> tuple[Signal, Callable[[], EngineStates]]:
    """Return the target's signal for a draft (None: before it is made), and an engine's states.

    The target of this process, or the engine, is opened at the first batch of which states are asked for, but with
    ``teacher.signal`` online at once.
    """
    teacher, student, dtype = run.settings.teacher, run.settings.student, run.settings.target.dtype
    beside, layers = teacher.kept == "online" and not teacher.in_engine, run.captured_layers
    parts = run.frozen if beside else run.target_parts().to(DTYPES[dtype])

    @cache
    def opened() -> EngineStates:
        return EngineStates(run.states, parts, layers, run.device)

    def source(batch: Batch) -> States:
        return opened()(batch) if teacher.in_engine else read_states(run.frozen, layers, batch)

    named = student.model is not None and not student.draft.head
    vocab = int(config_of(student, 0).get_text_config().vocab_size) if named else None
    signal = Signal(
        parts, teacher.kept, draft, None if beside else source, layers=layers, vocab=vocab, k=teacher.signal_k,
        dtype=teacher.number_format(dtype),
    )  # fmt: skip
    signal.to(run.device)
    if teacher.served:  # in a training texts come again and again
        most = -(-len(run.examples) // ranks.world()) if signal.kind == "online" else inf
        signal.check = run.answer_check(kept=True, most=most)
    return signal, opened


def shards(run: Run, texts: str, signal: Signal, name: str, shapes: Shapes, *made_from: object) -> Kept:
    """Return where columns of texts with a fingerprint are kept."""
    teacher, attention = run.settings.teacher, run.settings.trainer.attention
    key = fingerprint(texts, attention, teacher.in_engine, teacher.arguments, signal.key, *made_from)
    folder = run.work / "signals" / f"{name}-{key[:16]}"
    for other in () if folder.exists() else folder.parent.glob(f"{name}-{'[0-9a-f]' * 16}"):
        run.line(f"{other} stays, of other settings or files")
    return Kept(shapes, folder)


def prepare(run: Run, draft: Draft, settings: DraftSettings) -> DistillData:
    """Return the target's signal, and examples with the columns that a distillation needs.

    The target leaves memory before the training where no text is written during it and ``teacher.signal`` is not
    online.
    """
    served, precision = run.settings.teacher.in_engine, run.settings.trainer.precision
    train_rows, validation_rows, texts = texts_of_run(run)
    limit = settings.training_of(run.settings.training).examples
    train, validation = Examples.of(train_rows, limit), Examples.of(validation_rows)
    learned, divergence = [] if settings.on_policy else [train], Divergence(settings.divergence)
    signal, _ = target_signal(run, draft.model)
    online, column = signal.kind == "online", None
    kept, expect = partial(shards, run, texts, signal), None
    if served:
        expect = lambda coming: run.states.expect(texts_of(coming))  # noqa: E731
    if settings.selects:
        name = cast(str, settings.reference)
        reference = open_draft(run, run.path(name), dtype=weights_dtype(precision))
        reference.model.to(run.device)
        column = reference_losses(reference, signal, divergence, precision)
    with working(run.console, f"the target's signal ({signal.kind})"):
        # of an engine whose states are not kept, those that are read again and again
        stored = [*(() if online else learned), *(() if online and not served else [validation])]
        if stored:
            keep_columns(kept(run.settings.student.kind, signal.columns), stored, signal.kept, expect)
        if stored and signal.ids is not None and INSIDE not in signal.columns:
            inside = kept("inside", {INSIDE: ((2,), "float32")}, signal.ids.tolist())
            keep_columns(inside, stored, signal.kept_inside, reads={HIDDEN if HIDDEN in signal.columns else FEATURES})
        if column is not None and learned:
            made_by = run.draft_record(name).fingerprint
            losses = kept(f"{name}-{settings.divergence}", column[0], made_by, divergence.key, precision)
            keep_columns(losses, learned, column[1], expect if online else None)

    if signal.check is not None:
        signal.check.judge()
    if settings.on_policy:
        signal.check = None  # what the draft writes is no sample of the target

    def complete(batch: Batch) -> Batch:
        batch = batch if online else batch | signal.kept(batch)
        return batch if column is None else batch | column[1](batch)

    if signal.kind == "topk":
        tail = mean_tail(validation)
        run.line(f"the stored {signal.k} probabilities leave out {tail:.2%} of the mass; α is off by at most that")
    if not settings.on_policy and (served or not online):
        run.release()  # no signal will be computed any more
    return DistillData(signal, train, validation, complete, expect if online else None)


def mean_tail(examples: Examples) -> float:
    """Return the mean probability that the kept top ids leave to all others; bounds the error of α."""
    inside = 0.0
    for number in range(len(examples)):
        log_p = np.ascontiguousarray(examples.values(TOPK, number)[:, 1]).view(np.float32)
        inside += float(np.exp(log_p).sum(dtype=np.float64))
    return max(0.0, 1 - inside / max(1, examples.label_count))


def distil(run: Run, name: str, key: str) -> StageResult:
    """Return a draft that starts from the student: by DistillSpec, or with a reference by AdaSPEC."""
    started, full, settings = time.monotonic(), run.settings, run.settings.drafts[name]
    training, seed = settings.training_of(full.training), [*settings.seeds, full.seed][0]
    draft = open_draft(run, run.path("initial"), accepted_only=settings.accepted_only)
    data, model = prepare(run, draft, settings), draft.model
    steps = training.steps_for(len(data.train))
    record = new_record(run, key, model)
    module = DistillModule(draft, data.signal, training, steps, settings=settings, seed=seed)
    schedule, texts = Schedule(data.train.lengths, training.batch_size, training.length_bucket, seed * 10 + 2), None
    if settings.on_policy:
        parts = run.target_parts()
        texts = OnPolicy(
            partial(write_texts, model), data.train, schedule, steps, full.teacher.responses, settings.on_policy, seed,
            full.data.max_length, stop_ids(parts, run.tokenizer), data.complete,
        )  # fmt: skip
    batches = TrainingBatches(data.train, schedule, steps, texts, full.data.loader_workers, data.expect, draft)
    record.seconds = time.monotonic() - started
    _fit(run, name, record, module, batches, data.validation, full.trainer)
    if data.signal.check is not None:
        data.signal.check.judge()
    steps = int(record.history[-1]["step"])  # a callback may have ended the training early
    read = (data.train.labels_of(schedule.batch(step)) for step in range(steps))
    used = together = tokens = sum(read) if texts is None else texts.label_tokens
    if settings.selects:
        reference = run.draft_record(cast(str, settings.reference)).account
        used, together = sum(ranks.exchange(module.selected)), tokens + reference["teacher_tokens"]
    counts = steps, steps * training.batch_size, tokens, used, together
    record.account = dict(zip(ACCOUNT, counts, strict=True))
    model = draft.model = module.model.eval()  # under FSDP not the one that was sharded
    return StageResult(record, model.cpu() if full.student.draft.head else ready_to_save(model, run.tokenizer))


def _fit(
    run: Run, stage: str, record: StageRecord, module: TrainingModule, batches: TrainingBatches, validation: Examples,
    trainer: TrainerSettings,
) -> None:  # fmt: skip
    """Train; the record gets the learning curve and the seconds, those before an interruption included."""
    data, work = DistillDataModule(batches, validation), run.checkpoints(stage, module.steps)
    logger = for_stage(run.logger, stage)
    record.history, seconds, read = fit(module, data, trainer, work, name=stage, logger=logger, console=run.console)
    record.seconds += seconds
    run.line(f"{read:,} tokens read, {read / max(seconds, 1e-9):,.0f} a second")
