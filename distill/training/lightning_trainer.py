"""Lightning's trainer for every stage: what it is given of ours, and how a killed training goes on.

A training of S steps is one epoch of Lightning's. The loader carries its place, the batches and all random numbers are
functions of the step, so a run that was killed and continued ends with the weights of an uninterrupted one.
"""

import copy
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback, ProgressBar, Timer
from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from rich.console import Console
from transformers import PreTrainedModel

from decode.core.errors import UserError
from decode.core.progress import output_console
from decode.models.layer_locations import decoder_layers
from distill.config.training import SHARDED, TrainerSettings
from distill.core import ranks
from distill.data.batches.datamodule import DistillDataModule
from distill.models.attention import use_attention
from distill.models.loading import checkpoint_layers
from distill.training.checkpoints import (
    BackgroundCheckpointIO,
    BestWeights,
    ResumeCheckpoint,
    SafeCheckpointIO,
    newest_sound,
)
from distill.training.fsdp import Fsdp
from distill.training.lightning_module import TrainingModule
from distill.training.progress_bar import ProgressLines, StageProgressBar
from distill.training.training_speed import Speed


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
