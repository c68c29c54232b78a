"""What is computed once and kept: values of texts in shards on disk that know nothing of processes.

A shard is a safetensors file with the values of some dozens of texts, renamed into place when it is whole. Any number
of processes write shards of their own into one folder, and read those of all by memory mapping. What is missing is told
by the files alone, so that neither a kill nor another number of processes repeats a finished shard.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from hashlib import blake2b
from pathlib import Path
from threading import RLock
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from decode.errors import UserError
from decode.files import write_safely
from distill import ranks
from distill.files import free_bytes, remove

Ints = NDArray[np.int64]
Keys = NDArray[np.uint64]
Shapes = dict[str, tuple[tuple[int, ...], str]]
"""Shape of a row and number format of each column, by name."""
Values = Mapping[str, NDArray[Any]]
"""The rows of a text in each column."""
TEXTS, BYTES = 64, 1 << 28
"""A shard ends with this many texts, or before the text that would exceed this many bytes."""
TEXT_IDS: Shapes = {"ids": ((), "int32")}
"""The column of texts that a model writes."""
OPENED = 128  # shards that a process holds open
PLACES = 1 << 16  # more than the texts of a shard: a text's place is ``shard · PLACES + number in the shard``


class Kept:
    """Columns of values of texts, each under a key of 64 bits; 16 bytes of memory for a text.

    Args:
        shapes: The columns.
        folder: Where the shards are; None: values stay in memory.
    """

    def __init__(self, shapes: Shapes, folder: Path | None = None) -> None:
        self.shapes, self.folder = shapes, folder
        self.shards: list[Path | Values] = []
        self.keys, self.places = np.zeros(0, np.uint64), np.zeros(0, np.int64)
        self._unsorted: list[tuple[Keys, Ints]] = []
        self._waiting: list[tuple[int, Values]] = []
        self._lock = RLock()
        self._opened = lru_cache(OPENED)(self._open)
        self.scan()

    @classmethod
    def at(cls, parent: Path, name: str, key: str, shapes: Shapes) -> "Kept":
        """The values of a name and a fingerprint of what they depend on; those of other fingerprints are removed."""
        folder = parent / f"{name}-{key[:16]}"
        if ranks.is_first():
            for other in parent.glob(f"{name}-{'[0-9a-f]' * 16}"):
                if other != folder:
                    remove(other)
        return cls(shapes, folder)

    def __len__(self) -> int:
        return len(self.keys) + sum(len(keys) for keys, _ in self._unsorted)

    # -- which texts are there ----------------------------------------------------------------------------------------

    def scan(self) -> None:
        """Look for shards that other processes, or earlier ones, have written; one that is cut short is none."""
        visited = {shard for shard in self.shards if isinstance(shard, Path)}
        for path in sorted(self.folder.glob("*.safetensors")) if self.folder is not None else ():
            if path in visited:
                continue
            try:
                with safe_open(path, "numpy") as file:
                    if {*self.shapes, "keys"} <= {*file.keys()}:
                        self._add(path, file.get_tensor("keys"))
            except (OSError, SafetensorError):
                continue

    def _add(self, shard: Path | Values, keys: Keys) -> None:
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
            size = sum(value.nbytes for _, text in self._waiting for value in text.values())
            if self._waiting and size + sum(value.nbytes for value in values.values()) > BYTES:
                self.flush()
            self._waiting.append((key, values))
            if len(self._waiting) == TEXTS:
                self.flush()

    def flush(self) -> None:
        """Write the texts that wait for their shard to be full.

        Raises:
            OSError: The disk is full.
        """
        with self._lock:
            if not self._waiting:
                return
            keys = np.array([key for key, _ in self._waiting], np.uint64)
            shard = {"keys": keys}
            for name, (shape, kind) in self.shapes.items():
                parts = [np.asarray(values[name], kind).reshape(-1, *shape) for _, values in self._waiting]
                shard[name], shard[f"{name}.ends"] = np.concatenate(parts), np.cumsum(list(map(len, parts)))
            if self.folder is None:
                self._add(shard, keys)
            else:
                # of all its texts: another shard may begin with a text that is in both
                path = self.folder / f"{blake2b(keys.tobytes(), digest_size=8).hexdigest()}.safetensors"
                write_safely(path, lambda file: save_file(shard, file))
                self._add(path, keys)
            self._waiting = []

    def rows(self, name: str, place: int) -> NDArray[Any]:
        """The rows ``[rows, *shape]`` of a column of the text at a place (see `find`)."""
        shard, number = divmod(int(place), PLACES)
        read, ends = self._opened(shard)
        start, end = int(ends[name][number - 1]) if number else 0, int(ends[name][number])
        shape, kind = self.shapes[name]
        return read(name, start, end) if end > start else np.zeros((0, *shape), kind)

    def text(self, key: int) -> list[int]:
        """The ids of a text of `TEXT_IDS`.

        Raises:
            KeyError: It is not there.
        """
        if (place := int(self.find(np.array([key], np.uint64))[0])) < 0:
            raise KeyError(key)
        ids: list[int] = self.rows("ids", place).tolist()
        return ids

    def _open(self, number: int) -> tuple[Callable[[str, int, int], NDArray[Any]], Values]:
        shard = self.shards[number]
        if isinstance(shard, Mapping):
            return lambda name, start, end: shard[name][start:end], {
                name: shard[f"{name}.ends"] for name in self.shapes
            }
        file: Any = safe_open(shard, "numpy")
        ends = {name: file.get_tensor(f"{name}.ends") for name in self.shapes}
        return lambda name, start, end: file.get_slice(name)[start:end], ends

    # -- sharing the work ---------------------------------------------------------------------------------------------

    def share(self, groups: Sequence[Keys], size: int, advice: str = "", *, alone: bool = False) -> list[int]:
        """The numbers of this process's groups of texts: those of which a text is missing, dealt out by stride.

        ``size`` is the bytes of all texts that are missing, for every process together. ``alone``: the first process
        has all groups.

        Raises:
            UserError: The disk has no room for them.
        """
        unfinished = [number for number, keys in enumerate(groups) if (self.find(keys) < 0).any()]
        if self.folder is None:
            return unfinished
        free = ranks.exchange(free_bytes(self.folder))[0]  # which also waits until all have looked
        if unfinished and size > free:
            needs = f"{self.folder} needs {size / 1e9:.2f} GB and {free / 1e9:.2f} GB are free there"
            raise UserError(f"{needs}: free some space{advice}")
        return unfinished[ranks.rank() :: 1 if alone else ranks.world()] if ranks.is_first() or not alone else []

    def join(self, keys: Keys) -> Ints:
        """Wait for all processes; where the texts are.

        Raises:
            UserError: A text is missing, because processes see different folders.
        """
        self.flush()
        if self.folder is not None:
            ranks.barrier()
            self.scan()
        if (places := self.find(keys)).min(initial=0) < 0:
            raise UserError(f"{self.folder} is not seen alike by all processes: give all of them the same output_dir")
        return places


def by_tokens(numbers: Ints, lengths: Ints, most: int) -> Iterator[Ints]:
    """Batches of texts, the longest first, none of more than ``most`` tokens with its padding but a single text."""
    order = numbers[np.argsort(-lengths, kind="stable")]
    lengths = -np.sort(-lengths)
    start = 0
    while start < len(order):
        end = start + max(1, most // max(1, int(lengths[start])))
        yield order[start:end]
        start = end
