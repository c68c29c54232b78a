"""Examples as flat arrays, batches of them, the order in which they are trained on, and Lightning's data module."""

import hashlib
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import pyarrow.compute
import torch
from datasets import Dataset
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, get_worker_info
from torch.utils.data import Dataset as TorchDataset

from distill.data.chat import IGNORE, Ids, prompt_part
from distill.files import free_bytes
from distill.kept import Ints, Kept, Keys

Batch = dict[str, Any]
"""Tensors by name; in training also ``weight``, ``part`` and ``examples``, plain numbers (see `TrainingBatches`)."""
Chance = Sequence[np.random.Generator]
"""A source of random numbers for each text of a batch."""
PLACES = "places"
"""Where the positions whose next token is a label lie among all of a batch's, ascending, ``[label tokens]``. They are
made on the host, since a device that is asked for them lets the host wait."""
FEATURES, REFERENCE = "features", "reference_loss"
"""Columns of batches: the target's states that a head reads, ``[batch, time, width]``; and the reference's divergence,
``[label tokens, drafting steps]``, 1 step of a language model."""
LOADERS, ROOM = 2, 1 << 34
"""Processes that read states for a GPU where none are asked for, and the bytes of shared memory that they need."""
STALL = 300.0  # seconds in which a loader's process has to bring a batch
PER_TOKEN = (FEATURES,)
"""Columns with a row for every token of a text. Those of all other columns are of its label tokens."""


@dataclass
class Examples:
    """Texts with labels, of a table that may be mapped into memory; they take 16 bytes of memory each."""

    ids: pyarrow.ChunkedArray  # a list of token ids for each example
    labels: pyarrow.ChunkedArray  # labels of the same length, not shifted; -100 where no loss is taken
    lengths: Ints  # tokens of each example, ``[examples]``
    # Label tokens of each. A label in first place has nothing to be predicted from and does not count
    label_counts: Ints
    columns: dict[str, Kept] = field(default_factory=dict)  # values of frozen models by name, which batches carry

    @classmethod
    def of(cls, dataset: Dataset, limit: int | None = None) -> "Examples":
        """The first ``limit`` examples of a data set with the columns ``input_ids`` and ``labels``."""
        count = len(dataset) if limit is None else min(limit, len(dataset))
        rows = dataset.select_columns(["input_ids", "labels"]).select(range(count))
        # a data set of rows that were chosen one by one has no table of its own, and is copied
        table = rows.data.table if rows._indices is None else rows.with_format("arrow")[:]
        ids, labels = table.columns
        lengths = pyarrow.compute.list_value_length(ids).to_numpy().astype(np.int64)
        counts = np.concatenate([np.zeros(0, np.int64), *map(_labels_in, labels.chunks)])
        return cls(ids, labels, lengths, counts)

    @cached_property
    def keys(self) -> Keys:
        """A hash of the ids and labels of each example."""
        texts = (b"".join(part.tobytes() for part in self.text(number)) for number in range(len(self)))
        return np.frombuffer(b"".join(hashlib.blake2b(text, digest_size=8).digest() for text in texts), np.uint64)

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def label_count(self) -> int:
        """Label tokens of all examples."""
        return int(self.label_counts.sum())

    def labels_of(self, examples: Ints | int) -> int:
        """Label tokens of some examples."""
        return int(self.label_counts[examples].sum())

    def text(self, example: int | np.int64) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """Token ids and labels of an example."""
        ids, labels = (column[int(example)].values.to_numpy() for column in (self.ids, self.labels))
        return ids.astype(np.int32, copy=False), labels.astype(np.int32, copy=False)

    def values(self, name: str, example: int) -> NDArray[Any]:
        """The rows of an example in a column, ``[rows, ...]``."""
        return self.columns[name].get(name, self.keys[example])

    def prompt(self, example: int) -> Ids:
        """Token ids that a response follows: those before the first label, or a quarter of a block of plain text."""
        return prompt_part(*(part.tolist() for part in self.text(example)))

    def batch(self, examples: Ints) -> Batch:
        """`collate` of some of the examples ``[batch]``."""
        return collate([(self, int(example)) for example in examples])


def _labels_in(lists: pyarrow.ListArray) -> Ints:
    """Label tokens of each list of labels, but for its first place."""
    ends = lists.offsets.to_numpy().astype(np.int64)
    ends -= ends[0]
    learned = np.concatenate([[0], np.cumsum(lists.flatten().to_numpy() != IGNORE)])
    return learned[ends[1:]] - learned[np.minimum(ends[:-1] + 1, ends[1:])]


Expect = Callable[[Iterable["Picks"]], None]
"""Is told the examples of the batches that will be asked for, in order."""
Picks = Sequence[tuple[Examples, int]]
"""Examples of a batch: the set that an example is in, and its number there."""


def collate(picks: Picks, reads: Collection[str] | None = None) -> Batch:
    """A batch of examples, of several sets if need be, padded on the right.

    It carries the columns that ``reads`` names, or all (None).

    Causal attention never looks to the right, so no attention mask is needed: padding, by id 0, cannot reach a label.

    Returns:
        ``input_ids`` and ``labels`` ``[batch, time]`` (int64); of each column that all examples have the rows of the
        labels ``[label rows, ...]`` in their order, or values of every token ``[batch, time, ...]``, zeros in padding.
    """

    def padded(parts: Iterable[NDArray[Any]], value: int = 0) -> Tensor:
        tensors = [torch.from_numpy(part if part.flags.writeable else part.copy()) for part in parts]
        return pad_sequence(tensors, batch_first=True, padding_value=value)

    ids, labels = zip(*(examples.text(number) for examples, number in picks))
    batch: Batch = {"input_ids": padded(ids).long(), "labels": padded(labels, IGNORE).long()}
    batch[PLACES] = places(label_mask(batch["labels"]))
    shared = set.intersection(*(set(examples.columns) for examples, _ in picks))
    for name in sorted(shared if reads is None else shared.intersection(reads)):
        parts = [examples.values(name, number) for examples, number in picks]
        batch[name] = padded(parts) if name in PER_TOKEN else torch.from_numpy(np.concatenate(parts))
    return batch


def label_mask(labels: Tensor) -> Tensor:
    """Positions ``[batch, time]`` (bool) whose next token is a label: where predictions are gathered."""
    mask = torch.zeros_like(labels, dtype=torch.bool)
    mask[:, :-1] = labels[:, 1:] != IGNORE
    return mask


def places(mask: Tensor) -> Tensor:
    """Where the positions of a mask lie among all of a batch's, ascending."""
    return mask.flatten().nonzero()[:, 0]


def on_device(batch: Batch, device: torch.device) -> Batch:
    """The batch with its tensors on a device."""
    return {name: value.to(device) if isinstance(value, Tensor) else value for name, value in batch.items()}


def completed(batch: Batch) -> Batch:
    """A batch of any loader with what `collate` gives: what its ``attention_mask`` hides is moved behind each text."""
    if PLACES in batch:
        return batch
    ids, labels, mask = batch["input_ids"], batch["labels"], batch.get("attention_mask")
    if mask is not None:
        order = (mask == 0).sort(dim=1, stable=True).indices
        ids, labels = ids.gather(1, order), labels.masked_fill(mask == 0, IGNORE).gather(1, order)
    return batch | {"input_ids": ids, "labels": labels, PLACES: places(label_mask(labels))}


# -- the order of training --------------------------------------------------------------------------------------------


@dataclass(eq=False)
class Schedule:
    """Which examples make batch number ``step``.

    Every epoch is a new permutation of all examples, so that each occurs once in it. The examples of ``bucket`` batches
    of an epoch are sorted by length and cut into batches, whose order is shuffled. Epochs follow one another.
    """

    lengths: Ints  # tokens of each example, ``[examples]``
    batch_size: int  # examples of a step, over all ranks
    bucket: int = 1  # batches that are cut from one sorted list; 1 leaves batches random
    seed: int = 0  # chooses the order

    def __post_init__(self) -> None:
        self.epoch = lru_cache(maxsize=4)(self._made)

    def batch(self, step: int) -> Ints:
        """Numbers of the examples of a step, ``[batch_size]``."""
        places = np.arange(step * self.batch_size, (step + 1) * self.batch_size)
        epochs, places = np.divmod(places, len(self.lengths))
        return np.concatenate([self.epoch(int(number))[places[epochs == number]] for number in np.unique(epochs)])

    def _made(self, epoch: int) -> Ints:
        shuffled = np.random.default_rng([self.seed, 0, epoch]).permutation(len(self.lengths))
        if self.bucket == 1:
            return shuffled
        random, parts = np.random.default_rng([self.seed, 1, epoch]), []
        for start in range(0, len(shuffled), self.bucket * self.batch_size):
            part = shuffled[start : start + self.bucket * self.batch_size]
            part = part[np.argsort(self.lengths[part], kind="stable")]
            batches, rest = divmod(len(part), self.batch_size)
            full = part[: len(part) - rest].reshape(batches, self.batch_size)
            parts += [full[random.permutation(batches)].flatten(), part[len(part) - rest :]]
        return np.concatenate(parts)


@dataclass(eq=False)
class TrainingBatches(TorchDataset[Batch]):
    """One rank's micro-batches of all steps: number ``step · micros + micro`` is a function of the seed alone.

    Each batch carries ``weight``, the factor of a mean over its rows with which the average over the step's parts is
    the mean over all of them; ``part``, its number among these parts; and the numbers of its ``examples``.
    """

    examples: Examples  # for training
    schedule: Schedule  # which of them make which step
    steps: int  # optimiser steps in all
    # Replaces examples of a step by texts that the draft writes itself (`distill.responses.on_policy`). These depend on
    # the weights of the moment, so no batch is made ahead
    texts: Any = None
    workers: int = 0  # processes that make batches ahead
    expect: Expect | None = None
    # A `distill.kinds.base.Draft`, which finds a batch's rows, and weighs texts by these instead of their label tokens
    index: Any = None
    rank: int = 0  # whose batches these are, of ``world`` ranks
    world: int = 1
    micros: int = 1  # batches of a rank in a step, between which gradients are summed up

    def __len__(self) -> int:
        return self.steps * self.micros

    def __getitem__(self, number: int) -> Batch:
        step, micro = divmod(number, self.micros)
        picks: Picks = [(self.examples, int(example)) for example in self.schedule.batch(step)]
        picks = picks if self.texts is None else self.texts(step, picks)
        rows, parts = self.share(micro), self.world * self.micros
        if self.index is None:
            shares = [float(examples.labels_of(example)) for examples, example in picks]
        else:  # of all texts, as every process draws them
            labels = (examples.text(example)[1] for examples, example in picks)
            shares = [self.index.share(*pair) for pair in zip(labels, self.chance(step, len(picks)))]
        batch = collate(picks[rows])
        if self.texts is not None:
            batch = self.texts.complete(batch)
        if self.index is not None:
            batch |= self.index.index(batch, self.chance(step, len(picks))[rows])
        if get_worker_info() is not None:
            for tensor in batch.values():
                if isinstance(tensor, Tensor):
                    tensor.share_memory_()  # here, since a batch that finds no room later is lost without a word
        weight = parts * sum(shares[rows]) / (sum(shares) or 1.0)
        numbers = [example for _, example in picks[rows]]
        return batch | {"weight": weight, "part": self.rank * self.micros + micro, "examples": numbers}

    def chance(self, step: int, texts: int) -> Chance:
        """What each text of a step draws from, wherever it is trained on."""
        return [np.random.default_rng([self.schedule.seed, 5, step, text]) for text in range(texts)]

    def share(self, micro: int) -> slice:
        """This rank's part of a step's examples."""
        return slice(self.rank + self.world * micro, None, self.world * self.micros)

    def begin(self, first: int) -> None:
        """Announce the examples of all batches from a number on."""
        if self.expect is not None and self.texts is None:
            steps = (divmod(number, self.micros) for number in range(first, len(self)))
            parts = (self.schedule.batch(step)[self.share(micro)] for step, micro in steps)
            self.expect([(self.examples, int(example)) for example in part] for part in parts)


@dataclass(eq=False)
class ValidationBatches(TorchDataset[Batch]):
    """One rank's batches of similar length, each made when it is asked for."""

    examples: Examples
    size: int  # examples of a batch
    rank: int
    world: int
    index: Any = None

    def __post_init__(self) -> None:
        self.share = np.argsort(self.examples.lengths, kind="stable")[self.rank :: self.world]

    def __len__(self) -> int:
        return math.ceil(math.ceil(len(self.examples) / self.world) / self.size)

    def __getitem__(self, number: int) -> Batch:
        if number >= len(self):
            raise IndexError(number)
        chosen = self.share[number * self.size : (number + 1) * self.size]
        batch = self.examples.batch(chosen if len(chosen) else np.array([0]))
        if not len(chosen):  # another rank has one example more: one without labels takes its place
            batch["labels"].fill_(IGNORE)
            batch |= {name: batch[name][:0] for name in (PLACES, *self.examples.columns) if name not in PER_TOKEN}
        return batch if self.index is None else batch | self.index.index(batch, None)


@dataclass(frozen=True)
class From:
    """The numbers of the batches from a step on; the length counts those before it too, as Lightning does."""

    first: int
    count: int

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.first, self.count))


class DistillDataModule(L.LightningDataModule):
    """Batches of a stage's training, dealt out to the trainer's processes.

    A training is one epoch of all its steps. A continued one begins at the trainer's step.
    """

    trainer: Any

    def __init__(self, training: TrainingBatches, validation: Examples) -> None:
        super().__init__()
        self.training, self.validation = training, validation

    def train_dataloader(self) -> DataLoader[Batch]:
        """The batches of all steps that are left."""
        training, trainer = self.training, self.trainer
        training.rank, training.world = trainer.global_rank, trainer.world_size
        training.micros = trainer.accumulate_grad_batches
        reads = bool(training.examples.columns) and torch.cuda.is_available() and free_bytes(Path("/dev/shm")) > ROOM
        workers = (training.workers or LOADERS * reads) if training.texts is None else 0
        training.begin(first := trainer.global_step * training.micros)
        return DataLoader(
            training,
            batch_size=None,
            sampler=From(first, len(training)),
            num_workers=workers,
            timeout=STALL if workers else 0,
            pin_memory=torch.cuda.is_available(),
            multiprocessing_context="fork" if workers else None,  # they read the same arrays
            generator=torch.Generator(),  # not the one that dropout draws from
        )

    def val_dataloader(self) -> DataLoader[Batch]:
        """This rank's validation examples; every rank has as many batches, as sharded weights require."""
        trainer, index = self.trainer, self.training.index
        rank, world = trainer.global_rank, trainer.world_size
        size = max(1, self.training.schedule.batch_size // (world * trainer.accumulate_grad_batches))
        return DataLoader(ValidationBatches(self.validation, size, rank, world, index), batch_size=None)

    def state_dict(self) -> dict[str, Any]:
        """The texts that the draft wrote, which depend on its weights at that time."""
        texts = self.training.texts
        return {"texts": None if texts is None else texts.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores them."""
        if self.training.texts is not None:
            self.training.texts.load_state_dict(state_dict["texts"])
