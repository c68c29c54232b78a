"""How fast a training runs: tokens a second, share of padding, memory, and of the device's arithmetic (MFU)."""

from __future__ import annotations

import time
from typing import Any

import lightning as L
import torch
from lightning.fabric.utilities.throughput import get_available_flops
from lightning.pytorch.callbacks import Callback
from torch import nn

from distill.data.batches.datamodule import Seen


class Speed(Callback):
    """Logs ``tokens_per_second`` of all processes, ``padding``, and on a GPU ``memory_gb`` and ``mfu``.

    MFU is 6 operations a parameter and token (2 forward, 4 backward) over what the device can do in that time, where
    its peak is known.

    Args:
        seen: What the loader has drawn.
    """

    def __init__(self, seen: Seen) -> None:
        self.seen = seen
        self._mark = self._logged_at = 0.0
        self._logged = 0

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Begins to count."""
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
        device = pl_module.device
        if device.type == "cuda":
            values["memory_gb"] = torch.cuda.max_memory_allocated(device) / 1e9
            bf16 = "bf16" in str(trainer.precision)
            peak = get_available_flops(device, torch.bfloat16 if bf16 else torch.float32)
            if peak:
                values["mfu"] = 6 * matrix_parameters(pl_module.model) * rate / peak  # type: ignore[arg-type]
        pl_module.log_dict(values)


def matrix_parameters(model: nn.Module) -> int:
    """Parameters that a token is multiplied with: all but the table of embeddings, unless it is the head too."""
    tables = [module.weight for module in model.modules() if isinstance(module, nn.Embedding)]
    head = getattr(model, "get_output_embeddings", lambda: None)()
    looked_up = sum(table.numel() for table in tables if head is None or table is not head.weight)
    return sum(parameter.numel() for parameter in model.parameters()) - looked_up
