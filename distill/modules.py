"""What every kind of training shares, as a Lightning module: optimiser, seeds, logging, validation by sums."""

import math
from collections import Counter
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, Literal, cast

import lightning as L
import torch
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor
from transformers import PreTrainedModel

from decode.errors import UserError
from decode.models.heads import FeatureHead
from distill import ranks
from distill.checkpoints import FirstBad, Fsdp, explain, shard
from distill.config.training import StudentSettings, TrainingSettings
from distill.data.batches import Batch, example_of_rows, label_mask
from distill.data.loader import OptimizerStep
from distill.losses.chunked import LossRequest, LossRows, can_fuse, fused_loss, plain_loss
from distill.losses.next_token import next_token_hits, next_token_loss
from distill.losses.objective import Drafted, Objective
from distill.losses.selection import Selection, delta_loss, top_share
from distill.models.layers import LayerSkip, ProgressiveStacking
from distill.models.lm_head import LMHead, last_hidden
from distill.models.optimizers import make_optimizer, make_schedule
from distill.teacher.heads import drafting_steps
from distill.teacher.signals import Teacher


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
    selected: Tensor | None = None  # no buffer: each rank counts its own

    def __init__(
        self, model: PreTrainedModel | FeatureHead, training: TrainingSettings, steps: int, *, seed: int = 0
    ) -> None:
        super().__init__()
        self.model, self.training_settings, self.steps, self.seed = model, training, steps, seed
        self.history: list[dict[str, float]] = []  # Every validation's metrics with its step
        self.last_loss: Tensor | None = None  # The latest training loss, on the device
        self.log_every = 0  # Steps between logged ones; 0 outside a training
        # in a list: its weights are the model's, not to be counted twice
        self._head = [LMHead(model)] if isinstance(model, PreTrainedModel) else []
        self._sums: Tensor | None = None
        self._sharded = False
        self._first_bad = FirstBad()
        self.strict_loading = all(weight.requires_grad for weight in model.parameters())  # Lightning's: all are saved

    @property
    def logs_this_step(self) -> bool:
        """Whether Lightning's loggers take this step's values; only then are they computed and read."""
        return self.log_every > 0 and (self.global_step + 1) % self.log_every == 0

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
        self.log_every = self.trainer.log_every_n_steps  # type: ignore[attr-defined]
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


class CausalLMModule(TrainingModule):
    """Next-token training; the best checkpoint has the smallest validation loss.

    Under LayerSkip that is the recipe's, over some exits and the last layer: of a model that is trained already, the
    last layer's own loss is the smallest where the exits have learned least.
    """

    stacking: ProgressiveStacking | None = None  # where the first layers are trained alone for a while
    _layerskip: LayerSkip | None = None

    @property
    def layerskip(self) -> LayerSkip | None:
        """LayerSkip's recipe, where the model is trained with it."""
        return self._layerskip

    @layerskip.setter
    def layerskip(self, recipe: LayerSkip) -> None:
        self._layerskip, self.monitor = recipe, "validation_recipe_loss"

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
        """The loss to train on, that of the last layer alone, and how many labels are the most probable token.

        The first is the mean cross-entropy over the batch's labels; under LayerSkip together with that of the early
        exits. The last is counted in evaluation only.
        """
        hidden, mask = self.hidden(batch)
        head, labels = self._head[0], batch["labels"].roll(-1, 1)[mask]
        loss = next_token_loss(hidden, head, labels)
        total, hits = loss, labels.new_zeros(()) if self.training else next_token_hits(hidden, head, labels)
        if self.layerskip is not None:
            total = self.layerskip.combine(loss, lambda rows: next_token_loss(rows, head, labels), mask)
        return total, loss, hits

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """The batch's loss, weighted by its share of the step's labels."""
        step = self.global_step
        with nullcontext() if self.stacking is None else self.stacking.training(step) as layers:
            if self.layerskip is not None:
                self.layerskip.begin(step, layers)
            total, last, _ = self(batch)
        self.log_step(total, **({} if self.layerskip is None else {"last_layer_loss": last.detach()}))
        weighted: Tensor = total * batch["step"].weight if "step" in batch else total
        return weighted

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        """Adds up losses and top-1 hits."""
        if self.layerskip is not None:
            self.layerskip.watch()
        total, loss, hits = self(batch)
        count = torch.tensor(float((batch["labels"][:, 1:] != -100).sum()), device=self.device)
        recipe = [total * count] * (self.layerskip is not None)
        self.add_sums(loss * count, hits, *recipe, count)

    def on_validation_epoch_end(self) -> None:
        """Logs loss and next-token accuracy, under LayerSkip the recipe's loss too."""
        self.log_means("loss", "accuracy", *["recipe_loss"] * (self.layerskip is not None))


class DistillModule(TrainingModule):
    """DistillSpec; with a selection, AdaSPEC. The best checkpoint has the largest validation alpha.

    A draft model drafts in one step; what has several, as feature heads do, defines `drafted`, and `weight` of each.
    """

    monitor = "validation_alpha"
    mode = "max"

    def __init__(
        self,
        model: PreTrainedModel | FeatureHead,
        training: TrainingSettings,
        steps: int,
        *,
        target: Teacher,
        objective: Objective | None = None,
        fused: bool = True,
        seed: int = 0,
    ) -> None:
        super().__init__(model, training, steps, seed=seed)
        self.target, self.objective, self.fused = target, objective or Objective(), fused
        if self.objective.selection is not None:
            self.selected = torch.zeros(int(model.config.get_text_config().vocab_size), dtype=torch.long)
        self._chosen: list[list[Tensor]] = []  # of every drafting step and micro-batch of the step

    def setup(self, stage: str) -> None:
        """Moves the frozen target, too, to this rank's device: before the first validation."""
        self.target.to(self.trainer.strategy.root_device)

    def drafted(self, batch: Batch, *, training: bool) -> Iterator[Drafted]:
        """What the draft says of a batch, in each of its drafting steps; for validation the first one alone counts."""
        hidden, mask = self.hidden(batch)
        labels, sequence = batch["labels"].roll(-1, 1)[mask], example_of_rows(batch, mask)
        reference = batch.get("reference_loss")
        yield Drafted(hidden, self._head[0], self.target.rows(batch, mask), sequence, labels, reference)

    def weight(self, number: int) -> float:
        """Of a drafting step's loss in the sum of them."""
        return 1.0

    def forward(
        self, batch: Batch, objective: Objective, *, metrics: bool, training: bool = True
    ) -> list[tuple[Drafted, LossRows]]:
        """The losses of a batch's label rows, in each drafting step."""
        found, step = [], batch.get("step")
        for number, drafted in enumerate(self.drafted(batch, training=training)):
            request = objective.request(
                self.global_step,
                drafted,
                metrics=metrics or objective.accepted_only,
            )
            if step is not None and request.choose is not None and step.parts > 1:
                request = self._choose_in_step(request, objective, drafted, step, number)
            found.append((drafted, rows := self._loss(drafted, request)))
            if not training:
                break
            if objective.accepted_only:
                assert rows.alpha is not None
                drafted.accepted = torch.rand_like(rows.alpha) < rows.alpha
        return found

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Divergence summed over the selected tokens and normalised by the whole step's (paper, training objective).

        Gradients are averaged over the parts of a step, so each part's loss is its share times their number.
        """
        found = self(batch, self.objective, metrics=self.logs_this_step)
        step, selection = batch.get("step"), self.objective.selection
        loss = torch.zeros((), device=self.device)
        for number, (drafted, rows) in enumerate(found):
            loss = loss + self.weight(number) * self._step_loss(number, drafted, rows, step, selection)
        if selection is not None:
            assert self.selected is not None
            drafted, rows = found[0]
            self.selected += torch.bincount(drafted.labels[rows.chosen], minlength=len(self.selected))
        first = found[0][1]
        values = {} if first.alpha is None else {"alpha": first.alpha.mean(), "loss_all": first.losses.mean()}
        return self.log_step(loss, **values)

    def _step_loss(
        self,
        number: int,
        drafted: Drafted,
        found: LossRows,
        step: OptimizerStep | None,
        selection: Selection | None,
    ) -> Tensor:
        """Returns the loss of one drafting step, normalised by the tokens of the whole optimiser step."""
        parts, rows = (1, len(found.losses)) if step is None else (step.parts, step.tokens)
        if selection is None:
            return found.total / (max(1, rows) / parts)
        assert found.chosen is not None
        chosen: float = len(found.chosen)
        if step is not None and drafted.rows is None:
            chosen = selection.count(step.counts)
        elif step is not None and parts > 1 and selection.scope == "global":
            own = sum(map(len, self._chosen[number])) if step.micros > 1 else len(found.chosen)
            counts = torch.tensor(own, device=self.device)
            chosen = own if step.world == 1 else int(cast(Tensor, self.all_gather(counts)).sum())
        elif step is not None and parts > 1:  # which rows other parts leave out is not known here
            chosen *= parts / (step.weight or 1.0)
        return found.total / (selection.divisor(chosen, rows) / parts)

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        """Adds up divergence, alpha and top-1 agreement over all label tokens, whatever the selection."""
        ((drafted, found),) = self(batch, Objective(self.objective.divergence), metrics=True, training=False)
        count = torch.tensor(float(len(found.losses)), device=self.device)
        agreement = found.agreement if drafted.learnable is None else found.agreement * drafted.learnable
        self.add_sums(found.losses.sum(), found.alpha.sum(), agreement.sum(), count)

    def on_validation_epoch_end(self) -> None:
        """Logs divergence, alpha and agreement."""
        self.log_means("loss", "alpha", "agreement")

    def _loss(self, drafted: Drafted, request: LossRequest) -> LossRows:
        if not (self.fused and can_fuse(drafted.head)):
            return plain_loss(drafted.hidden, drafted.head, drafted.target, request)
        on_gpu = drafted.hidden.is_cuda  # there the kernels are compiled
        return fused_loss(drafted.hidden, drafted.head, drafted.target, request, compiled=on_gpu)

    def _choose_in_step(
        self, request: LossRequest, objective: Objective, drafted: Drafted, step: OptimizerStep, number: int
    ) -> LossRequest:
        """With scope ``global`` the choice among all parts of the step; other scopes look at one part only."""
        selection = objective.selection
        assert selection is not None
        if selection.scope != "global":
            return request
        select = partial(top_share, k=selection.k)
        if step.micros == 1:
            sequence = [drafted.sequence]
            return replace(
                request, choose=lambda values: step.choose([delta_loss(values, drafted.reference)], sequence, select)[0]
            )
        if step.micro == 0 and number == 0:
            micros = [
                self._deltas(self.transfer_batch_to_device(part, self.device, 0), objective) for part in step.ahead
            ]
            self._chosen = [
                step.choose([delta for delta, _ in parts], [sequence for _, sequence in parts], select)
                for parts in zip(*micros, strict=True)
            ]
        return replace(request, choose=lambda values: self._chosen[number][step.micro])

    @torch.no_grad()
    def _deltas(self, batch: Batch, objective: Objective) -> list[tuple[Tensor, Tensor]]:
        """ΔL of a batch's rows, and the examples they belong to, for every drafting step."""
        deltas: list[tuple[Tensor, Tensor]] = []
        for drafted in self.drafted(batch, training=True):
            found = self._loss(drafted, LossRequest(objective.divergence, metrics=False))
            deltas.append((delta_loss(found.losses, drafted.reference), drafted.sequence))
        return deltas


def token_counts(selected: Tensor) -> list[tuple[int, int]]:
    """(token id, times selected), the most often selected first."""
    return [(token, count) for token, count in Counter(dict(enumerate(selected.tolist()))).most_common() if count]


class HeadModule(DistillModule):
    """EAGLE; with a selection, EAGLE + AdaSPEC: Σ decayⁱ · loss over the drafting steps i.

    EAGLE-1 adds the feature regression, on all label tokens. The other losses are of those whose most probable token
    of the target the head can draft, and a selection ranks them by ΔL at each drafting step.
    """

    model: FeatureHead

    def __init__(
        self, model: FeatureHead, training: TrainingSettings, steps: int, *, settings: StudentSettings, **options: Any
    ) -> None:
        super().__init__(model, training, steps, **options)
        self.settings = settings

    def drafted(self, batch: Batch, *, training: bool) -> Iterator[Drafted]:
        """See `distill.teacher.heads`."""
        settings, divergence = self.settings, self.objective.divergence
        noisy = training and self.model.version == 1 and self.model.training
        yield from drafting_steps(
            self.model,
            self.target,
            batch,
            settings.steps if training else 1,
            temperature=divergence.temperature,
            noise=settings.noise if noisy else 0.0,
            learnable_only=training,
        )

    def weight(self, number: int) -> float:
        """decayⁱ; 1 where the rows that are reached decide how much each drafting step counts."""
        return 1.0 if self.objective.accepted_only else self.settings.decay**number

    def _step_loss(
        self,
        number: int,
        drafted: Drafted,
        found: LossRows,
        step: OptimizerStep | None,
        selection: Selection | None,
    ) -> Tensor:
        loss = super()._step_loss(number, drafted, found, step, selection)
        if drafted.regression is None:
            return loss
        share = 1.0 if step is None else step.weight
        return self.settings.ce_weight * loss + self.settings.feature_weight * share * drafted.regression
