"""Training and validation batches for Lightning; the training loader carries its place, so any step can be resumed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import lightning as L
import numpy as np

from decode.core.errors import UserError
from distill.data.batch_schedule import EvalBatches, Schedule
from distill.data.optimizer_step import OptimizerStep
from distill.data.token_dataset import Batch, Picks, TokenDataset, label_count, make_batch


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

    def __len__(self) -> int:
        return self.steps * self.micros

    def __iter__(self) -> Iterator[Batch]:
        for step in range(self.drawn // self.micros, self.steps):
            picks: Picks = [(self.rows, int(example)) for example in self.schedule.batch(step)]
            if self.texts is not None:
                picks = self.texts(step, picks)
            for batch in self._parts(picks):
                self.drawn += 1
                yield batch

    def state_dict(self) -> dict[str, Any]:
        """How many batches were drawn, and the texts that the draft wrote."""
        return {"drawn": self.drawn, "texts": None if self.texts is None else self.texts.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes it back; checkpoints are written between steps."""
        self.drawn = state["drawn"]
        if self.texts is not None:
            self.texts.load_state_dict(state["texts"])

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
            yield batch | {"step": OptimizerStep(counts, self.rank, self.world, micro, self.micros, ahead)}


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
    """

    train: TokenDataset
    validation: TokenDataset
    schedule: Schedule
    steps: int
    pad_id: int
    all_tokens: bool = False
    texts: OwnTexts | None = None
    look_ahead: bool = False

    def __post_init__(self) -> None:
        super().__init__()

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
