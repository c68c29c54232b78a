"""Progress of a stage: Lightning's bar on a terminal, a line now and then in a file."""

from __future__ import annotations

import time
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import Callback, RichProgressBar
from rich.console import Console


class StageProgressBar(RichProgressBar):
    """Lightning's bar under the stage's name."""

    def __init__(self, name: str) -> None:
        super().__init__(refresh_rate=5)
        self.name = name

    def _get_train_description(self, current_epoch: int) -> str:
        return self.name


class ProgressLines(Callback):
    """A line every ten seconds: steps done, the values that a progress bar shows, and the time left.

    Args:
        console: Where they are printed.
        name: Of the stage.
    """

    every = 10.0

    def __init__(self, console: Console, name: str) -> None:
        self.console, self.name = console, name
        self._shown = self._started = time.monotonic()
        self._first = 0

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Notes the step that the run continues from."""
        self._first, self._started = trainer.global_step, time.monotonic()

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
        """Prints a line if it is time for one."""
        now = time.monotonic()
        if now - self._shown < self.every:
            return
        self._shown, step = now, trainer.global_step
        left = (trainer.max_steps - step) * (now - self._started) / max(1, step - self._first)
        values = " ".join(f"{name} {float(value):.4f}" for name, value in trainer.progress_bar_metrics.items())
        line = f"  {self.name} {step}/{trainer.max_steps} {values} ({left:.0f} s left)"
        self.console.print(line, highlight=False, soft_wrap=True)
