"""What every kind of training shares, as a Lightning module: optimiser, seeds, logging, validation by sums."""

import math
from typing import Any, Literal, cast

import lightning as L
import torch
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor
from transformers import PreTrainedModel

from decode.core.errors import UserError
from decode.models.eagle.head import FeatureHead
from distill.config.training import CompileLoss, TrainingSettings
from distill.core import ranks
from distill.data.batches.token_dataset import Batch, label_mask
from distill.models.lm_head import LMHead, last_hidden
from distill.models.optimizers import make_optimizer, make_schedule
from distill.training.fsdp import Fsdp, shard
from distill.training.nan_guard import FirstBad, explain


class TrainingModule(L.LightningModule):
    """Base of the modules for next tokens, distillation and feature heads.

    A subclass computes what it needs of a batch in `forward`, inside which sharded weights are whole, and defines
    `training_step`, `validation_step` and `on_validation_epoch_end`.

    Args:
        model: The model to train.
        training: Optimiser and length.
        steps: Optimiser steps in all.
        seed: All randomness of step i is drawn from (seed, i, rank), so a resumed run needs no saved state of it.

    Attributes:
        selected: How often each token id was selected, ``[vocab]``; None without a selection. During training by
            this rank, afterwards by all.
    """

    monitor = "validation_loss"  # The logged metric by which checkpoints are compared, and ``mode`` which way is better
    mode: Literal["min", "max"] = "min"

    model: Any
    compile_loss: CompileLoss = "off"  # as `TrainerSettings.compile_loss`, which `fit` sets
    selected: Tensor | None = None  # no buffer: each rank counts its own

    def __init__(
        self, model: PreTrainedModel | FeatureHead, training: TrainingSettings, steps: int, *, seed: int = 0
    ) -> None:
        super().__init__()
        self.model, self.training_settings, self.steps, self.seed = model, training, steps, seed
        self.history: list[dict[str, float]] = []  # Every validation's metrics with its step
        self.last_loss: Tensor | None = None  # The latest training loss, on the device
        # in a list: its weights are the model's, not to be counted twice
        self._head = [LMHead(model)] if isinstance(model, PreTrainedModel) else []
        self._sums: Tensor | None = None
        self._sharded = False
        self._first_bad = FirstBad()
        self.strict_loading = all(weight.requires_grad for weight in model.parameters())  # Lightning's: all are saved

    @property
    def logs_this_step(self) -> bool:
        """Whether Lightning's loggers take this step's values; only then are they computed and read."""
        every: int = 0 if self._trainer is None else self._trainer.log_every_n_steps  # type: ignore[attr-defined]
        return every > 0 and (self.global_step + 1) % every == 0

    def hidden(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Last hidden states ``[rows, hidden]`` where a label is predicted, and those positions ``[batch, time]``."""
        mask = label_mask(batch["labels"])
        return last_hidden(self.model, batch["input_ids"], mask, batch.get("position_ids")), mask

    def configure_optimizers(self) -> OptimizerLRScheduler:
        """The settings' optimiser and its learning-rate schedule."""
        optimizer = make_optimizer(self.model, self.training_settings, precision=str(self.trainer.precision))
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
            shard(self, self.model, self.trainer.strategy.sharding_mesh)

    # -- training ---------------------------------------------------------------------------------------------------

    def on_train_batch_start(self, batch: Batch, batch_idx: int) -> None:
        """Makes dropout a function of (seed, step, part of the step)."""
        seed = (self.seed * 1_000_003 + self.global_step) * 1_009 + batch["step"].part
        torch.default_generator.manual_seed(seed)  # torch.manual_seed asks every backend, which takes 0.1 ms a step
        if self.device.type == "cuda":
            torch.cuda.manual_seed(seed)

    def log_step(self, loss: Tensor, **values: Tensor) -> Tensor:
        """Logs a step's values if it is one to be logged, and notes whether the loss is finite; returns the loss.

        Raises:
            UserError: The loss of this or an earlier step was not, with the step, its examples and the likely cause.
        """
        self.last_loss = loss.detach()
        self._first_bad.note(self.last_loss, self.global_step)
        if self.logs_this_step:
            self.check_finite()
            self.log("loss", self.last_loss, prog_bar=True, sync_dist=True)
            rate = self.optimizers().param_groups[0]["lr"]  # type: ignore[union-attr]
            self.log_dict({"lr": rate, **values})
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Batch, batch_idx: int) -> None:
        """Has the last step validated too, wherever it lies between two validations."""
        if self.trainer.is_last_batch:
            self.trainer.should_stop = True

    def check_finite(self) -> None:
        """Whether all losses so far were numbers.

        Raises:
            UserError: One was not, with the step, its examples and the likely cause.
        """
        step = self._first_bad.step()
        if step is not None:
            raise explain(self, step)

    # -- validation -------------------------------------------------------------------------------------------------

    def on_validation_epoch_start(self) -> None:
        """Empties the sums. Weights whose training loss was not finite are neither validated nor saved."""
        self._sums = None
        self.check_finite()

    def add_sums(self, *sums: Tensor) -> None:
        """Adds a validation batch's sums; the last one is the number of label rows."""
        batch = torch.stack([value.double().to(self.device) for value in sums])
        self._sums = batch if self._sums is None else self._sums + batch

    def log_means(self, *names: str) -> None:
        """Logs the sums over all ranks, divided by the number of rows, as ``validation_<name>``.

        Raises:
            UserError: One of them is not finite.
        """
        assert self._sums is not None, "validation saw no batch"
        sums = self._sums
        if self.trainer.world_size > 1:
            sums = cast(Tensor, self.all_gather(sums)).sum(0)
        means: list[float] = (sums[:-1] / sums[-1].clamp_min(1)).tolist()
        if not all(math.isfinite(mean) for mean in means):
            raise UserError(
                f"validation at step {self.global_step} gave {means}: the model's output is not finite. Before the "
                "first step that is the model as loaded: try another dtype. Later, lower the learning rate"
            )
        if not self.trainer.sanity_checking:
            self.history.append({"step": self.global_step, **dict(zip(names, means))})
        for name, mean in zip(names, means):
            self.log(f"validation_{name}", mean, prog_bar=f"validation_{name}" == self.monitor)

    # -- what checkpoints hold ----------------------------------------------------------------------------------------

    def on_fit_start(self) -> None:
        """Moves the counts of selected tokens to this rank's device."""
        if self.selected is not None:
            self.selected = self.selected.to(self.device)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Saves the learning curve, the counts of all ranks, and of a model with an adapter the adapter alone."""
        checkpoint["history"] = self.history
        if not self.strict_loading:
            trained = {name for name, weight in self.named_parameters() if weight.requires_grad}
            checkpoint["state_dict"] = {n: w for n, w in checkpoint["state_dict"].items() if n in trained}
        if self.selected is not None:
            checkpoint["selected"] = self._selected_by_all().cpu()

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Takes them back, the counts on the first rank."""
        self.history = list(checkpoint["history"])
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
