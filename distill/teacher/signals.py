"""Which kind of signal is kept of the target, by what it takes and what room there is."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Generic, TypeVar, cast, get_args

from transformers import AutoConfig, PreTrainedModel

from decode.errors import UserError, read_json
from decode.models.loading import choose_device, load_model, stop_ids
from decode.progress import duration, working
from distill import ranks
from distill.config.drafts import ResponseSettings, Signal
from distill.data.batches import Schedule, TokenDataset
from distill.data.context import StageContext, open_placed
from distill.files import files_state, fingerprint, write_json
from distill.losses.objective import Objective
from distill.models.lm_head import LMHead, check_head
from distill.models.loading import quantization_config, use_attention, weights_dtype
from distill.responses.on_policy import OnPolicy, Writer
from distill.responses.server import answered_by_server
from distill.responses.store import Answer, answered_by_all, answered_here, answering_engine, make_jobs, response_rows
from distill.teacher import store as signals
from distill.teacher.store import check_several, shard_layers
from distill.teacher.target_distribution import TargetSignal, TargetSource

ROOM = 0.9
"""Share of the free disk that signals may take."""


def choose_signal(context: StageContext, size_of: Callable[[Signal], int], key: str) -> Signal:
    """The kind of signal that the settings name, or under ``auto`` the first that there is room for.

    The choice is noted on disk: a later draft of the run, and every other process, has the same, however little room
    the first one's signal has left.

    Args:
        context: Settings, folder and console.
        size_of: Bytes of a kind.
        key: Fingerprint of the texts and the target.
    """
    settings, note = context.settings.reference, context.run.work / "signals" / "kind.json"
    if settings.signal != "auto":
        return settings.signal
    about = fingerprint(key, settings.signal_dtype, settings.signal_k, settings.signal_limit_gb)

    def noted() -> Signal | None:
        known = read_json(note)
        sound = known.get("made_from") == about and known["kind"] in get_args(Signal)
        return cast(Signal, known["kind"]) if sound else None

    if (found := noted()) is not None:
        return found
    if not ranks.is_first():
        return ranks.wait_for(noted, "the kind of signal")
    note.parent.mkdir(parents=True, exist_ok=True)
    room = min(settings.signal_limit_gb * 1e9, ROOM * shutil.disk_usage(note.parent).free)
    kinds: tuple[Signal, ...] = ("hidden", "topk")
    kind: Signal = next((kind for kind in kinds if size_of(kind) <= room), "online")
    if kind != kinds[0]:
        sizes = ", ".join(f"{kind} {size_of(kind) / 1e9:.2f} GB" for kind in kinds)
        context.console.print(
            f"  signal: {kind} ({sizes}; room for {room / 1e9:.2f} GB by reference.signal_limit_gb and the disk)",
            highlight=False,
        )
    write_json(note, {"kind": kind, "made_from": about})
    return kind


@contextmanager
def announced(
    context: StageContext, kind: Signal, what: str, key: str, size: int, tokens: int, seconds: Callable[[], float]
) -> Iterator[None]:
    """Tells the size of the target's values and the time they take, before they are made inside for the first time.

    Args:
        context: Settings, folder and console.
        kind: Of signal.
        what: What is kept.
        key: Fingerprint of what they are made from.
        size: Bytes on disk.
        tokens: Label tokens.
        seconds: Measures a few examples.

    Raises:
        UserError: It is above the limit.
    """
    settings, note = context.settings.reference, context.run.work / "signals" / "made.json"
    told = f"{size / 1e9:.2f} GB" if size >= 1e9 else f"{size / 1e6:.1f} MB"
    if size > settings.signal_limit_gb * 1e9:
        instead = {
            "hidden": "set reference.signal to topk or online, or reference.signal_dtype to bfloat16",
            "topk": "lower reference.signal_k, or set reference.signal to online",
            "log_probs": "set reference.signal to hidden, topk or online",
        }[kind]
        raise UserError(
            f"the target's {what} ({kind}) of {tokens:,} label tokens needs {told} and "
            f"reference.signal_limit_gb is {settings.signal_limit_gb:g}: raise the limit, lower reference.examples, or "
            f"{instead}"
        )
    new = read_json(note).get("made_from") != key
    if new:
        sentence = f"{told} for {tokens:,} label tokens, about {duration(seconds())} to compute"
        context.console.print(f"  the target's {what} ({kind}): {sentence}", highlight=False)
    yield
    if new and ranks.is_first():
        write_json(note, {"made_from": key})


def open_target(context: StageContext, path: str | Path | None = None, dtype: str | None = None) -> PreTrainedModel:
    """The run's target in evaluation mode: in its own place if the settings give it one, else on the CPU.

    Args:
        context: Settings and folder.
        path: Of another target; None: the run's.
        dtype: Another number format than ``target.dtype``.

    Raises:
        UserError: It cannot be read or placed.
    """
    wanted = context.settings.target
    model = open_placed(wanted, path or context.run.target, context.device, dtype)
    if wanted.sharded:
        shard_layers(model, context.device)
    return model


def check_place(context: StageContext) -> None:
    """Refuses before the first step a place or a format that the machine does not have."""
    wanted = context.settings.target
    for name in wanted.devices:
        choose_device(name)
    if wanted.sharded:
        check_several()
    if wanted.quantization:
        place = wanted.devices[0] if wanted.devices else context.device
        instead = "target.dtype to bfloat16, target.devices or target.sharded"
        quantization_config(wanted.quantization, place, "target.quantization", instead)


def at_work(context: StageContext, model: PreTrainedModel) -> PreTrainedModel:
    """The target where it computes: its own place, or the draft's device."""
    return model if context.settings.target.placed else model.to(context.device)


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
    reference, ranking, precision = None, objective.divergence, context.settings.trainer.precision
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
