"""The two kinds of training as Lightning modules: next tokens, and distillation with or without selection."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal, cast

import lightning as L
import torch
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor
from transformers import PreTrainedModel

from decode.errors import UserError
from distill import ranks
from distill.batches import Batch
from distill.fused import LossRows, Task, can_fuse, fused_loss, plain_loss
from distill.layerskip import LayerSkip
from distill.losses import label_mask, next_token_loss
from distill.models import Head, last_hidden
from distill.objective import Objective
from distill.optimizers import make_optimizer, make_schedule
from distill.selection import Selection
from distill.settings import TrainingSettings
from distill.sharding import Fsdp, shard
from distill.step import Step
from distill.teacher import Target


class Module(L.LightningModule):
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
    """

    monitor = "loss"
    mode: Literal["min", "max"] = "min"

    def __init__(
        self, model: PreTrainedModel, training: TrainingSettings, steps: int, *, seed: int = 0, log_every: int = 20
    ) -> None:
        super().__init__()
        self.model, self.training_settings, self.steps, self.seed = model, training, steps, seed
        self.log_every = log_every
        self.metrics: dict[str, float] = {}
        self.last_loss: Tensor | None = None
        self._head = [Head(model)]  # in a list: its weights are the model's, not to be counted twice
        self._sums: Tensor | None = None
        self._sharded = False

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

    def on_train_batch_start(self, batch: Batch, batch_idx: int) -> None:
        """Makes dropout a function of (seed, step, part of the step)."""
        torch.manual_seed((self.seed * 1_000_003 + self.global_step) * 1_009 + batch["step"].part)

    def report(self, loss: Tensor, **values: Tensor) -> None:
        """Logs the values of this step if one is due, and stops a run whose loss is no number."""
        self.last_loss = loss.detach()
        if not self.due:
            return
        value = loss.item()
        if value != value:
            raise UserError(
                f"the loss is NaN at step {self.global_step}: lower the learning rate (it is "
                f"{self.optimizers().param_groups[0]['lr']:.2g}), or train with precision 32-true"  # type: ignore[union-attr]
            )
        if self.logger is not None:
            rate = self.optimizers().param_groups[0]["lr"]  # type: ignore[union-attr]
            numbers = {name: float(number) for name, number in values.items()}
            self.logger.log_metrics({"loss": value, "lr": rate, **numbers}, step=self.global_step)

    def on_validation_epoch_start(self) -> None:
        """Empties the sums."""
        self._sums = None

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
        return values

    def publish(self, **metrics: float) -> None:
        """Keeps a validation's results and logs them."""
        self.metrics = metrics
        if self.logger is not None and not self.trainer.sanity_checking:
            named = {f"validation_{name}": value for name, value in metrics.items()}
            self.logger.log_metrics(named, step=self.global_step)


class CausalLMModule(Module):
    """Next-token training of targets and initial drafts; the best checkpoint has the smallest validation loss.

    Attributes:
        layerskip: LayerSkip's recipe, where the model is trained with it.
    """

    layerskip: LayerSkip | None = None

    def learn(self, batch: Batch) -> Tensor:
        """Mean cross-entropy over the batch's labels, under LayerSkip together with that of the early exits."""
        skip = self.layerskip
        if skip is not None:
            skip.begin(self.global_step)
        logits, mask = self.rows(batch)
        labels = batch["labels"].roll(-1, 1)[mask]
        loss = next_token_loss(logits, labels)
        weight = batch["step"].weight if "step" in batch else 1.0
        if skip is None:
            self.report(loss)
            return loss * weight
        total = skip.combine(loss, lambda rows: next_token_loss(self._head[0](rows), labels), mask)
        self.report(total, last_layer_loss=loss.detach())
        return total * weight

    def judge(self, batch: Batch) -> None:
        """Adds up loss and top-1 hits."""
        logits, mask = self.rows(batch)
        labels = batch["labels"].roll(-1, 1)[mask]
        count = torch.tensor(float(len(labels)), device=self.device)
        self.add(next_token_loss(logits, labels) * count, (logits.argmax(-1) == labels).sum(), count)

    def on_validation_epoch_end(self) -> None:
        """Publishes loss and next-token accuracy."""
        loss, accuracy = self.totals()
        self.publish(loss=loss, accuracy=accuracy)


class DistillModule(Module):
    """DistillSpec; with a selection, AdaSPEC. The best checkpoint has the largest validation alpha.

    Args:
        model: The draft.
        target: Where the target's distributions come from.
        objective: The loss per token and which tokens count. With a selection batches carry ``reference_loss``.
        fused: Compute the loss in chunks, without the logits of all rows (see `distill.fused`).

    Attributes:
        selected: How often each token id was selected, ``[vocab]``; None without a selection. During training by
            this rank, afterwards by all.
    """

    monitor = "alpha"
    mode = "max"
    selected: Tensor | None

    def __init__(
        self,
        model: PreTrainedModel,
        training: TrainingSettings,
        steps: int,
        *,
        target: Target,
        objective: Objective | None = None,
        fused: bool = True,
        seed: int = 0,
        log_every: int = 20,
    ) -> None:
        super().__init__(model, training, steps, seed=seed, log_every=log_every)
        self.target, self.objective = target, objective or Objective()
        self.compute = fused_loss if fused and can_fuse(self._head[0]) else plain_loss
        vocab = int(model.get_input_embeddings().num_embeddings)
        # no buffer: each rank counts its own
        self.selected = None if self.objective.selection is None else torch.zeros(vocab, dtype=torch.long)
        self._chosen: list[Tensor] = []  # of every micro-batch of the step

    def on_fit_start(self) -> None:
        """Moves the frozen target, and the counts, to this rank's device."""
        self.target.to(self.device)
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

    def loss_rows(self, batch: Batch, objective: Objective, *, metrics: bool) -> tuple[LossRows, Tensor]:
        """The loss of a batch's label rows, and where they are, ``[batch, time]``."""
        hidden, mask = self.hidden(batch)
        task = objective.task(self.global_step, batch, mask, metrics=metrics)
        if (step := batch.get("step")) is not None and task.choose is not None and step.parts > 1:
            task = self._among_all(task, objective, batch, mask, step)
        return self.compute(hidden, self._head[0], self.target.rows(batch, mask), task), mask

    def _among_all(self, task: Task, objective: Objective, batch: Batch, mask: Tensor, step: Step) -> Task:
        """With scope ``global`` the choice among all parts of the step; other scopes look at one part only."""
        selection = objective.selection_at(self.global_step)
        assert selection is not None
        if selection.scope != "global":
            return task
        if step.micros == 1:
            reference, sequence = batch["reference_loss"], mask.nonzero()[:, 0]
            return replace(task, choose=lambda values: step.choose([values - reference], [sequence], selection.k)[0])
        if step.micro == 0:
            deltas = [
                self._deltas(self.transfer_batch_to_device(part, self.device, 0), objective) for part in step.ahead
            ]
            self._chosen = step.choose([d for d, _ in deltas], [sequence for _, sequence in deltas], selection.k)
        return replace(task, choose=lambda values: self._chosen[step.micro])

    @torch.no_grad()
    def _deltas(self, batch: Batch, objective: Objective) -> tuple[Tensor, Tensor]:
        """ΔL of a batch's label tokens, and the examples they belong to."""
        hidden, mask = self.hidden(batch)
        found: list[Tensor] = []

        def note(values: Tensor) -> Tensor:
            found.append(values - batch["reference_loss"])
            return values.new_empty(0, dtype=torch.long)

        task = replace(objective.task(self.global_step, batch, mask, metrics=False), choose=note)
        self.compute(hidden, self._head[0], self.target.rows(batch, mask), task)
        return found[0], mask.nonzero()[:, 0]

    def learn(self, batch: Batch) -> Tensor:
        """Divergence summed over the selected tokens and normalised (paper, training objective)."""
        found, mask = self.loss_rows(batch, self.objective, metrics=self.due)
        step, selection = batch.get("step"), self.objective.selection_at(self.global_step)
        rows, chosen = len(found.losses), len(found.losses)
        if selection is not None:
            assert found.chosen is not None
            assert self.selected is not None
            labels = batch["labels"].roll(-1, 1)[mask][found.chosen]
            self.selected += torch.bincount(labels, minlength=len(self.selected))
            chosen = len(labels)
        values = {} if found.alpha is None else {"alpha": found.alpha.mean(), "loss_all": found.losses.mean()}
        self.report(found.total / _divisor(selection, chosen, rows), **values)
        if step is None:
            return found.total / _divisor(selection, chosen, rows)
        chosen = step.tokens if selection is None else selection.count(step.counts)
        return found.total / (_divisor(selection, chosen, step.tokens) / step.parts)

    def judge(self, batch: Batch) -> None:
        """Adds up divergence, alpha and top-1 agreement over all label tokens, whatever the selection."""
        found, _ = self.loss_rows(batch, Objective(self.objective.divergence), metrics=True)
        assert found.alpha is not None
        assert found.agreement is not None
        count = torch.tensor(float(len(found.losses)), device=self.device)
        self.add(found.losses.sum(), found.alpha.sum(), found.agreement.sum(), count)

    def on_validation_epoch_end(self) -> None:
        """Publishes divergence, alpha and agreement."""
        divergence, alpha, agreement = self.totals()
        self.publish(loss=divergence, alpha=alpha, agreement=agreement)


def _divisor(selection: Selection | None, chosen: int, rows: int) -> int:
    """What a summed loss is divided by."""
    return max(1, rows) if selection is None else selection.divisor(chosen, rows)


def token_counts(selected: Tensor) -> list[tuple[int, int]]:
    """(token id, times selected), the most often selected first."""
    return [(token, count) for token, count in Counter(dict(enumerate(selected.tolist()))).most_common() if count]
