"""Columns of examples that frozen models compute once, in shards that every process finds again."""

from collections.abc import Callable, Collection, Sequence

import numpy as np
from torch import Tensor

from decode.errors import UserError
from decode.progress import current
from distill.data.dataset import PER_TOKEN, Batch, Examples, Expect, Picks, collate
from distill.kept import BYTES, Ints, Kept, Shapes, Values, by_tokens

Compute = Callable[[Batch], dict[str, Tensor]]
"""Gives the columns of a batch: of label tokens ``[label tokens, ...]``, or padded ``[batch, time, ...]``."""
TOKENS = 1 << 14
"""Tokens of a batch with its padding, unless a single text has more: their states are in memory."""
ADVICE = (
    ", use fewer teacher.examples, or set teacher.signal to topk or online (an engine's teacher.engine.keep to float8 "
    "or false)"
)


def row_bytes(shapes: Shapes) -> dict[str, int]:
    """Bytes of a row of each column."""
    return {name: int(np.prod(shape)) * np.dtype(kind).itemsize for name, (shape, kind) in shapes.items()}


def size_of(examples: Examples, shapes: Shapes, chosen: Ints | slice = slice(None)) -> int:
    """Bytes of the columns of examples on disk."""
    tokens, labels = int(examples.lengths[chosen].sum()), int(examples.label_counts[chosen].sum())
    return sum((tokens if name in PER_TOKEN else labels) * size for name, size in row_bytes(shapes).items())


def keep_columns(
    kept: Kept,
    sets: Sequence[Examples],
    compute: Compute,
    expect: Expect | None = None,
    reads: Collection[str] | None = None,
) -> None:
    """Adds columns to examples of several sets: those that are kept, or computed by all processes together.

    Batches depend on the examples alone, and each is a shard, so that its bits are those of any number of processes.
    ``expect`` is called with the batches that will be computed, before they are. Of the columns that are there already
    the batches carry those that ``reads`` names; None: all.

    Raises:
        UserError: The disk has not enough room, or values are not finite.
    """
    work, size = list[Picks](), 0
    most = min(TOKENS, BYTES // max(1, sum(row_bytes(kept.shapes).values())))
    for examples in sets:
        for numbers in by_tokens(examples.lengths, most):
            missing = numbers[kept.find(examples.keys[numbers]) < 0]
            size += size_of(examples, kept.shapes, missing)
            if len(missing):
                work.append([(examples, int(number)) for number in missing])
    share, progress = kept.share(work, size, ADVICE), current()
    progress.update(total=sum(map(len, share)), done=0)
    if expect is not None and share:
        expect(share)
    for picks in share:
        values = values_of(compute(collate(picks, reads)), picks)
        kept.write([(int(examples.keys[number]), text) for (examples, number), text in zip(picks, values)])
        progress.advance(len(picks))
    for examples in sets:
        kept.join(examples.keys)
        examples.columns |= dict.fromkeys(kept.shapes, kept)


def values_of(columns: dict[str, Tensor], picks: Picks) -> list[Values]:
    """The values of each example of a batch.

    Raises:
        UserError: They are not finite.
    """
    ends = np.cumsum([examples.labels_of(number) for examples, number in picks])
    texts: list[dict[str, np.ndarray]] = [{} for _ in picks]
    for name, tensor in columns.items():
        array = tensor.numpy()
        if array.dtype.kind == "f" and not np.isfinite(array).all():
            raise UserError(
                f"{name} is not finite in a batch of examples {sorted(n for _, n in picks)}: if target.dtype is "
                "float16, set it to float32 or bfloat16; otherwise the model itself is broken"
            )
        parts = list(array) if name in PER_TOKEN else np.split(array, ends[:-1])
        for text, part, (examples, number) in zip(texts, parts, picks):
            text[name] = part[: examples.lengths[number]] if name in PER_TOKEN else part
    return [*texts]
