"""Checkpoints that a kill at any moment leaves sound: written aside, renamed, checked before they are used.

A checkpoint is a zip file whose members carry CRC-32 sums, so one that was cut short or altered is recognised; of
sharded weights it is a folder of `torch.distributed.checkpoint`, whose metadata holds the sizes of its files.
"""

from __future__ import annotations

import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, cast

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.plugins.io import TorchCheckpointIO
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import nn
from torch.distributed import checkpoint as sharded
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedModel

from decode.errors import UserError, write_safely
from decode.models.families import decoder_layers
from distill import ranks
from distill.config.training import TrainingSettings
from distill.files import remove

META = "meta.pt"  # Lightning's file of everything but weights and optimisers in a sharded checkpoint


class SafeCheckpointIO(TorchCheckpointIO):
    """Lightning's checkpoint format, written aside and renamed."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None) -> None:
        """Write the checkpoint atomically."""
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        write_safely(Path(path), lambda file: torch.save(checkpoint, file))


class BestWeights(Callback):
    """Keeps the weights of the best validation on the CPU, and in every checkpoint.

    Args:
        monitor: The logged metric by which validations are compared.
        mode: Whether its smallest or its largest value is the best.
    """

    def __init__(self, monitor: str, mode: Literal["min", "max"]) -> None:
        self.monitor, self.sign = monitor, 1 if mode == "max" else -1
        self.value: float | None = None
        self.weights: dict[str, Any] = {}

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Take the weights if they are the best so far."""
        value = float(trainer.callback_metrics[self.monitor])
        if trainer.state.fn != "fit" or (self.value is not None and self.sign * value <= self.sign * self.value):
            return
        self.value, model = value, cast(nn.Module, pl_module.model)
        if isinstance(trainer.strategy, Fsdp):
            whole = StateDictOptions(full_state_dict=True, cpu_offload=True)
            self.weights = get_model_state_dict(model, options=whole)  # on the first rank
        elif ranks.is_first():
            frozen = {name for name, weight in model.named_parameters() if not weight.requires_grad}
            self.weights = {
                name: value.detach().to("cpu", copy=True)
                for name, value in model.state_dict().items()
                if name not in frozen
            }

    def state_dict(self) -> dict[str, Any]:
        """Return the best value and its weights."""
        return {"value": self.value, "weights": self.weights}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore them."""
        self.value, self.weights = state_dict["value"], state_dict["weights"]

    def restore(self, model: nn.Module) -> None:
        """Load the best weights into a model.

        Raises:
            UserError: There was no validation.
        """
        if self.value is None:
            raise UserError(
                "the stage ended before its first validation, so there are no weights to keep: set "
                "trainer.validate_every to at most the number of steps"
            )
        whole = all(weight.requires_grad for weight in model.parameters())  # an adapter is saved alone
        model.load_state_dict(self.weights, strict=whole)


def newest_sound(folder: Path, note: Callable[[str], None]) -> Path | None:
    """Return the newest sound checkpoint to continue from; damaged ones are removed."""
    for path in sorted(folder.glob("step-*.ckpt"), reverse=True):
        if is_sound(path):
            note(f"continuing from step {int(path.stem.split('-')[1])}")
            return path
        note(f"{path.name} is damaged or incomplete and is not used")
        if ranks.is_first():
            remove(path)
    return None


def is_sound(path: Path) -> bool:
    """Return whether a checkpoint is whole and unaltered."""
    try:
        if path.is_dir():
            places = sharded.FileSystemReader(path).read_metadata().storage_data.values()
            whole = all((path / of.relative_path).stat().st_size >= of.offset + of.length for of in places)
            return whole and is_sound(path / META)
        with zipfile.ZipFile(path) as file:
            return file.testzip() is None
    except (OSError, zipfile.BadZipFile, ValueError, NotImplementedError, pickle.UnpicklingError, EOFError):
        return False


class Fsdp(ModelParallelStrategy):
    """PyTorch's second FSDP under Lightning; runs on CPUs too.

    Every rank writes its share of a checkpoint, a folder from which any number of ranks can go on.

    Args:
        world: Number of ranks.
        machines: Number of machines, each with a copy of the weights (HSDP); 1: weights are spread over all ranks.
    """

    def __init__(self, world: int, machines: int = 1) -> None:
        copies = machines if machines > 1 else world
        super().__init__(
            data_parallel_size=copies, tensor_parallel_size=world // copies, save_distributed_checkpoint=True
        )
        self.hybrid = machines > 1

    @property
    def sharding_mesh(self) -> DeviceMesh:
        """The ranks: along one axis, or ``[machines, ranks of a machine]``, the weights copied along the first."""
        return self.device_mesh if self.hybrid else self.device_mesh["data_parallel"]

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None) -> None:
        """Write the folder aside, then rename it."""
        path = Path(self.broadcast(filepath))
        aside = path.with_name(f".tmp-{path.name}")
        if self.is_global_zero:
            remove(aside)
        self.barrier()
        try:
            super().save_checkpoint(checkpoint, aside, storage_options)
        except sharded.CheckpointException as error:  # raise its cause, such as a full disk
            raise next(iter(error.failures.values()))[0] from error
        self.barrier()
        if self.is_global_zero:
            remove(path)
            aside.rename(path)
        self.barrier()


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


def explain(module: L.LightningModule, step: int) -> UserError:
    """Return the error for a loss that was no number at a step, with its examples and what to try."""
    loader = getattr(getattr(module.trainer, "datamodule", None), "loader", None)
    examples = [] if loader is None else sorted(int(i) for i in loader.schedule.batch(step))
    precision, training = str(module.trainer.precision), cast(TrainingSettings, module.training_settings)
    return UserError(
        f"the loss is NaN or infinite at step {step} (training examples {', '.join(map(str, examples[:16]))}), with "
        f"trainer.precision {precision}: lower the learning rate (its peak is {training.lr:.2g}), raise warmup_steps "
        f"({training.warmup_steps}), set a smaller gradient_clip_val in trainer.extra, or train with precision 32-true "
        "or bf16-mixed if it is another one"
    )
