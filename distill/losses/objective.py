"""What a distillation minimises at each step: the divergence, and which tokens count."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from distill.config.drafts import AdaSpecSettings, DistillSettings, DivergenceName, WeighBy
from distill.losses.chunked import LossRequest, TargetRows
from distill.losses.divergences import Divergence
from distill.losses.selection import Selection, delta_loss
from distill.models.lm_head import LMHead


@dataclass
class Drafted:
    """The label rows of a drafting step; a language model has one step."""

    hidden: Tensor  # last hidden states at the rows, ``[rows, hidden]``
    head: LMHead  # their output head
    target: TargetRows  # the target's distributions of the rows, over the head's ids
    sequence: Tensor  # the example of the batch that each row belongs to, ascending
    labels: Tensor  # the rows' labels, ``[rows]``
    reference: Tensor | None = None  # the reference's divergences, where there is a selection
    rows: Tensor | None = None  # which of the batch's label rows these are; None: all
    mass: Tensor | None = None  # probability that the target gives to the head's ids together; None: 1
    learnable: Tensor | None = None  # 1 where the target's most probable token is one of them; None: everywhere
    regression: Tensor | None = None  # mean distance of the states from the target's, of EAGLE-1, a scalar
    # Set by who reads this step, before the next: which rows' tokens are accepted. The chains of the others end; None:
    # all go on.
    accepted: Tensor | None = None


@dataclass(frozen=True)
class BlockWeights:
    """Weights of a batch's rows."""

    by: WeighBy  # tested: the chance that decoding tests a drafted token there; rounds: the rounds it saves
    length: int  # γ

    def __call__(self, alpha: Tensor, sequence: Tensor) -> Tensor:
        """Weights whose mean is 1, ``[rows, steps]``.

        Args:
            alpha: acceptance of each row in each drafting step, ``[rows, steps]``.
            sequence: which example each row belongs to, ascending.
        """
        counts = [count for count in torch.bincount(sequence).tolist() if count]
        if not counts:
            return torch.ones_like(alpha)
        step = torch.arange(self.length).clamp_max(alpha.shape[1] - 1)  # that tells the acceptance at each depth
        texts = pad_sequence(list(alpha.double().cpu()[:, step].split(counts)), batch_first=True)
        inside = torch.arange(texts.shape[1]) < torch.tensor(counts)[:, None]
        by_depth = (self.tested(texts) if self.by == "tested" else self.saved(texts, inside))[inside]
        found = torch.zeros(alpha.shape, dtype=by_depth.dtype).index_add_(1, step, by_depth)
        return (found / found.mean().clamp_min(1e-12)).to(alpha.device, alpha.dtype)

    def depths(self, alpha: Tensor) -> Tensor:
        """π, ``[texts, time, γ + 1]``, of acceptances ``[texts, time, γ]``."""
        now = alpha.new_zeros(len(alpha), self.length + 1)
        now[:, 0] = 1.0
        found = []
        for chance in alpha.unbind(1):
            found.append(now)
            accepted = now[:, :-1] * chance
            now = torch.cat([1 - accepted.sum(1, keepdim=True), accepted], 1)
        return torch.stack(found, 1)

    def tested(self, alpha: Tensor) -> Tensor:
        """π of what is drafted, ``[texts, time, γ]``."""
        return self.depths(alpha)[:, :, :-1]

    def rounds(self, alpha: Tensor, inside: Tensor) -> Tensor:
        """W, ``[texts, time + 1, γ + 1]``; 0 where a text has ended."""
        left = alpha.new_zeros(len(alpha), self.length + 1)
        found = [left]
        for chance, here in zip(reversed(alpha.unbind(1)), reversed(inside.unbind(1))):
            restart = left[:, :1]
            drafted = chance * left[:, 1:] + (1 - chance) * restart
            drafted[:, 0] += 1
            left = torch.cat([drafted, restart], 1) * here[:, None]
            found.append(left)
        return torch.stack(found[::-1], 1)

    def saved(self, alpha: Tensor, inside: Tensor) -> Tensor:
        """−∂R/∂α, ``[texts, time, γ]``."""
        after = self.rounds(alpha, inside)[:, 1:]
        return self.tested(alpha) * (after[:, :, :1] - after[:, :, 1:])


@dataclass(frozen=True)
class Objective:
    """DistillSpec; with a selection AdaSPEC; with the other fields variations of them."""

    divergence: Divergence = field(default_factory=Divergence)  # The loss per token
    selection: Selection | None = None  # Which tokens count; None: all
    # The divergence D in which ΔL = D(p, draft) - D(p, reference) is measured; None: the loss. With ``tv`` it is
    # α_reference - α_draft, the acceptance that the reference shows can be gained.
    criterion: Divergence | None = None
    warmup: int = 0  # Steps of forward KL before the divergence takes over
    # The selection's share at the first step, from where it moves linearly to k; None: k throughout
    k_start: float | None = None
    steps: int = 1  # Steps over which it moves
    weigh: BlockWeights | None = None  # Weights of the rows from their acceptances; None: all alike
    accepted_only: bool = False  # Whether a chain of drafting steps ends at the first token that is rejected

    @property
    def ranking(self) -> Divergence:
        """In which ΔL is measured; the same at all steps, since the reference's side of it is computed once."""
        return self.criterion or self.divergence

    def divergence_at(self, step: int) -> Divergence:
        """The loss of a step."""
        return replace(self.divergence, name="forward_kl") if step < self.warmup else self.divergence

    def selection_at(self, step: int) -> Selection | None:
        """The selection of a step."""
        if self.selection is None or self.k_start is None:
            return self.selection
        share = min(1.0, step / max(1, self.steps - 1))
        return replace(self.selection, k=self.k_start + share * (self.selection.k - self.k_start))

    def request(self, step: int, drafted: Drafted, responses: int | None = None, *, metrics: bool) -> LossRequest:
        """What to compute of the rows of a drafting step.

        Args:
            step: Which optimiser step.
            drafted: The rows, with the reference's losses where there is a selection.
            responses: Examples with labels in the whole optimiser step; None: those of the batch.
            metrics: Whether alpha and agreement are wanted.
        """
        loss, selection = self.divergence_at(step), self.selection_at(step)
        if selection is None:
            return LossRequest(loss, metrics=metrics, mass=drafted.mass)
        sequence = drafted.sequence
        return LossRequest(
            loss,
            lambda values: selection.choose(delta_loss(values, drafted.reference), sequence),
            None if self.ranking == loss else self.ranking,
            metrics,
            selection.weights(sequence, responses),
            drafted.mass,
        )


def divergence_of(settings: DistillSettings, name: DivergenceName | None = None) -> Divergence:
    """The divergence of this name (None: the one set) with the parameters set."""
    return Divergence(name or settings.divergence, settings.jsd_beta, settings.tv_weight, settings.temperature)


def objective_of(draft: AdaSpecSettings, reference: DistillSettings, steps: int) -> Objective:
    """The objective that a draft's settings describe.

    Args:
        draft: Its settings.
        reference: Those of DistillSpec, whose divergence it has unless it names another.
        steps: Optimiser steps in all.
    """
    loss, warmup = divergence_of(reference, draft.divergence), round(draft.kl_first * steps)
    accepted = draft.weigh_by == "accepted"
    weigh = None if draft.weigh_by in ("none", "accepted") else BlockWeights(draft.weigh_by, draft.block)
    if draft.selects_all:
        return Objective(loss, warmup=warmup, weigh=weigh, accepted_only=accepted)
    return Objective(
        loss,
        Selection(draft.k, draft.scope, draft.normalisation),
        divergence_of(reference, "tv") if draft.select_by == "acceptance_gain" else None,
        warmup,
        draft.k_start,
        round(draft.k_ramp * steps),
        weigh,
    )
