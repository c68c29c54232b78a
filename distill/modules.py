"""The Lightning modules: next-token training, distillation of draft models, and of feature heads."""

import math
import operator
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from itertools import accumulate
from typing import Any, Literal, cast

import lightning as L
import torch
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedModel

from decode.bench.offline_acceptance import DEPTH
from decode.errors import UserError
from decode.models.block_head import BlockHead
from decode.models.heads import DraftHead, FeatureHead
from decode.models.mtp import MtpHead
from distill import ranks
from distill.checkpoints import Fsdp, explain, shard
from distill.config.training import StudentSettings, TrainingSettings
from distill.data.batches import Batch, label_mask
from distill.data.loader import OptimizerStep
from distill.losses.chunked import (
    LossRequest,
    LossRows,
    fused_loss,
    next_token_hits,
    next_token_loss,
)
from distill.losses.objective import Drafted, Objective, Selection
from distill.losses.slots import decay, reached
from distill.models.layers import LayerSkip, ProgressiveStacking
from distill.models.lm_head import LMHead, last_hidden
from distill.models.optimizers import make_optimizer, make_schedule
from distill.teacher.blocks import block_rows
from distill.teacher.drafting import acceptance_by_position, drafting_steps, model_rows
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
        history: Every validation's metrics with its step.
        last_loss: The latest training loss, on the device.
        log_every: Steps between logged ones; 0 outside a training.
    """

    monitor = "validation_loss"  # The logged metric by which checkpoints are compared, and ``mode`` which way is better
    mode: Literal["min", "max"] = "min"

    model: Any

    def __init__(
        self, model: PreTrainedModel | DraftHead, training: TrainingSettings, steps: int, *, seed: int = 0
    ) -> None:
        super().__init__()
        self.model, self.training_settings, self.steps, self.seed = model, training, steps, seed
        self.history: list[dict[str, float]] = []
        self.last_loss: Tensor | None = None
        self.log_every = 0
        self.sums: Tensor | None = None
        self.bad_step = torch.tensor(-1)  # the first whose loss was no number, on the device, so that no step waits
        self.strict_loading = all(weight.requires_grad for weight in model.parameters())  # Lightning's: all are saved

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
        """Spreads the weights over the ranks under FSDP, once: Lightning calls this for validation and training."""
        if isinstance(self.trainer.strategy, Fsdp) and not hasattr(self, "unshard"):  # a method of sharded modules
            shard(self, self.model, self.trainer.strategy.sharding_mesh)

    # -- training ---------------------------------------------------------------------------------------------------

    def on_fit_start(self) -> None:
        """Notes which steps Lightning's loggers take; only then are further values computed and read."""
        self.log_every = self.trainer.log_every_n_steps  # type: ignore[attr-defined]

    @property
    def logs_this_step(self) -> bool:
        """Whether Lightning's loggers take this step's values."""
        return self.log_every > 0 and (self.global_step + 1) % self.log_every == 0

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
        bad = self.bad_step.to(loss.device)
        self.bad_step = torch.where((bad < 0) & ~self.last_loss.isfinite(), self.global_step, bad)
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
        """Checks that all losses so far were numbers.

        Raises:
            UserError: One was not, with the step, its examples and the likely cause.
        """
        if (step := int(self.bad_step)) >= 0:
            raise explain(self, step)

    # -- validation -------------------------------------------------------------------------------------------------

    def on_validation_epoch_start(self) -> None:
        """Empties the sums. Weights whose training loss was not finite are neither validated nor saved."""
        self.sums = None
        self.check_finite()

    def add_sums(self, sums: Sequence[Tensor], *counts: Tensor) -> None:
        """Adds a validation batch's sums, and what each is divided by in the end: one count, or one of each sum."""
        top, bottom = (torch.stack([value.double().to(self.device) for value in of]) for of in (sums, counts))
        batch = torch.stack((top, bottom.expand_as(top)))
        self.sums = batch if self.sums is None else self.sums + batch

    def means(self, *names: str) -> dict[str, float]:
        """Returns the sums over all ranks, each divided by its count.

        Raises:
            UserError: One of them is not finite.
        """
        assert self.sums is not None, "validation saw no batch"
        sums = self.sums if self.trainer.world_size == 1 else cast(Tensor, self.all_gather(self.sums)).sum(0)
        means: list[float] = (sums[0] / sums[1].where(sums[1] != 0, 1)).tolist()
        if not all(map(math.isfinite, means)):
            raise UserError(
                f"validation at step {self.global_step} gave {means}: the model's output is not finite. Before the "
                "first step that is the model as loaded: try another dtype. Later, lower the learning rate"
            )
        return dict(zip(names, means, strict=True))

    def log_validation(self, values: dict[str, float]) -> None:
        """Adds a validation to the history, and logs its values as ``validation_<name>``."""
        if not self.trainer.sanity_checking:
            self.history.append({"step": self.global_step, **values})
        for name, value in values.items():
            shown = name in ("alpha", "accepted_length") or f"validation_{name}" == self.monitor
            self.log(f"validation_{name}", value, prog_bar=shown)

    # -- what checkpoints hold ----------------------------------------------------------------------------------------

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Saves the learning curve, and of a model with an adapter the adapter alone."""
        checkpoint["history"] = self.history
        if not self.strict_loading:
            trained = {name for name, weight in self.named_parameters() if weight.requires_grad}
            checkpoint["state_dict"] = {n: w for n, w in checkpoint["state_dict"].items() if n in trained}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Restores the learning curve."""
        self.history = list(checkpoint["history"])


class CausalLMModule(TrainingModule):
    """Next-token training; the best checkpoint has the smallest validation loss.

    Under LayerSkip that is the recipe's, over some exits and the last layer: of a model that is trained already, the
    last layer's own loss is the smallest where the exits have learned least.

    Args:
        layerskip: LayerSkip's recipe, where the model is trained with it.
        stacking: Trains the first layers alone for a while.
        options: Arguments of `TrainingModule`.
    """

    def __init__(
        self, *given: Any, layerskip: LayerSkip | None = None, stacking: ProgressiveStacking | None = None,
        **options: Any,
    ) -> None:  # fmt: skip
        super().__init__(*given, **options)
        self.layerskip, self.stacking = layerskip, stacking
        if layerskip is not None:
            self.monitor = "validation_recipe_loss"

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
        """The loss to train on, that of the last layer alone, and how many labels are the most probable token.

        The first is the mean cross-entropy over the batch's labels; under LayerSkip together with that of the early
        exits. The last is counted in evaluation only.
        """
        mask = label_mask(batch["labels"])
        hidden = last_hidden(self.model, batch["input_ids"], mask, batch.get("position_ids"))
        head, labels = LMHead(self.model), batch["labels"].roll(-1, 1)[mask]
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
        count = label_mask(batch["labels"]).sum()
        recipe = [total * count] * (self.layerskip is not None)
        self.add_sums((loss * count, hits, *recipe), count)

    def on_validation_epoch_end(self) -> None:
        """Logs loss and next-token accuracy, under LayerSkip the recipe's loss too."""
        self.log_validation(self.means("loss", "accuracy", *["recipe_loss"] * (self.layerskip is not None)))


class DistillModule(TrainingModule):
    """DistillSpec; with a selection, AdaSPEC. The best checkpoint has the largest validation alpha.

    Every kind of draft is a `drafted` of its own, which yields the label rows of each drafting step.

    Args:
        target: The target's distributions.
        objective: Divergence and selection. None: forward KL of all tokens.
        options: Arguments of `TrainingModule`.

    Attributes:
        selected: Tokens that entered the loss under a selection, during training by this rank, afterwards by all.
        ahead: Rows that a selection over several micro-batches chose, ``[drafting steps][micro-batches]``.
    """

    monitor = "validation_alpha"
    mode = "max"

    def __init__(self, *given: Any, target: Teacher, objective: Objective | None = None, **options: Any) -> None:
        super().__init__(*given, **options)
        self.target, self.objective = target, objective or Objective()
        self.selected = 0
        self.ahead: list[list[Tensor]] = []

    def setup(self, stage: str) -> None:
        """Moves the frozen target, too, to this rank's device: before the first validation."""
        self.target.to(self.trainer.strategy.root_device)

    def drafted(self, batch: Batch, *, training: bool) -> Iterator[Drafted]:
        """The label rows of each drafting step of a batch."""
        yield model_rows(self.model, self.target, batch)

    def forward(self, batch: Batch, *, training: bool = True, metrics: bool = True) -> list[tuple[Drafted, LossRows]]:
        """The losses of a batch's rows in each drafting step: of the objective, for validation of its divergence."""
        objective, step, found = self.objective, batch.get("step"), []
        loss = objective.divergence_at(self.global_step) if training else objective.divergence
        selection = objective.selection if training else None
        if selection is not None and selection.scope == "global" and step is not None and step.ahead:
            self.ahead = self.choose_ahead(step, selection)
        for number, draft in enumerate(self.drafted(batch, training=training)):
            choose = None if selection is None else partial(self.choose, number, draft, step)
            ranking = None if selection is None or loss == objective.divergence else objective.divergence
            request = LossRequest(loss, choose, ranking, metrics or objective.accepted_only, mass=draft.mass)
            if training and draft.slots is not None:
                request = replace(request, metrics=True, factors=self.factors(draft))
            found.append((draft, rows := self.loss_of(draft, request)))
            if training and draft.confidence is not None and rows.alpha is not None:
                draft.extra = self.confidence_loss(draft, rows.alpha)
            if training and objective.accepted_only and rows.alpha is not None:
                draft.accepted = torch.rand_like(rows.alpha) < rows.alpha
        return found

    def factors(self, draft: Drafted) -> Tensor:
        """The factors of the losses of a block head's rows, 1 on average but for those that it cannot draft."""
        found = decay(cast(Tensor, draft.slots), self.model.drafts)
        return found / found.mean() * (1.0 if draft.learnable is None else draft.learnable)

    def confidence_loss(self, draft: Drafted, alpha: Tensor) -> Tensor:
        """The cross-entropy of the confidence head's estimates against the acceptance rates (DSpark, section 3)."""
        factors = decay(cast(Tensor, draft.slots), self.model.drafts)
        odds = cast(Tensor, draft.confidence).float()
        loss = functional.binary_cross_entropy_with_logits(odds, alpha.float(), factors, reduction="sum")
        return loss / factors.sum().clamp_min(1e-6)

    def loss_of(self, draft: Drafted, request: LossRequest) -> LossRows:
        """The losses of a drafting step's rows."""
        on_gpu = draft.hidden.is_cuda  # there the kernels are compiled
        return fused_loss(draft.hidden, draft.head, draft.target, request, compiled=on_gpu)

    def choose(
        self, number: int, draft: Drafted, step: OptimizerStep | None, losses: Tensor, alpha: Tensor | None
    ) -> Tensor:
        """The rows of a drafting step to train on, by ΔL among the batch's rows or the whole optimiser step's."""
        selection = self.objective.selection
        assert selection is not None
        delta = self.rank(draft, losses, alpha)
        if step is None or step.parts == 1 or selection.scope != "global":
            return selection.choose(delta)
        if step.micros > 1:
            return self.ahead[number][step.micro]
        return step.choose([delta], [draft.sequence], selection.choose)[0]

    def rank(self, draft: Drafted, losses: Tensor, alpha: Tensor | None) -> Tensor:
        """ΔL of the rows; of a block's times the probability that the slot is reached, if the head can draft it."""
        delta = draft.delta(losses)
        if draft.slots is None:
            return delta
        delta = delta * reached(cast(Tensor, alpha), draft.slots)
        return delta if draft.learnable is None else delta.where(draft.learnable > 0, -torch.inf)

    @torch.no_grad()
    def choose_ahead(self, step: OptimizerStep, selection: Selection) -> list[list[Tensor]]:
        """The choice among all micro-batches of a step, which its first one needs, for each drafting step."""
        request = LossRequest(self.objective.divergence, metrics=isinstance(self.model, BlockHead))
        micros: list[list[tuple[Tensor, Tensor]]] = []  # ΔL, and the examples of the rows
        for part in step.ahead:
            batch = self.transfer_batch_to_device(part, self.device, 0)
            drafts = [(draft, self.loss_of(draft, request)) for draft in self.drafted(batch, training=True)]
            micros.append([(self.rank(draft, rows.losses, rows.alpha), draft.sequence) for draft, rows in drafts])
        found = []
        for parts in zip(*micros, strict=True):
            deltas, sequences = zip(*parts)
            found.append(step.choose(deltas, sequences, selection.choose))
        return found

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Divergence summed over the selected tokens and normalised by the whole step's (paper, training objective).

        Gradients are averaged over the parts of a step, so each part's loss is its share times their number.
        """
        found, step = self(batch, metrics=self.logs_this_step), batch.get("step")
        loss = torch.zeros((), device=self.device)
        for number, (draft, rows) in enumerate(found):
            loss = loss + draft.weight * (rows.total / self.divisor(number, draft, rows, step))
            if draft.extra is not None:
                loss = loss + (1.0 if step is None else step.weight) * draft.extra
        first = found[0][1]
        self.selected += 0 if first.chosen is None else len(first.chosen)
        values = {} if first.alpha is None else {"alpha": first.alpha.mean(), "loss_all": first.losses.mean()}
        return self.log_step(loss, **values)

    def divisor(self, number: int, draft: Drafted, rows: LossRows, step: OptimizerStep | None) -> float:
        """The tokens of the whole optimiser step by which a drafting step's loss is divided, over the step's parts."""
        selection, parts, tokens = self.objective.selection, 1, float(len(rows.losses))
        if step is not None:
            # of a block head's rows those of other parts are not known: as many for each label are assumed
            parts, tokens = step.parts, step.tokens if draft.slots is None else tokens * step.parts / (step.weight or 1)
        if selection is None:
            return max(1, tokens) / parts
        assert rows.chosen is not None
        chosen: float = len(rows.chosen)
        if step is not None and draft.rows is None:
            chosen = selection.count(step.counts)
        elif step is not None and parts > 1 and selection.scope == "global":
            chosen = sum(map(len, self.ahead[number])) if step.micros > 1 else len(rows.chosen)
            if step.world > 1:
                chosen = int(cast(Tensor, self.all_gather(torch.tensor(chosen, device=self.device))).sum())
        elif step is not None and parts > 1:  # which rows other parts leave out is not known here
            chosen *= parts / (step.weight or 1.0)
        return selection.divisor(chosen, tokens) / parts

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        """Adds up divergence, and alpha and top-1 agreement by position in the draft, whatever the selection."""
        found = self(batch, training=False)
        first, place = found[0][1], label_mask(batch["labels"]).flatten().nonzero()[:, 0]
        # by drafting step the label rows, and whether they are accepted: sampled, and greedy
        by_alpha, by_top = list[tuple[Tensor | None, Tensor]](), list[tuple[Tensor | None, Tensor]]()
        for draft, rows in found:
            agreed = rows.agreement if draft.learnable is None else rows.agreement * draft.learnable
            slots = draft.slots
            for own in [slice(None)] if slots is None else [(slots == i).nonzero()[:, 0] for i in range(self.depth)]:
                which = None if draft.rows is None else draft.rows[own]
                by_alpha.append((which, rows.alpha[own]))
                by_top.append((which, agreed[own]))
        (alphas, tested), (agreed, reached) = (
            acceptance_by_position(of, place, self.depth) for of in (by_alpha, by_top)
        )
        self.add_sums((first.losses.sum(), *alphas, *agreed), torch.tensor(len(first.losses)), *tested, *reached)

    def on_validation_epoch_end(self) -> None:
        """Logs divergence, acceptance and agreement by position, and the accepted length 1 + α₁ + α₁·α₂ + …."""
        alphas, agreed = ([name, *(f"{name}_{i}" for i in range(2, self.depth + 1))] for name in ("alpha", "agreement"))
        values = self.means("loss", *alphas, *agreed)
        length = 1 + sum(accumulate((values[name] for name in alphas), operator.mul))
        self.log_validation(values | {"accepted_length": length})

    @property
    def depth(self) -> int:
        """Positions of a draft at which validation measures acceptance: of some heads all that it can have."""
        return getattr(self.model, "drafts", None) or DEPTH

    def on_fit_end(self) -> None:
        """Sums the selected tokens of all ranks up."""
        self.selected = sum(ranks.exchange(self.selected))

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Saves the number of selected tokens of all ranks too."""
        super().on_save_checkpoint(checkpoint)
        checkpoint["selected"] = sum(ranks.exchange(self.selected))

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Restores this number, on the first rank."""
        super().on_load_checkpoint(checkpoint)
        self.selected = checkpoint["selected"] if ranks.is_first() else 0


class HeadModule(DistillModule):
    """EAGLE and MTP; with a selection, AdaSPEC: Σ decayⁱ · loss over the drafting steps i; best by accepted length.

    EAGLE-1 adds the feature regression, on all label tokens. The other losses are of those whose most probable token
    of the target the head can draft, and a selection ranks them by ΔL at each drafting step. Where a further step is
    trained on accepted tokens alone, the rows that are reached decide how much each step counts, without a decay.

    Args:
        settings: Drafting steps, noise and weights.
        options: Arguments of `DistillModule`.
    """

    monitor = "validation_accepted_length"
    model: FeatureHead | MtpHead

    def __init__(self, *given: Any, settings: StudentSettings, **options: Any) -> None:
        super().__init__(*given, **options)
        self.settings = settings

    def drafted(self, batch: Batch, *, training: bool) -> Iterator[Drafted]:
        """See `distill.teacher.drafting`."""
        settings = self.settings
        noise = settings.noise if training and self.model.version == 1 and self.model.training else 0.0
        drafts = drafting_steps(self.model, self.target, batch, settings.steps, noise=noise, learnable_only=training)
        for number, draft in enumerate(drafts):
            draft.weight = 1.0 if self.objective.accepted_only else settings.decay**number
            if draft.extra is not None:
                draft.extra = draft.weight * settings.feature_weight * draft.extra
                draft.weight *= settings.ce_weight
            yield draft


class BlockModule(DistillModule):
    """DFlash and DSpark; with a selection, AdaSPEC on the slots of their blocks; best by accepted length.

    Args:
        anchors: Blocks of a text, drawn anew at each step.
        options: Arguments of `DistillModule`.
    """

    monitor = "validation_accepted_length"
    model: BlockHead

    def __init__(self, *given: Any, anchors: int, **options: Any) -> None:
        super().__init__(*given, **options)
        self.anchors = anchors

    def drafted(self, batch: Batch, *, training: bool) -> Iterator[Drafted]:
        """The slots of all blocks at once; see `distill.teacher.blocks`."""
        generator = None
        if training:  # the same for a batch that is read twice
            seed = (self.seed * 1_000_003 + self.global_step) * 1_009 + int(batch["input_ids"].sum())
            generator = torch.Generator().manual_seed(seed)
        yield block_rows(self.model, self.target, batch, self.anchors, generator)
