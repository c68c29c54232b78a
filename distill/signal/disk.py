"""Columns of examples that frozen models compute once, kept as Arrow files that are mapped into memory.

`datasets.Dataset.map` computes them batch by batch, writes each file aside and renames it. Every process computes and
writes its share of the examples, and reads those of all.
"""

from collections.abc import Callable
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
from datasets import Dataset, Features, List, Value
from torch import Tensor

from decode.errors import UserError
from decode.files import write_safely
from decode.progress import current
from distill import ranks
from distill.data.dataset import PER_TOKEN, Batch, Column, Examples, Expect, Ints, Shapes
from distill.files import fingerprint, free_bytes

Compute = Callable[[Batch], dict[str, Tensor]]
"""Gives the columns of a batch: of label tokens ``[label tokens, ...]``, or padded ``[batch, time, ...]``."""
BATCH = 16  # examples that are computed together
BUFFER = 1 << 28  # bytes that are held before they are written


def size_of(examples: Examples, shapes: Shapes) -> int:
    """Returns the bytes of columns on disk."""
    tokens, labels = len(examples.ids), examples.label_count
    return sum(
        (tokens if name in PER_TOKEN else labels) * prod(shape) * np.dtype(kind).itemsize
        for name, (shape, kind) in shapes.items()
    )


def keep_columns(
    examples: Examples,
    compute: Compute,
    shapes: Shapes,
    folder: Path | None = None,
    name: str = "",
    key: str = "",
    expect: Expect | None = None,
) -> None:
    """Adds columns to the examples: those on disk, or computed; without a folder they stay in memory.

    ``key`` is a fingerprint of everything that the values depend on. ``expect`` is called with what will be computed,
    before it is.

    Raises:
        UserError: The disk has not enough room, or values are not finite.
    """
    order = np.concatenate([np.zeros(0, np.int64), *examples.batches(BATCH)])
    world = 1 if folder is None else ranks.world()
    key = fingerprint(key, name, len(examples), world)
    computed = partial(_computed, examples, compute, shapes, key, expect)
    if folder is None:
        parts: list[Dataset | None] = [computed(order, None)]
    else:
        size = size_of(examples, shapes)
        files = {folder / f"{name}-{key[:16]}-{n}.arrow": each for n, each in enumerate(np.array_split(order, world))}
        path, share = list(files.items())[ranks.rank()]
        folder.mkdir(parents=True, exist_ok=True)
        if ranks.is_first():
            for other in set(folder.glob(f"{name}-*.arrow")) - files.keys():  # made from something else
                other.unlink()
        there = _open(path, len(share)) is not None
        if not there and size // world > (free := free_bytes(folder)):
            raise UserError(
                f"{name} needs {size / 1e9:.2f} GB and {free / 1e9:.2f} GB are free in {folder}: free some space, use "
                "fewer teacher.examples, or set teacher.signal to topk or online (an engine's teacher.engine.keep to "
                "float8 or false)"
            )
        if not there:
            write_safely(path, partial(computed, share))
        ranks.barrier()
        parts = [_open(path, len(share)) for path, share in files.items()]
    if None in parts:
        raise UserError(f"{folder} is not seen alike by all processes: give all of them the same output_dir")
    table = pyarrow.concat_tables([part.data.table for part in parts if part is not None])
    back = np.argsort(table.column("example").to_numpy(), kind="stable")
    for column, (shape, _) in shapes.items():
        examples.columns[column] = Column(table.column(column), back, shape)


def _open(path: Path, count: int) -> Dataset | None:
    """Returns a file's rows, mapped into memory; None if it is not there, cut short, or has another number of rows."""
    try:
        rows = Dataset.from_file(str(path))
    except (OSError, ValueError, pyarrow.ArrowException):
        return None
    return rows if len(rows) == count else None


def _computed(
    examples: Examples,
    compute: Compute,
    shapes: Shapes,
    key: str,
    expect: Expect | None,
    numbers: Ints,
    path: Path | None,
) -> Dataset:
    """Computes the columns of some examples, in batches of these numbers, into a file or in memory."""
    work = current()
    work.update(total=len(numbers), done=0)
    labels = np.diff(examples.label_offsets)
    if expect is not None:
        expect(examples, (numbers[start : start + BATCH] for start in range(0, len(numbers), BATCH)))

    def columns(batch: dict[str, list[int]]) -> dict[str, list[Any]]:
        chosen = np.array(batch["example"])
        values, made = compute(examples.batch(chosen)), {}
        for name, tensor in values.items():
            array = tensor.numpy()
            if array.dtype.kind == "f" and not np.isfinite(array).all():
                raise UserError(
                    f"{name} is not finite in a batch of examples {sorted(chosen.tolist())}: if target.dtype is "
                    "float16, set it to float32 or bfloat16; otherwise the model itself is broken"
                )
            counts = labels[chosen]
            if name in PER_TOKEN:  # padded
                counts = examples.lengths[chosen]
                array = array[np.arange(array.shape[1]) < counts[:, None]]
            made[name] = [part.reshape(-1) for part in np.split(array, np.cumsum(counts)[:-1])]
        work.advance(len(chosen))
        return made

    a_row = size_of(examples, shapes) // max(1, len(examples)) or 1
    features = Features({"example": Value("int64")} | {n: List(Value(kind)) for n, (_, kind) in shapes.items()})
    return Dataset.from_dict({"example": numbers.tolist()}).map(
        columns,
        batched=True,
        batch_size=BATCH,
        features=features,
        writer_batch_size=max(BATCH, min(1000, BUFFER // a_row)),
        keep_in_memory=path is None,
        cache_file_name=None if path is None else str(path),
        load_from_cache_file=False,
        new_fingerprint=key,
    )
