"""Signals of frozen models on fixed data, computed once and kept on disk.

Two arrays hold what AdaSPEC needs of the target p and the reference r, a row a label token:

- ``target_hidden``, the target's last hidden state, whose product with its head are its logits, exactly as recomputed;
  or ``target_topk``, its largest log-probabilities, or ``target_log_probs``, all of them.
- ``reference_loss``: the reference's divergence D(p, r) in float32. With it ΔL = D(p, q) - D(p, r) needs no reference
  model any more.

Values of many examples are several files, which all processes write at once (`distill.teacher.store`).
"""

from __future__ import annotations

import json
import math
import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from decode.errors import UserError
from decode.models.families import decoder_layers
from decode.progress import current
from distill import ranks
from distill.data.batches import EvalBatches, TokenDataset, label_mask
from distill.files import checksum, fingerprint, write_json
from distill.losses.chunked import LossRequest, fused_loss
from distill.losses.divergences import Divergence
from distill.models.lm_head import LMHead, last_hidden
from distill.models.loading import forward_precision
from distill.teacher.target_distribution import TargetSignal, TargetSource

Array = NDArray[Any]


@dataclass(frozen=True)
class Kept:
    """One array on disk.

    Attributes:
        path: File to keep it in (``.npy``).
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


Part = tuple[slice, Array]
"""A range of rows and their values."""


def cached(
    path: Path | None, fingerprint: str, shape: tuple[int, ...], parts: Iterator[Part], dtype: str = "float32"
) -> Array:
    """An array on disk (see `cached_together`), without a path in memory."""
    if path is None:
        values = np.empty(shape, dtype=dtype)
        fill([values], ((part,) for part in parts))
        return values
    (array,) = cached_together([Kept(path, fingerprint, shape, dtype)], ((part,) for part in parts))
    return array


def cached_together(wanted: Sequence[Kept], parts: Iterable[Sequence[Part]], owner: int = 0) -> list[Array]:
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
    wanted[0].path.parent.mkdir(parents=True, exist_ok=True)
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
    """Makes sure that arrays of one folder fit on its disk."""
    if not wanted:
        return
    folder, size, names = wanted[0].path.parent, sum(kept.bytes for kept in wanted), [kept.path.name for kept in wanted]
    folder.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(folder).free
    if size > free:
        needs = f"{names[0]} needs" if len(names) == 1 else f"{', '.join(names[:4])} (of {len(names)} files) need"
        raise UserError(
            f"{needs} {size / 1e9:.2f} GB and {free / 1e9:.2f} GB are free in {folder}: free some space, use fewer "
            "reference.examples, or set reference.signal to online"
        )


def fill(arrays: Sequence[Array], parts: Iterable[Sequence[Part]]) -> None:
    """Put row ranges and values, one for each array, into the arrays."""
    for values in parts:
        for array, (place, value) in zip(arrays, values, strict=True):
            array[place] = value
        current().advance(len(values[0][1]))


def check_several() -> None:
    """Refuses to spread weights over one process."""
    if ranks.started() < 2 or "MASTER_ADDR" not in os.environ:
        raise UserError(
            f"target.sharded spreads the target over processes, and {ranks.started()} was started: start several by "
            "torchrun --nproc-per-node N -m distill ... --trainer.devices N, or leave it out"
        )


def shard_layers(model: PreTrainedModel, device: torch.device) -> None:
    """Spreads the layers over all processes; embedding and output head, which may be one, stay whole on ``device``."""
    from torch.distributed.fsdp import fully_shard

    if device.type == "cuda":
        torch.cuda.set_device(device)
    if not dist.is_initialized():
        dist.init_process_group()
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    for part in (model.get_input_embeddings(), model.get_output_embeddings()):
        part.to(device)
    for layer in decoder_layers(model):
        fully_shard(layer, mesh=mesh)
    fully_shard(model.base_model, mesh=mesh, ignored_params=set(model.get_input_embeddings().parameters()))


@contextmanager
def in_step(model: PreTrainedModel | None) -> Iterator[None]:
    """Inside, each process runs a sharded model as often as it likes: a forward pass of one is one of all.

    One that has no more to compute takes part in the others' with a single token, until they are ready too.
    """
    if model is None or not any(isinstance(weight, DTensor) for weight in model.parameters()):
        yield
        return
    base, ids = model.base_model, torch.zeros(1, 1, dtype=torch.long, device=model.device)
    hook = base.register_forward_pre_hook(lambda *_: _busy(True, ids.device) and None, prepend=True)
    try:
        yield
    finally:
        hook.remove()
    with torch.no_grad():
        while _busy(False, ids.device):
            base(input_ids=ids, use_cache=False)


def _busy(here: bool, device: torch.device) -> bool:
    """Whether any process is about to run the model."""
    flag = torch.tensor(int(here), device=device)
    dist.all_reduce(flag, dist.ReduceOp.MAX)
    return bool(flag)


TOKENS = 1 << 20
"""Of a file, about; fewer are one file, written by the first process."""


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


def cached_in_shards(
    rows: TokenDataset,
    wanted: Callable[[TokenDataset], list[Kept]],
    parts: Callable[[TokenDataset], Iterable[Sequence[Part]]],
    model: PreTrainedModel | None = None,
) -> list[Array]:
    """Arrays of the examples' values on disk, each one file or, of many tokens, `Shards`; made unless they are there.

    Args:
        rows: The examples.
        wanted: The arrays of some examples, under the paths of the whole.
        parts: Row ranges and values of some examples, see `cached_together`.
        model: What the parts are computed with, if it may be sharded.

    Raises:
        UserError: The disk has not enough room for them.
    """
    whole, count = wanted(rows), max(1, min(len(rows), math.ceil(len(rows.ids) / TOKENS)))
    bounds = np.searchsorted(rows.offsets, np.linspace(0, len(rows.ids), count + 1)).tolist()
    pieces = [rows.part(first, last) for first, last in pairwise(bounds) if last > first]
    shards = [[_shard(kept, n, len(pieces)) for kept in wanted(piece)] for n, piece in enumerate(pieces)]
    if count == 1:
        pieces, shards = [rows], [whole]
    elif ranks.is_first():
        _make_room(whole, shards)
    rank, world = ranks.rank(), ranks.started()
    with in_step(model):
        own = {n: cached_together(shards[n], parts(pieces[n]), owner=rank) for n in range(rank, len(pieces), world)}
    found = [own[n] if n in own else cached_together(kept, (), owner=n % world) for n, kept in enumerate(shards)]
    return found[0] if count == 1 else [Shards(arrays) for arrays in zip(*found, strict=True)]  # type: ignore[misc]


def label_values(
    rows: TokenDataset,
    parts: Callable[[TokenDataset], Iterator[Part]],
    path: Path | None,
    fingerprint: str,
    shape: tuple[int, ...] = (),
    dtype: str = "float32",
    model: PreTrainedModel | None = None,
) -> Array:
    """Values of every label token of the examples, ``[label tokens, *shape]``, on disk; without a path in memory."""
    if path is None:
        return cached(None, "", (rows.label_count, *shape), parts(rows), dtype)
    (values,) = cached_in_shards(
        rows,
        lambda some: [Kept(path, fingerprint, (some.label_count, *shape), dtype)],
        lambda some: ((part,) for part in parts(some)),
        model,
    )
    return values


def _shard(kept: Kept, number: int, count: int) -> Kept:
    path = kept.path.with_name(f"{kept.path.stem}.{number:04d}-of-{count:04d}.npy")
    return replace(kept, path=path, fingerprint=fingerprint(kept.fingerprint, number, count))


def _make_room(whole: Sequence[Kept], shards: Sequence[Sequence[Kept]]) -> None:
    """Removes files of other divisions, and makes sure that what is missing fits on the disk."""
    named = {kept.path for some in shards for kept in some}
    for kept in whole:
        for left in kept.path.parent.glob(f"{kept.path.stem}.*-of-*.npy"):
            if left not in named:
                left.unlink(missing_ok=True)
                left.with_suffix(".json").unlink(missing_ok=True)
    check_room([kept for some in shards for kept in some if not kept.path.exists()])


def signal_bytes(target: PreTrainedModel, signal: TargetSignal, tokens: int) -> int:
    """Size on disk of the target's signal for so many label tokens."""
    shape, dtype = signal.layout(LMHead(target))
    return tokens * int(np.prod(shape)) * np.dtype(dtype).itemsize


@torch.no_grad()
def seconds_of(target: PreTrainedModel, sets: Sequence[TokenDataset], count: int = 4) -> float:
    """About how long the target takes to read all examples: from a few of middling length, measured."""
    total = sum(len(rows.ids) for rows in sets)
    rows = max(sets, key=len)
    middle = np.argsort(rows.lengths, kind="stable")[max(0, (len(rows) - count) // 2) :][:count]
    batch = rows.batch(middle, 0)
    started = time.perf_counter()
    last_hidden(target, batch["input_ids"].to(target.device), label_mask(batch["labels"]).to(target.device)).cpu()
    return (time.perf_counter() - started) * total / max(1, int(rows.lengths[middle].sum()))


def target_signal(
    target: PreTrainedModel,
    signal: TargetSignal,
    rows: TokenDataset,
    path: Path | None = None,
    fingerprint: str = "",
    batch_size: int = 16,
) -> Array:
    """What is kept of the target where a label is predicted, ``[label tokens, ...]`` as `TargetSignal.layout` says.

    Without a path it is kept in memory: for texts that are used for a while only.
    """
    shape, dtype = signal.layout(LMHead(target))
    return label_values(
        rows, lambda some: _target_parts(target, signal, some, batch_size), path, fingerprint, shape, dtype, target
    )


def mean_tail(values: Array, block: int = 1 << 16) -> float:
    """Probability that the target's kept top ids leave to all others, on average; bounds the error of α."""
    kept = sum(
        float(np.exp(np.ascontiguousarray(values[i : i + block][:, 1]).view(np.float32)).sum(dtype=np.float64))
        for i in range(0, len(values), block)
    )
    return max(0.0, 1 - kept / max(1, len(values)))


def reference_loss(
    reference: PreTrainedModel,
    target: TargetSource,
    rows: TokenDataset,
    path: Path | None = None,
    fingerprint: str = "",
    divergence: Divergence | None = None,
    batch_size: int = 16,
    precision: str = "32-true",
) -> Array:
    """D(p, r) of the reference r at every label token, ``[label tokens]`` in float32; D is forward KL by default.

    ``precision`` is the trainer's: the draft's side of ΔL is computed in it, so the reference's has to be. Without a
    path the losses are kept in memory; the target's signal is taken from the rows where it is kept.
    """
    divergence = divergence or Divergence()
    return label_values(
        rows,
        lambda some: _loss_parts(reference, target, some, divergence, batch_size, precision),
        path,
        fingerprint,
        model=target.model,
    )


@torch.no_grad()
def _target_parts(
    target: PreTrainedModel, signal: TargetSignal, rows: TokenDataset, batch_size: int
) -> Iterator[tuple[slice, Array]]:
    target.eval()
    head, batches = LMHead(target), EvalBatches(rows, batch_size, pad_id=0)
    for examples in batches.indices():
        batch = rows.batch(examples, 0)
        mask = label_mask(batch["labels"])
        with signal.forward_precision(target.device):
            hidden = last_hidden(target, batch["input_ids"].to(target.device), mask.to(target.device))
        check_finite(hidden, "target's hidden states", examples)
        yield from scatter(rows, examples, signal.encode(hidden, head).cpu().numpy())


@torch.no_grad()
def _loss_parts(
    reference: PreTrainedModel,
    target: TargetSource,
    rows: TokenDataset,
    divergence: Divergence,
    batch_size: int,
    precision: str,
) -> Iterator[tuple[slice, Array]]:
    reference.eval()
    head, device = LMHead(reference), reference.device
    target.to(device)
    for examples in EvalBatches(rows, batch_size, pad_id=0).indices():
        batch = {name: values.to(device) for name, values in rows.batch(examples, 0).items()}
        mask = label_mask(batch["labels"])
        with forward_precision(precision, device):
            hidden = last_hidden(reference, batch["input_ids"], mask)
            found = fused_loss(hidden, head, target.rows(batch, mask), LossRequest(divergence, metrics=False))
        check_finite(found.losses, "reference's losses", examples)
        yield from scatter(rows, examples, found.losses.cpu().numpy())


def check_finite(values: Tensor, what: str, examples: NDArray[np.int64]) -> None:
    """Refuses values that are not numbers."""
    if not values.isfinite().all():
        raise UserError(
            f"the {what} are not finite in a batch of examples {sorted(examples.tolist())}: if target.dtype is "
            "float16, set it to float32 or bfloat16; otherwise the model itself is broken"
        )


def scatter(rows: TokenDataset, examples: NDArray[np.int64], values: Array) -> Iterator[tuple[slice, Array]]:
    """Values of a batch's label rows, example by example, with the places where they belong."""
    start = 0
    for example in examples:
        first, last = int(rows.label_offsets[example]), int(rows.label_offsets[example + 1])
        yield slice(first, last), values[start : start + last - first]
        start += last - first
