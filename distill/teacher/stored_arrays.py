"""Arrays on disk that are made once.

A file is written beside its place and renamed when complete. The description next to it holds the fingerprint of
what it was made from and a checksum of its bytes; a file that does not agree with it is made again.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from decode.core.errors import UserError
from decode.core.progress import current
from distill.core import ranks
from distill.core.file_fingerprints import checksum, write_json

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
