"""Lightning's trainer for every stage: segments between validations, checkpoints that survive a kill, progress.

A training of S steps is a row of segments of ``validate_every`` steps, each one epoch to Lightning: train, validate,
write a checkpoint. A killed run goes on from the last checkpoint; since the batches and all chance are functions of
the step, it ends with the weights of an uninterrupted run.
"""

from __future__ import annotations

import copy
import logging
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import Logger
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from transformers import PreTrainedModel

from decode.core.errors import UserError
from distill.config.settings import TrainerSettings
from distill.core import ranks
from distill.data.batch_schedule import EvalBatches, Schedule, TrainBatches
from distill.data.token_dataset import TokenDataset
from distill.generation.on_policy import OnPolicy
from distill.models.loading import checkpoint_layers
from distill.training.base_module import TrainingModule
from distill.training.checkpointing import Keeper, SafeCheckpointIO
from distill.training.distributed import Fsdp


@dataclass(eq=False)
class Segments(L.LightningDataModule):
    """Train and validation batches; Lightning asks for new train batches at the start of every segment."""

    train: TokenDataset
    validation: TokenDataset
    schedule: Schedule
    steps: int
    segment: int
    pad_id: int
    all_tokens: bool = False
    texts: OnPolicy | None = None
    micros: int = 1
    look_ahead: bool = False

    def __post_init__(self) -> None:
        super().__init__()

    def _trainer(self) -> L.Trainer:
        assert self.trainer is not None
        return self.trainer

    def train_dataloader(self) -> TrainBatches:
        """The batches from the current step to the next validation.

        A continued run is first asked for the segment that its checkpoint ended, and draws nothing from it: Lightning
        compares its length with the batches done, and would validate too early where the next one is shorter.
        """
        trainer = self._trainer()
        start = trainer.global_step
        if start and trainer.fit_loop.restarting:
            start, stop = (start - 1) // self.segment * self.segment, start
        else:
            stop = min(self.steps, (start // self.segment + 1) * self.segment)
        parts = trainer.world_size * self.micros
        if self.schedule.batch_size < parts:
            raise UserError(
                f"{self.schedule.batch_size} examples a step cannot be dealt out to {parts} batches (processes times "
                "trainer.accumulate): raise batch_size, or lower trainer.devices or trainer.accumulate"
            )
        return TrainBatches(
            self.train,
            self.schedule,
            self.pad_id,
            start,
            stop,
            trainer.global_rank,
            trainer.world_size,
            self.all_tokens,
            self.texts,
            self.micros,
            self.look_ahead and self.micros > 1,
        )

    def state_dict(self) -> dict[str, Any]:
        """What checkpoints hold of the data: the texts that the draft wrote."""
        return self.texts.state_dict() if self.texts is not None else {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes them back."""
        if self.texts is not None:
            self.texts.load_state_dict(state_dict)

    def val_dataloader(self) -> EvalBatches:
        """All validation examples, in batches of the training's size."""
        trainer = self._trainer()
        size = max(1, self.schedule.batch_size // trainer.world_size)
        return EvalBatches(self.validation, size, self.pad_id, trainer.global_rank, trainer.world_size)


class StageProgress(Callback):
    """One bar for a whole stage on a terminal; in a log file a line every ten seconds."""

    every = 10.0

    def __init__(self, console: Console, name: str) -> None:
        self.console, self.name = console, name
        self._bar: Progress | None = None
        self._shown = self._started = time.monotonic()
        self._first = 0

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Starts the bar at the step the run continues from."""
        self._first, self._started = trainer.global_step, time.monotonic()
        if self.console.is_terminal:
            columns = TextColumn("  {task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
            self._bar = Progress(*columns, console=self.console, transient=True)
            self._bar.add_task(self.name, total=trainer.max_steps, completed=trainer.global_step)
            self._bar.start()

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
        """Shows the step; reads the loss from the device only when something is shown."""
        now = time.monotonic()
        if now - self._shown < (0.5 if self._bar else self.every):
            return
        self._shown, step = now, trainer.global_step
        assert isinstance(pl_module, TrainingModule)
        loss = "" if pl_module.last_loss is None else f"loss {pl_module.last_loss.item():.4f}"
        validated = " ".join(f"validation {key} {value:.4f}" for key, value in pl_module.metrics.items())
        if self._bar:
            self._bar.update(self._bar.task_ids[0], completed=step, description=f"{self.name} {loss} {validated}")
        else:
            left = (trainer.max_steps - step) * (now - self._started) / max(1, step - self._first)
            self.console.print(f"  {self.name} {step}/{trainer.max_steps} {loss} {validated} ({left:.0f} s left)")

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Takes the bar away."""
        if self._bar:
            self._bar.stop()

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        """Takes the bar away when training stops half-way."""
        if self._bar:
            self._bar.stop()


def fit(
    module: TrainingModule,
    data: Segments,
    settings: TrainerSettings,
    work: Path,
    *,
    name: str,
    logger: Logger | None = None,
    console: Console | None = None,
    callbacks: tuple[Callback, ...] = (),
) -> tuple[list[dict[str, float]], float]:
    """Train to the end, from the last sound checkpoint in ``work`` if there is one; ends with the best weights.

    Args:
        module: What to train. Afterwards its ``model`` holds the weights of the best validation, in the first process.
        data: Batches of both kinds.
        settings: Trainer settings.
        work: Folder for checkpoints. They are left there, for the caller to remove once the result is safe.
        name: Shown beside the progress.
        logger: Where losses and validations go.
        console: Where progress is shown.
        callbacks: Further Lightning callbacks.

    Returns:
        The learning curve, ``{"step": ..., metric: value, ...}`` for every validation, step 0 included; and the
        seconds of training, those before an interruption included as far as checkpoints know.
    """
    console = console or Console()
    keeper = Keeper(work, module.monitor, module.mode, note=lambda text: console.print(f"  {text}"))
    checkpoint = keeper.latest()
    if settings.gradient_checkpointing and isinstance(module.model, PreTrainedModel):
        checkpoint_layers(module.model)
    sharded = settings.strategy == "fsdp"
    plain = copy.deepcopy(module.model) if sharded and ranks.is_first() else module.model
    with quiet():
        trainer = L.Trainer(
            accelerator=settings.accelerator,
            devices=settings.devices,
            num_nodes=settings.num_nodes,
            strategy=Fsdp() if sharded else settings.strategy,
            accumulate_grad_batches=settings.accumulate,
            inference_mode=not sharded,
            precision=settings.precision,  # type: ignore[arg-type]
            gradient_clip_val=settings.gradient_clip or None,
            max_steps=data.steps,
            max_epochs=-1,
            reload_dataloaders_every_n_epochs=1,
            num_sanity_val_steps=0,
            log_every_n_steps=1,
            logger=logger or False,
            callbacks=[keeper, StageProgress(console, name), *callbacks],
            plugins=[SafeCheckpointIO()],
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            use_distributed_sampler=False,
            default_root_dir=work,
        )
        if checkpoint is None:
            trainer.validate(module, datamodule=data, verbose=False)
        try:
            trainer.fit(module, datamodule=data, ckpt_path=checkpoint, weights_only=True)
        except SystemExit as stop:  # Lightning's way of ending after Ctrl-C
            raise KeyboardInterrupt from stop
    module.model = plain
    if ranks.is_first():
        keeper.restore_best(plain)
    return keeper.history, keeper.seconds


@contextmanager
def quiet() -> Iterator[None]:
    """Without Lightning's remarks about things that are meant here (no workers, unsaved loops, tips, ...)."""
    loggers = [logging.getLogger(name) for name in ("lightning.pytorch", "lightning.fabric", "lightning")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", module="lightning.*")
            yield
    finally:
        for logger, level in zip(loggers, levels):
            logger.setLevel(level)
