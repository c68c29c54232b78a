"""What is computed once and kept: values of texts in shards on disk that know nothing of processes.

A shard is a safetensors file with the values of some dozens of texts, renamed into place when it is whole. Any number
of processes write shards of their own into one folder, and read those of all by memory mapping. What is missing is told
by the files alone, so that neither a kill nor another number of processes repeats a finished shard.
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache, partial
from hashlib import blake2b
from pathlib import Path
from threading import RLock
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from decode.errors import UserError
from decode.files import write_safely
from distill import ranks
from distill.files import free_bytes

Item = TypeVar("Item")
Ints = NDArray[np.int64]
Keys = NDArray[np.uint64]
Shapes = dict[str, tuple[tuple[int, ...], str]]
"""Shape of a row and number format of each column, by name."""
Values = Mapping[str, NDArray[Any]]
"""The rows of a text in each column."""
TEXTS, BYTES = 64, 1 << 28
"""A shard has this many texts at most, and no more bytes than these unless it is one text's."""
TEXT_IDS: Shapes = {"ids": ((), "int32")}
"""The column of texts that a model writes."""
OPENED = 128  # shards that a process holds open
PLACES = 1 << 16  # more than the texts of a shard: a text's place is ``shard · PLACES + number in the shard``


class Kept:
    """Columns of values of texts, each under a key of 64 bits; 16 bytes of memory for a text.

    Args:
        shapes: The columns.
        folder: Where the shards are.
    """

    def __init__(self, shapes: Shapes, folder: Path) -> None:
        self.shapes, self.folder = shapes, folder
        self.shards: list[Path] = []
        self.keys, self.places = np.zeros(0, np.uint64), np.zeros(0, np.int64)
        self._unsorted: list[tuple[Keys, Ints]] = []
        self._waiting: list[tuple[int, Values]] = []
        self._lock = RLock()
        self._opened = lru_cache(OPENED)(partial(safe_open, framework="numpy"))
        self.scan()

    def __len__(self) -> int:
        return len(self.keys) + sum(len(keys) for keys, _ in self._unsorted)

    # -- which texts are there ----------------------------------------------------------------------------------------

    def scan(self) -> None:
        """Look for shards that other processes, or earlier ones, have written; one that is cut short is none."""
        for path in sorted({*self.folder.glob("*.safetensors")} - {*self.shards}):
            try:
                with safe_open(path, "numpy") as file:
                    if {*self.shapes, "keys"} <= {*file.keys()}:
                        self._add(path, file.get_tensor("keys"))
            except (OSError, SafetensorError):
                continue

    def _add(self, shard: Path, keys: Keys) -> None:
        self._unsorted.append((keys, len(self.shards) * PLACES + np.arange(len(keys))))
        self.shards.append(shard)

    def find(self, keys: Keys) -> Ints:
        """Where texts are, -1 for those that are missing."""
        with self._lock:
            if self._unsorted:
                parts = [(self.keys, self.places), *self._unsorted]
                merged, places = (np.concatenate(part) for part in zip(*parts))
                order = np.argsort(merged, kind="stable")
                self.keys, self.places, self._unsorted = merged[order], places[order], []
        if not len(self.keys):
            return np.full(len(keys), -1)
        at = np.minimum(np.searchsorted(self.keys, keys), len(self.keys) - 1)
        return np.where(self.keys[at] == keys, self.places[at], -1)

    # -- values -------------------------------------------------------------------------------------------------------

    def put(self, key: int, values: Values) -> None:
        """Add a text, which is on disk when its shard is full or after `flush`. Threads may call it at once."""
        with self._lock:
            self._waiting.append((key, values))
            size = sum(value.nbytes for _, text in self._waiting for value in text.values())
            if len(self._waiting) == TEXTS or size > BYTES:
                self.flush()

    def flush(self) -> None:
        """Write the texts that wait for their shard to be full.

        Raises:
            OSError: The disk is full.
        """
        with self._lock:
            if self._waiting:
                self.write(self._waiting)
            self._waiting = []

    def write(self, texts: Sequence[tuple[int, Values]]) -> None:
        """Write a shard of these texts by their keys.

        Raises:
            OSError: The disk is full.
        """
        keys = np.array([key for key, _ in texts], np.uint64)
        shard = {"keys": keys}
        for name, (shape, kind) in self.shapes.items():
            parts = [np.asarray(values[name], kind).reshape(-1, *shape) for _, values in texts]
            shard[name], shard[f"{name}.ends"] = np.concatenate(parts), np.cumsum(list(map(len, parts)))
        # of all its texts: another shard may begin with a text that is in both
        path = self.folder / f"{blake2b(keys.tobytes(), digest_size=8).hexdigest()}.safetensors"
        with self._lock:
            write_safely(path, lambda file: save_file(shard, file))
            self._add(path, keys)

    def get(self, name: str, key: int | np.uint64) -> NDArray[Any]:
        """The rows ``[rows, *shape]`` of a column of a text.

        Raises:
            KeyError: The text is missing.
        """
        if (place := int(self.find(np.array([key], np.uint64))[0])) < 0:
            raise KeyError(key)
        shard, number = divmod(place, PLACES)
        column = self._opened(self.shards[shard]).get_slice
        start, end = [0, *column(f"{name}.ends")[max(0, number - 1) : number + 1]][-2:]
        shape, kind = self.shapes[name]
        return column(name)[start:end] if end > start else np.zeros((0, *shape), kind)

    # -- sharing the work ---------------------------------------------------------------------------------------------

    def share(self, work: Sequence[Item], size: int = 0, advice: str = "", *, alone: bool = False) -> Sequence[Item]:
        """This process's part of what is to be computed, which is dealt out by stride.

        ``size`` is the bytes that all processes together will write. ``alone``: the first process has all of it.

        Raises:
            UserError: The disk has no room for them.
        """
        free = ranks.exchange(free_bytes(self.folder))[0]  # which also waits until all have looked what is missing
        if work and size > free:
            needs = f"{self.folder} needs {size / 1e9:.2f} GB and {free / 1e9:.2f} GB are free there"
            raise UserError(f"{needs}: free some space, such as what is there of other settings{advice}")
        if alone:
            return work if ranks.is_first() else []
        return work[ranks.rank() :: ranks.world()]

    def join(self, keys: Keys) -> None:
        """Write what waits, and wait for all processes.

        Raises:
            UserError: A text is missing, because processes see different folders.
        """
        self.flush()
        ranks.barrier()

        def complete() -> bool:
            self.scan()
            return not (self.find(keys) < 0).any()

        if not ranks.soon(complete):
            raise UserError(f"{self.folder} is not seen alike by all processes: give all of them the same output_dir")


def by_tokens(lengths: Ints, most: int) -> Iterator[Ints]:
    """The numbers of texts in batches for a shard each, the longest first.

    None has more than ``most`` tokens with its padding, but for a single text.
    """
    order, start = np.argsort(-lengths, kind="stable"), 0
    while start < len(order):
        end = start + max(1, min(TEXTS, most // max(1, int(lengths[order[start]]))))
        yield order[start:end]
        start = end
