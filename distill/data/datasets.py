"""Examples as flat arrays of token ids and labels, and how some of them become a padded batch."""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow.compute as pc
import torch
from datasets import Dataset
from numpy.typing import ArrayLike, NDArray
from torch import Tensor
from transformers import PreTrainedModel

from distill.data.chat import IGNORE, prompt_part

Rows = list[list[int]]
"""The examples of each row."""


def dealt_to_rows(lengths: Sequence[int], row_length: int) -> Rows:
    """Deals examples to as few rows of about ``row_length`` tokens as hold them, of lengths as equal as can be.

    The longest examples first, each to the row that is shortest so far; a batch is padded to its longest row.
    """
    count = min(len(lengths), max(1, math.ceil(sum(lengths) / row_length)))
    rows: Rows = [[] for _ in range(count)]
    shortest = [(0, row) for row in range(count)]
    for example in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        filled, row = heapq.heappop(shortest)
        rows[row].append(example)
        heapq.heappush(shortest, (filled + int(lengths[example]), row))
    return rows


def positions_in_rows(lengths: Sequence[Sequence[int]], time: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Each token's position in its example, and the number of that example, both ``[rows, time]``.

    Args:
        lengths: Of the examples of each row.
        time: Length of the rows; what fills them up sees itself alone.
    """
    positions = np.zeros((len(lengths), time), dtype=np.int64)
    numbers = np.zeros_like(positions)
    number = 0
    for row, inside in enumerate(lengths):
        start = 0
        for length in inside:
            positions[row, start : start + length] = np.arange(length)
            numbers[row, start : start + length] = number
            start, number = start + length, number + 1
    return positions, numbers


@torch.no_grad()
def keeps_apart(model: PreTrainedModel) -> bool:
    """Whether the model computes for two examples in one row what it computes for each alone.

    FlashAttention is asked on a GPU only (`tests/gpu`); it does so for batches of one row.
    """
    if "flash" in str(getattr(model.config, "_attn_implementation", "")):
        return True
    was_training = model.training
    model.eval()
    device, vocab = model.device, model.get_input_embeddings().num_embeddings
    ids = (torch.arange(1, 13, device=device) * 7 % vocab)[None]
    positions = torch.cat([torch.arange(5), torch.arange(7)])[None].to(device)
    try:
        together = model.base_model(input_ids=ids, position_ids=positions, use_cache=False).last_hidden_state[0]
        parts = (model.base_model(input_ids=part, use_cache=False) for part in ids.split([5, 7], 1))
        wanted = torch.cat([part.last_hidden_state[0] for part in parts])
    except (TypeError, ValueError, RuntimeError):  # a forward without positions
        return False
    finally:
        model.train(was_training)
    tolerance = 1e-4 if model.dtype in (torch.float32, torch.float64) else 5e-2
    return bool((together - wanted).abs().max() <= tolerance * wanted.abs().max().clamp_min(1.0))


Ints = NDArray[np.int64]
Batch = dict[str, Any]
"""Tensors by name, and under ``step`` the batch's `OptimizerStep`."""


@dataclass
class TokenDataset:
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
        prompt_lengths: Tokens of each prompt ``[examples]``, where the labels do not tell; None: they do.
    """

    ids: NDArray[np.int32]
    labels: NDArray[np.int32]
    offsets: Ints
    label_offsets: Ints
    signals: dict[str, np.ndarray] = field(default_factory=dict)
    tokens: dict[str, np.ndarray] = field(default_factory=dict)
    prompt_lengths: Ints | None = None

    @classmethod
    def of(cls, dataset: Dataset, limit: int | None = None) -> TokenDataset:
        """The first ``limit`` examples of a data set with the columns ``input_ids`` and ``labels``."""
        dataset = dataset.select(range(min(limit or len(dataset), len(dataset))))
        table = dataset.select_columns(["input_ids", "labels"]).with_format("arrow")[:]
        ids, labels = (pc.list_flatten(table[name]).to_numpy() for name in ("input_ids", "labels"))
        lengths = pc.list_value_length(table["input_ids"]).to_numpy()
        offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
        counted = labels != IGNORE
        counted[offsets[:-1][lengths > 0]] = False
        before = np.concatenate([[0], np.cumsum(counted)]).astype(np.int64)
        return cls(ids.astype(np.int32), labels.astype(np.int32), offsets, before[offsets])

    @classmethod
    def from_lists(cls, input_ids: Sequence[ArrayLike], labels: Sequence[ArrayLike]) -> TokenDataset:
        """Examples from their token ids and labels."""
        ids = [np.asarray(row, dtype=np.int32) for row in input_ids]
        label_rows = [np.asarray(row, dtype=np.int32) for row in labels]
        counts = [int((row[1:] != IGNORE).sum()) for row in label_rows]
        none = np.empty(0, dtype=np.int32)
        return cls(
            np.concatenate([none, *ids]),
            np.concatenate([none, *label_rows]),
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
        if self.prompt_lengths is not None:
            return self.ids[place][: self.prompt_lengths[example]].tolist()
        return prompt_part(self.ids[place].tolist(), self.labels[place].tolist())

    def all_labelled(self) -> TokenDataset:
        """The same examples with every token a label, and without cached values."""
        prompts = np.array([len(self.prompt(i)) for i in range(len(self))], dtype=np.int64)
        starts = self.offsets - np.arange(len(self) + 1)  # an example's first token is predicted from nothing
        return TokenDataset(self.ids, self.ids, self.offsets, starts, prompt_lengths=prompts)

    def part(self, first: int, last: int) -> TokenDataset:
        """The examples from ``first`` to before ``last``, without copying."""
        tokens, labels = (slice(int(o[first]), int(o[last])) for o in (self.offsets, self.label_offsets))
        return TokenDataset(
            self.ids[tokens],
            self.labels[tokens],
            self.offsets[first : last + 1] - self.offsets[first],
            self.label_offsets[first : last + 1] - self.label_offsets[first],
            {name: values[labels] for name, values in self.signals.items()},
            {name: values[tokens] for name, values in self.tokens.items()},
            None if self.prompt_lengths is None else self.prompt_lengths[first:last],
        )

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


Picks = Sequence[tuple[TokenDataset, int]]
"""Examples of a batch: the rows that an example is in, and its number there."""


def make_batch(picks: Picks, pad_id: int, *, all_tokens: bool = False, packed: Rows | None = None) -> Batch:
    """Examples, of several sets of rows if need be, as one batch; see `TokenDataset.batch`.

    Cached signals are carried only where all the examples have them. Examples that are ``packed``, several in a row,
    have their positions and numbers with them, under ``position_ids`` and ``examples``, ``[rows, time]``; values kept
    for every token are not packed.

    Args:
        picks: The examples.
        pad_id: Fills up rows.
        all_tokens: Label every token.
        packed: Which of them are in which row, numbered from the first row to the last; None: one in each.
    """
    spans = [slice(int(rows.offsets[i]), int(rows.offsets[i + 1])) for rows, i in picks]
    inside = [[row] for row in range(len(picks))] if packed is None else packed
    lengths = [[spans[example].stop - spans[example].start for example in row] for row in inside]
    shape = len(inside), max(map(sum, lengths), default=1)
    ids, labels = np.full(shape, pad_id, dtype=np.int64), np.full(shape, IGNORE, dtype=np.int64)
    for row, examples in enumerate(inside):
        start = 0
        for example in examples:
            rows, span = picks[example][0], spans[example]
            place = slice(start, start + span.stop - span.start)
            ids[row, place] = rows.ids[span]
            labels[row, place] = (rows.ids if all_tokens else rows.labels)[span]
            if start:
                labels[row, start] = IGNORE  # nothing of its own text comes before it
            start = place.stop
    batch = {"input_ids": torch.from_numpy(ids), "labels": torch.from_numpy(labels)}
    if packed is not None:
        positions, numbers = positions_in_rows(lengths, shape[1])
        batch |= {"position_ids": torch.from_numpy(positions), "examples": torch.from_numpy(numbers)}
    names = set.intersection(*(set(rows.signals) for rows, _ in picks)) if picks else set()
    for name in sorted(names):
        parts = [rows.signals[name][rows.label_offsets[i] : rows.label_offsets[i + 1]] for rows, i in picks]
        batch[name] = torch.from_numpy(np.concatenate(parts))
    for name in picks[0][0].tokens if picks else ():
        array = picks[0][0].tokens[name]
        padded = np.zeros((*shape, *array.shape[1:]), dtype=array.dtype)
        for row, ((rows, _), span) in enumerate(zip(picks, spans)):
            padded[row, : span.stop - span.start] = rows.tokens[name][span]
        batch[name] = torch.from_numpy(padded)
    return batch


def label_count(pick: tuple[TokenDataset, int], *, all_tokens: bool = False) -> int:
    """Label tokens of one example of a batch."""
    rows, example = pick
    offsets = rows.offsets if all_tokens else rows.label_offsets
    return int(offsets[example + 1] - offsets[example]) - all_tokens


def example_of_rows(batch: Batch, mask: Tensor) -> Tensor:
    """Which example of the batch each label row belongs to, ``[rows]``, ascending; ``mask`` is `label_mask`."""
    numbers: Tensor = batch["examples"][mask] if "examples" in batch else mask.nonzero()[:, 0]
    return numbers


def label_mask(labels: Tensor) -> Tensor:
    """Positions ``[batch, time]`` (bool) whose next token is a label: where predictions are gathered."""
    mask = torch.zeros_like(labels, dtype=torch.bool)
    mask[:, :-1] = labels[:, 1:] != IGNORE
    return mask
