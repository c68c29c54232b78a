"""Checkpoints that a kill at any moment leaves sound: written aside, renamed, checked before they are used."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.plugins.io import TorchCheckpointIO
from safetensors.torch import load_file, save_file
from torch import nn

from decode.core.errors import UserError
from distill.core import ranks
from distill.core.files import checksum, write_json, write_safely
from distill.training.base_module import TrainingModule


class SafeCheckpointIO(TorchCheckpointIO):
    """Lightning's checkpoint format, written aside and renamed."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None) -> None:
        """Writes the checkpoint safely."""
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        write_safely(Path(path), lambda file: torch.save(checkpoint, file))


class Keeper(Callback):
    """After every validation: keep the weights if they are the best so far, and write a checkpoint.

    A checkpoint ``step-N.ckpt`` counts once ``step-N.json`` stands beside it with its checksum, and the name and
    checksum of the best weights at that time. Two checkpoints are kept, so that a damaged one costs one interval.

    Args:
        folder: Where they go.
        monitor: Name of the validation metric that decides.
        mode: Whether larger or smaller is better.
        note: Told when a damaged checkpoint is passed over.

    Attributes:
        history: Every validation's metrics with its step.
        best: Value, step, file and checksum of the best weights.
    """

    def __init__(
        self, folder: Path, monitor: str, mode: Literal["min", "max"], note: Callable[[str], None] = print
    ) -> None:
        self.folder, self.monitor, self.mode, self.note = folder, monitor, mode, note
        self.history: list[dict[str, float]] = []
        self.best: dict[str, Any] = {}
        self._saved = -1  # step of the latest checkpoint
        self._before, self._started = 0.0, time.monotonic()

    @property
    def seconds(self) -> float:
        """Time spent on the stage, over all starts."""
        return self._before + time.monotonic() - self._started

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint holds of this."""
        return {"history": self.history, "best": self.best, "seconds": self.seconds}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes it back."""
        self.history, self.best = list(state_dict["history"]), dict(state_dict["best"])
        self._before, self._saved = state_dict["seconds"], int(self.history[-1]["step"])

    def latest(self) -> Path | None:
        """The newest sound checkpoint; damaged ones are removed."""
        candidates = sorted(self.folder.glob("step-*.ckpt"), reverse=True)
        for path in candidates:
            if self._sound(path):
                self.note(f"continuing from step {int(path.stem.split('-')[1])}")
                return path
            self.note(f"{path.name} is damaged or incomplete and is not used")
            if ranks.is_first():
                path.unlink()
                path.with_suffix(".json").unlink(missing_ok=True)
        if candidates:
            self.note("no sound checkpoint is left: the stage starts from its beginning")
        return None

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Notes the metrics."""
        assert isinstance(pl_module, TrainingModule)
        self.history.append({"step": trainer.global_step, **pl_module.metrics})

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Keeps the best weights, then writes the checkpoint that names them, then removes what is superseded."""
        assert isinstance(pl_module, TrainingModule)
        step = trainer.global_step
        if step == self._saved:  # a continued run ends the segment of its checkpoint once more
            return
        self._saved, value = step, pl_module.metrics[self.monitor]
        self.folder.mkdir(parents=True, exist_ok=True)
        if not self.best or (value > self.best["value"] if self.mode == "max" else value < self.best["value"]):
            state = trainer.strategy.lightning_module_state_dict()
            path = self.folder / f"best-{step:08d}.safetensors"
            if trainer.is_global_zero:
                write_safely(path, lambda file: save_file(_distinct(state), file))
            crc = checksum(path) if trainer.is_global_zero else None  # all ranks decide alike, the first one writes
            self.best = {"value": value, "step": step, "file": path.name, "crc32": crc}
        path = self.folder / f"step-{step:08d}.ckpt"
        trainer.save_checkpoint(path)
        if trainer.is_global_zero:
            write_json(path.with_suffix(".json"), {"crc32": checksum(path), "best": self.best})
            self._prune()

    def restore_best(self, model: nn.Module) -> None:
        """Loads the best weights."""
        if not self.best:
            raise UserError("the stage ended before its first validation, so there are no weights to keep")
        weights = load_file(self.folder / self.best["file"])
        result = model.load_state_dict(weights, strict=False)
        if result.unexpected_keys:
            raise RuntimeError(f"weights for unknown parameters: {result.unexpected_keys[:3]}")

    def _sound(self, path: Path) -> bool:
        try:
            note = json.loads(path.with_suffix(".json").read_text())
            best = self.folder / note["best"]["file"]
            return checksum(path) == note["crc32"] and checksum(best) == note["best"]["crc32"]
        except (OSError, ValueError, KeyError, TypeError):
            return False

    def _prune(self) -> None:
        kept = sorted(self.folder.glob("step-*.ckpt"))
        for path in kept[:-2]:
            path.with_suffix(".json").unlink(missing_ok=True)
            path.unlink()
        notes = [path.with_suffix(".json") for path in kept[-2:]]
        named = {json.loads(note.read_text())["best"]["file"] for note in notes if note.exists()}
        for path in self.folder.glob("best-*.safetensors"):
            if path.name not in named:
                path.unlink()


def _distinct(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The model's weights without its prefix, each shared tensor (tied embeddings) once."""
    seen: set[tuple[int, torch.Size]] = set()
    weights = {}
    for name, tensor in state.items():
        if name.startswith("model.") and (key := (tensor.data_ptr(), tensor.shape)) not in seen:
            seen.add(key)
            weights[name.removeprefix("model.")] = tensor.detach().cpu().contiguous()
    return weights
