"""What every kind of training shares, as a Lightning module: optimiser, chance, sparse logging, validation."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal, cast

import lightning as L
import torch
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor
from transformers import PreTrainedModel

from decode.core.errors import UserError
from decode.models.eagle.head import FeatureHead
from distill.config.trainer import TrainingSettings
from distill.core import ranks
from distill.data.token_dataset import Batch, label_mask
from distill.models.lm_head import LMHead, last_hidden
from distill.models.optim import make_optimizer, make_schedule
from distill.training.distributed import Fsdp, shard
from distill.training.nan_guard import FirstBad, explain


class TrainingModule(L.LightningModule):
    """What both kinds share: optimiser, chance, sparse logging, validation by sums.

    Args:
        model: The model to train.
        training: Optimiser and length.
        steps: Optimiser steps in all.
        seed: All randomness of step i is drawn from (seed, i, rank), so a resumed run needs no saved state of it.
        log_every: Steps between logged values; only then is a value read from the device.

    Attributes:
        metrics: The latest validation's results by name.
        monitor: The name in `metrics` by which checkpoints are compared, and ``mode`` which way is better.
        last_loss: The latest training loss, on the device.
        selected: How often each token id was selected, ``[vocab]``; None without a selection. During training by
            this rank, afterwards by all.
    """

    monitor = "loss"
    mode: Literal["min", "max"] = "min"

    model: Any
    selected: Tensor | None = None  # no buffer: each rank counts its own

    def __init__(
        self,
        model: PreTrainedModel | FeatureHead,
        training: TrainingSettings,
        steps: int,
        *,
        seed: int = 0,
        log_every: int = 20,
    ) -> None:
        super().__init__()
        self.model, self.training_settings, self.steps, self.seed = model, training, steps, seed
        self.log_every = log_every
        self.metrics: dict[str, float] = {}
        self.last_loss: Tensor | None = None
        # in a list: its weights are the model's, not to be counted twice
        self._head = [LMHead(model)] if isinstance(model, PreTrainedModel) else []
        self._sums: Tensor | None = None
        self._sharded = False
        self._first_bad = FirstBad()

    @property
    def due(self) -> bool:
        """Whether this step's values are logged."""
        return self.global_step % self.log_every == 0

    def hidden(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Last hidden states ``[rows, hidden]`` where a label is predicted, and those positions ``[batch, time]``."""
        mask = label_mask(batch["labels"])
        return last_hidden(self.model, batch["input_ids"], mask), mask

    def rows(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Logits ``[rows, vocab]`` where a label is predicted, and the mask ``[batch, time]`` of those positions."""
        hidden, mask = self.hidden(batch)
        return self._head[0](hidden), mask

    def configure_optimizers(self) -> OptimizerLRScheduler:
        """The settings' optimiser and its learning-rate schedule."""
        fused = "mixed" not in str(self.trainer.precision)
        optimizer = make_optimizer(self.model, self.training_settings, fused=fused)
        schedule = make_schedule(optimizer, self.training_settings, self.steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: torch.optim.Optimizer) -> None:
        """Drops the gradients; PyTorch's own way takes ten times as long on small models."""
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = None

    def transfer_batch_to_device(self, batch: Batch, device: torch.device, dataloader_idx: int) -> Batch:
        """Moves a batch; there is nothing to look for where it is in place already."""
        return batch if device.type == "cpu" else super().transfer_batch_to_device(batch, device, dataloader_idx)

    def configure_model(self) -> None:
        """Spreads the weights over the ranks, under FSDP."""
        if isinstance(self.trainer.strategy, Fsdp) and not self._sharded:
            self._sharded = True
            shard(self, self.model, self.trainer.strategy.device_mesh["data_parallel"])

    def forward(self, function: Callable[..., Any], *args: Any) -> Any:
        """Calls the function, within a forward of this module: sharded weights are whole in it."""
        return function(*args)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """The loss of a batch, as a share of its step's."""
        return cast(Tensor, self(self.learn, batch))

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        """Adds up what is measured on a batch."""
        self(self.judge, batch)

    def learn(self, batch: Batch) -> Tensor:
        """The loss of a batch; see the subclasses."""
        raise NotImplementedError

    def judge(self, batch: Batch) -> None:
        """Measures a batch; see the subclasses."""
        raise NotImplementedError

    def on_fit_start(self) -> None:
        """Moves the counts of selected tokens to this rank's device."""
        if self.selected is not None:
            self.selected = self.selected.to(self.device)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Saves the counts of all ranks."""
        if self.selected is not None:
            checkpoint["selected"] = self._selected_by_all().cpu()

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Takes them back, on the first rank."""
        if self.selected is not None and ranks.is_first():
            self.selected = checkpoint["selected"].to(self.device)

    def on_fit_end(self) -> None:
        """Sums the counts up."""
        if self.selected is not None:
            self.selected = self._selected_by_all()

    def _selected_by_all(self) -> Tensor:
        assert self.selected is not None
        if self.trainer.world_size == 1:
            return self.selected
        return cast(Tensor, self.all_gather(self.selected)).sum(0)

    def on_train_batch_start(self, batch: Batch, batch_idx: int) -> None:
        """Makes dropout a function of (seed, step, part of the step)."""
        seed = (self.seed * 1_000_003 + self.global_step) * 1_009 + batch["step"].part
        torch.default_generator.manual_seed(seed)  # torch.manual_seed asks every backend, which takes 0.1 ms a step
        if self.device.type == "cuda":
            torch.cuda.manual_seed(seed)

    def report(self, loss: Tensor, **values: Tensor) -> None:
        """Logs the values of this step if one is due, and stops a run whose loss was no number since."""
        self.last_loss = loss.detach()
        self._first_bad.note(self.last_loss, self.global_step)
        if not self.due:
            return
        self.check()
        value = loss.item()
        if self.logger is not None:
            rate = self.optimizers().param_groups[0]["lr"]  # type: ignore[union-attr]
            numbers = {name: float(number) for name, number in values.items()}
            self.logger.log_metrics({"loss": value, "lr": rate, **numbers}, step=self.global_step)

    def check(self) -> None:
        """Stops a run whose loss was no number at some step.

        Raises:
            UserError: With the step, its examples and the likely cause.
        """
        step = self._first_bad.step()
        if step is not None:
            raise explain(self, step)

    def on_validation_epoch_start(self) -> None:
        """Empties the sums; a segment of training whose loss was no number gets no checkpoint."""
        self._sums = None
        self.check()

    def add(self, *sums: Tensor) -> None:
        """Adds a validation batch's sums; the last one is the number of label rows."""
        batch = torch.stack([value.double().to(self.device) for value in sums])
        self._sums = batch if self._sums is None else self._sums + batch

    def totals(self) -> list[float]:
        """Validation sums over all ranks, divided by the number of rows (which is left out)."""
        assert self._sums is not None, "validation saw no batch"
        sums = self._sums
        if self.trainer.world_size > 1:
            sums = cast(Tensor, self.all_gather(sums)).sum(0)
        values: list[float] = (sums[:-1] / sums[-1].clamp_min(1)).tolist()
        if not all(math.isfinite(value) for value in values):
            raise UserError(
                f"validation at step {self.global_step} gave {values}: the model's output is not finite. Before the "
                "first step that is the model as loaded: try another dtype. Later, lower the learning rate"
            )
        return values

    def publish(self, **metrics: float) -> None:
        """Keeps a validation's results and logs them."""
        self.metrics = metrics
        if self.logger is not None and not self.trainer.sanity_checking:
            named = {f"validation_{name}": value for name, value in metrics.items()}
            self.logger.log_metrics(named, step=self.global_step)
