"""The order in which training and validation see the examples.

Batch number ``step`` is a pure function of (seed, step): nothing has to be saved to continue a killed run exactly
where it was, and every rank of a distributed run can name its own share.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from distill.data.batches.token_dataset import Batch, Ints, TokenDataset
from distill.data.tokenization.label_masks import IGNORE


@dataclass(frozen=True)
class Schedule:
    """Which examples make batch number ``step``.

    Epoch after epoch the examples are shuffled into one endless stream; ``bucket`` batches' worth of it is sorted by
    length, cut into batches and their order shuffled. Every example is seen equally often, up to one.
    """

    lengths: Ints  # Tokens of each example, ``[examples]``
    batch_size: int  # Examples a step, over all ranks
    bucket: int = 1  # Batches that are cut from one sorted list; 1 leaves batches random
    seed: int = 0  # Chooses the order
    _chunks: dict[int, Ints] = field(default_factory=dict, repr=False, compare=False)

    def batch(self, step: int) -> Ints:
        """Indices of the examples of a step, ``[batch_size]``."""
        chunk, place = divmod(step, self.bucket)
        if chunk not in self._chunks:
            self._chunks.clear()
            self._chunks[chunk] = self._chunk(chunk)
        return self._chunks[chunk][place]

    def _chunk(self, chunk: int) -> Ints:
        """The batches of one bucket, ``[bucket, batch_size]``."""
        size = self.bucket * self.batch_size
        picked = self._stream(chunk * size, size)
        if self.bucket == 1:
            return picked[None]
        picked = picked[np.argsort(self.lengths[picked], kind="stable")]
        order = np.random.default_rng([self.seed, 1, chunk]).permutation(self.bucket)
        return picked.reshape(self.bucket, self.batch_size)[order]

    def _stream(self, start: int, count: int) -> Ints:
        """``count`` places of the endless shuffled stream."""
        n = len(self.lengths)
        first, last = start // n, (start + count - 1) // n
        epochs = [np.random.default_rng([self.seed, 0, epoch]).permutation(n) for epoch in range(first, last + 1)]
        return np.concatenate(epochs)[start - first * n :][:count]


@dataclass(frozen=True)
class EvalBatches:
    """Every example once, by length, so that batches pad little; one rank's share.

    All ranks have equally many batches, as sharded weights demand: one without labels makes up for a missing one.
    """

    rows: TokenDataset
    batch_size: int
    pad_id: int
    rank: int = 0
    world: int = 1

    def __len__(self) -> int:
        return math.ceil(len(range(0, len(self.rows), self.world)) / self.batch_size)

    def __iter__(self) -> Iterator[Batch]:
        missing = len(self)
        for examples in self.indices():
            yield self.rows.batch(examples, self.pad_id)
            missing -= 1
        for _ in range(missing):
            batch = self.rows.batch(np.array([0]), self.pad_id)
            batch["labels"].fill_(IGNORE)
            yield batch | {name: batch[name][:0] for name in self.rows.signals}

    def indices(self) -> Iterator[Ints]:
        """The examples of each batch."""
        order = np.argsort(self.rows.lengths, kind="stable")[self.rank :: self.world]
        for start in range(0, len(order), self.batch_size):
            yield order[start : start + self.batch_size]
