"""How fast a training runs: tokens a second, share of padding, memory, and of the device's arithmetic (MFU)."""

from __future__ import annotations

import resource
import sys
import time
from typing import Any

import lightning as L
import torch
from lightning.fabric.utilities.throughput import get_available_flops
from lightning.pytorch.callbacks import Callback
from rich.console import Console
from torch import nn

from decode.models.eagle.head import FeatureHead
from distill.data.batches.datamodule import Seen


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
