"""Columns of examples that frozen models compute once, in shards that every process finds again."""

from collections.abc import Callable, Collection, Iterator, Sequence
from itertools import chain

import numpy as np
from torch import Tensor

from decode.errors import UserError
from decode.progress import current
from distill.data.dataset import PER_TOKEN, Batch, Column, Examples, Expect, Picks, collate
from distill.kept import BYTES, TEXTS, Ints, Kept, Shapes, Values, by_tokens

Compute = Callable[[Batch], dict[str, Tensor]]
"""Gives the columns of a batch: of label tokens ``[label tokens, ...]``, or padded ``[batch, time, ...]``."""
TOKENS = 1 << 14
"""Tokens of a batch with its padding, unless a single text has more: all layers' states of so many are in memory."""
ADVICE = (
    ", use fewer teacher.examples, or set teacher.signal to topk or online (an engine's teacher.engine.keep to float8 "
    "or false)"
)


def size_of(examples: Examples, shapes: Shapes, chosen: Ints | None = None) -> int:
    """Bytes of the columns of examples (None: of all) on disk."""
    chosen = np.arange(len(examples)) if chosen is None else chosen
    return int(_sizes(examples, shapes)[chosen].sum())


def _sizes(examples: Examples, shapes: Shapes) -> Ints:
    rows = {name: examples.lengths if name in PER_TOKEN else np.diff(examples.label_offsets) for name in shapes}
    a_row = {name: int(np.prod(shape)) * np.dtype(kind).itemsize for name, (shape, kind) in shapes.items()}
    return sum((rows[name] * a_row[name] for name in shapes), np.zeros(len(examples), np.int64))


def groups_of(examples: Examples, shapes: Shapes) -> list[Ints]:
    """The numbers of all examples, a list for each shard: texts of similar length, the longest first.

    They depend on the examples alone. A shard is computed whole, so that its bits are those of any number of processes.
    """
    order, sizes = np.argsort(-examples.lengths, kind="stable"), _sizes(examples, shapes)
    groups, start, room = list[Ints](), 0, BYTES
    for place, number in enumerate(order.tolist()):
        if place > start and (place - start == TEXTS or sizes[number] > room):
            groups.append(order[start:place])
            start, room = place, BYTES
        room -= int(sizes[number])
    return [*groups, order[start:]] if len(order) else []


def keep_columns(
    kept: Kept,
    sets: Sequence[Examples],
    compute: Compute,
    expect: Expect | None = None,
    reads: Collection[str] | None = None,
) -> None:
    """Adds columns to examples of several sets: those that are kept, or computed by all processes together.

    ``expect`` is called with the batches that will be computed, before they are. Of the columns that are there already
    the batches carry those that ``reads`` names; None: all.

    Raises:
        UserError: The disk has not enough room, or values are not finite.
    """
    groups = [(examples, numbers) for examples in sets for numbers in groups_of(examples, kept.shapes)]
    keys = [examples.keys[numbers] for examples, numbers in groups]
    missing = [kept.find(its) < 0 for its in keys]
    size = sum(size_of(rows, kept.shapes, numbers[lack]) for (rows, numbers), lack in zip(groups, missing))
    share, work = kept.share(keys, size, ADVICE), current()
    work.update(total=sum(int(missing[number].sum()) for number in share), done=0)

    def batches(group: int) -> Iterator[Picks]:
        examples, numbers = groups[group][0], groups[group][1][missing[group]]
        for batch in by_tokens(numbers, examples.lengths[numbers], TOKENS):
            yield [(examples, int(number)) for number in batch]

    if expect is not None:
        expect(chain.from_iterable(map(batches, share)))
    for group in share:
        for picks in batches(group):
            for (examples, number), values in zip(picks, values_of(compute(collate(picks, reads)), picks)):
                kept.put(int(examples.keys[number]), values)
            work.advance(len(picks))
        kept.flush()
    for examples in sets:
        places = kept.join(examples.keys)
        examples.columns |= {name: Column(kept, name, places) for name in kept.shapes}


def values_of(columns: dict[str, Tensor], picks: Picks) -> list[Values]:
    """The values of each example of a batch.

    Raises:
        UserError: They are not finite.
    """
    lengths = np.array([examples.offsets[n + 1] - examples.offsets[n] for examples, n in picks])
    labels = np.array([examples.labels_of(n) for examples, n in picks])
    texts: list[dict[str, np.ndarray]] = [{} for _ in picks]
    for name, tensor in columns.items():
        array = tensor.numpy()
        if array.dtype.kind == "f" and not np.isfinite(array).all():
            raise UserError(
                f"{name} is not finite in a batch of examples {sorted(n for _, n in picks)}: if target.dtype is "
                "float16, set it to float32 or bfloat16; otherwise the model itself is broken"
            )
        if name in PER_TOKEN:  # padded
            parts = [row[:length] for row, length in zip(array, lengths)]
        else:
            parts = np.split(array, np.cumsum(labels)[:-1])
        for text, part in zip(texts, parts):
            text[name] = part
    return [*texts]
