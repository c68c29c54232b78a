"""The order of examples, the batches of an optimiser step, and Lightning's data module."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import lightning as L
import numpy as np
import torch
import torch.utils.data
from numpy.typing import NDArray
from torch import Tensor

from decode.errors import UserError
from distill import ranks
from distill.data.batches import Batch, Ints, Picks, TokenDataset, dealt_to_rows, make_batch
from distill.data.chat import IGNORE

LONGEST = 1 << 24  # label tokens of an example, at most


@lru_cache(maxsize=4)
def _shuffled(seed: int, epoch: int, count: int) -> Ints:
    return np.random.default_rng([seed, 0, epoch]).permutation(count)


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

    def batch(self, step: int) -> Ints:
        """Indices of the examples of a step, ``[batch_size]``."""
        chunk, number = divmod(step, self.bucket)
        size = self.bucket * self.batch_size
        epochs, places = np.divmod(np.arange(chunk * size, (chunk + 1) * size), len(self.lengths))
        picked = np.concatenate(
            [_shuffled(self.seed, int(e), len(self.lengths))[places[epochs == e]] for e in np.unique(epochs)]
        )
        if self.bucket == 1:
            return picked
        picked = picked[np.argsort(self.lengths[picked], kind="stable")]
        order = np.random.default_rng([self.seed, 1, chunk]).permutation(self.bucket)
        return picked.reshape(self.bucket, self.batch_size)[order[number]]


@dataclass(frozen=True)
class EvalBatches:
    """Every example once, by length, so that batches pad little; one rank's share.

    All ranks have equally many batches, as sharded weights require: one without labels replaces a missing one.
    """

    rows: TokenDataset
    batch_size: int
    rank: int = 0
    world: int = 1

    def __len__(self) -> int:
        return math.ceil(len(range(0, len(self.rows), self.world)) / self.batch_size)

    def __iter__(self) -> Iterator[Batch]:
        own = list(self.indices())
        for examples in own:
            yield self.rows.batch(examples)
        for _ in range(len(self) - len(own)):
            batch = self.rows.batch(np.array([0]))
            batch["labels"].fill_(IGNORE)
            yield batch | {name: batch[name][:0] for name in self.rows.signals}

    def indices(self) -> Iterator[Ints]:
        """The examples of each batch."""
        order = np.argsort(self.rows.lengths, kind="stable")[self.rank :: self.world]
        for start in range(0, len(order), self.batch_size):
            yield order[start : start + self.batch_size]


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
            select: Indices of the selected among ΔL ``[n]`` of the whole step (`losses.objective.Selection.choose`).

        Returns:
            Indices, ascending, for each of the micro-batches.
        """
        own = []
        for micro, sequence in enumerate(sequences):
            offset = torch.arange(len(sequence), device=sequence.device) - torch.searchsorted(sequence, sequence)
            own.append((self.rank + self.world * (micro + self.micros * sequence)) * LONGEST + offset)
        order, delta = torch.cat(own), torch.cat(list(deltas))
        if self.world > 1:
            order, delta = (
                torch.cat([part.to(values.device) for part in ranks.exchange(values.cpu())])
                for values in (order, delta)
            )
        sort = order.argsort()
        chosen = order[sort][select(delta[sort])]
        return [torch.isin(part, chosen).nonzero()[:, 0] for part in own]


@dataclass
class Seen:
    """What training batches held, and how long their steps took."""

    tokens: int = 0  # of examples
    places: int = 0  # tokens and padding
    seconds: float = 0.0  # of the steps, with the drawing of their batches and without validations
    first: float = 0.0  # of the first batch among them, which is slower
    batches: int = 0
    validation: float = 0.0  # seconds of the validations while training
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

    A step gives ``micros`` batches, between which gradients are summed up. Each carries its `OptimizerStep`.

    Attributes:
        rows: Examples for training.
        schedule: Which examples make which step.
        steps: Optimiser steps in all.
        rank: Whose batches these are, of ``world`` ranks.
        texts: Replaces examples by texts that the draft writes itself (`distill.responses.on_policy.OnPolicy`); they
            depend on the weights of the moment, so no batch is then made ahead.
        look_ahead: The selection needs all micro-batches of a step at once; the first one carries them.
        row_length: Tokens of a row that several examples are packed into; None: a row each.
        workers: Processes that make batches ahead.
        drawn: Batches drawn so far.
        seen: What they held.
    """

    rows: TokenDataset
    schedule: Schedule
    steps: int
    rank: int = 0
    world: int = 1
    micros: int = 1
    texts: Any = None
    look_ahead: bool = False
    row_length: int | None = None
    workers: int = 0
    drawn: int = 0
    seen: Seen = field(default_factory=Seen)

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
                pin_memory=torch.cuda.is_available(),
                multiprocessing_context="fork",  # they read the same arrays
                generator=torch.Generator(),  # not the one that dropout draws from
            )
        for batches, tokens in made:
            self.seen.tokens += tokens
            self.seen.places += sum(batch["input_ids"].numel() for batch in batches)
            for batch in batches:
                self.drawn += 1
                yield batch

    def __getitem__(self, step: int) -> tuple[list[Batch], int]:
        """This rank's micro-batches of a step, and the number of tokens of the examples in them."""
        picks: Picks = [(self.rows, int(example)) for example in self.schedule.batch(step)]
        if self.texts is not None:
            picks = self.texts(step, picks)
        counts = np.zeros((self.world * self.micros, math.ceil(len(picks) / (self.world * self.micros))), np.int64)
        batches, tokens = list[Batch](), 0
        for part, (rank, micro) in enumerate(np.ndindex(self.world, self.micros)):
            own, packed = picks[rank :: self.world][micro :: self.micros], None
            lengths = [(span := rows.span(i)).stop - span.start for rows, i in own]
            if self.row_length is not None:  # the examples in the order in which they fill rows
                dealt = dealt_to_rows(lengths, self.row_length)
                own, packed = [own[i] for row in dealt for i in row], [len(row) for row in dealt]
            counts[part, : len(own)] = [rows.labels_of(i) for rows, i in own]
            if rank == self.rank:
                batches.append(make_batch(own, packed))
                tokens += sum(lengths)
        ahead = [dict(part) for part in batches] if self.look_ahead and self.micros > 1 else ()
        for micro, batch in enumerate(batches):
            batch["step"] = OptimizerStep(counts, self.rank, self.world, micro, self.micros, () if micro else ahead)
        return batches, tokens

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


class DistillDataModule(L.LightningDataModule):
    """Batches of a stage's training, dealt out to the trainer's processes.

    Args:
        loader: Training batches.
        validation: Examples by which checkpoints are compared.
    """

    def __init__(self, loader: TrainLoader, validation: TokenDataset) -> None:
        super().__init__()
        self.loader, self.validation = loader, validation

    def train_dataloader(self) -> TrainLoader:
        """All steps' batches; a checkpoint's state moves the loader to its step."""
        rank, world, micros = self._place()
        return replace(self.loader, rank=rank, world=world, micros=micros)

    def val_dataloader(self) -> EvalBatches:
        """All validation examples, in batches of the size of the training's micro-batches."""
        rank, world, micros = self._place()
        size = max(1, self.loader.schedule.batch_size // (world * micros))
        return EvalBatches(self.validation, size, rank, world)

    def _place(self) -> tuple[int, int, int]:
        """This rank, the number of ranks, and of micro-batches of each in a step."""
        assert self.trainer is not None
        return self.trainer.global_rank, self.trainer.world_size, self.trainer.accumulate_grad_batches
