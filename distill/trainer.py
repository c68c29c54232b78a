"""Lightning's trainer for every stage: what it is given of ours, and how a killed training goes on.

A training of S steps is one epoch of Lightning's. The loader carries its place, the batches and all random numbers are
functions of the step, so a run that was killed and continued ends with the weights of an uninterrupted one.
"""

from __future__ import annotations

import copy
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
from lightning.fabric.utilities.throughput import get_available_flops
from lightning.pytorch.callbacks import Callback, ProgressBar, RichProgressBar, Timer
from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from rich.console import Console
from torch import nn
from transformers import PreTrainedModel

from decode.errors import UserError
from decode.models.families import decoder_layers
from decode.models.heads import FeatureHead
from decode.progress import EVERY, Progress, output_console
from distill import ranks
from distill.checkpoints import (
    BackgroundCheckpointIO,
    BestWeights,
    Fsdp,
    ResumeCheckpoint,
    SafeCheckpointIO,
    newest_sound,
)
from distill.config.training import SHARDED, TrainerSettings
from distill.data.batches import DistillDataModule, Seen
from distill.models.loading import checkpoint_layers, use_attention
from distill.modules import TrainingModule


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


class Speed(Callback):
    """Logs ``tokens_per_second`` of all processes, ``padding``, ``memory_gb``, and ``mfu`` of language models on a GPU.

    MFU (model FLOPs utilisation) is the trained model's `operations` over what the device can do in that time, where
    its peak is known; the target's forward passes are not in it.

    Args:
        seen: What the loader has drawn.
        console: Told where a GPU's peak is not known.
    """

    def __init__(self, seen: Seen, console: Console) -> None:
        self.seen, self.console = seen, console
        self._peak: int | None = None
        self._mark = self._logged_at = 0.0
        self._logged = 0

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Begins to count."""
        if pl_module.device.type == "cuda" and not isinstance(pl_module.model, FeatureHead):
            self._peak = peak_operations(pl_module.device, str(trainer.precision))
            if self._peak is None:
                name = torch.cuda.get_device_name(pl_module.device)
                self.console.print(f"  mfu is not logged: no peak is known of {name} in {trainer.precision}")
        self._mark, self._logged_at, self._logged = time.perf_counter(), self.seen.seconds, self.seen.tokens

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Begins to time a validation."""
        self._mark = time.perf_counter()

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Counts it by itself."""
        now = time.perf_counter()
        self.seen.validation, self._mark = self.seen.validation + now - self._mark, now
        self.seen.validations += 1

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
        """Counts a batch; logs after the steps that Lightning logs."""
        now = time.perf_counter()
        spent, self._mark = now - self._mark, now
        self.seen.first = self.seen.first or spent
        self.seen.seconds, self.seen.batches = self.seen.seconds + spent, self.seen.batches + 1
        whole = (trainer.fit_loop.epoch_loop.batch_idx + 1) % trainer.accumulate_grad_batches == 0
        if not whole or trainer.global_step % trainer.log_every_n_steps:  # type: ignore[attr-defined]
            return
        spent, tokens = self.seen.seconds - self._logged_at, self.seen.tokens - self._logged
        self._logged_at, self._logged = self.seen.seconds, self.seen.tokens
        rate = tokens / max(spent, 1e-9)
        values = {"tokens_per_second": rate * trainer.world_size, "padding": self.seen.padding}
        values["memory_gb"] = peak_memory(pl_module.device) / 1e9
        if self._peak is not None:
            values["mfu"] = operations(pl_module.model) * rate / self._peak  # type: ignore[arg-type]
        pl_module.log_dict(values)


def peak_memory(device: torch.device) -> int:
    """The most memory taken so far, in bytes: of the GPU, or of this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def peak_operations(device: torch.device, precision: str) -> int | None:
    """Operations a second that a GPU is sold with in the number format of its matrix products; None: not known."""
    formats = {"bf16": torch.bfloat16, "16": torch.float16, "64": torch.float64}
    return get_available_flops(device, formats.get(precision.split("-")[0], torch.float32))


def operations(model: nn.Module) -> int:
    """Operations of a training step for a token: 2 forward and 4 backward a parameter, 2 backward where it is frozen.

    A table of embeddings is looked up, so it does not count unless it is the head too; nor does attention to other
    tokens.
    """
    head = getattr(model, "get_output_embeddings", lambda: None)()
    tables = [module.weight for module in model.modules() if isinstance(module, nn.Embedding)]
    looked_up = {id(table) for table in tables if head is None or table is not head.weight}
    counted = (weight for weight in model.parameters() if id(weight) not in looked_up)
    return sum(weight.numel() * (6 if weight.requires_grad else 4) for weight in counted)


def fit(
    module: TrainingModule,
    data: DistillDataModule,
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
        callbacks: Further Lightning callbacks, beside those of the settings.

    Returns:
        The learning curve, ``{"step": ..., metric: value, ...}`` for every validation, step 0 included; and the
        seconds of training, those before an interruption included as far as checkpoints know.
    """
    console = console or output_console()
    checkpoint = newest_sound(work, lambda text: console.print(f"  {text}"))
    if settings.gradient_checkpointing and isinstance(module.model, PreTrainedModel):
        checkpoint_layers(module.model)
    if isinstance(module.model, PreTrainedModel):
        use_attention(module.model, settings.attention)
    module.compile_loss = settings.compile_loss
    sharded = settings.strategy in SHARDED
    in_thread = settings.checkpoint_background and not sharded  # what is sharded has threads of its own
    plain = copy.deepcopy(module.model) if sharded and ranks.is_first() else module.model
    best, timer = BestWeights(work, module.monitor, module.mode), Timer()
    resume = ResumeCheckpoint(work, settings.checkpoint_every or settings.validate_every, best)
    further = [*settings.callback_instances(), *callbacks]
    bar = settings.extra.get("enable_progress_bar", True) and console.is_terminal and not console.quiet
    if bar and not any(isinstance(callback, ProgressBar) for callback in further):
        further.append(StageProgressBar(name))
    elif not bar:
        further.append(ProgressLines(console, name))
    options = {
        "accelerator": settings.accelerator,
        "devices": settings.devices,
        "num_nodes": settings.num_nodes,
        "strategy": _sharding(settings) if sharded else settings.strategy,
        "accumulate_grad_batches": settings.accumulate,
        "inference_mode": not sharded,
        "precision": settings.precision,
        "gradient_clip_val": settings.gradient_clip or None,
        "max_steps": data.steps,
        "val_check_interval": min(settings.validate_every, data.steps) * settings.accumulate,
        "num_sanity_val_steps": 0,
        "log_every_n_steps": settings.log_every,
        "logger": logger or False,
        "callbacks": [timer, Speed(data.seen, console), *further, best, resume],
        "profiler": settings.profiler_instance(),
        "plugins": [BackgroundCheckpointIO(SafeCheckpointIO()) if in_thread else SafeCheckpointIO()],
        "enable_progress_bar": any(isinstance(callback, ProgressBar) for callback in further),
        "enable_model_summary": False,
        "use_distributed_sampler": False,
        "default_root_dir": work,
    }
    with quiet(), _compiled(module, settings), _products(settings):
        try:
            trainer = L.Trainer(**options | settings.extra)
        except (ValueError, MisconfigurationException) as error:
            raise UserError(f"Lightning refuses the settings of the section trainer: {error}") from error
        if checkpoint is None:
            trainer.validate(module, datamodule=data, verbose=False)
        try:
            trainer.fit(module, datamodule=data, ckpt_path=checkpoint)
        except SystemExit as stop:  # Lightning's way of ending after Ctrl-C
            raise KeyboardInterrupt from stop
    module.model = plain
    if ranks.is_first():
        best.restore(plain)
    return module.history, timer.time_elapsed("train")


def _sharding(settings: TrainerSettings) -> Fsdp:
    return Fsdp(hybrid=settings.strategy == "hsdp", background=settings.checkpoint_background)


@contextmanager
def _compiled(module: TrainingModule, settings: TrainerSettings) -> Iterator[None]:
    """Inside, the layers of the module's language model are compiled, if that is wanted.

    One after the other, in place: equal layers share their code, and the names of weights stay.
    """
    wanted = settings.compile != "none" and isinstance(module.model, PreTrainedModel)
    layers = list(decoder_layers(module.model)) if wanted else []
    for layer in layers:
        layer.compile(mode=settings.compile, dynamic=None)
    try:
        yield
    finally:
        for layer in layers:
            layer._compiled_call_impl = None


@contextmanager
def _products(settings: TrainerSettings) -> Iterator[None]:
    """Inside, float32 products are as precise as the settings want them."""
    before = torch.get_float32_matmul_precision()
    if settings.tf32:
        torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


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
