"""Checkpoints that a kill at any moment leaves sound: written aside, renamed, checked before they are used.

A checkpoint is a zip file whose members carry CRC-32 sums, so one that was cut short or altered is recognised without
a description beside it; of sharded weights it is a folder of `torch.distributed.checkpoint`, whose description tells
which bytes of which file there have to be.
"""

from __future__ import annotations

import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.io import AsyncCheckpointIO, TorchCheckpointIO
from torch import nn
from torch.distributed import checkpoint as sharded

from decode.core.atomic_files import write_safely
from decode.core.errors import UserError
from distill.core import ranks
from distill.core.file_fingerprints import remove

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
