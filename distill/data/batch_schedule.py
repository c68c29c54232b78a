"""Token rows in flat arrays, and the order in which training sees them.

Batch number ``step`` is a pure function of (seed, step): nothing has to be saved to continue a killed run exactly
where it was, and every rank of a distributed run can name its own share.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from numpy.typing import ArrayLike, NDArray

from distill.data.tokenize import prompt_ids
from distill.losses.rows import IGNORE
from distill.training.step import Step

Ints = NDArray[np.int64]
Batch = dict[str, Any]
"""Tensors by name, and under ``step`` the batch's `Step`."""


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
        tokens: Cached values per token, those of the prompt too, ``[tokens, ...]``, by name; batches carry them padded
            with zeros.
    """

    ids: NDArray[np.int32]
    labels: NDArray[np.int32]
    offsets: Ints
    label_offsets: Ints
    signals: dict[str, np.ndarray] = field(default_factory=dict)
    tokens: dict[str, np.ndarray] = field(default_factory=dict)

    @classmethod
    def of(cls, dataset: Dataset, limit: int | None = None) -> Rows:
        """The first ``limit`` examples of a data set with the columns ``input_ids`` and ``labels``."""
        dataset = dataset.select(range(min(limit or len(dataset), len(dataset))))
        columns = dataset.select_columns(["input_ids", "labels"]).with_format("numpy")[:]
        return cls.from_lists(columns["input_ids"], columns["labels"])

    @classmethod
    def from_lists(cls, input_ids: Sequence[ArrayLike], labels: Sequence[ArrayLike]) -> Rows:
        """Examples from their token ids and labels."""
        ids = [np.asarray(row, dtype=np.int32) for row in input_ids]
        wanted = [np.asarray(row, dtype=np.int32) for row in labels]
        counts = [int((row[1:] != IGNORE).sum()) for row in wanted]
        none = np.empty(0, dtype=np.int32)
        return cls(
            np.concatenate([none, *ids]),
            np.concatenate([none, *wanted]),
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

    def prompt(self, example: int) -> list[int]:
        """Token ids that a response follows: those before the first label, or a quarter of a block of plain text."""
        place = slice(self.offsets[example], self.offsets[example + 1])
        return prompt_ids(self.ids[place].tolist(), self.labels[place].tolist())

    def batch(self, examples: Ints, pad_id: int, *, all_tokens: bool = False) -> Batch:
        """Examples padded on the right.

        Causal attention never looks to the right, so no attention mask is needed: padding cannot reach a label.

        Args:
            examples: Which ones, ``[batch]``.
            pad_id: Fills ``input_ids``; any id of the vocabulary does.
            all_tokens: Label every token, those of the prompt too.

        Returns:
            ``input_ids`` and ``labels`` ``[batch, time]`` (int64); each cached signal's values ``[rows, ...]`` in
            the order of the labels, and those kept for every token ``[batch, time, ...]``.
        """
        return make_batch([(self, int(example)) for example in examples], pad_id, all_tokens=all_tokens)


Picks = Sequence[tuple[Rows, int]]
"""Examples of a batch: the rows that an example is in, and its number there."""


def make_batch(picks: Picks, pad_id: int, *, all_tokens: bool = False) -> Batch:
    """Examples, of several sets of rows if need be, as one batch; see `Rows.batch`.

    Cached signals are carried only where all the examples have them.
    """
    spans = [slice(int(rows.offsets[i]), int(rows.offsets[i + 1])) for rows, i in picks]
    shape = len(picks), max((span.stop - span.start for span in spans), default=1)
    ids, labels = np.full(shape, pad_id, dtype=np.int64), np.full(shape, IGNORE, dtype=np.int64)
    for row, ((rows, _), span) in enumerate(zip(picks, spans)):
        length = span.stop - span.start
        ids[row, :length] = rows.ids[span]
        labels[row, :length] = (rows.ids if all_tokens else rows.labels)[span]
    batch = {"input_ids": torch.from_numpy(ids), "labels": torch.from_numpy(labels)}
    names = set.intersection(*(set(rows.signals) for rows, _ in picks)) if picks else set()
    for name in sorted(names):
        parts = [np.asarray(rows.signals[name])[rows.label_offsets[i] : rows.label_offsets[i + 1]] for rows, i in picks]
        batch[name] = torch.from_numpy(np.concatenate(parts))
    for name in picks[0][0].tokens if picks else ():
        padded = np.zeros((*shape, *picks[0][0].tokens[name].shape[1:]), dtype=np.float32)
        for row, ((rows, _), span) in enumerate(zip(picks, spans)):
            padded[row, : span.stop - span.start] = rows.tokens[name][span]
        batch[name] = torch.from_numpy(padded)
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


def label_count(pick: tuple[Rows, int], *, all_tokens: bool = False) -> int:
    """Label tokens of one example of a batch."""
    rows, example = pick
    offsets = rows.offsets if all_tokens else rows.label_offsets
    return int(offsets[example + 1] - offsets[example]) - all_tokens


@dataclass(frozen=True)
class TrainBatches:
    """The batches of steps ``start`` to ``stop``, one rank's share of each; iterated once an epoch of Lightning's.

    A step gives ``micros`` batches, between which gradients are summed up. Each carries its `Step`; with
    ``look_ahead`` the first one carries all.

    ``texts`` replaces examples of a step by ones that the draft has written. It may write with the weights of that
    moment, so a batch must not be drawn before its step.
    """

    rows: Rows
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

    rows: Rows
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
