"""Lightning's trainer for every stage, and how a killed training goes on.

A training of S steps is one epoch. The loader's state is its place, and the batches and all random numbers are
functions of the step, so a run that was killed and continued ends with the weights of an uninterrupted one.
"""

from __future__ import annotations

import copy
import gc
import logging
import resource
import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint, ProgressBar, Timer
from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from rich.console import Console
from transformers import PreTrainedModel

from decode.errors import UserError
from decode.progress import EVERY, Progress, Work
from distill import ranks
from distill.checkpoints import BestWeights, Fsdp, SafeCheckpointIO, newest_sound
from distill.config.training import SHARDED, TrainerSettings
from distill.data.loader import DistillDataModule, Seen
from distill.models.loading import checkpoint_layers, use_attention
from distill.modules import TrainingModule


class ProgressLines(Callback):
    """Shows steps done, the values of a progress bar, and the time left."""

    def __init__(self, name: str, work: Work) -> None:
        self.name, self.work, self.read = name, work, 0.0

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Note the step that the run continues from."""
        self.work.update(name=self.name)
        self.work.begin(trainer.global_step, trainer.max_steps)

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
        """Note the step, and now and then the values."""
        self.work.update(done=trainer.global_step)
        if (now := time.monotonic()) - self.read > EVERY / 4:
            values = trainer.progress_bar_metrics.items()
            self.work.detail, self.read = " ".join(f"{name} {float(value):.4f}" for name, value in values), now


class Speed(Callback):
    """Times steps and validations; logs ``tokens_per_second`` of all processes, ``padding`` and ``memory_gb``.

    Args:
        seen: What the loader has drawn.
    """

    def __init__(self, seen: Seen) -> None:
        self.seen = seen
        self.mark = self.logged_at = 0.0
        self.logged = 0

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Begin to count."""
        self.mark, self.logged_at, self.logged = time.perf_counter(), self.seen.seconds, self.seen.tokens

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Begin to time a validation."""
        self.mark = time.perf_counter()

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Count a validation by itself."""
        now = time.perf_counter()
        self.seen.validation, self.mark = self.seen.validation + now - self.mark, now
        self.seen.validations += 1

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Count a batch; log after the steps that Lightning logs."""
        seen, now = self.seen, time.perf_counter()
        spent, self.mark = now - self.mark, now
        seen.first, seen.seconds, seen.batches = seen.first or spent, seen.seconds + spent, seen.batches + 1
        whole = (batch_idx + 1) % trainer.accumulate_grad_batches == 0
        if whole and trainer.global_step % trainer.log_every_n_steps == 0:  # type: ignore[attr-defined]
            rate = (seen.tokens - self.logged) / max(seen.seconds - self.logged_at, 1e-9) * trainer.world_size
            memory = peak_memory(pl_module.device) / 1e9
            pl_module.log_dict({"tokens_per_second": rate, "padding": seen.padding, "memory_gb": memory})
            self.logged_at, self.logged = seen.seconds, seen.tokens


def peak_memory(device: torch.device) -> int:
    """Return the most memory taken so far, in bytes: of the GPU, or of this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def reset_peak_memory(device: torch.device) -> None:
    """Free what a GPU holds of objects that are no longer used, and begin to count its most memory anew."""
    if device.type == "cuda":
        gc.collect()
        torch.cuda.reset_peak_memory_stats(device)


def fit(
    module: TrainingModule,
    data: DistillDataModule,
    settings: TrainerSettings,
    work: Path,
    *,
    name: str,
    console: Console,
    logger: Logger | None = None,
    callbacks: tuple[Callback, ...] = (),
) -> tuple[list[dict[str, float]], float]:
    """Train to the end, from the newest sound checkpoint in ``work`` if there is one; ends with the best weights.

    Args:
        module: What to train. Afterwards its ``model`` holds the weights of the best validation, in the first process.
        data: Batches of both kinds.
        settings: Trainer settings.
        work: Folder for checkpoints. They are left there, for the caller to remove once the result is safe.
        name: Shown beside the progress.
        console: Where progress is shown.
        logger: Where losses and validations are logged.
        callbacks: Further Lightning callbacks, beside those of the settings.

    Returns:
        The learning curve, ``{"step": ..., metric: value, ...}`` for every validation, step 0 included; and the
        seconds of training, those before an interruption included as far as checkpoints know.
    """
    checkpoint = newest_sound(work, lambda text: console.print(f"  {text}"))
    if isinstance(module.model, PreTrainedModel):
        use_attention(module.model, settings.attention)
        if settings.gradient_checkpointing:
            checkpoint_layers(module.model)
    sharded = settings.strategy in SHARDED
    plain = copy.deepcopy(module.model) if sharded and ranks.is_first() else module.model
    best, timer = BestWeights(module.monitor, module.mode), Timer()
    resume = ModelCheckpoint(
        work,
        "step-{step:08d}",
        monitor="step",
        mode="max",
        save_top_k=2,
        save_on_train_epoch_end=False,  # after every validation
        auto_insert_metric_name=False,
        enable_version_counter=False,
    )
    further = [*settings.callback_instances(), *callbacks]
    bar = any(isinstance(callback, ProgressBar) for callback in further)
    strategy: Any = settings.strategy
    if sharded:
        world = ranks.process_count(settings)
        strategy = Fsdp(world, settings.num_nodes if settings.strategy == "hsdp" else 1)
    options: dict[str, Any] = {
        "accelerator": settings.accelerator,
        "devices": settings.devices,
        "num_nodes": settings.num_nodes,
        "strategy": strategy,
        "accumulate_grad_batches": settings.accumulate,
        "inference_mode": not sharded,
        "precision": settings.precision,
        "gradient_clip_val": 1.0,
        "max_steps": data.loader.steps,
        "val_check_interval": min(settings.validate_every, data.loader.steps) * settings.accumulate,
        "num_sanity_val_steps": 0,
        "log_every_n_steps": 20,
        "logger": logger or False,
        "plugins": [SafeCheckpointIO()],
        "enable_progress_bar": bar,
        "enable_model_summary": False,
        "use_distributed_sampler": False,
        "default_root_dir": work,
    }
    products = torch.get_float32_matmul_precision()
    with quiet(), Progress(Console(quiet=True) if bar else console) as shown:
        lines = ProgressLines(name, shown.add(name if checkpoint else f"{name}: validation before training"))
        options["callbacks"] = [timer, Speed(data.loader.seen), *further, lines, best, resume]
        try:
            trainer = L.Trainer(**options | settings.extra)
        except (ValueError, MisconfigurationException) as error:
            raise UserError(f"Lightning refuses the settings of the section trainer: {error}") from error
        try:
            if settings.tf32:
                torch.set_float32_matmul_precision("high")
            if checkpoint is None:
                trainer.validate(module, datamodule=data, verbose=False)
            trainer.fit(module, datamodule=data, ckpt_path=checkpoint)
        except SystemExit as stop:  # Lightning's way of ending after Ctrl-C
            raise KeyboardInterrupt from stop
        finally:
            torch.set_float32_matmul_precision(products)
    module.model = plain
    if ranks.is_first():
        best.restore(plain)
    return module.history, timer.time_elapsed("train")


@contextmanager
def quiet() -> Iterator[None]:
    """Suppress Lightning's remarks about things that are meant here (no workers, unsaved loops, tips, ...)."""
    loggers = [logging.getLogger(name) for name in ("lightning.pytorch", "lightning.fabric", "lightning")]
    levels = [logger.level for logger in loggers]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module="lightning.*")
        for logger in loggers:
            logger.setLevel(logging.ERROR)
        try:
            yield
        finally:
            for logger, level in zip(loggers, levels):
                logger.setLevel(level)
