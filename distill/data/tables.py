"""Tables of rows that do not stay in memory."""

from collections.abc import Iterable
from pathlib import Path

from datasets import Dataset, Features
from datasets.arrow_writer import ArrowWriter

from decode.files import write_safely
from decode.measure.suites import Row

TOGETHER = 1000  # rows that are held before they are written


def mapped_table(path: Path, features: Features, rows: Iterable[Row]) -> Dataset:
    """Writes rows to a file as they come, whole or not at all; a data set that maps the file into memory."""

    def write(file: Path) -> None:
        with ArrowWriter(features=features, path=str(file), writer_batch_size=TOGETHER) as writer:
            for row in rows:
                writer.write(row)
            writer.finalize()

    write_safely(path, write)
    return Dataset.from_file(str(path))
