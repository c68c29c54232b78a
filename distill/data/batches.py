"""Examples as flat arrays of ids and labels; batches, packing and the order of examples; Lightning's data module."""

from __future__ import annotations

import heapq
import math
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import lightning as L
import numpy as np
import pyarrow.compute as pc
import torch
import torch.distributed as dist
import torch.utils.data
from datasets import Dataset
from numpy.typing import ArrayLike, NDArray
from torch import Tensor
from transformers import PreTrainedModel

from decode.errors import UserError
from distill import ranks
from distill.data.chat import IGNORE, prompt_part

Ints = NDArray[np.int64]
Rows = list[list[int]]
"""The examples of each row of a packed batch."""
Batch = dict[str, Any]
"""Tensors by name, and under ``step`` the batch's `OptimizerStep`."""
LONGEST = 1 << 24  # label tokens of an example, at most


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
        prompt_lengths: Tokens of each prompt ``[examples]`` if every token is a label; None: the labels show them.
    """

    ids: NDArray[np.int32]
    labels: NDArray[np.int32]
    offsets: Ints
    label_offsets: Ints
    signals: dict[str, np.ndarray] = field(default_factory=dict)
    tokens: dict[str, np.ndarray] = field(default_factory=dict)
    prompt_lengths: Ints | None = None

    @classmethod
    def _of_arrays(cls, ids: ArrayLike, labels: ArrayLike, lengths: ArrayLike) -> TokenDataset:
        offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
        labels = np.asarray(labels, dtype=np.int32)
        counted = labels != IGNORE
        counted[offsets[:-1][np.diff(offsets) > 0]] = False
        before = np.concatenate([[0], np.cumsum(counted)]).astype(np.int64)
        return cls(np.asarray(ids, dtype=np.int32), labels, offsets, before[offsets])

    @classmethod
    def of(cls, dataset: Dataset, limit: int | None = None) -> TokenDataset:
        """The first ``limit`` examples of a data set with the columns ``input_ids`` and ``labels``."""
        dataset = dataset.select(range(min(limit or len(dataset), len(dataset))))
        table = dataset.select_columns(["input_ids", "labels"]).with_format("arrow")[:]
        ids, labels = (pc.list_flatten(table[name]).to_numpy() for name in ("input_ids", "labels"))
        return cls._of_arrays(ids, labels, pc.list_value_length(table["input_ids"]).to_numpy())

    @classmethod
    def from_lists(cls, input_ids: Sequence[Sequence[int]], labels: Sequence[Sequence[int]]) -> TokenDataset:
        """Examples from their token ids and labels."""
        flat = [[token for row in rows for token in row] for rows in (input_ids, labels)]
        return cls._of_arrays(flat[0], flat[1], [len(row) for row in input_ids])

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

    def batch(self, examples: Ints, pad_id: int) -> Batch:
        """`make_batch` of some of the examples ``[batch]``."""
        return make_batch([(self, int(example)) for example in examples], pad_id)


Picks = Sequence[tuple[TokenDataset, int]]
"""Examples of a batch: the rows that an example is in, and its number there."""


def make_batch(picks: Picks, pad_id: int, packed: Rows | None = None) -> Batch:
    """Examples, of several data sets if need be, padded on the right.

    Causal attention never looks to the right, so no attention mask is needed: padding cannot reach a label.

    Args:
        picks: The examples.
        pad_id: Fills up ``input_ids``; any id of the vocabulary does.
        packed: Which of them are in which row, numbered from the first row to the last; None: one in each.

    Returns:
        ``input_ids`` and ``labels`` ``[batch, time]`` (int64); each cached signal that all examples have, ``[label
        rows, ...]`` in the order of the labels; values kept for every token ``[batch, time, ...]``, which are not
        packed. Packed rows have ``position_ids`` and ``examples``, the number of each token's example, too.
    """
    spans = [slice(int(rows.offsets[i]), int(rows.offsets[i + 1])) for rows, i in picks]
    lengths = [span.stop - span.start for span in spans]
    inside = [[row] for row in range(len(picks))] if packed is None else packed
    shape = len(inside), max((sum(lengths[example] for example in row) for row in inside), default=1)
    ids, labels = np.full(shape, pad_id, dtype=np.int64), np.full(shape, IGNORE, dtype=np.int64)
    positions, numbers = np.zeros((2, *shape), dtype=np.int64)
    for row, examples in enumerate(inside):
        start = 0
        for example in examples:
            rows, span, place = picks[example][0], spans[example], slice(start, start + lengths[example])
            ids[row, place] = rows.ids[span]
            labels[row, place] = rows.labels[span]
            if start:
                labels[row, start] = IGNORE  # nothing of its own text comes before it
            if packed is not None:
                positions[row, place], numbers[row, place] = np.arange(lengths[example]), example
            start = place.stop
    batch = {"input_ids": torch.from_numpy(ids), "labels": torch.from_numpy(labels)}
    if packed is not None:
        batch |= {"position_ids": torch.from_numpy(positions), "examples": torch.from_numpy(numbers)}
    names = set.intersection(*(set(rows.signals) for rows, _ in picks)) if picks else set()
    for name in sorted(names):
        parts = [rows.signals[name][rows.label_offsets[i] : rows.label_offsets[i + 1]] for rows, i in picks]
        batch[name] = torch.from_numpy(np.concatenate(parts))
    for name, array in picks[0][0].tokens.items() if picks else ():
        padded = np.zeros((*shape, *array.shape[1:]), dtype=array.dtype)
        for row, ((rows, _), span) in enumerate(zip(picks, spans)):
            padded[row, : span.stop - span.start] = rows.tokens[name][span]
        batch[name] = torch.from_numpy(padded)
    return batch


def label_mask(labels: Tensor) -> Tensor:
    """Positions ``[batch, time]`` (bool) whose next token is a label: where predictions are gathered."""
    mask = torch.zeros_like(labels, dtype=torch.bool)
    mask[:, :-1] = labels[:, 1:] != IGNORE
    return mask


def example_of_rows(batch: Batch, mask: Tensor) -> Tensor:
    """Which example of the batch each label row belongs to, ``[rows]``, ascending; ``mask`` is `label_mask`."""
    numbers: Tensor = batch["examples"][mask] if "examples" in batch else mask.nonzero()[:, 0]
    return numbers


# -- packing ----------------------------------------------------------------------------------------------------------


def dealt_to_rows(lengths: Sequence[int], row_length: int) -> Rows:
    """Deals examples to as few rows of about ``row_length`` tokens as hold them, of lengths as equal as possible.

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


# -- the order of examples --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Schedule:
    """Which examples make batch number ``step``.

    Epoch after epoch the examples are shuffled into one endless stream; the examples of ``bucket`` batches are sorted
    by length and cut into batches, whose order is shuffled. Every example is seen equally often, up to one.

    Attributes:
        lengths: Tokens of each example, ``[examples]``.
        batch_size: Examples of a step, over all ranks.
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
        count, n = self.bucket * self.batch_size, len(self.lengths)
        start = chunk * count
        first, last = start // n, (start + count - 1) // n
        epochs = [np.random.default_rng([self.seed, 0, epoch]).permutation(n) for epoch in range(first, last + 1)]
        picked = np.concatenate(epochs)[start - first * n :][:count]
        if self.bucket == 1:
            return picked[None]
        picked = picked[np.argsort(self.lengths[picked], kind="stable")]
        order = np.random.default_rng([self.seed, 1, chunk]).permutation(self.bucket)
        return picked.reshape(self.bucket, self.batch_size)[order]


@dataclass(frozen=True)
class EvalBatches:
    """Every example once, by length, so that batches pad little; one rank's share.

    All ranks have equally many batches, as sharded weights require: one without labels replaces a missing one.
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


# -- training batches -------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class OptimizerStep:
    """A micro-batch's place in its optimiser step. It holds no tensor, so it is not moved to the device.

    Attributes:
        counts: Label tokens of every example, ``[ranks x micro-batches, examples]``, filled up with 0.
        rank: Whose micro-batch it is, of ``world`` ranks.
        micro: Which of the rank's ``micros`` it is.
        ahead: All the rank's micro-batches of the step, with its first one, where the selection needs them at once.
    """

    counts: NDArray[np.int64]
    rank: int = 0
    world: int = 1
    micro: int = 0
    micros: int = 1
    ahead: Sequence[dict[str, Any]] = ()

    @property
    def parts(self) -> int:
        """Micro-batches of the step, over all ranks. Gradients are averaged over them."""
        return self.world * self.micros

    @property
    def part(self) -> int:
        """Number of this one."""
        return self.rank * self.micros + self.micro

    @property
    def tokens(self) -> int:
        """Label tokens of the step."""
        return int(self.counts.sum())

    @property
    def weight(self) -> float:
        """Factor of a mean over this part's label tokens, so that the average over parts is the step's mean."""
        return self.parts * int(self.counts[self.part].sum()) / max(1, self.tokens)

    def choose(
        self, deltas: Sequence[Tensor], sequences: Sequence[Tensor], select: Callable[[Tensor], Tensor]
    ) -> list[Tensor]:
        """Selects among all label tokens of the step by their ΔL, however the step is dealt out.

        Args:
            deltas: ΔL of the label tokens of each of this rank's micro-batches.
            sequences: The example of the micro-batch that each of the tokens belongs to, ascending.
            select: Indices of the selected among ΔL ``[n]`` of the whole step (`losses.selection.top_share`).

        Returns:
            Indices, ascending, for each of the micro-batches.
        """
        own = []
        for micro, sequence in enumerate(sequences):
            offset = torch.arange(len(sequence), device=sequence.device) - torch.searchsorted(sequence, sequence)
            own.append((self.rank + self.world * (micro + self.micros * sequence)) * LONGEST + offset)
        order, delta = self._gathered(torch.cat(own)), self._gathered(torch.cat(list(deltas)))
        sort = order.argsort()
        chosen = order[sort][select(delta[sort])]
        return [torch.isin(part, chosen).nonzero()[:, 0] for part in own]

    def _gathered(self, values: Tensor) -> Tensor:
        """The values of all ranks, one after the other."""
        if self.world == 1:
            return values
        sizes = [torch.empty(1, dtype=torch.long, device=values.device) for _ in range(self.world)]
        dist.all_gather(sizes, torch.tensor([len(values)], device=values.device))
        padded = values.new_zeros(max(map(int, sizes)))
        padded[: len(values)] = values
        found = [torch.empty_like(padded) for _ in sizes]
        dist.all_gather(found, padded)
        return torch.cat([part[: int(size)] for part, size in zip(found, sizes)])


@dataclass
class Seen:
    """What training batches held, and how long their steps took.

    Attributes:
        tokens: Of examples.
        places: Tokens and padding.
        seconds: Of the steps, with the drawing of their batches and without validations.
        first: Of the first batch among them, which is slower.
        batches: Their number.
        validation: Seconds of the validations while training.
        validations: Their number.
    """

    tokens: int = 0
    places: int = 0
    seconds: float = 0.0
    first: float = 0.0
    batches: int = 0
    validation: float = 0.0
    validations: int = 0

    @property
    def padding(self) -> float:
        """Share of places that hold nothing."""
        return 1 - self.tokens / self.places if self.places else 0.0

    @property
    def speed(self) -> float:
        """Tokens a second of this process."""
        return self.tokens / self.seconds if self.seconds else 0.0


@dataclass(eq=False)
class TrainLoader(torch.utils.data.Dataset[tuple[list[Batch], int]]):
    """One rank's batches of all steps; Lightning saves and restores how many were drawn, so any step can be resumed.

    A step gives ``micros`` batches, between which gradients are summed up. Each carries its `OptimizerStep`; with
    ``look_ahead`` the first one carries all. The attributes are those of `DistillDataModule`.
    """

    rows: TokenDataset
    schedule: Schedule
    steps: int
    pad_id: int
    rank: int = 0
    world: int = 1
    texts: Any = None
    micros: int = 1
    look_ahead: bool = False
    drawn: int = 0
    row_length: int | None = None
    seen: Seen = field(default_factory=Seen)
    workers: int = 0
    pin: bool = False

    def __len__(self) -> int:
        return self.steps * self.micros

    def __iter__(self) -> Iterator[Batch]:
        steps = range(self.drawn // self.micros, self.steps)
        made: Any = map(self.__getitem__, steps)
        if self.workers and self.texts is None:  # made by other processes two steps ahead; what was not drawn is lost
            made = torch.utils.data.DataLoader(
                self,
                batch_size=None,
                sampler=steps,
                num_workers=self.workers,
                pin_memory=self.pin,
                multiprocessing_context="fork",  # they read the same arrays
                generator=torch.Generator(),  # not the one that dropout draws from
            )
        for batches, tokens in made:
            self.seen.tokens += tokens
            self.seen.places += sum(batch["input_ids"].numel() for batch in batches)
            for batch in batches:
                self.drawn += 1
                yield batch

    def state_dict(self) -> dict[str, Any]:
        """How many batches were drawn, how many make a step, and the texts that the draft wrote."""
        texts = None if self.texts is None else self.texts.state_dict()
        return {"drawn": self.drawn, "micros": self.micros, "texts": texts}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores it; checkpoints are written between steps.

        Raises:
            UserError: A step then had another number of batches, by which Lightning counts.
        """
        if state["micros"] != self.micros:
            raise UserError(
                f"this training was begun with trainer.accumulate {state['micros']} and is continued with "
                f"{self.micros}: set it back, or remove the stage's checkpoints (work/checkpoints-STAGE in the run's "
                "folder) to begin anew"
            )
        self.drawn = state["drawn"]
        if self.texts is not None:
            self.texts.load_state_dict(state["texts"])

    def __getitem__(self, step: int) -> tuple[list[Batch], int]:
        """This rank's micro-batches of a step, and the number of tokens of the examples in them."""
        picks: Picks = [(self.rows, int(example)) for example in self.schedule.batch(step)]
        if self.texts is not None:
            picks = self.texts(step, picks)
        dealt = [picks[rank :: self.world][micro :: self.micros] for rank, micro in np.ndindex(self.world, self.micros)]
        packed: list[Rows | None] = [None] * len(dealt)
        if self.row_length is not None:  # the examples in the order in which they fill rows
            for part, own in enumerate(dealt):
                rows = dealt_to_rows([int(r.offsets[i + 1] - r.offsets[i]) for r, i in own], self.row_length)
                dealt[part], numbers = [own[i] for row in rows for i in row], iter(range(len(own)))
                packed[part] = [[next(numbers) for _ in row] for row in rows]
        counts = np.zeros((len(dealt), max(map(len, dealt))), dtype=np.int64)
        for part, own in enumerate(dealt):
            counts[part, : len(own)] = [r.label_offsets[i + 1] - r.label_offsets[i] for r, i in own]
        share = slice(self.rank * self.micros, (self.rank + 1) * self.micros)
        batches = [make_batch(own, self.pad_id, rows) for own, rows in zip(dealt[share], packed[share])]
        for micro, batch in enumerate(batches):
            ahead = [dict(part) for part in batches] if self.look_ahead and micro == 0 else ()
            batch["step"] = OptimizerStep(counts, self.rank, self.world, micro, self.micros, ahead)
        return batches, sum(int(r.offsets[i + 1] - r.offsets[i]) for own in dealt[share] for r, i in own)


@dataclass(eq=False)
class DistillDataModule(L.LightningDataModule):
    """Batches of a stage's training.

    Attributes:
        train: Examples for training.
        validation: Examples by which checkpoints are compared.
        schedule: Which examples make which step.
        steps: Optimiser steps in all.
        pad_id: Fills up batches.
        texts: Replaces examples by texts that the draft writes itself (`distill.responses.on_policy.OnPolicy`); they
            depend on the weights of the moment, so no batch is then made ahead.
        look_ahead: The selection needs all micro-batches of a step at once.
        row_length: Tokens of a row that several training examples are packed into; None: a row each.
        seen: What this process's training batches held so far.
        workers: Processes that make training batches ahead.
    """

    train: TokenDataset
    validation: TokenDataset
    schedule: Schedule
    steps: int
    pad_id: int
    texts: Any = None
    look_ahead: bool = False
    row_length: int | None = None
    seen: Seen = field(default_factory=Seen)
    workers: int = 0

    def __post_init__(self) -> None:
        super().__init__()

    def setup(self, stage: str) -> None:
        """Makes sure that all processes are about to train on the same examples in the same order."""
        batches = self.schedule.batch_size, self.schedule.seed, self.schedule.bucket, self.steps, self.row_length
        own = [zlib.crc32(self.train.ids.tobytes()), zlib.crc32(self.train.labels.tobytes()), len(self.train), batches]
        found = ranks.exchange(own)
        other = next((rank for rank, value in enumerate(found) if value != found[0]), None)
        if other is not None:
            raise UserError(
                f"process {other} has {found[other][2]:,} training examples and process 0 {found[0][2]:,}, not the "
                "same ones: give all of them the same configuration, data files and output_dir (one that all can see)"
            )

    def train_dataloader(self) -> TrainLoader:
        """All steps' batches; a checkpoint's state moves the loader to its step.

        Raises:
            UserError: A step has fewer examples than there are batches to deal them out to.
        """
        rank, world, micros = self._place()
        if self.schedule.batch_size < world * micros:
            raise UserError(
                f"{self.schedule.batch_size} examples a step cannot be dealt out to {world * micros} batches "
                "(processes times trainer.accumulate): raise batch_size, or lower trainer.devices or trainer.accumulate"
            )
        assert self.trainer is not None
        return TrainLoader(
            self.train, self.schedule, self.steps, self.pad_id, rank, world, self.texts, micros,
            self.look_ahead and micros > 1, row_length=self.row_length, seen=self.seen, workers=self.workers,
            pin=self.trainer.strategy.root_device.type == "cuda",
        )  # fmt: skip

    def val_dataloader(self) -> EvalBatches:
        """All validation examples, in batches of the size of the training's micro-batches."""
        rank, world, micros = self._place()
        size = max(1, self.schedule.batch_size // (world * micros))
        return EvalBatches(self.validation, size, self.pad_id, rank, world)

    def _place(self) -> tuple[int, int, int]:
        """This rank, the number of ranks, and of micro-batches of each in a step."""
        assert self.trainer is not None
        return self.trainer.global_rank, self.trainer.world_size, self.trainer.accumulate_grad_batches
