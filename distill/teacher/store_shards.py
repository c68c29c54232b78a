"""Signals of many examples in several files: each is written by one process, all processes write at once.

How examples are dealt to files depends on their tokens alone, so a run goes on with another number of processes: what
is there and sound is not made again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
from transformers import PreTrainedModel

from distill.core import ranks
from distill.core.file_fingerprints import fingerprint
from distill.data.batches.token_dataset import TokenDataset
from distill.teacher.sharded_target import in_step
from distill.teacher.stored_arrays import Array, Kept, Part, cached, cached_together, check_room

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
