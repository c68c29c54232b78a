"""Progress of a stage: Lightning's bar on a terminal, a line now and then in a file."""

import time
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import Callback, RichProgressBar
from rich.console import Console

from decode.core.progress import EVERY, Progress


class StageProgressBar(RichProgressBar):
    """Lightning's bar under the stage's name."""

    def __init__(self, name: str) -> None:
        super().__init__(refresh_rate=5)
        self.name = name

    def _get_train_description(self, current_epoch: int) -> str:
        return self.name


class ProgressLines(Callback):
    """A line now and then: steps done, the values that a progress bar shows, and the time left."""

    def __init__(self, console: Console, name: str) -> None:
        self.console, self.name = console, name
        self._progress: Progress | None = None  # none yet where Lightning fails to begin

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Begins to print."""
        self._progress, self._read = (progress := Progress(self.console)), 0.0
        name = self.name if stage == "fit" else f"{self.name}: validation before training"
        self._work = progress.__enter__().add(name)

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Notes the step that the run continues from."""
        self._work.begin(trainer.global_step, trainer.max_steps)

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
        """Notes the step, and now and then the values."""
        self._work.update(done=trainer.global_step)
        if (now := time.monotonic()) - self._read > EVERY / 4:
            values = trainer.progress_bar_metrics.items()
            self._work.detail, self._read = " ".join(f"{name} {float(value):.4f}" for name, value in values), now

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        """Ends."""
        if self._progress is not None:
            self._progress.__exit__(None, None, None)

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Ends."""
        assert self._progress is not None
        self._progress.__exit__(None, None, None)
