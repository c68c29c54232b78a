"""Examples as flat arrays, batches of them, the order in which they are trained on, and Lightning's data module."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Protocol

import lightning as L
import numpy as np
import pyarrow
import torch
from datasets import Dataset
from numpy.typing import NDArray
from pyarrow.compute import list_flatten, list_value_length
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, get_worker_info
from torch.utils.data import Dataset as TorchDataset

from decode.errors import UserError
from distill.data.chat import IGNORE, Ids, prompt_part

Ints = NDArray[np.int64]
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
Shapes = dict[str, tuple[tuple[int, ...], str]]
"""Shape of a row and number format of each column, by name."""
STALL = 300.0  # seconds in which a loader's process has to bring a batch
PER_TOKEN = (FEATURES,)
"""Columns with a row for every token of a text. Those of all other columns are of its label tokens."""


@dataclass(frozen=True)
class Column:
    """Values of examples as lists of an Arrow table, which may be files that are mapped into memory."""

    rows: pyarrow.ChunkedArray  # flat values of each example
    order: Ints  # the number in ``rows`` of each example
    shape: tuple[int, ...]  # of one row of an example

    def __getitem__(self, example: int) -> NDArray[Any]:
        """The rows of an example, ``[rows, *shape]``."""
        values: NDArray[Any] = self.rows[int(self.order[example])].values.to_numpy()
        return values.reshape(-1, *self.shape)


@dataclass
class Examples:
    """Texts with labels; example i is ``ids[offsets[i]:offsets[i + 1]]``."""

    ids: NDArray[np.int32]  # token ids of all examples, one after the other
    labels: NDArray[np.int32]  # labels of the same length, not shifted; -100 where no loss is taken
    offsets: Ints  # where each example starts, ``[examples + 1]``
    # Where each example's label tokens start when all are numbered through, ``[examples + 1]``. A label in first place
    # has nothing to be predicted from and does not count
    label_offsets: Ints
    columns: dict[str, Column] = field(default_factory=dict)  # values of frozen models by name, which batches carry

    @classmethod
    def of(cls, dataset: Dataset, limit: int | None = None) -> "Examples":
        """The first ``limit`` examples of a data set with the columns ``input_ids`` and ``labels``."""
        table = dataset.select_columns(["input_ids", "labels"]).with_format("arrow")[:limit]
        ids, labels = (list_flatten(column).to_numpy().astype(np.int32) for column in table.columns)
        lengths = list_value_length(table.column(0)).to_numpy()
        offsets, counted = np.concatenate([[0], np.cumsum(lengths)]), labels != IGNORE
        counted[offsets[:-1][lengths > 0]] = False
        return cls(ids, labels, offsets, np.concatenate([[0], np.cumsum(counted)])[offsets])

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def lengths(self) -> Ints:
        """Tokens of each example, ``[examples]``."""
        return np.diff(self.offsets)

    @property
    def label_count(self) -> int:
        """Label tokens of all examples."""
        return int(self.label_offsets[-1])

    def labels_of(self, examples: Ints | int) -> int:
        """Label tokens of some examples."""
        return int((self.label_offsets[examples + 1] - self.label_offsets[examples]).sum())

    def span(self, example: int) -> slice:
        """Where an example is in ``ids``."""
        return slice(int(self.offsets[example]), int(self.offsets[example + 1]))

    def prompt(self, example: int) -> Ids:
        """Token ids that a response follows: those before the first label, or a quarter of a block of plain text."""
        span = self.span(example)
        return prompt_part(self.ids[span].tolist(), self.labels[span].tolist())

    def batch(self, examples: Ints) -> Batch:
        """`collate` of some of the examples ``[batch]``."""
        return collate([(self, int(example)) for example in examples])

    def batches(self, size: int) -> list[Ints]:
        """The numbers of all examples in batches of similar length."""
        order = np.argsort(self.lengths, kind="stable")
        return [order[start : start + size] for start in range(0, len(order), size)]


Expect = Callable[[Examples, Iterable[Ints]], None]
"""Is told the examples, and those of the batches that will be asked for, in order."""
Picks = Sequence[tuple[Examples, int]]
"""Examples of a batch: the set that an example is in, and its number there."""


def collate(picks: Picks) -> Batch:
    """A batch of examples, of several sets if need be, padded on the right.

    Causal attention never looks to the right, so no attention mask is needed: padding, by id 0, cannot reach a label.

    Returns:
        ``input_ids`` and ``labels`` ``[batch, time]`` (int64); of each column that all examples have the rows of the
        labels ``[label rows, ...]`` in their order, or values of every token ``[batch, time, ...]``, zeros in padding.
    """

    def padded(parts: Iterable[NDArray[Any]], value: int = 0) -> Tensor:
        return pad_sequence([torch.tensor(part) for part in parts], batch_first=True, padding_value=value)

    spans = [examples.span(number) for examples, number in picks]
    batch: Batch = {
        "input_ids": padded(examples.ids[span] for (examples, _), span in zip(picks, spans)).long(),
        "labels": padded((examples.labels[span] for (examples, _), span in zip(picks, spans)), IGNORE).long(),
    }
    batch[PLACES] = places(label_mask(batch["labels"]))
    for name in sorted(set.intersection(*(set(examples.columns) for examples, _ in picks))):
        parts = [examples.columns[name][number] for examples, number in picks]
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


class Index(Protocol):
    """Of a draft: which rows a batch has, found on the host. See `distill.kinds.base.Draft`."""

    def index(self, batch: Batch, chance: Chance | None) -> Batch:
        """What is added to a batch; without ``chance`` nothing is drawn."""

    def share(self, labels: NDArray[Any], chance: np.random.Generator) -> float:
        """The weight of a text with these labels in the loss of a step."""


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
    index: Index | None = None  # finds a batch's rows, and weighs texts by these instead of their label tokens
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
            labels = (examples.labels[examples.span(example)] for examples, example in picks)
            shares = [self.index.share(*pair) for pair in zip(labels, self.chance(step, len(picks)))]
        batch = collate(picks[rows])
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
            self.expect(self.examples, (self.schedule.batch(step)[self.share(micro)] for step, micro in steps))


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
        workers = training.workers if training.texts is None else 0
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
        share, batches = np.argsort(self.validation.lengths, kind="stable")[rank::world], []
        for start in range(0, math.ceil(len(self.validation) / world), size):
            examples = share[start : start + size]
            batch = self.validation.batch(examples if len(examples) else np.array([0]))
            if not len(examples):  # of an example without labels
                batch["labels"].fill_(IGNORE)
                batch |= {n: batch[n][:0] for n in (PLACES, *self.validation.columns) if n not in PER_TOKEN}
            batches.append(batch | ({} if index is None else index.index(batch, None)))
        return DataLoader(batches, batch_size=None)  # type: ignore[arg-type]

    def state_dict(self) -> dict[str, Any]:
        """The texts that the draft wrote, which depend on its weights at that time, and the number of micro-batches."""
        texts = self.training.texts
        return {"micros": self.training.micros, "texts": None if texts is None else texts.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores them.

        Raises:
            UserError: A step then had another number of batches, by which Lightning counts.
        """
        if state_dict["micros"] != (micros := self.trainer.accumulate_grad_batches):
            raise UserError(
                f"this training was begun with trainer.accumulate {state_dict['micros']} and is continued with "
                f"{micros}: set it back, or remove the stage's checkpoints (work/checkpoints-STAGE in the run's folder)"
            )
        if self.training.texts is not None:
            self.training.texts.load_state_dict(state_dict["texts"])
