"""Distillation as a Lightning module: DistillSpec and, with a selection of tokens, AdaSPEC."""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor
from transformers import PreTrainedModel

from decode.models.eagle.head import FeatureHead
from distill.config.training import TrainingSettings
from distill.data.batches.gradient_accumulation import OptimizerStep
from distill.data.batches.token_dataset import Batch, example_of_rows, label_mask
from distill.eagle.target_features import FeatureSource
from distill.losses.chunked_kl import LossRequest, LossRows, fused_loss, plain_loss
from distill.losses.draft_outputs import Drafted
from distill.losses.head_gradients import can_fuse
from distill.losses.objective import Objective
from distill.losses.position_weights import BlockWeights
from distill.losses.token_selection import Selection, delta_loss, top_share
from distill.teacher.target_distribution import TargetSource
from distill.training.lightning_module import TrainingModule


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
        target: TargetSource | FeatureSource,
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
        assert isinstance(self.target, TargetSource)
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
        steps: Iterable[Drafted] = self.drafted(batch, training=training)
        weights: list[Tensor] = []
        if objective.weigh is not None:
            steps = list(steps)
            weights = self._position_weights(batch, steps, objective.weigh)
        for number, drafted in enumerate(steps):
            request = objective.request(
                self.global_step,
                drafted,
                step.responses if step is not None else None,
                metrics=metrics or objective.accepted_only,
            )
            if step is not None and request.choose is not None and step.parts > 1:
                request = self._choose_in_step(request, objective, drafted, step, number)
            if weights:
                own = weights[number]
                request = replace(request, weights=own if request.weights is None else request.weights * own)
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
        step, selection = batch.get("step"), self.objective.selection_at(self.global_step)
        loss = torch.zeros((), device=self.device)
        for number, (drafted, rows) in enumerate(found):
            loss = loss + self.weight(number) * self._step_loss(drafted, rows, step, selection)
        if selection is not None:
            assert self.selected is not None
            drafted, rows = found[0]
            self.selected += torch.bincount(drafted.labels[rows.chosen], minlength=len(self.selected))
        first = found[0][1]
        values = {} if first.alpha is None else {"alpha": first.alpha.mean(), "loss_all": first.losses.mean()}
        return self.log_step(loss, **values)

    def _step_loss(
        self, drafted: Drafted, found: LossRows, step: OptimizerStep | None, selection: Selection | None
    ) -> Tensor:
        """The loss of one drafting step."""
        parts, rows = 1, len(found.losses)
        chosen = rows if found.chosen is None else len(found.chosen)
        if step is not None:
            parts, rows = step.parts, step.tokens
            chosen = rows if selection is None else selection.count(step.counts)
        divisor = max(1, rows) if selection is None else selection.divisor(chosen, rows)
        return found.total / (divisor / parts)

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
        compiled = self.compile_loss == "on" or (self.compile_loss == "auto" and drafted.hidden.is_cuda)
        return fused_loss(drafted.hidden, drafted.head, drafted.target, request, compiled=compiled)

    @torch.no_grad()
    def _position_weights(self, batch: Batch, steps: list[Drafted], weigh: BlockWeights) -> list[Tensor]:
        """Weights of the rows of each drafting step, from the acceptances of the draft as it is.

        A row that a step does not draft, as where a head has no id for the target's token, counts as rejected.
        """
        sequence = example_of_rows(batch, label_mask(batch["labels"]))
        alpha = torch.zeros(len(sequence), len(steps), device=self.device)
        rows = [slice(None) if drafted.rows is None else drafted.rows for drafted in steps]
        for number, (drafted, place) in enumerate(zip(steps, rows)):
            now = self._loss(drafted, LossRequest(self.objective.divergence, mass=drafted.mass)).alpha
            assert now is not None
            alpha[place, number] = now.to(alpha.dtype)
        weights = weigh(alpha, sequence)
        return [weights[place, number] for number, place in enumerate(rows)]

    def _choose_in_step(
        self, request: LossRequest, objective: Objective, drafted: Drafted, step: OptimizerStep, number: int
    ) -> LossRequest:
        """With scope ``global`` the choice among all parts of the step; other scopes look at one part only."""
        selection = objective.selection_at(self.global_step)
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
            found = self._loss(drafted, LossRequest(objective.ranking, metrics=False))
            deltas.append((delta_loss(found.losses, drafted.reference), drafted.sequence))
        return deltas


def token_counts(selected: Tensor) -> list[tuple[int, int]]:
    """(token id, times selected), the most often selected first."""
    return [(token, count) for token, count in Counter(dict(enumerate(selected.tolist()))).most_common() if count]
