"""Checkpoints that a kill at any moment leaves sound: written aside, renamed, checked before they are used.

A checkpoint is a zip file whose members carry CRC-32 sums, so one that was cut short or altered is recognised without
a description beside it; of sharded weights it is a folder of `torch.distributed.checkpoint`, whose description tells
which bytes of which file there have to be.
"""

from __future__ import annotations

import pickle
import zipfile
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, cast

import lightning as L
import numpy as np
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.io import AsyncCheckpointIO, TorchCheckpointIO
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor, distributed, nn
from torch.distributed import checkpoint as sharded
from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedModel

from decode.errors import UserError, write_safely
from decode.models.families import decoder_layers
from distill import ranks
from distill.config.training import TrainingSettings
from distill.files import remove

REST = "meta.pt"  # what Lightning calls the file of everything but weights and optimisers in a sharded checkpoint


class SafeCheckpointIO(TorchCheckpointIO):
    """Lightning's checkpoint format, written aside and renamed."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None) -> None:
        """Writes the checkpoint safely."""
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        write_safely(Path(path), lambda file: torch.save(checkpoint, file))


class BackgroundCheckpointIO(AsyncCheckpointIO):
    """Lightning's writing in a thread, in which older checkpoints are removed, too, once the newer ones are there."""

    def remove_checkpoint(self, path: Any) -> None:
        """Removes one after all that is being written."""
        self._ensure_setup()
        assert self._executor is not None
        self._executor.submit(super().remove_checkpoint, path)


class _Movable(ModelCheckpoint):
    """Keeps to the folder it is given, also where a checkpoint was written when the run's folder was elsewhere."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes the state back, with every path in this folder."""
        assert self.dirpath is not None
        super().load_state_dict(_moved(state_dict, str(state_dict["dirpath"]), str(self.dirpath)))

    def _should_remove_checkpoint(self, trainer: L.Trainer, previous: str, current: str) -> bool:
        return previous != current  # Lightning keeps the one that a run was continued from for ever


class ResumeCheckpoint(_Movable):
    """Everything needed to go on, every so many steps and at the end; the two newest are kept.

    Where a validation follows a step, the checkpoint follows the validation: a continued run has its result.

    Args:
        folder: Where they go, as ``step-N.ckpt``.
        every: Steps between them.
        best: Keeps the best weights; files of it that a checkpoint here names are left until it is removed.
    """

    def __init__(self, folder: Path, every: int, best: BestWeights) -> None:
        super().__init__(
            folder,
            "step-{step:08d}",
            monitor="step",
            mode="max",
            save_top_k=2,
            auto_insert_metric_name=False,
            every_n_train_steps=every,
            enable_version_counter=False,
        )
        self.every, self.best = every, best
        self.best_of: dict[str, str] = {}
        best.keep = self.best_of.values

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *args: Any) -> None:
        """Saves after a whole step that no validation follows."""
        batch = trainer.fit_loop.epoch_loop.batch_idx + 1
        validated = trainer.is_last_batch or batch % (trainer.val_check_batch or 1) == 0
        if batch % trainer.accumulate_grad_batches == 0 and trainer.global_step % self.every == 0 and not validated:
            self._save(trainer)

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Saves after the validation of a step."""
        if trainer.global_step % self.every == 0 or trainer.is_last_batch:
            self._save(trainer)

    def state_dict(self) -> dict[str, Any]:
        """With the best weights of each checkpoint's time."""
        return super().state_dict() | {"best_of": self.best_of}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes it back."""
        super().load_state_dict(state_dict)
        self.best_of |= _moved(state_dict["best_of"], str(state_dict["dirpath"]), str(self.dirpath))

    def _save(self, trainer: L.Trainer) -> None:
        if not self._should_skip_saving_checkpoint(trainer):
            check_finite: Callable[[], None] = getattr(trainer.lightning_module, "check_finite", lambda: None)
            check_finite()
            self._save_topk_checkpoint(trainer, self._monitor_candidates(trainer))

    def _save_checkpoint(self, trainer: L.Trainer, filepath: str) -> None:
        self.best_of[filepath] = self.best.best_model_path  # before saving: it is part of the state
        super()._save_checkpoint(trainer, filepath)

    def _remove_checkpoint(self, trainer: L.Trainer, filepath: str) -> None:
        super()._remove_checkpoint(trainer, filepath)
        weights = self.best_of.pop(filepath, "")
        if weights and weights != self.best.best_model_path:
            self.best._remove_checkpoint(trainer, weights)


class BestWeights(_Movable):
    """The weights of the best validation, as ``best-N.ckpt``."""

    keep: Callable[[], Any] = staticmethod(tuple)

    def __init__(self, folder: Path, monitor: str, mode: Literal["min", "max"]) -> None:
        super().__init__(
            folder,
            "best-{step:08d}",
            monitor=monitor,
            mode=mode,
            save_weights_only=True,
            auto_insert_metric_name=False,
            save_on_train_epoch_end=False,
            enable_version_counter=False,
        )

    def _remove_checkpoint(self, trainer: L.Trainer, filepath: str) -> None:
        if filepath not in self.keep():
            super()._remove_checkpoint(trainer, filepath)

    def restore(self, model: nn.Module) -> None:
        """Loads them.

        Raises:
            UserError: There was no validation.
        """
        if not self.best_model_path:
            raise UserError(
                "the stage ended before its first validation, so there are no weights to keep: set "
                "trainer.validate_every to at most the number of steps"
            )
        if Path(self.best_model_path).is_dir():
            own = {f"model.{name}": value for name, value in model.state_dict().items()}
            sharded.load({"state_dict": own}, checkpoint_id=self.best_model_path, no_dist=True)
            return
        state = torch.load(self.best_model_path, map_location="cpu", weights_only=True)["state_dict"]
        whole = all(weight.requires_grad for weight in model.parameters())  # of an adapter there is nothing else
        model.load_state_dict({name.removeprefix("model."): value for name, value in state.items()}, strict=whole)


def newest_sound(folder: Path, note: Callable[[str], None]) -> Path | None:
    """The newest checkpoint to go on from that is sound and whose best weights are; others are removed."""
    candidates = sorted(folder.glob("step-*.ckpt"), reverse=True)
    for path in candidates:
        if is_sound(path) and all(is_sound(folder / Path(best).name) for best in _best_named_in(path)):
            note(f"continuing from step {int(path.stem.split('-')[1])}")
            return path
        note(f"{path.name} is damaged or incomplete and is not used")
        if ranks.is_first():
            remove(path)
    if candidates:
        note("no sound checkpoint is left: the stage starts from its beginning")
    return None


def is_sound(path: Path) -> bool:
    """Whether a checkpoint is whole and unaltered."""
    try:
        if path.is_dir():
            places = sharded.FileSystemReader(path).read_metadata().storage_data.values()
            whole = all((path / of.relative_path).stat().st_size >= of.offset + of.length for of in places)
            return whole and is_sound(path / REST)
        with zipfile.ZipFile(path) as file:
            return file.testzip() is None
    except (OSError, zipfile.BadZipFile, ValueError, NotImplementedError, pickle.UnpicklingError, EOFError):
        return False


def _best_named_in(path: Path) -> list[str]:
    """The best weights at the time of a checkpoint; none before the first validation."""
    path, name = (path / REST if path.is_dir() else path), path.name
    states = torch.load(path, map_location="cpu", weights_only=True, mmap=True)["callbacks"].values()
    named = [(Path(file).name, best) for state in states for file, best in state.get("best_of", {}).items()]
    return [best for file, best in named if file == name and best]


def _moved(value: Any, old: str, new: str) -> Any:
    """The same with paths in another folder."""
    if isinstance(value, dict):
        return {_moved(key, old, new): _moved(item, old, new) for key, item in value.items()}
    return new + value[len(old) :] if isinstance(value, str) and value.startswith(old) else value


class Fsdp(ModelParallelStrategy):
    """PyTorch's second FSDP under Lightning; runs on CPUs too.

    Every rank writes its share of a checkpoint, a folder of `torch.distributed.checkpoint`, from which any number of
    ranks can go on.

    Args:
        hybrid: a copy on every machine (HSDP).
        background: Write checkpoints in a thread of every rank, from a copy on the CPU, one at a time.
    """

    def __init__(self, *, hybrid: bool = False, background: bool = False) -> None:
        super().__init__(save_distributed_checkpoint=True)
        self.hybrid = hybrid
        self._thread = ThreadPoolExecutor(1) if background else None
        self._jobs: list[Future[None]] = []
        self._group: distributed.ProcessGroup | None = None  # of the threads: training must not wait in theirs

    @property
    def sharding_mesh(self) -> DeviceMesh:
        """The ranks: along one axis, or ``[machines, ranks of a machine]``, the weights copied along the first."""
        return self.device_mesh if self.hybrid else self.device_mesh["data_parallel"]

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None) -> None:
        """Writes the folder aside, then renames it."""
        path = Path(self.broadcast(filepath))
        aside = path.with_name(f".tmp-{path.name}")
        self._wait()
        state = {"state_dict": checkpoint.pop("state_dict")}
        state |= {f"optimizer_{n}": own for n, own in enumerate(checkpoint.pop("optimizer_states", []))}
        if self.is_global_zero:
            remove(aside)
            aside.mkdir(parents=True)
            torch.save(checkpoint, aside / REST)  # at once: training changes what it refers to
        self.barrier()
        if self._thread:
            self._group = self._group or distributed.new_group(backend="gloo")
            saved = sharded.async_save(state, checkpoint_id=aside, process_group=self._group)
            assert isinstance(saved, Future)
            self._do(lambda: self._rename(aside, path, saved))
        else:
            with _cause_shown():
                sharded.save(state, checkpoint_id=aside)
            self._rename(aside, path)
            self.barrier()

    def remove_checkpoint(self, filepath: Any) -> None:
        """Removes one, once what is being written is there."""
        self._do(lambda: super(Fsdp, self).remove_checkpoint(filepath))

    def teardown(self) -> None:
        """Waits for what is being written."""
        self._wait()
        super().teardown()

    def _rename(self, aside: Path, path: Path, saved: Future[Any] | None = None) -> None:
        if saved:
            with _cause_shown():
                saved.result()  # in the first rank: that all have written
        if self.is_global_zero:
            remove(path)
            aside.rename(path)

    def _do(self, job: Callable[[], None]) -> None:
        if self._thread:
            self._jobs.append(self._thread.submit(job))
        else:
            job()

    def _wait(self) -> None:
        while self._jobs:
            self._jobs.pop(0).result()

    def _setup_distributed(self) -> None:
        super()._setup_distributed()
        machines = self.num_nodes if self.hybrid else self.world_size
        self._data_parallel_size, self._tensor_parallel_size = machines, self.world_size // machines


@contextmanager
def _cause_shown() -> Iterator[None]:
    """Inside, what kept a rank from writing is raised itself, such as its disk's being full."""
    try:
        yield
    except sharded.CheckpointException as error:
        raise next(iter(error.failures.values()))[0] from error


def shard(root: nn.Module, model: PreTrainedModel, mesh: DeviceMesh) -> Any:
    """Spreads the weights of ``root``: each layer of the model by itself, everything else together.

    Args:
        root: The module whose forward everything runs in.
        model: The model in it.
        mesh: The ranks, see `Fsdp.sharding_mesh`.
    """
    from torch.distributed.fsdp import fully_shard

    for layer in decoder_layers(model):
        fully_shard(layer, mesh=mesh)
    return fully_shard(root, mesh=mesh)


SHOWN = 16  # examples named in the message at most


class FirstBad:
    """The first step whose loss was no number, noted on the device, so that no step has to wait for it."""

    def __init__(self) -> None:
        self._step: Tensor | None = None

    def note(self, loss: Tensor, step: int) -> None:
        """A step's loss, a scalar."""
        if self._step is None:
            self._step = torch.full((), -1, device=loss.device)
        self._step = torch.where((self._step < 0) & ~loss.isfinite(), step, self._step)

    def step(self) -> int | None:
        """That step, if there was one; waits for the device."""
        found = -1 if self._step is None else int(self._step)
        return found if found >= 0 else None


def explain(module: L.LightningModule, step: int) -> UserError:
    """The error for a loss that was no number at a step."""
    data = getattr(module.trainer, "datamodule", None)
    schedule, rows = getattr(data, "schedule", None), getattr(data, "train", None)
    examples = [] if schedule is None else sorted(int(i) for i in schedule.batch(step))
    where = f" (training examples {', '.join(map(str, examples[:SHOWN]))}{', …' if len(examples) > SHOWN else ''})"
    return UserError(
        f"the loss is NaN or infinite at step {step}{where if examples else ''}: {_cause(module, rows, examples)}"
    )


def _cause(module: L.LightningModule, rows: object, examples: list[int]) -> str:
    """What to try: what is broken if that can be seen, otherwise the usual suspect."""
    for name, values in getattr(rows, "signals", {}).items():
        for example in examples:
            kept = values[rows.label_offsets[example] : rows.label_offsets[example + 1]]  # type: ignore[attr-defined]
            if kept.dtype == np.float32 and not np.isfinite(kept).all():
                return (
                    f"the kept {name} of example {example} is not finite. Remove the run's work/signals, and set "
                    "target.dtype to float32 or bfloat16 if it was float16"
                )
    precision = str(module.trainer.precision)
    if precision.startswith("16"):
        return f"trainer.precision is {precision}, whose numbers end at 65504; train with bf16-mixed or 32-true"
    rate = cast(TrainingSettings, module.training_settings)
    return (
        f"lower the learning rate (its peak is {rate.lr:.2g}) or raise warmup_steps ({rate.warmup_steps}); "
        f"trainer.gradient_clip (1.0 is usual) holds back single large steps"
        + ("" if precision == "32-true" else f"; or train with precision 32-true instead of {precision}")
    )
