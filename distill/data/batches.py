"""Examples as flat arrays of ids and labels, and batches of them, padded or packed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel

from distill.data.chat import IGNORE, prompt_part

Ints = NDArray[np.int64]
Batch = dict[str, Any]
"""Tensors by name, and under ``step`` the batch's `distill.data.loader.OptimizerStep`."""


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
    """

    ids: NDArray[np.int32]
    labels: NDArray[np.int32]
    offsets: Ints
    label_offsets: Ints
    signals: dict[str, np.ndarray] = field(default_factory=dict)
    tokens: dict[str, np.ndarray] = field(default_factory=dict)

    @classmethod
    def from_lists(cls, input_ids: Sequence[Any], labels: Sequence[Any]) -> TokenDataset:
        """Examples from their token ids and labels, lists or arrays."""
        offsets, none = np.cumsum([0, *map(len, input_ids)]), np.zeros(0, dtype=np.int32)
        ids, flat = (np.concatenate([none, *rows], dtype=np.int32, casting="unsafe") for rows in (input_ids, labels))
        counted = flat != IGNORE
        counted[offsets[:-1]] = False
        return cls(ids, flat, offsets, np.concatenate([[0], np.cumsum(counted)])[offsets])

    @classmethod
    def of(cls, dataset: Dataset, limit: int | None = None) -> TokenDataset:
        """The first ``limit`` examples of a data set with the columns ``input_ids`` and ``labels``."""
        columns = dataset.select_columns(["input_ids", "labels"]).with_format("numpy")[:limit]
        return cls.from_lists(columns["input_ids"], columns["labels"])

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

    def labels_of(self, examples: Ints | int) -> int:
        """Label tokens of some examples."""
        return int((self.label_offsets[examples + 1] - self.label_offsets[examples]).sum())

    def span(self, example: int) -> slice:
        """Where an example is in ``ids``."""
        return slice(int(self.offsets[example]), int(self.offsets[example + 1]))

    def prompt(self, example: int) -> list[int]:
        """Token ids that a response follows: those before the first label, or a quarter of a block of plain text."""
        ids = self.ids[self.span(example)].tolist()
        return prompt_part(ids, self.labels[self.span(example)].tolist())

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
        )

    def batch(self, examples: Ints) -> Batch:
        """`make_batch` of some of the examples ``[batch]``."""
        return make_batch([(self, int(example)) for example in examples])


Picks = Sequence[tuple[TokenDataset, int]]
"""Examples of a batch: the rows that an example is in, and its number there."""


def make_batch(picks: Picks, packed: Sequence[int] | None = None) -> Batch:
    """Examples, of several data sets if need be, padded on the right.

    Causal attention never looks to the right, so no attention mask is needed: padding, by id 0, cannot reach a label.

    Args:
        picks: The examples, at least one.
        packed: How many of them, in their order, are in each row; None: one in each.

    Returns:
        ``input_ids`` and ``labels`` ``[batch, time]`` (int64); each cached signal that all examples have, ``[label
        rows, ...]`` in the order of the labels; values kept for every token ``[batch, time, ...]``, which are not
        packed. Packed rows have ``position_ids`` and ``examples``, the number of each token's example, too.
    """
    spans = [rows.span(example) for rows, example in picks]
    places, following = list[tuple[int, slice]](), iter(spans)
    for row, count in enumerate([1] * len(picks) if packed is None else packed):
        start = 0
        for span in islice(following, count):
            places.append((row, slice(start, start + span.stop - span.start)))
            start = places[-1][1].stop
    shape = places[-1][0] + 1, max(place.stop for _, place in places)
    ids, labels = np.zeros(shape, dtype=np.int64), np.full(shape, IGNORE)
    positions, numbers = np.zeros((2, *shape), dtype=np.int64)
    made = {"input_ids": ids, "labels": labels}
    if packed is not None:
        made |= {"position_ids": positions, "examples": numbers}
    for name in sorted(set.intersection(*(set(rows.signals) for rows, _ in picks))):
        parts = [rows.signals[name][rows.label_offsets[i] : rows.label_offsets[i + 1]] for rows, i in picks]
        made[name] = np.concatenate(parts)
    tokens = {name: np.zeros((*shape, *array.shape[1:]), array.dtype) for name, array in picks[0][0].tokens.items()}
    for number, ((rows, _), span, place) in enumerate(zip(picks, spans, places)):
        ids[place], labels[place] = rows.ids[span], rows.labels[span]
        positions[place], numbers[place] = np.arange(span.stop - span.start), number
        if place[1].start:
            labels[place[0], place[1].start] = IGNORE  # nothing of its own text comes before it
        for name, values in tokens.items():
            values[place] = rows.tokens[name][span]
    return {name: torch.from_numpy(values) for name, values in (made | tokens).items()}


def label_mask(labels: Tensor) -> Tensor:
    """Positions ``[batch, time]`` (bool) whose next token is a label: where predictions are gathered."""
    mask = torch.zeros_like(labels, dtype=torch.bool)
    mask[:, :-1] = labels[:, 1:] != IGNORE
    return mask


def example_of_rows(batch: Batch, mask: Tensor) -> Tensor:
    """Which example of the batch each label row belongs to, ``[rows]``, ascending; ``mask`` is `label_mask`."""
    numbers: Tensor = batch["examples"][mask] if "examples" in batch else mask.nonzero()[:, 0]
    return numbers


def dealt_to_rows(lengths: Sequence[int], row_length: int) -> list[list[int]]:
    """Deals examples to as few rows of about ``row_length`` tokens as hold them, of lengths as equal as possible.

    The longest examples first, each to the row that is shortest so far; a batch is padded to its longest row.
    """
    filled = np.zeros(min(len(lengths), max(1, math.ceil(sum(lengths) / row_length))), dtype=np.int64)
    rows: list[list[int]] = [[] for _ in filled]
    for example in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        shortest = int(filled.argmin())
        rows[shortest].append(example)
        filled[shortest] += lengths[example]
    return rows


@torch.no_grad()
def keeps_apart(model: PreTrainedModel) -> bool:
    """Whether the model computes for two examples in one row what it computes for each alone.

    FlashAttention is tested on a GPU only (`tests/gpu`); it does so for batches of one row.
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
