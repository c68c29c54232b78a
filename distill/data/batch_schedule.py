"""The order in which training and validation see the examples.

Batch number ``step`` is a pure function of (seed, step): nothing has to be saved to continue a killed run exactly
where it was, and every rank of a distributed run can name its own share.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np

from distill.data.step import Step
from distill.data.token_dataset import Batch, Ints, Picks, TokenDataset, label_count, make_batch
from distill.data.tokenize import IGNORE


@dataclass(frozen=True)
class Schedule:
    """Which examples make batch number ``step``.

    Epoch after epoch the examples are shuffled into one endless stream; ``bucket`` batches' worth of it is sorted by
    length, cut into batches and their order shuffled. Every example is seen equally often, up to one.

    Attributes:
        lengths: Tokens of each example, ``[examples]``.
        batch_size: Examples a step, over all ranks.
        bucket: Batches that are cut from one sorted list; 1 leaves batches random.
        seed: Chooses the order.
    """

    lengths: Ints
    batch_size: int
    bucket: int = 1
    seed: int = 0
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
class TrainBatches:
    """The batches of steps ``start`` to ``stop``, one rank's share of each; iterated once an epoch of Lightning's.

    A step gives ``micros`` batches, between which gradients are summed up. Each carries its `Step`; with
    ``look_ahead`` the first one carries all.

    ``texts`` replaces examples of a step by ones that the draft has written. It may write with the weights of that
    moment, so a batch must not be drawn before its step.
    """

    rows: TokenDataset
    schedule: Schedule
    pad_id: int
    start: int
    stop: int
    rank: int = 0
    world: int = 1
    all_tokens: bool = False
    texts: Callable[[int, Picks], Picks] | None = None
    micros: int = 1
    look_ahead: bool = False

    def __len__(self) -> int:
        return (self.stop - self.start) * self.micros

    def __iter__(self) -> Iterator[Batch]:
        for step in range(self.start, self.stop):
            picks: Picks = [(self.rows, int(example)) for example in self.schedule.batch(step)]
            if self.texts is not None:
                picks = self.texts(step, picks)
            yield from self._parts(picks)

    def _parts(self, picks: Picks) -> Iterator[Batch]:
        """This rank's micro-batches of a step."""
        dealt = [picks[rank :: self.world][micro :: self.micros] for rank, micro in np.ndindex(self.world, self.micros)]
        counts = np.zeros((len(dealt), max(map(len, dealt))), dtype=np.int64)
        for row, part in enumerate(dealt):
            counts[row, : len(part)] = [label_count(pick, all_tokens=self.all_tokens) for pick in part]
        own = dealt[self.rank * self.micros : (self.rank + 1) * self.micros]
        batches = [make_batch(part, self.pad_id, all_tokens=self.all_tokens) for part in own]
        for micro, batch in enumerate(batches):
            ahead = batches if self.look_ahead and micro == 0 else ()
            yield batch | {"step": Step(counts, self.rank, self.world, micro, self.micros, ahead)}


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
