"""Token rows in flat arrays, and the order in which training sees them.

Batch number ``step`` is a pure function of (seed, step): nothing has to be saved to continue a killed run exactly
where it was, and every rank of a distributed run can name its own share.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import torch
from datasets import Dataset
from numpy.typing import NDArray
from torch import Tensor

from distill.losses import IGNORE

Ints = NDArray[np.int64]
Batch = dict[str, Tensor]


@dataclass
class Rows:
    """Examples as flat arrays; example i is ``ids[offsets[i]:offsets[i + 1]]``.

    Attributes:
        ids: Token ids of all examples, one after the other.
        labels: Labels of the same length, not shifted; -100 where no loss is taken.
        offsets: Where each example starts, ``[examples + 1]``.
        label_offsets: Where each example's label tokens start when all are numbered through, ``[examples + 1]``.
            A label in first place has nothing to be predicted from and does not count.
        signals: Cached values per label token, ``[label tokens, ...]``, by name; batches carry their share.
    """

    ids: NDArray[np.int32]
    labels: NDArray[np.int32]
    offsets: Ints
    label_offsets: Ints
    signals: dict[str, np.ndarray] = field(default_factory=dict)

    @classmethod
    def of(cls, dataset: Dataset, limit: int | None = None) -> Rows:
        """The first ``limit`` examples of a data set with the columns ``input_ids`` and ``labels``."""
        dataset = dataset.select(range(min(limit or len(dataset), len(dataset))))
        columns = dataset.select_columns(["input_ids", "labels"]).with_format("numpy")[:]
        ids = [np.asarray(row, dtype=np.int32) for row in columns["input_ids"]]
        labels = [np.asarray(row, dtype=np.int32) for row in columns["labels"]]
        counts = [int((row[1:] != IGNORE).sum()) for row in labels]
        return cls(
            np.concatenate(ids),
            np.concatenate(labels),
            np.concatenate([[0], np.cumsum([len(row) for row in ids])]).astype(np.int64),
            np.concatenate([[0], np.cumsum(counts)]).astype(np.int64),
        )

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def lengths(self) -> Ints:
        """Tokens of each example, ``[examples]``."""
        return np.diff(self.offsets)

    @property
    def label_count(self) -> int:
        """Label tokens of all examples: one loss each."""
        return int(self.label_offsets[-1])

    def labels_of(self, examples: Ints) -> int:
        """Label tokens of some examples."""
        return int((self.label_offsets[examples + 1] - self.label_offsets[examples]).sum())

    def batch(self, examples: Ints, pad_id: int, *, all_tokens: bool = False) -> Batch:
        """Examples padded on the right.

        Causal attention never looks to the right, so no attention mask is needed: padding cannot reach a label.

        Args:
            examples: Which ones, ``[batch]``.
            pad_id: Fills ``input_ids``; any id of the vocabulary does.
            all_tokens: Label every token, those of the prompt too.

        Returns:
            ``input_ids`` and ``labels`` ``[batch, time]`` (int64); each cached signal's values ``[rows, ...]`` in
            the order of the labels.
        """
        starts, lengths = self.offsets[examples], self.lengths[examples]
        shape = len(examples), int(lengths.max()) if len(examples) else 1
        ids, labels = np.full(shape, pad_id, dtype=np.int64), np.full(shape, IGNORE, dtype=np.int64)
        for row, (start, length) in enumerate(zip(starts, lengths)):
            ids[row, :length] = self.ids[start : start + length]
            labels[row, :length] = (self.ids if all_tokens else self.labels)[start : start + length]
        batch = {"input_ids": torch.from_numpy(ids), "labels": torch.from_numpy(labels)}
        spans = list(zip(self.label_offsets[examples], self.label_offsets[examples + 1]))
        for name, values in self.signals.items():
            parts = [values[start:end] for start, end in spans]
            batch[name] = torch.from_numpy(np.concatenate(parts) if parts else np.empty((0, *values.shape[1:])))
        return batch


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
    """The batches of steps ``start`` to ``stop``, one rank's share of each; iterated once an epoch of Lightning's."""

    rows: Rows
    schedule: Schedule
    pad_id: int
    start: int
    stop: int
    rank: int = 0
    world: int = 1
    all_tokens: bool = False

    def __len__(self) -> int:
        return self.stop - self.start

    def __iter__(self) -> Iterator[Batch]:
        for step in range(self.start, self.stop):
            examples = self.schedule.batch(step)[self.rank :: self.world]
            yield self.rows.batch(examples, self.pad_id, all_tokens=self.all_tokens)


@dataclass(frozen=True)
class EvalBatches:
    """Every example once, by length, so that batches pad little; one rank's share."""

    rows: Rows
    batch_size: int
    pad_id: int
    rank: int = 0
    world: int = 1

    def __len__(self) -> int:
        return math.ceil(len(range(self.rank, len(self.rows), self.world)) / self.batch_size)

    def __iter__(self) -> Iterator[Batch]:
        for examples in self.indices():
            yield self.rows.batch(examples, self.pad_id)

    def indices(self) -> Iterator[Ints]:
        """The examples of each batch."""
        order = np.argsort(self.rows.lengths, kind="stable")[self.rank :: self.world]
        for start in range(0, len(order), self.batch_size):
            yield order[start : start + self.batch_size]
