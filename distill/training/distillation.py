"""Distillation as a Lightning module: DistillSpec and, with a selection of tokens, AdaSPEC."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor
from transformers import PreTrainedModel

from distill.config.trainer import TrainingSettings
from distill.data.optimizer_step import OptimizerStep
from distill.data.token_dataset import Batch
from distill.losses.chunked_kl import LossRequest, LossRows, fused_loss, plain_loss
from distill.losses.head_gradients import can_fuse
from distill.losses.objective import Objective
from distill.losses.token_selection import Selection, top_share
from distill.teacher.target_distribution import TargetSource
from distill.training.base_module import TrainingModule


class DistillModule(TrainingModule):
    """DistillSpec; with a selection, AdaSPEC. The best checkpoint has the largest validation alpha.

    Args:
        model: The draft.
        target: Where the target's distributions come from.
        objective: The loss per token and which tokens count. With a selection batches carry ``reference_loss``.
        fused: Compute the loss in chunks, without the logits of all rows (see `distill.losses.chunked_kl`).
    """

    monitor = "validation_alpha"
    mode = "max"

    def __init__(
        self,
        model: PreTrainedModel,
        training: TrainingSettings,
        steps: int,
        *,
        target: TargetSource,
        objective: Objective | None = None,
        fused: bool = True,
        seed: int = 0,
    ) -> None:
        super().__init__(model, training, steps, seed=seed)
        self.target, self.objective = target, objective or Objective()
        self.compute = fused_loss if fused and can_fuse(self._head[0]) else plain_loss
        if self.objective.selection is not None:
            self.selected = torch.zeros(int(model.get_input_embeddings().num_embeddings), dtype=torch.long)
        self._chosen: list[Tensor] = []  # of every micro-batch of the step

    def setup(self, stage: str) -> None:
        """Moves the frozen target, too, to this rank's device: before the first validation."""
        self.target.to(self.trainer.strategy.root_device)

    def forward(self, batch: Batch, objective: Objective, *, metrics: bool) -> tuple[LossRows, Tensor]:
        """The loss of a batch's label rows, and where they are, ``[batch, time]``."""
        hidden, mask = self.hidden(batch)
        request = objective.request(self.global_step, batch, mask, metrics=metrics)
        if (step := batch.get("step")) is not None and request.choose is not None and step.parts > 1:
            request = self._choose_in_step(request, objective, batch, mask, step)
        return self.compute(hidden, self._head[0], self.target.rows(batch, mask), request), mask

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Divergence summed over the selected tokens and normalised by the whole step's (paper, training objective).

        Gradients are averaged over the parts of a step, so each part's loss is its share times their number.
        """
        found, mask = self(batch, self.objective, metrics=self.logs_this_step)
        step, selection = batch.get("step"), self.objective.selection_at(self.global_step)
        rows = chosen = len(found.losses)
        if selection is not None:
            assert self.selected is not None
            labels = batch["labels"].roll(-1, 1)[mask][found.chosen]
            self.selected += torch.bincount(labels, minlength=len(self.selected))
            chosen = len(labels)
        parts = 1
        if step is not None:
            parts, rows = step.parts, step.tokens
            chosen = rows if selection is None else selection.count(step.counts)
        loss = found.total / (_divisor(selection, chosen, rows) / parts)
        values = {} if found.alpha is None else {"alpha": found.alpha.mean(), "loss_all": found.losses.mean()}
        return self.log_step(loss, **values)

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        """Adds up divergence, alpha and top-1 agreement over all label tokens, whatever the selection."""
        found, _ = self(batch, Objective(self.objective.divergence), metrics=True)
        count = torch.tensor(float(len(found.losses)), device=self.device)
        self.add_sums(found.losses.sum(), found.alpha.sum(), found.agreement.sum(), count)

    def on_validation_epoch_end(self) -> None:
        """Logs divergence, alpha and agreement."""
        self.log_means("loss", "alpha", "agreement")

    def _choose_in_step(
        self, request: LossRequest, objective: Objective, batch: Batch, mask: Tensor, step: OptimizerStep
    ) -> LossRequest:
        """With scope ``global`` the choice among all parts of the step; other scopes look at one part only."""
        selection = objective.selection_at(self.global_step)
        assert selection is not None
        if selection.scope != "global":
            return request
        select = partial(top_share, k=selection.k)
        if step.micros == 1:
            reference, sequence = batch["reference_loss"], mask.nonzero()[:, 0]
            return replace(request, choose=lambda values: step.choose([values - reference], [sequence], select)[0])
        if step.micro == 0:
            deltas = [
                self._deltas(self.transfer_batch_to_device(part, self.device, 0), objective) for part in step.ahead
            ]
            self._chosen = step.choose([d for d, _ in deltas], [sequence for _, sequence in deltas], select)
        return replace(request, choose=lambda values: self._chosen[step.micro])

    @torch.no_grad()
    def _deltas(self, batch: Batch, objective: Objective) -> tuple[Tensor, Tensor]:
        """ΔL of a batch's label tokens, and the examples they belong to."""
        hidden, mask = self.hidden(batch)
        found: list[Tensor] = []

        def note(values: Tensor) -> Tensor:
            found.append(values - batch["reference_loss"])
            return values.new_empty(0, dtype=torch.long)

        request = replace(objective.request(self.global_step, batch, mask, metrics=False), choose=note)
        self.compute(hidden, self._head[0], self.target.rows(batch, mask), request)
        return found[0], mask.nonzero()[:, 0]


def _divisor(selection: Selection | None, chosen: int, rows: int) -> int:
    """What a summed loss is divided by."""
    return max(1, rows) if selection is None else selection.divisor(chosen, rows)


def token_counts(selected: Tensor) -> list[tuple[int, int]]:
    """(token id, times selected), the most often selected first."""
    return [(token, count) for token, count in Counter(dict(enumerate(selected.tolist()))).most_common() if count]
