"""Lightning's trainer for every stage, and how a killed training goes on.

A training of S steps is one epoch. The batches and all random numbers are functions of the step, so a run that was
killed and continued from its last checkpoint ends with the weights of an uninterrupted one: on a CPU with the same
bits, on a GPU but for the order in which the backward pass of its attention adds up.
"""

import copy
import logging
import resource
import signal
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from zipfile import is_zipfile

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint, ProgressBar, Timer
from lightning.pytorch.loggers import Logger
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException, SIGTERMException
from rich.console import Console
from transformers import PreTrainedModel

from decode.errors import UserError
from decode.models.open import DTYPES
from decode.progress import EVERY, Work, working
from distill import ranks
from distill.config import TrainerSettings
from distill.config.base import SHARDED, Values
from distill.data.dataset import DistillDataModule
from distill.files import saved_step
from distill.networks.models import checkpoint_layers, use_attention, weights_dtype
from distill.training.modules import Metrics, TrainingModule


class ProgressLines(Callback):
    """Shows steps done, the values of a progress bar, and the time left; and logs the speed, by the host's clock.

    Attributes:
        tokens: Read by this process in training, padding included.
    """

    def __init__(self, name: str, work: Work) -> None:
        self.name, self.work, self.read = name, work, 0.0
        self.tokens, self.logged = 0, (0, 0.0)

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Note the step that the run continues from."""
        self.work.update(name=self.name)
        self.work.begin(trainer.global_step, trainer.max_steps)
        self.logged = self.tokens, time.monotonic()

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Note the step, and now and then the values."""
        self.work.update(done=trainer.global_step)
        self.tokens += batch["input_ids"].numel()
        every, now = trainer.log_every_n_steps, time.monotonic()  # type: ignore[attr-defined]
        if every and trainer.global_step % every == 0 and (batch_idx + 1) % trainer.accumulate_grad_batches == 0:
            (tokens, began), self.logged = self.logged, (self.tokens, now)
            for logger in trainer.loggers:
                speed = (self.tokens - tokens) / max(now - began, 1e-9)
                logger.log_metrics({"tokens_per_second": speed}, step=trainer.global_step)
        if now - self.read > EVERY / 4:
            values = trainer.progress_bar_metrics.items()
            self.work.tell(" ".join(f"{name} {float(value):.4f}" for name, value in values))
            self.read = now


class SavedStop(Callback):
    """Lets SIGTERM end the training after the running step, with a checkpoint from which it continues there.

    ``folder`` is that of the checkpoints, and ``every`` the steps between validations, which save one themselves.
    """

    def __init__(self, folder: Path, every: int) -> None:
        self.folder, self.every, self.stops = folder, every, False

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Take the signal over from Lightning, which ends at once, and asks all processes by the device every step."""
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, self.note)  # Lightning's teardown puts back what was there before
        trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor = lambda: None  # type: ignore[method-assign]

    def note(self, *_: Any) -> None:
        """Remember the signal; a second one ends the process."""
        self.stops = True
        signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Save and end, once every process has the signal's news; not where a validation comes first.

        Raises:
            SIGTERMException: The process was asked to end.
        """
        if (batch_idx + 1) % trainer.accumulate_grad_batches or trainer.global_step % self.every == 0:
            return
        if ranks.anywhere(self.stops) and trainer.global_step < trainer.max_steps:
            trainer.save_checkpoint(self.folder / f"last-step={trainer.global_step}.ckpt")
            raise SIGTERMException


def peak_memory(device: torch.device) -> int:
    """Return the most memory taken so far, in bytes: of the GPU, or of this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def fit(
    module: TrainingModule,
    data: DistillDataModule,
    settings: TrainerSettings,
    work: Path,
    *,
    name: str,
    console: Console,
    logger: Logger | None = None,
) -> tuple[list[Metrics], float, int]:
    """Train to the end, from the last checkpoint in ``work`` if there is one; ends with the best weights.

    Args:
        module: What to train. Afterwards its ``model`` holds the weights of the best validation.
        data: Batches of both kinds.
        settings: Trainer settings.
        work: Folder for checkpoints. They are left there, for the caller to remove once the result is safe.
        name: Shown beside the progress.
        console: Where progress is shown.
        logger: Where losses and validations are logged.

    Returns:
        The learning curve, ``{"step": ..., metric: value, ...}`` for every validation, step 0 included; the seconds of
        training, those before an interruption included as far as checkpoints know; and the tokens read, with padding.
    """
    steps, model = module.steps, module.model
    saved = sorted(work.glob("last-*.ckpt"), key=saved_step)
    last = next(filter(is_zipfile, reversed(saved)), None)  # a disk that fails may cut one short
    if saved and last != saved[-1]:
        console.print(f"  {saved[-1]} is not whole and is passed over", highlight=False)
    if last is not None:
        console.print(f"  continuing from step {saved_step(last)}", highlight=False)
    if isinstance(model, PreTrainedModel):
        use_attention(model, settings.attention)
        if settings.gradient_checkpointing:
            checkpoint_layers(model)
    if (share := unmoved(model, module.training_settings.lr, settings.precision)) >= 0.01:
        told = (
            f"  {share:.0%} of the weights cannot move in {settings.precision}: an update of the size of the learning "
            f"rate is less than half a unit in their last place. Set trainer.precision to "
            f"{settings.precision.replace('true', 'mixed')}, whose weights are float32, or raise the learning rate"
        )
        console.print(told, highlight=False, soft_wrap=True)
    sharded = settings.strategy in SHARDED
    plain = model
    if sharded:  # a copy without weights, for those that the training ends with: a rank holds them once
        weights = {id(weight): torch.nn.Parameter(weight.to("meta")) for weight in model.parameters()}
        plain = copy.deepcopy(model, dict[int, Any](weights))
    best = ModelCheckpoint(
        work, "best-{step}", monitor=module.monitor, mode=module.mode, save_weights_only=True,
        save_on_train_epoch_end=False, enable_version_counter=False,
    )  # fmt: skip
    resume = ModelCheckpoint(
        work, "last-{step}", monitor="step", mode="max", save_on_train_epoch_end=False, enable_version_counter=False
    )
    timer, further = Timer(), settings.callback_instances()
    bar = any(isinstance(callback, ProgressBar) for callback in further)
    strategy: Any = settings.strategy
    if sharded:
        strategy = ModelParallelStrategy(ranks.process_count(settings), 1, save_distributed_checkpoint=False)
    options: Values = {
        "accelerator": ranks.accelerator(settings),
        "devices": settings.devices,
        "num_nodes": settings.num_nodes,
        "strategy": strategy,
        "plugins": [ranks.environment()],  # else Lightning looks for launchers otherwise than the run did
        "accumulate_grad_batches": settings.accumulate,
        "inference_mode": not sharded,
        "precision": settings.precision,
        "gradient_clip_val": 1.0,
        "max_steps": steps,
        "max_epochs": 1,
        "val_check_interval": min(settings.validate_every, steps) * settings.accumulate,
        "num_sanity_val_steps": 0,
        "log_every_n_steps": 20,
        "logger": logger or DummyLogger(),  # on every rank: callbacks may need one
        "enable_progress_bar": bar,
        "enable_model_summary": False,
        "use_distributed_sampler": False,
        "default_root_dir": work,
    }
    title = name if last else f"{name}: validation before training"
    with quiet(), working(Console(quiet=True) if bar else console, title, leave=True) as shown:
        lines = ProgressLines(name, shown)
        stop = SavedStop(work, min(settings.validate_every, steps))
        options["callbacks"] = [timer, *further, lines, stop, best, resume]
        try:
            trainer = L.Trainer(**options | settings.extra)
        except (TypeError, ValueError, MisconfigurationException) as error:
            raise UserError(f"Lightning refuses the settings of the section trainer: {error}") from error
        try:
            if last is None:
                trainer.validate(module, datamodule=data, verbose=False)
            trainer.fit(module, datamodule=data, ckpt_path=last)
            if not module.history or module.history[-1]["step"] != trainer.global_step:
                trainer.validate(module, datamodule=data, verbose=False)
        except SystemExit as ended:  # Lightning's way of ending after a KeyboardInterrupt
            raise KeyboardInterrupt(*getattr(ended.__context__, "args", [signal.SIGTERM])) from ended
        except RuntimeError as error:
            if "DataLoader" not in str(error):
                raise
            raise UserError(
                f"a process of data.loader_workers failed ({str(error).strip().splitlines()[-1]}): set it to 0, or "
                "make /dev/shm larger, through which batches pass (docker run --shm-size 8g), and run again"
            ) from error
        _take_best(module, trainer, plain, work)
    return module.history, timer.time_elapsed("train"), lines.tokens


def unmoved(model: torch.nn.Module, lr: float, precision: str) -> float:
    """Return the share of the trained weights that an update of size lr leaves in the number format of a precision."""
    kind = DTYPES[weights_dtype(precision)]
    weights = [weight.detach() for weight in model.parameters() if weight.requires_grad]
    stay = sum(int((rounded + lr == rounded).sum()) for rounded in (weight.to(kind) for weight in weights))
    return stay / sum(weight.numel() for weight in weights)


def _take_best(module: TrainingModule, trainer: L.Trainer, plain: torch.nn.Module, work: Path) -> None:
    """Put the weights of the best validation after step 0 into the model `plain`, which becomes the module's."""
    key, better = module.monitor.removeprefix("validation_"), max if module.mode == "max" else min
    steps = (at for at in module.history if at["step"])
    best = better(steps, key=lambda at: float(torch.tensor(at[key])))  # in float32, as Lightning's checkpoint compares
    if best["step"] == trainer.global_step:
        weights = trainer.strategy.lightning_module_state_dict()
    else:
        path = work / f"best-step={int(best['step'])}.ckpt"
        weights = torch.load(path, map_location="cpu", weights_only=True)["state_dict"]
    weights = {name.removeprefix("model."): value for name, value in weights.items() if name.startswith("model.")}
    if weights:  # of sharded ones the first process alone has them
        plain.load_state_dict(weights, strict=module.strict_loading, assign=plain is not module.model)
    if plain is not module.model:
        if isinstance(plain, PreTrainedModel):
            plain.tie_weights()
        if not weights:
            plain.to_empty(device="cpu")  # nothing reads the other processes' result
    module.model = plain


@contextmanager
def quiet() -> Iterator[None]:
    """Suppress Lightning's remarks about things that are meant here (no workers, unsaved loops, tips, ...)."""
    for name in ("lightning.pytorch", "lightning.fabric", "lightning"):
        logging.getLogger(name).setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module="lightning.*")
        yield
