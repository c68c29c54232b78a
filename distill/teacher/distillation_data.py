"""What a distillation trains on: examples by whoever wrote their responses, and what frozen models say of them."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Generic, TypeVar

from transformers import AutoConfig, PreTrainedModel

from decode.core.progress import working
from decode.models.loading.open_model import load_model, stop_ids
from distill.config.distillation import Signal
from distill.config.responses import ResponseSettings
from distill.core.file_fingerprints import files_state, fingerprint
from distill.data.batches.batch_schedule import Schedule
from distill.data.batches.token_dataset import TokenDataset
from distill.data.stage_context import StageContext
from distill.generation.answering_engine import answering_engine
from distill.generation.on_policy import OnPolicy, Writer
from distill.generation.openai_client import answered_by_server
from distill.generation.response_store import Answer, answered_by_all, answered_here, make_jobs, response_rows
from distill.losses.objective import Objective
from distill.models.attention import use_attention
from distill.models.lm_head import LMHead, check_head
from distill.models.precision import weights_dtype
from distill.teacher import hidden_state_store as signals
from distill.teacher.choose_signal import announced, choose_signal
from distill.teacher.target_distribution import TargetSignal, TargetSource
from distill.teacher.target_model import at_work, open_target

Target = TypeVar("Target")

SIGNAL, LOSSES, ANSWERS = "signal", "reference's losses", "answers"
"""What is timed of a preparation, see `StageContext.measured`."""


@dataclass
class DistillData(Generic[Target]):
    """Examples with the signals of frozen models."""

    target: Target  # The target's distribution for label rows
    train: TokenDataset  # Examples for training, with cached signals; for texts of the draft, their prompts alone
    validation: TokenDataset  # Examples for comparing checkpoints, with cached signals
    ends: set[int]  # The target's end-of-text tokens
    add_signals: Callable[[TokenDataset], None]  # Puts the same signals into rows that were written just now
    share: float = 0.0  # Of the examples whose responses the draft writes itself

    def on_policy(
        self, context: StageContext, write: Writer, schedule: Schedule, steps: int, seed: int
    ) -> OnPolicy | None:
        """The draft's own texts, which ``write`` writes, where some are wanted."""
        if not self.share:
            return None
        settings = replace(context.settings.reference.responses, source="mixed", share=self.share)
        limit = context.settings.data.max_length
        return OnPolicy(write, self.train, schedule, steps, settings, seed, limit, self.ends, self.add_signals)


def prepare(
    context: StageContext,
    objective: Objective,
    share: float = 0.0,
    draft_vocab: int | None = None,
    first: int | None = None,
) -> DistillData[TargetSource]:
    """The target as a source of logits, and examples with the cached values that the distillation needs.

    Args:
        context: settings, data and folder.
        objective: of the draft.
        share: of the examples whose responses the draft will write itself.
        draft_vocab: ids of the draft; None: those of the run's initial draft.
        first: examples that are wanted, the first ones; None: all.
    """
    folder = context.run.work / "signals"
    model = open_target(context)
    check_head(model, LMHead(model))
    ends = stop_ids(model, context.corpus.tokenizer)
    train, validation, key = fixed_texts(context, model, ends)
    train = train.part(0, min(first or len(train), len(train)))
    all_own = share == 1
    fixed = {"validation": validation} if all_own else {"validation": validation, "train": train}
    tokens = sum(rows.label_count for rows in fixed.values())

    def size_of(kind: Signal) -> int:
        return signals.signal_bytes(model, _signal(context, model, draft_vocab, kind), tokens)

    signal = _signal(context, model, draft_vocab, choose_signal(context, size_of, key))
    use_attention(model, context.settings.trainer.attention)
    if signal.kind != "online":
        model = at_work(context, model)
        seconds, made_from = partial(signals.seconds_of, model, list(fixed.values())), fingerprint(key, signal.key)
        with announced(context, signal.kind, "signal", made_from, size_of(signal.kind), tokens, seconds):
            for name, rows in fixed.items():
                path = folder / f"{signal.name}_{name}.npy"
                told, about = f"the target's signal ({signal.kind}), {name}", (key, name, len(rows), signal.key)
                with working(context.console, told), context.timed(f"{SIGNAL} {name}", len(rows.ids)):
                    rows.signals[signal.name] = signals.target_signal(model, signal, rows, path, fingerprint(*about))
        if signal.kind == "topk":
            tail = signals.mean_tail(validation.signals[signal.name])
            context.console.print(
                f"  the target's top {signal.k} ids leave {tail:.2%} to the others on average: alpha is off by at most "
                "that much",
                highlight=False,
            )
    target = TargetSource(model, signal, stays=context.settings.target.placed)
    reference, ranking, precision = None, objective.ranking, context.settings.trainer.precision
    if objective.selection is not None:
        record = context.run.record("reference")
        assert record is not None
        dtype = weights_dtype(precision)  # the draft's side of the loss differences is computed in it, too
        trust = context.settings.initial.trust_remote_code
        path = context.run.path("reference")
        reference = load_model(path, device=context.device, dtype=dtype, trust_remote_code=trust)
        use_attention(reference, context.settings.trainer.attention)
        other = [] if precision == "32-true" else [precision]
        if not all_own:
            file = folder / f"reference_{ranking.name}.npy"
            made_from = fingerprint(key, signal.key, record.fingerprint, vars(ranking), *other)
            with working(context.console, "the reference's losses"), context.timed(f"{LOSSES} train", len(train.ids)):
                train.signals["reference_loss"] = signals.reference_loss(
                    reference, target, train, file, made_from, ranking, precision=precision
                )

    if not share:  # the models leave memory here: nothing will be asked of them again
        return DistillData(target, train, validation, ends, _unchanged)

    def add_signals(rows: TokenDataset) -> None:
        if signal.kind != "online":
            rows.signals[signal.name] = signals.target_signal(model, signal, rows)
        if reference is not None:
            rows.signals["reference_loss"] = signals.reference_loss(
                reference, target, rows, divergence=ranking, precision=precision
            )

    return DistillData(target, train, validation, ends, add_signals, share)


def _unchanged(_: TokenDataset) -> None:
    """No signals: no texts are written on the way."""


def _signal(context: StageContext, model: PreTrainedModel, draft: int | None, kind: Signal) -> TargetSignal:
    """What is kept of the target, by its kind, of the ids that a draft of so many shares with it."""
    if draft is None:
        path, trust = context.run.path("initial"), context.settings.initial.trust_remote_code
        config = AutoConfig.from_pretrained(path, trust_remote_code=trust)
        draft = int(config.get_text_config().vocab_size)
    return TargetSignal.of(replace(context.settings.reference, signal=kind), min(draft, LMHead(model).vocab))


def fixed_texts(
    context: StageContext, target: PreTrainedModel, ends: set[int]
) -> tuple[TokenDataset, TokenDataset, str]:
    """Train and validation examples, with the data set's responses or the target's; and their fingerprint."""
    settings, corpus = context.settings.reference, context.corpus
    record = context.run.record("target")
    assert record is not None
    made_from: dict[str, Any] = {
        "target": record.fingerprint,
        "corpus": corpus.fingerprint,
        "examples": settings.examples,
    }
    if context.settings.target.quantization:
        made_from["quantization"] = context.settings.target.quantization
    if context.settings.target.kind != "as_is" and context.settings.target.dtype != "float32":
        made_from["dtype"] = context.settings.target.dtype  # of models as they are, it is in their fingerprint
    splits = {"train": bare(context.examples), "validation": bare(context.validation)}
    if settings.responses.from_target:
        made_from |= {
            "seed": context.settings.seed,
            "max_length": context.settings.data.max_length,
            "responses": settings.responses.key(),
        }
        splits = _answered(context, target, ends, splits, made_from, context.run.target)
    if settings.training.prompt_loss:
        splits["train"], made_from["prompt_loss"] = splits["train"].all_labelled(), True
    return splits["train"], splits["validation"], fingerprint(made_from)


def answered_by_target(context: StageContext) -> tuple[TokenDataset, TokenDataset]:
    """Train and validation examples with the target's responses, for those who do not have the target at hand."""
    model = open_target(context)
    train, validation, _ = fixed_texts(context, model, stop_ids(model, context.corpus.tokenizer))
    return train, validation


def answered_by_original(context: StageContext, model: PreTrainedModel) -> tuple[TokenDataset, TokenDataset]:
    """Train and validation examples with the responses of a given target, before anything is trained."""
    settings, corpus = context.settings, context.corpus
    wanted, given = settings.reference.responses, settings.target.model
    assert given is not None
    made_from = {
        "target": files_state([given]) or given,
        "corpus": corpus.fingerprint,
        "seed": settings.seed,
        "max_length": settings.data.max_length,
        "responses": wanted.written(),
    }
    splits = {"train": bare(TokenDataset.of(corpus.train)), "validation": bare(context.validation)}
    ends = stop_ids(model, corpus.tokenizer)
    splits = _answered(context, model, ends, splits, made_from, given, folder="original")
    return splits["train"], splits["validation"]


def _answered(
    context: StageContext,
    target: PreTrainedModel,
    ends: set[int],
    splits: dict[str, TokenDataset],
    made_from: dict[str, Any],
    path: str | Path,
    folder: str = "responses",
) -> dict[str, TokenDataset]:
    """The splits' prompts with the responses of the target at a path, kept in a folder of the run's work."""
    settings, tokenizer = context.settings.reference.responses, context.corpus.tokenizer
    seed, limit = context.settings.seed, context.settings.data.max_length

    def writer(engine: Callable[[], ResponseSettings]) -> Answer:
        asked = engine() if settings.server.engine else settings
        if asked.server.addresses:
            return answered_by_server(asked, seed, tokenizer, ends, Path(path), context.line)
        other = settings.dtype not in (None, context.settings.target.dtype)
        model = open_target(context, path, settings.dtype) if other else target
        return answered_here(at_work(context, model), settings, seed, ends)

    @contextmanager
    def shown(split: str, jobs: int, count: int) -> Iterator[None]:
        title = f"the target's responses, {split}"
        with working(context.console, title, count), context.timed(f"{ANSWERS} {split}", count):
            yield
        context.line(f"{title}: {jobs}, {count} of them written now")

    dtype = settings.dtype or context.settings.target.dtype
    answered = {}
    with answering_engine(settings, path, limit, dtype, context.line) as engine:
        for split, rows in splits.items():
            jobs = make_jobs(rows, getattr(context.corpus, split)[: len(rows)], settings, limit)
            written = answered_by_all(
                jobs, settings, context.run.work / folder, split, made_from | {"split": split, "prompts": len(rows)},
                writer=partial(writer, engine), tokenizer=tokenizer, around=partial(shown, split, len(jobs)),
            )  # fmt: skip
            answered[split] = response_rows([job.ids for job in jobs], written, ends)
    return answered


def bare(rows: TokenDataset) -> TokenDataset:
    """The same examples without cached signals."""
    return TokenDataset(rows.ids, rows.labels, rows.offsets, rows.label_offsets)
