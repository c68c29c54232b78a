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
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AutoConfig, PreTrainedModel

from decode.errors import UserError, read_json
from decode.models.block_head import BlockHead
from decode.models.heads import DraftHead, FeatureHead
from decode.models.loading import choose_device, load_model, stop_ids
from decode.models.mtp import MtpHead
from decode.progress import current, working
from distill import ranks
from distill.config.drafts import Signal
from distill.config.training import TargetSettings
from distill.data.batches import Ints, TokenDataset
from distill.data.context import StageContext
from distill.data.loader import EvalBatches
from distill.data.target import in_step
from distill.files import checksum, fingerprint, write_json
from distill.losses.chunked import LossRequest, fused_loss
from distill.losses.divergences import Divergence
from distill.losses.objective import Objective
from distill.models.lm_head import LMHead, check_head
from distill.models.loading import forward_precision, quantization_config, use_attention, weights_dtype
from distill.responses.texts import fixed_texts
from distill.teacher.blocks import block_rows
from distill.teacher.drafting import drafting_steps, model_rows
from distill.teacher.signals import FEATURES, TargetSignal, Teacher, check_finite

Array = NDArray[Any]
Shape = tuple[tuple[int, ...], str]  # shape and numpy type of an array
Values = Iterable[tuple[Ints, Mapping[str, Array]]]  # examples and their values by name, one after the other
TOKENS = 1 << 20  # tokens of a file, about; fewer are one file, which the first process writes
ROOM = 0.9  # share of the free disk that signals may take
SIGNAL, LOSSES = "signal", "reference's losses"  # names in `StageContext.measured`


# -- arrays on disk ---------------------------------------------------------------------------------------------------


def load_array(path: Path, key: str, shape: Shape) -> Array | None:
    """Returns an array, memory-mapped, if it is there, complete, unaltered and of this fingerprint."""
    try:
        note = json.loads(path.with_suffix(".json").read_text())
        if note["fingerprint"] != key or note["crc32"] != checksum(path):
            return None
        array: Array = np.load(path, mmap_mode="r")
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return array if (array.shape, str(array.dtype)) == shape else None


def cached(
    files: Mapping[Path, Shape], key: str, make: Callable[[Sequence[Array]], None], owner: int = 0
) -> list[Array]:
    """Returns arrays on disk, memory-mapped; made unless sound ones of this fingerprint are there.

    Args:
        files: The arrays' files (``.npy``).
        key: Fingerprint of everything that the values depend on.
        make: Fills the arrays.
        owner: The process that makes them; the others wait.

    Raises:
        UserError: The disk has not enough room for them.
    """

    def there() -> list[Array] | None:
        found = [load_array(path, key, shape) for path, shape in files.items()]
        return None if any(array is None for array in found) else cast(list[Array], found)

    if (found := there()) is not None:
        return found
    if ranks.rank() != owner:
        return ranks.wait_for(there, f"{next(iter(files)).name} (process {owner} makes it)")
    check_room(files)
    aside = {path: path.with_name(f".tmp-{os.getpid()}-{path.name}") for path in files}
    try:
        arrays = [
            np.lib.format.open_memmap(aside[path], mode="w+", dtype=dtype, shape=shape)
            for path, (shape, dtype) in files.items()
        ]
        make(arrays)
        for array in arrays:
            array.flush()
        del array, arrays
        for path, temporary in aside.items():
            note = {"fingerprint": key, "crc32": checksum(temporary)}
            os.replace(temporary, path)
            write_json(path.with_suffix(".json"), note)
    finally:
        for temporary in aside.values():
            temporary.unlink(missing_ok=True)
    return [np.load(path, mmap_mode="r") for path in files]


def check_room(files: Mapping[Path, Shape]) -> None:
    """Makes sure that the disk has room for arrays of one folder."""
    folder, size = next(iter(files)).parent, size_of(files.values())
    folder.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(folder).free
    if size > free:
        names = ", ".join(path.name for path in list(files)[:4])
        raise UserError(
            f"{len(files)} files ({names}) need {size / 1e9:.2f} GB and {free / 1e9:.2f} GB are free in {folder}: "
            "free some space, use fewer teacher.examples, or set teacher.signal to online"
        )


def size_of(shapes: Iterable[Shape]) -> int:
    """Returns the bytes of arrays."""
    return sum(int(np.prod(shape)) * np.dtype(dtype).itemsize for shape, dtype in shapes)


class Shards:
    """Arrays one after the other, read as one; a slice that lies within one of them is not copied."""

    def __init__(self, arrays: Sequence[Array]) -> None:
        self.arrays, self.starts = list(arrays), np.cumsum([0, *map(len, arrays)])
        self.dtype, self.shape = arrays[0].dtype, (int(self.starts[-1]), *arrays[0].shape[1:])

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, rows: slice) -> Array:
        """Returns some of the rows, a range without a step."""
        start, stop, _ = rows.indices(len(self))
        first = max(0, int(np.searchsorted(self.starts, start, "right")) - 1)
        last = max(first + 1, int(np.searchsorted(self.starts, stop, "left")))
        pairs = zip(self.arrays[first:last], self.starts[first:last].tolist())
        found = [array[max(0, start - begin) : max(0, stop - begin)] for array, begin in pairs]
        return found[0] if len(found) == 1 else np.concatenate([self.arrays[0][:0], *found])


def keep(
    rows: TokenDataset,
    layout: Callable[[TokenDataset], Mapping[str, Shape]],
    values: Callable[[TokenDataset], Values],
    folder: Path | None,
    split: str = "",
    key: str = "",
    model: PreTrainedModel | None = None,
) -> dict[str, Array]:
    """Returns the examples' values by name: arrays on disk, made unless they are there, or without a folder in memory.

    Args:
        rows: The examples.
        layout: The arrays of some examples.
        values: Computes the values of some examples, batch by batch.
        folder: Where they are kept: each array in one file or, of many tokens, in several.
        split: Part of the files' names.
        key: Fingerprint of everything that the values depend on.
        model: What the values are computed with, if it may be sharded.

    Raises:
        UserError: The disk has not enough room for them.
    """
    names = list(layout(rows))

    def fill(some: TokenDataset, arrays: Sequence[Array]) -> None:
        progress = current()
        progress.update(total=len(some))
        for examples, found in values(some):
            for name, array in zip(names, arrays, strict=True):
                starts, begin = some.offsets if name == FEATURES else some.label_offsets, 0
                for first, last in zip(starts[examples].tolist(), starts[examples + 1].tolist()):
                    array[first:last] = found[name][begin : begin + last - first]
                    begin += last - first
            progress.advance(len(examples))

    if folder is None:
        arrays = [np.empty(shape, dtype) for shape, dtype in layout(rows).values()]
        fill(rows, arrays)
        return dict(zip(names, arrays))
    count = max(1, min(len(rows), math.ceil(len(rows.ids) / TOKENS)))
    bounds = np.searchsorted(rows.offsets, np.linspace(0, len(rows.ids), count + 1)).tolist()
    pieces = [rows] if count == 1 else [rows.part(first, last) for first, last in pairwise(bounds) if last > first]
    shards: list[dict[Path, Shape]] = []
    for n, piece in enumerate(pieces):
        end = f"{split}.npy" if count == 1 else f"{split}.{n:04d}-of-{len(pieces):04d}.npy"
        shards.append({folder / f"{name}_{end}": shape for name, shape in layout(piece).items()})
    if count > 1 and ranks.is_first():
        every = {path for files in shards for path in files}
        for left in (path for name in names for path in folder.glob(f"{name}_{split}.*-of-*.npy")):
            if left not in every:  # of another division
                left.unlink(missing_ok=True)
    rank, world = ranks.rank(), ranks.started()
    with in_step(model):
        own = {
            n: cached(shards[n], key, lambda arrays, n=n: fill(pieces[n], arrays), rank)  # type: ignore[misc]
            for n in range(rank, len(pieces), world)
        }
    found = [own[n] if n in own else cached(files, key, lambda _: None, n % world) for n, files in enumerate(shards)]
    return dict(zip(names, found[0] if count == 1 else map(Shards, zip(*found, strict=True))))  # type: ignore[arg-type]


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

    def values(some: TokenDataset) -> Values:
        for examples in EvalBatches(some, 16).indices():
            yield examples, teacher.values(model, some, examples)

    ids = None if teacher.ids is None else teacher.ids.tolist()
    about = fingerprint(key, split, len(rows), teacher.captured, teacher.signal.key, ids)
    for name, array in keep(rows, teacher.layout, values, folder, split, about, model).items():
        (rows.tokens if name == FEATURES else rows.signals)[name] = array


def reference_loss(
    reference: PreTrainedModel | DraftHead,
    teacher: Teacher,
    rows: TokenDataset,
    divergence: Divergence,
    steps: int = 1,
    precision: str = "32-true",
    folder: Path | None = None,
    name: str = "",
    key: str = "",
) -> Array:
    """Returns the reference's divergence at every label token, ``[labels]``, of a head ``[labels, steps]``.

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
    shape = (steps,) if isinstance(reference, DraftHead) else ()
    request = LossRequest(divergence, metrics=False)

    @torch.no_grad()
    def values(some: TokenDataset) -> Values:
        reference.eval()
        teacher.to(device)
        for examples in EvalBatches(some, 16).indices():
            batch = {name: values.to(device) for name, values in some.batch(examples).items()}
            losses = torch.zeros(some.labels_of(examples), steps, device=device)
            with forward_precision(precision, device):
                if isinstance(reference, FeatureHead | MtpHead):
                    drafts = drafting_steps(reference, teacher, batch, steps)
                elif isinstance(reference, BlockHead):
                    drafts = iter([block_rows(reference, teacher, batch, None)])
                else:
                    drafts = iter([model_rows(reference, teacher, batch)])
                for step, draft in enumerate(drafts):
                    made = fused_loss(draft.hidden, draft.head, draft.target, request).losses.float()
                    rows = slice(None) if draft.rows is None else draft.rows
                    losses[rows, step if draft.slots is None else draft.slots] = made
            check_finite(losses, "reference's losses", examples)
            yield examples, {name: losses.cpu().numpy().reshape(-1, *shape)}

    def layout(some: TokenDataset) -> dict[str, Shape]:
        return {name: ((some.label_count, *shape), "float32")}

    (array,) = keep(rows, layout, values, folder, "train", key, teacher.model).values()
    return array


def mean_tail(values: Array) -> float:
    """Returns the mean probability that the kept top ids leave to all others; bounds the error of α."""
    log_p = np.ascontiguousarray(values[:, 1]).view(np.float32)
    return max(0.0, 1 - float(np.exp(log_p).sum(dtype=np.float64)) / max(1, len(values)))


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


def choose_signal(context: StageContext, bytes_of: Callable[[Signal], int], key: str) -> Signal:
    """Returns the kind of signal that the settings name, or under ``auto`` the first that fits the limit and the disk.

    The choice is noted on disk: a later draft of the run, and every other process, has the same, however little room
    the first one's signal has left.

    Args:
        context: Settings, folder and console.
        bytes_of: Bytes of a kind.
        key: Fingerprint of the texts and the target.
    """
    settings, note = context.settings.teacher, context.run.work / "signals" / "kind.json"
    if settings.signal != "auto":
        return settings.signal
    about = fingerprint(key, settings.signal_k, settings.signal_limit_gb)

    def noted() -> Signal | None:
        known = read_json(note)
        return cast(Signal, known["kind"]) if known.get("made_from") == about else None

    if (found := noted()) is not None:
        return found
    if not ranks.is_first():
        return ranks.wait_for(noted, "the kind of signal")
    note.parent.mkdir(parents=True, exist_ok=True)
    room = min(settings.signal_limit_gb * 1e9, ROOM * shutil.disk_usage(note.parent).free)
    kinds: tuple[Signal, ...] = ("hidden", "topk")
    kind: Signal = next((kind for kind in kinds if bytes_of(kind) <= room), "online")
    if kind != "hidden":
        sizes = ", ".join(f"{kind} {bytes_of(kind) / 1e9:.2f} GB" for kind in kinds)
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
    """

    teacher: Teacher
    train: TokenDataset
    validation: TokenDataset
    ends: set[int]
    add_signals: Callable[[TokenDataset], None]


def prepare(
    context: StageContext,
    objective: Objective,
    share: float = 0.0,
    *,
    head: DraftHead | None = None,
    draft_vocab: int | None = None,
    selector: str | None = None,
) -> DistillData:
    """Returns the target as a source of distributions, and examples with the values that the distillation needs.

    Args:
        context: Settings, data and folder.
        objective: Of the draft.
        share: Probability of each example to have a response that the draft writes itself.
        head: The feature head that is trained; None: a language model is.
        draft_vocab: Ids of a language model; None: those of the run's initial draft.
        selector: The draft by which the objective selects tokens.

    Raises:
        UserError: The signal is larger than ``teacher.signal_limit_gb`` or the free disk.
    """
    settings, run, folder = context.settings, context.run, context.run.work / "signals"
    trust = settings.student.trust_remote_code
    model = context.open_target()
    whole = LMHead(model)
    check_head(model, whole)
    ends = stop_ids(model, context.corpus.tokenizer)
    train, validation, key = fixed_texts(context, model, ends)
    fixed = {"validation": validation} | ({} if share == 1 else {"train": train})
    if head is not None:
        ids = head.draft_ids()
        draft_vocab = None if ids is None else len(ids)
    elif draft_vocab is None:
        config = AutoConfig.from_pretrained(run.path("initial"), trust_remote_code=trust)
        draft_vocab = int(config.get_text_config().vocab_size)
    vocab = min(draft_vocab or whole.vocab, whole.vocab)

    def teacher_of(kind: Signal) -> Teacher:
        bfloat16 = settings.target.dtype == "bfloat16"  # then the states have no more digits
        signal = TargetSignal.of(replace(settings.teacher, signal=kind), vocab, bfloat16=bfloat16)
        return Teacher(model, signal, head, stays=settings.target.placed)

    def bytes_of(kind: Signal) -> int:
        return sum(size_of(teacher_of(kind).layout(rows).values()) for rows in fixed.values())

    kind = choose_signal(context, bytes_of, fingerprint(key, None if head is None else head.captured_layers))
    use_attention(model, settings.trainer.attention)
    model = context.at_work(model)
    teacher = teacher_of(kind)
    teacher.to(context.device)
    if kind != "online":
        size, limit = bytes_of(kind), settings.teacher.signal_limit_gb
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
            tail = mean_tail(validation.signals[teacher.signal.name][:])
            context.line(f"the top {teacher.signal.k} ids leave {tail:.2%} to the others: alpha is off by at most that")
    reference: PreTrainedModel | DraftHead | None = None
    ranking, precision = objective.divergence, settings.trainer.precision
    steps = 1 if head is None else head.drafts or settings.student.steps
    if objective.selection is not None:
        assert selector is not None
        record, path = run.record(selector), run.path(selector)
        assert record is not None
        if head is not None:
            reference = context.load_head(path).to(context.device)
        else:
            dtype = weights_dtype(precision)
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

    return DistillData(teacher, train, validation, ends, add_signals)
