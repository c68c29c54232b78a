"""Examples with signals of frozen models, which are computed once and kept on disk.

For each label token the target's signal is kept (`signals.TargetSignal`), and where tokens are selected
``reference_loss``: the reference's divergence D(p, r) in float32. With it ΔL = D(p, q) - D(p, r) needs no reference
model any more. Values of many examples are several files, which all processes write at once.
"""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, cast, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AutoConfig, PreTrainedModel

from decode.errors import UserError, read_json
from decode.models.heads import FeatureHead, load_head
from decode.models.loading import choose_device, load_model, stop_ids
from decode.progress import current, working
from distill import ranks
from distill.config.drafts import Signal
from distill.config.training import TargetSettings
from distill.data.batches import Ints, TokenDataset, label_mask
from distill.data.context import StageContext
from distill.data.loader import EvalBatches, Schedule
from distill.data.target import in_step
from distill.files import checksum, fingerprint, write_json
from distill.losses.chunked import LossRequest, TargetRows, fused_loss
from distill.losses.divergences import Divergence
from distill.losses.objective import Objective
from distill.models.lm_head import LMHead, check_head, last_hidden
from distill.models.loading import forward_precision, quantization_config, use_attention, weights_dtype
from distill.responses.on_policy import OnPolicy, Writer
from distill.responses.texts import fixed_texts
from distill.teacher.heads import drafting_steps
from distill.teacher.signals import FEATURES, TargetSignal, Teacher, check_finite

Array = NDArray[Any]
Layout = Mapping[str, tuple[tuple[int, ...], str]]  # shape and numpy type of arrays, by name
Part = tuple[slice, Array]  # a range of rows and their values
TOKENS = 1 << 20  # tokens of a file, about; fewer are one file, which the first process writes
ROOM = 0.9  # share of the free disk that signals may take
SIGNAL, LOSSES = "signal", "reference's losses"  # names in `StageContext.measured`


# -- arrays on disk ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Kept:
    """One array on disk.

    Attributes:
        path: Its file (``.npy``).
        fingerprint: Of everything that the values depend on.
        shape: Rows first.
        dtype: Of the values.
    """

    path: Path
    fingerprint: str
    shape: tuple[int, ...]
    dtype: str = "float32"

    @property
    def bytes(self) -> int:
        """Size on disk."""
        return int(np.prod(self.shape)) * np.dtype(self.dtype).itemsize

    def load(self) -> Array | None:
        """The array, memory-mapped, if it is there, complete, unaltered and of this fingerprint."""
        try:
            note = json.loads(self.path.with_suffix(".json").read_text())
            if note["fingerprint"] != self.fingerprint or note["crc32"] != checksum(self.path):
                return None
            array: Array = np.load(self.path, mmap_mode="r")
        except (OSError, ValueError, KeyError, TypeError):
            return None
        return array if array.shape == self.shape and array.dtype == self.dtype else None


def cached(wanted: Sequence[Kept], parts: Iterable[Sequence[Part]], owner: int = 0) -> list[Array]:
    """Arrays on disk, memory-mapped; made from ``parts`` unless sound ones of these fingerprints are there.

    Args:
        wanted: The arrays.
        parts: Row ranges and values, one for each array; consumed only if the arrays have to be made.
        owner: The process that makes them; the others wait.

    Raises:
        UserError: The disk has not enough room for them.
    """

    def there() -> list[Array] | None:
        found = [kept.load() for kept in wanted]
        arrays = [array for array in found if array is not None]
        return arrays if len(arrays) == len(found) else None

    found = there()
    if found is None and ranks.rank() != owner:
        found = ranks.wait_for(there, f"{wanted[0].path.name} (process {owner} makes it)")
    if found is not None:
        return found
    check_room(wanted)
    temporary = [kept.path.with_name(f".tmp-{os.getpid()}-{kept.path.name}") for kept in wanted]
    try:
        arrays = [
            np.lib.format.open_memmap(path, mode="w+", dtype=kept.dtype, shape=kept.shape)
            for path, kept in zip(temporary, wanted)
        ]
        current().update(total=wanted[0].shape[0])
        fill(arrays, parts)
        for array in arrays:
            array.flush()
        del array, arrays
        for path, kept in zip(temporary, wanted):
            note = {"fingerprint": kept.fingerprint, "crc32": checksum(path)}
            os.replace(path, kept.path)
            write_json(kept.path.with_suffix(".json"), note)
    finally:
        for path in temporary:
            path.unlink(missing_ok=True)
    return [np.load(kept.path, mmap_mode="r") for kept in wanted]


def check_room(wanted: Sequence[Kept]) -> None:
    """Makes sure that the disk has room for arrays of one folder."""
    folder, size = wanted[0].path.parent, sum(kept.bytes for kept in wanted)
    folder.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(folder).free
    if size > free:
        names = ", ".join(kept.path.name for kept in wanted[:4])
        raise UserError(
            f"{len(wanted)} files ({names}) need {size / 1e9:.2f} GB and {free / 1e9:.2f} GB are free in {folder}: "
            "free some space, use fewer teacher.examples, or set teacher.signal to online"
        )


def fill(arrays: Sequence[Array], parts: Iterable[Sequence[Part]]) -> None:
    """Puts row ranges and values, one for each array, into the arrays."""
    for values in parts:
        for array, (place, value) in zip(arrays, values, strict=True):
            array[place] = value
        current().advance(len(values[0][1]))


class Shards:
    """Arrays one after the other, read as one; a slice that lies within one of them is not copied."""

    def __init__(self, arrays: Sequence[Array]) -> None:
        self.arrays, self.starts = list(arrays), np.cumsum([0, *map(len, arrays)])
        self.dtype, self.shape = arrays[0].dtype, (int(self.starts[-1]), *arrays[0].shape[1:])

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, rows: slice) -> Array:
        """Some of the rows, a range without a step."""
        start, stop, _ = rows.indices(len(self))
        first = int(np.searchsorted(self.starts, start, "right")) - 1
        found: list[Array] = []
        while first < len(self.arrays) and self.starts[first] < max(stop, start + 1):
            begin = int(self.starts[first])
            found.append(self.arrays[first][max(0, start - begin) : max(0, stop - begin)])
            first += 1
        return found[0] if len(found) == 1 else np.concatenate([self.arrays[0][:0], *found])


def keep(
    rows: TokenDataset,
    layout: Callable[[TokenDataset], Layout],
    parts: Callable[[TokenDataset], Iterable[Sequence[Part]]],
    folder: Path | None,
    split: str = "",
    key: str = "",
    model: PreTrainedModel | None = None,
) -> dict[str, Array]:
    """Arrays of the examples' values by name: on disk, made unless they are there, or without a folder in memory.

    Args:
        rows: The examples.
        layout: The arrays of some examples.
        parts: Row ranges and values of some examples, one for each array.
        folder: Where they are kept: each array in one file or, of many tokens, in several.
        split: Part of the files' names.
        key: Fingerprint of everything that the values depend on.
        model: What the parts are computed with, if it may be sharded.

    Raises:
        UserError: The disk has not enough room for them.
    """
    names = list(layout(rows))
    if folder is None:
        arrays = [np.empty(shape, dtype) for shape, dtype in layout(rows).values()]
        fill(arrays, parts(rows))
        return dict(zip(names, arrays))
    count = max(1, min(len(rows), math.ceil(len(rows.ids) / TOKENS)))
    bounds = np.searchsorted(rows.offsets, np.linspace(0, len(rows.ids), count + 1)).tolist()
    pieces = [rows] if count == 1 else [rows.part(first, last) for first, last in pairwise(bounds) if last > first]
    shards: list[list[Kept]] = []
    for n, piece in enumerate(pieces):
        end = f"{split}.npy" if count == 1 else f"{split}.{n:04d}-of-{len(pieces):04d}.npy"
        about, planned = (key, n, len(pieces)), layout(piece).items()
        shards.append([Kept(folder / f"{name}_{end}", fingerprint(*about, name), *how) for name, how in planned])
    if count > 1 and ranks.is_first():
        every = {kept.path: kept for some in shards for kept in some}
        for left in (path for name in names for path in folder.glob(f"{name}_{split}.*-of-*.npy")):
            if left not in every:  # of another division
                left.unlink(missing_ok=True)
        check_room([kept for path, kept in every.items() if not path.exists()] or shards[0])
    rank, world = ranks.rank(), ranks.started()
    with in_step(model):
        own = {n: cached(shards[n], parts(pieces[n]), owner=rank) for n in range(rank, len(pieces), world)}
    found = [own[n] if n in own else cached(kept, (), owner=n % world) for n, kept in enumerate(shards)]
    return dict(zip(names, found[0] if count == 1 else map(Shards, zip(*found, strict=True))))  # type: ignore[arg-type]


def scatter(starts: Ints, examples: Ints, values: Array) -> Iterator[Part]:
    """Values of a batch's rows, example by example, with their places among all; ``starts`` are the offsets."""
    begin = 0
    for example in examples:
        first, last = int(starts[example]), int(starts[example + 1])
        yield slice(first, last), values[begin : begin + last - first]
        begin += last - first


# -- signals ----------------------------------------------------------------------------------------------------------


def keep_signal(
    teacher: Teacher,
    model: PreTrainedModel,
    rows: TokenDataset,
    folder: Path | None = None,
    split: str = "",
    key: str = "",
) -> None:
    """Puts the target's values into ``rows``: those on disk, or computed; without a folder they stay in memory.

    Args:
        teacher: The signal, and the feature head that reads it.
        model: The target.
        rows: The examples.
        folder: Where the values are kept.
        split: Part of the files' names.
        key: Fingerprint of the target and the texts.
    """

    def parts(some: TokenDataset) -> Iterator[list[Part]]:
        for examples in EvalBatches(some, 16, pad_id=0).indices():
            places = []
            for name, values in teacher.values(model, some, examples).items():
                if name == FEATURES:
                    lengths = some.lengths[examples]
                    values = np.concatenate([values[row, :length] for row, length in enumerate(lengths)])
                places.append(scatter(some.offsets if name == FEATURES else some.label_offsets, examples, values))
            yield from map(list, zip(*places, strict=True))

    ids = None if teacher.ids is None else teacher.ids.tolist()
    about = fingerprint(key, split, len(rows), teacher.captured, teacher.signal.key, teacher.signal.temperature, ids)
    for name, array in keep(rows, teacher.layout, parts, folder, split, about, model).items():
        (rows.tokens if name == FEATURES else rows.signals)[name] = array


def reference_loss(
    reference: PreTrainedModel | FeatureHead,
    teacher: Teacher,
    rows: TokenDataset,
    divergence: Divergence,
    steps: int = 1,
    precision: str = "32-true",
    folder: Path | None = None,
    name: str = "",
    key: str = "",
) -> Array:
    """The reference's divergence at every label token, ``[label tokens]``, of a head ``[label tokens, steps]``.

    Args:
        reference: The draft by which tokens are selected.
        teacher: The target's distributions.
        rows: The examples, with the target's signal if it is kept.
        divergence: D(p, r).
        steps: Drafting steps of a head.
        precision: The trainer's: the draft's side of ΔL is computed in it.
        folder: Where the losses are kept; None: in memory.
        name: Of the file.
        key: Fingerprint of everything that they depend on.

    Raises:
        UserError: They are not finite.
    """
    device = next(reference.parameters()).device
    shape = (steps,) if isinstance(reference, FeatureHead) else ()

    def forward(batch: dict[str, Any]) -> Iterator[tuple[torch.Tensor, LMHead, TargetRows, Any]]:
        if isinstance(reference, FeatureHead):
            for made in drafting_steps(reference, teacher, batch, steps, temperature=divergence.temperature):
                yield made.hidden, made.head, made.target, made.rows
            return
        mask = label_mask(batch["labels"])
        hidden = last_hidden(reference, batch["input_ids"], mask)
        yield hidden, LMHead(reference), teacher.rows(batch, mask), slice(None)

    @torch.no_grad()
    def parts(some: TokenDataset) -> Iterator[list[Part]]:
        reference.eval()
        teacher.to(device)
        for examples in EvalBatches(some, 16, pad_id=0).indices():
            batch = {name: values.to(device) for name, values in some.batch(examples, 0).items()}
            losses = torch.zeros(some.labels_of(examples), steps, device=device)
            with forward_precision(precision, device):
                for step, (hidden, head, target, place) in enumerate(forward(batch)):
                    made = fused_loss(hidden, head, target, LossRequest(divergence, metrics=False))
                    losses[place, step] = made.losses.float()
            check_finite(losses, "reference's losses", examples)
            values = losses.cpu().numpy().reshape(-1, *shape)
            yield from ([part] for part in scatter(some.label_offsets, examples, values))

    def layout(some: TokenDataset) -> Layout:
        return {name: ((some.label_count, *shape), "float32")}

    (array,) = keep(rows, layout, parts, folder, "train", key, teacher.model).values()
    return array


def mean_tail(values: Array, block: int = 1 << 16) -> float:
    """Mean probability that the kept top ids leave to all others; bounds the error of α."""
    kept = sum(
        float(np.exp(np.ascontiguousarray(values[i : i + block][:, 1]).view(np.float32)).sum(dtype=np.float64))
        for i in range(0, len(values), block)
    )
    return max(0.0, 1 - kept / max(1, len(values)))


# -- the examples of a draft ------------------------------------------------------------------------------------------


def check_place(settings: TargetSettings, device: torch.device) -> None:
    """Refuses before the first step a device or a format that the machine does not have.

    Args:
        settings: The target's.
        device: The draft's.
    """
    for name in settings.devices:
        choose_device(name)
    if settings.sharded and (ranks.started() < 2 or "MASTER_ADDR" not in os.environ):
        raise UserError(
            f"target.sharded spreads the target over processes, and {ranks.started()} was started: start several by "
            "torchrun --nproc-per-node N -m distill ... --trainer.devices N, or leave it out"
        )
    if settings.quantization:
        place = settings.devices[0] if settings.devices else device
        instead = "target.dtype to bfloat16, target.devices or target.sharded"
        quantization_config(settings.quantization, place, "target.quantization", instead)


def choose_signal(context: StageContext, size_of: Callable[[Signal], int], key: str) -> Signal:
    """The kind of signal that the settings name, or under ``auto`` the first that fits the limit and the disk.

    The choice is noted on disk: a later draft of the run, and every other process, has the same, however little room
    the first one's signal has left.

    Args:
        context: Settings, folder and console.
        size_of: Bytes of a kind.
        key: Fingerprint of the texts and the target.
    """
    settings, note = context.settings.teacher, context.run.work / "signals" / "kind.json"
    if settings.signal != "auto":
        return settings.signal
    about = fingerprint(key, settings.signal_k, settings.signal_limit_gb)

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
    if kind != "hidden":
        sizes = ", ".join(f"{kind} {size_of(kind) / 1e9:.2f} GB" for kind in kinds)
        context.line(f"signal: {kind} ({sizes}; teacher.signal_limit_gb and the disk leave {room / 1e9:.2f} GB)")
    write_json(note, {"kind": kind, "made_from": about})
    return kind


@dataclass
class DistillData:
    """Examples with the signals of frozen models.

    Attributes:
        teacher: The target's distributions, and the features that a head reads.
        train: Examples for training; if the draft writes all texts itself, their prompts alone, without signals.
        validation: Examples for comparing checkpoints.
        ends: The target's end-of-text tokens.
        add_signals: Puts the same signals into rows that were just written.
        share: Probability of each example to have a response that the draft writes itself.
    """

    teacher: Teacher
    train: TokenDataset
    validation: TokenDataset
    ends: set[int]
    add_signals: Callable[[TokenDataset], None]
    share: float = 0.0

    def on_policy(
        self, context: StageContext, write: Writer, schedule: Schedule, steps: int, seed: int
    ) -> OnPolicy | None:
        """The draft's own texts, which ``write`` writes; None without a share."""
        if not self.share:
            return None
        settings, limit = context.settings.teacher.responses, context.settings.data.max_length
        return OnPolicy(
            write, self.train, schedule, steps, settings, self.share, seed, limit, self.ends, self.add_signals
        )


def prepare(
    context: StageContext,
    objective: Objective,
    share: float = 0.0,
    *,
    head: FeatureHead | None = None,
    draft_vocab: int | None = None,
    first: int | None = None,
    selector: str | None = None,
) -> DistillData:
    """The target as a source of distributions, and examples with the values that the distillation needs.

    Args:
        context: Settings, data and folder.
        objective: Of the draft.
        share: Probability of each example to have a response that the draft writes itself.
        head: The feature head that is trained; None: a language model is.
        draft_vocab: Ids of a language model; None: those of the run's initial draft.
        first: Number of examples, the first ones; None: all.
        selector: The draft by which the objective selects tokens.

    Raises:
        UserError: The signal is larger than ``teacher.signal_limit_gb`` or the free disk.
    """
    settings, run, folder = context.settings, context.run, context.run.work / "signals"
    model = context.open_target()
    check_head(model, LMHead(model))
    ends = stop_ids(model, context.corpus.tokenizer)
    train, validation, key = fixed_texts(context, model, ends)
    train = train.part(0, min(first or len(train), len(train)))
    fixed = {"validation": validation} | ({} if share == 1 else {"train": train})
    if head is not None:
        ids = head.draft_ids()
        draft_vocab = None if ids is None else len(ids)
    elif draft_vocab is None:
        config = AutoConfig.from_pretrained(run.path("initial"), trust_remote_code=settings.student.trust_remote_code)
        draft_vocab = int(config.get_text_config().vocab_size)
    vocab = min(draft_vocab or LMHead(model).vocab, LMHead(model).vocab)

    def teacher_of(kind: Signal) -> Teacher:
        how = replace(settings.teacher, signal=kind)
        bfloat16 = settings.target.dtype == "bfloat16"  # then the states have no more digits
        signal = TargetSignal.of(how, vocab, objective.divergence.temperature, bfloat16=bfloat16)
        return Teacher(model, signal, head, stays=settings.target.placed)

    def size_of(kind: Signal) -> int:
        layouts = [teacher_of(kind).layout(rows).values() for rows in fixed.values()]
        return sum(int(np.prod(shape)) * np.dtype(dtype).itemsize for each in layouts for shape, dtype in each)

    kind = choose_signal(context, size_of, fingerprint(key, None if head is None else head.captured_layers))
    use_attention(model, settings.trainer.attention)
    model = context.at_work(model)
    teacher = teacher_of(kind)
    teacher.to(context.device)
    if kind != "online":
        size, limit = size_of(kind), settings.teacher.signal_limit_gb
        if size > limit * 1e9:
            raise UserError(
                f"the target's signal ({kind}) needs {size / 1e9:.2f} GB and teacher.signal_limit_gb is {limit:g}: "
                "raise the limit, lower teacher.examples, or set teacher.signal to topk or online"
            )
        context.line(f"the target's signal ({kind}): {size / 1e6:,.1f} MB")
        for name, rows in fixed.items():
            title = f"the target's signal ({kind}), {name}"
            with working(context.console, title), context.timed(f"{SIGNAL} {name}", len(rows.ids)):
                keep_signal(teacher, model, rows, folder, name, key)
        if kind == "topk":
            tail = mean_tail(validation.signals[teacher.signal.name])
            context.line(f"the top {teacher.signal.k} ids leave {tail:.2%} to the others: alpha is off by at most that")
    reference: PreTrainedModel | FeatureHead | None = None
    ranking, precision = objective.divergence, settings.trainer.precision
    steps = 1 if head is None else settings.student.steps
    if objective.selection is not None:
        assert selector is not None
        record = run.record(selector)
        assert record is not None
        if head is not None:
            reference = load_head(run.path(selector)).to(context.device)
        else:
            trust, dtype = settings.student.trust_remote_code, weights_dtype(precision)
            path = run.path(selector)
            reference = load_model(path, device=context.device, dtype=dtype, trust_remote_code=trust)
            use_attention(reference, settings.trainer.attention)
        if share != 1:
            about = fingerprint(key, teacher.signal.key, record.fingerprint, steps, vars(ranking), precision)
            name = f"{selector}_{ranking.name}"
            with working(context.console, "the reference's losses"), context.timed(f"{LOSSES} train", len(train.ids)):
                train.signals["reference_loss"] = reference_loss(
                    reference, teacher, train, ranking, steps, precision, folder, name, about
                )
    if not share:  # the models leave memory here: no signal will be computed any more
        return DistillData(teacher, train, validation, ends, lambda rows: None)

    def add_signals(rows: TokenDataset) -> None:
        if kind != "online":
            keep_signal(teacher, model, rows)
        if reference is not None:
            rows.signals["reference_loss"] = reference_loss(reference, teacher, rows, ranking, steps, precision)

    return DistillData(teacher, train, validation, ends, add_signals, share)
