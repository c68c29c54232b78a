"""Training and validation batches for Lightning; the training loader carries its place, so any step can be resumed."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Protocol

import lightning as L
import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from decode.errors import UserError
from distill import ranks
from distill.data.chat import IGNORE
from distill.data.datasets import Batch, Ints, Picks, Rows, TokenDataset, dealt_to_rows, label_count, make_batch


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


LONGEST = 1 << 24  # label tokens of an example, at most


class OptimizerStep:
    """A micro-batch's place in its optimiser step. Kept on the host: no tensor, so it is not moved to the device.

    Args:
        counts: Label tokens of every example, ``[ranks x micro-batches, examples]``, filled up with 0.
        rank: Whose micro-batch it is, of ``world`` ranks.
        micro: Which of the rank's ``micros`` it is.
        ahead: All the rank's micro-batches of the step, with its first one, where the selection needs them at once.
    """

    def __init__(
        self,
        counts: NDArray[np.int64],
        rank: int = 0,
        world: int = 1,
        micro: int = 0,
        micros: int = 1,
        ahead: Sequence[dict[str, Any]] = (),
    ) -> None:
        self.counts, self.rank, self.world, self.micro, self.micros = counts, rank, world, micro, micros
        self.ahead = ahead

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
    def responses(self) -> int:
        """Examples of the step that have label tokens."""
        return int((self.counts > 0).sum())

    @property
    def weight(self) -> float:
        """What a mean over this part's label tokens is multiplied by, so that the average over parts is the step's."""
        return self.parts * int(self.counts[self.part].sum()) / max(1, self.tokens)

    def order(self, micro: int, sequence: Tensor) -> Tensor:
        """A number for every label token of a micro-batch that does not depend on how the step is dealt out, ``[n]``.

        Args:
            micro: Which of this rank's micro-batches.
            sequence: The example of the micro-batch that each token belongs to, ascending.
        """
        starts = torch.searchsorted(sequence, sequence)
        offset = torch.arange(len(sequence), device=sequence.device) - starts
        place = self.rank + self.world * (micro + self.micros * sequence)
        return place * LONGEST + offset

    def choose(
        self, deltas: Sequence[Tensor], sequences: Sequence[Tensor], select: Callable[[Tensor], Tensor]
    ) -> list[Tensor]:
        """Select among all label tokens of the step by their ΔL, in the step's own order.

        Args:
            deltas: ΔL of the label tokens of each of this rank's micro-batches.
            sequences: The examples they belong to.
            select: Indices of the selected among ΔL ``[n]`` of the whole step (`losses.token_selection.top_share`).

        Returns:
            Indices, ascending, for each of the micro-batches.
        """
        own = [self.order(micro, sequence) for micro, sequence in enumerate(sequences)]
        order, delta = self._gathered(torch.cat(own)), self._gathered(torch.cat(list(deltas)))
        sort = order.argsort()
        chosen = order[sort][select(delta[sort])]
        return [torch.isin(part, chosen).nonzero()[:, 0] for part in own]

    def _gathered(self, values: Tensor) -> Tensor:
        """The values of all ranks, one after the other."""
        if self.world == 1:
            return values
        size = torch.tensor([len(values)], device=values.device)
        counts = [torch.empty_like(size) for _ in range(self.world)]
        dist.all_gather(counts, size)
        sizes = [int(count) for count in counts]
        padded = values.new_zeros(max(sizes))
        padded[: len(values)] = values
        found = [torch.empty_like(padded) for _ in sizes]
        dist.all_gather(found, padded)
        return torch.cat([part[:size] for part, size in zip(found, sizes)])


class OwnTexts(Protocol):
    """Replaces examples of a step by texts that the draft has written, and carries these in checkpoints."""

    def __call__(self, step: int, picks: Picks) -> Picks:
        """The examples of a step. It may write with the weights of that moment, so no batch is drawn ahead."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint holds of the texts."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes it back."""
        ...


@dataclass
class Seen:
    """What training batches held, and how long their steps took.

    Attributes:
        tokens: Of examples.
        places: Tokens and padding.
        seconds: Of the steps, with the drawing of their batches and without validations.
        first: Of the first batch among them, which is slower.
        batches: How many there were.
        validation: Seconds of the validations while training.
        validations: How many there were.
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


@dataclass
class TrainLoader:
    """One rank's batches of all steps; Lightning saves and restores how many were drawn.

    A step gives ``micros`` batches, between which gradients are summed up. Each carries its `OptimizerStep`; with
    ``look_ahead`` the first one carries all.
    """

    rows: TokenDataset
    schedule: Schedule
    steps: int
    pad_id: int
    rank: int = 0
    world: int = 1
    all_tokens: bool = False
    texts: OwnTexts | None = None
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
        for batches, tokens in self._ahead(steps) if self.workers and self.texts is None else map(self._step, steps):
            self.seen.tokens += tokens
            self.seen.places += sum(batch["input_ids"].numel() for batch in batches)
            for batch in batches:
                self.drawn += 1
                yield batch

    def state_dict(self) -> dict[str, Any]:
        """How many batches were drawn, how many make a step, and the texts that the draft wrote."""
        return {
            "drawn": self.drawn,
            "micros": self.micros,
            "texts": None if self.texts is None else self.texts.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes it back; checkpoints are written between steps.

        Raises:
            UserError: a step then had another number of batches, by which Lightning counts.
        """
        if (micros := state.get("micros", self.micros)) != self.micros:
            raise UserError(
                f"this training was begun with trainer.accumulate {micros} and is continued with {self.micros}: set it "
                "back, or remove the stage's checkpoints (work/checkpoints-STAGE in the run's folder) to begin anew"
            )
        self.drawn = state["drawn"]
        if self.texts is not None:
            self.texts.load_state_dict(state["texts"])

    def _ahead(self, steps: range) -> Iterator[tuple[list[Batch], int]]:
        """The batches of steps, made by other processes two steps ahead each; what was not drawn is made again."""
        return iter(
            DataLoader(
                _Steps(self),
                batch_size=None,
                sampler=steps,
                num_workers=self.workers,
                pin_memory=self.pin,
                multiprocessing_context="fork",  # they read the same arrays
                generator=torch.Generator(),  # not the one that dropout draws from
            )
        )

    def _step(self, step: int) -> tuple[list[Batch], int]:
        """This rank's micro-batches of a step, and how many tokens of examples are in them."""
        picks: Picks = [(self.rows, int(example)) for example in self.schedule.batch(step)]
        if self.texts is not None:
            picks = self.texts(step, picks)
        dealt = [picks[rank :: self.world][micro :: self.micros] for rank, micro in np.ndindex(self.world, self.micros)]
        packed: list[Rows | None] = [None] * len(dealt)
        if self.row_length is not None:
            dealt, packed = map(list, zip(*(in_rows(part, self.row_length) for part in dealt), strict=True))
        counts = np.zeros((len(dealt), max(map(len, dealt))), dtype=np.int64)
        for row, part in enumerate(dealt):
            counts[row, : len(part)] = [label_count(pick, all_tokens=self.all_tokens) for pick in part]
        own = slice(self.rank * self.micros, (self.rank + 1) * self.micros)
        batches = [
            make_batch(part, self.pad_id, all_tokens=self.all_tokens, packed=rows)
            for part, rows in zip(dealt[own], packed[own])
        ]
        tokens = sum(int(rows.offsets[i + 1] - rows.offsets[i]) for part in dealt[own] for rows, i in part)
        for micro, batch in enumerate(batches):
            ahead = [dict(part) for part in batches] if self.look_ahead and micro == 0 else ()
            batch["step"] = OptimizerStep(counts, self.rank, self.world, micro, self.micros, ahead)
        return batches, tokens


@dataclass(frozen=True)
class _Steps(Dataset[tuple[list[Batch], int]]):
    """The steps of a loader, as PyTorch's own takes them."""

    loader: TrainLoader

    def __getitem__(self, step: int) -> tuple[list[Batch], int]:
        return self.loader._step(step)


def in_rows(picks: Picks, row_length: int) -> tuple[Picks, Rows]:
    """Examples in the order in which they fill rows of about so many tokens, and which of them are in which row."""
    rows = dealt_to_rows([int(rows.offsets[i + 1] - rows.offsets[i]) for rows, i in picks], row_length)
    order = [example for row in rows for example in row]
    starts = np.cumsum([0, *map(len, rows)]).tolist()
    return [picks[i] for i in order], [list(range(a, b)) for a, b in pairwise(starts)]


@dataclass(eq=False)
class DistillDataModule(L.LightningDataModule):
    """Batches of a stage's training.

    Attributes:
        train: Examples for training.
        validation: Examples by which checkpoints are compared.
        schedule: Which examples make which step.
        steps: Optimiser steps in all.
        pad_id: Fills up batches.
        all_tokens: Label the tokens of prompts too.
        texts: Replaces examples by texts that the draft writes itself.
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
    all_tokens: bool = False
    texts: OwnTexts | None = None
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
        world, micros = self._world()
        if self.schedule.batch_size < world * micros:
            raise UserError(
                f"{self.schedule.batch_size} examples a step cannot be dealt out to {world * micros} batches "
                "(processes times trainer.accumulate): raise batch_size, or lower trainer.devices or trainer.accumulate"
            )
        assert self.trainer is not None
        return TrainLoader(
            self.train,
            self.schedule,
            self.steps,
            self.pad_id,
            self.trainer.global_rank,
            world,
            self.all_tokens,
            self.texts,
            micros,
            self.look_ahead and micros > 1,
            row_length=self.row_length,
            seen=self.seen,
            workers=self.workers,
            pin=self.trainer.strategy.root_device.type == "cuda",
        )

    def val_dataloader(self) -> EvalBatches:
        """All validation examples, in batches of the size of the training's micro-batches."""
        world, micros = self._world()
        size = max(1, self.schedule.batch_size // (world * micros))
        assert self.trainer is not None
        return EvalBatches(self.validation, size, self.pad_id, self.trainer.global_rank, world)

    def _world(self) -> tuple[int, int]:
        """Ranks, and micro-batches of each in a step."""
        assert self.trainer is not None
        return self.trainer.world_size, self.trainer.accumulate_grad_batches
