"""Rows of a source in a file instead of memory: for sources that are read as a stream."""

from __future__ import annotations

import json
import tempfile
from array import array
from collections.abc import Iterable, Sequence
from itertools import islice
from pathlib import Path
from typing import overload

import datasets
import pyarrow as pa

from decode.prompts.dataset_files import Row

BATCH = 1000
"""Rows written together."""


class RowFile(Sequence[Row]):
    """Rows as lines of JSON in a memory-mapped file, or a selection of them; the file ends with the last of these.

    Args:
        lines: The rows of the file.
        places: The numbers of those that this one has.
    """

    def __init__(self, lines: pa.ChunkedArray, places: Sequence[int]) -> None:
        self.lines, self.places = lines, places

    @classmethod
    def of(cls, rows: Iterable[Row]) -> RowFile:
        """Writes rows to a file in the folder where `datasets` caches."""
        schema, folder = pa.schema([("row", pa.large_string())]), Path(datasets.config.HF_DATASETS_CACHE)
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder, prefix="rows-") as file:  # once mapped it needs no name
            with pa.ipc.new_stream(file, schema) as writer:
                found = iter(rows)
                while lines := [json.dumps(row, default=str) for row in islice(found, BATCH)]:
                    writer.write_batch(pa.record_batch([pa.array(lines, pa.large_string())], schema))
            file.flush()
            mapped = pa.ipc.open_stream(pa.memory_map(file.name)).read_all()["row"]
        return cls(mapped, range(len(mapped)))

    def select(self, places: Sequence[int]) -> RowFile:
        """Some of the rows."""
        return RowFile(self.lines, array("q", (self.places[place] for place in places)))

    def __len__(self) -> int:
        return len(self.places)

    @overload
    def __getitem__(self, place: int) -> Row: ...

    @overload
    def __getitem__(self, place: slice) -> Sequence[Row]: ...

    def __getitem__(self, place: int | slice) -> Row | Sequence[Row]:
        if isinstance(place, slice):
            return RowFile(self.lines, self.places[place])
        row: Row = json.loads(self.lines[self.places[place]].as_py())
        return row


def select(rows: Sequence[Row], places: Sequence[int]) -> Sequence[Row]:
    """Some of the rows, in a file where they are in one."""
    return rows.select(places) if isinstance(rows, RowFile) else [rows[place] for place in places]
