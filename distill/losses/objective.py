"""The training objective of a draft: a divergence, AdaSPEC's selection of tokens, and the rows that they are taken of.

AdaSPEC trains on the ⌈k·n⌉ label tokens with the largest ΔL: the draft's divergence minus the reference's.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from distill.config.drafts import DraftSettings, Normalisation, Scope
from distill.losses.divergences import Divergence, TargetRows
from distill.models.lm_head import LMHead


@dataclass
class Drafted:
    """The label rows of one drafting step. A language model has one drafting step, a feature head several.

    Attributes:
        hidden: Last hidden states of the rows, ``[rows, hidden]``.
        head: Output head that they are for.
        target: The target's distributions of the rows, over the head's ids.
        sequence: Example of the batch that each row belongs to, ``[rows]``, ascending.
        reference: The reference's divergence of each row, ``[rows]``, if tokens are selected.
        rows: Indices of these rows among the batch's label rows. None: all of them.
        mass: Probability that the target gives to the head's ids together, ``[rows]``. None: 1.
        learnable: 1 where the target's most probable token is one of the head's ids, ``[rows]``. None: everywhere.
        weight: Factor of this drafting step's mean loss.
        extra: A loss beside the divergence, a mean over the batch's rows, which is added with the factor 1.
        slots: Place of each row's token in the draft, ``[rows]``, of a block head, whose rows are those of one block
            after the other, each from the block's first drafted token on. None: one drafting step.
        confidence: Log-odds that the rows' tokens are accepted, as the draft estimates them, ``[rows]``.
        accepted: Rows whose token is accepted, set by the reader of this step before it asks for the next one. The
            chains of the other rows end. None: all continue.
    """

    hidden: Tensor
    head: LMHead
    target: TargetRows
    sequence: Tensor
    reference: Tensor | None = None
    rows: Tensor | None = None
    mass: Tensor | None = None
    learnable: Tensor | None = None
    weight: float = 1.0
    extra: Tensor | None = None
    slots: Tensor | None = None
    confidence: Tensor | None = None
    accepted: Tensor | None = None

    def delta(self, losses: Tensor) -> Tensor:
        """Returns ΔL of the rows, from the draft's divergences, ``[rows]``."""
        assert self.reference is not None, "batches carry no reference_loss"
        return losses - self.reference


@dataclass(frozen=True)
class Selection:
    """Which label tokens are trained on, and how their loss is normalised.

    Attributes:
        k: Share of the label tokens that is selected, in (0, 1].
        scope: ``microbatch`` ranks all label tokens of a batch together, as the official code does. ``global`` ranks
            those of the whole optimiser step, over all ranks and micro-batches (see `OptimizerStep.choose`).
        normalisation: ``paper`` divides the summed loss by the number of selected tokens of the step. ``official``
            divides by the number of all label tokens, as the official code does, which gives a loss k times as large.
    """

    k: float = 0.4
    scope: Scope = "microbatch"
    normalisation: Normalisation = "official"

    def choose(self, delta: Tensor) -> Tensor:
        """Returns the indices, ascending, of exactly ⌈k·n⌉ largest ΔL ``[n]``. Of equal values the first ones win.

        A threshold (``delta >= quantile``) would select every token where all are equal, as they are at the first step
        of a draft that starts as a copy of its reference. NaN counts as largest, so it shows in the loss.
        """
        order = torch.sort(delta, descending=True, stable=True).indices[: share(self.k, len(delta))]
        return order.sort().values

    def count(self, counts: NDArray[np.int64]) -> int:
        """Returns how many tokens a whole optimiser step selects.

        Args:
            counts: Label tokens of every example, ``[micro-batches of all ranks, examples]``.
        """
        ranked = [counts.sum()] if self.scope == "global" else counts.sum(1)
        return sum(share(self.k, int(n)) for n in ranked)

    def divisor(self, selected: float, rows: float) -> float:
        """Returns the divisor of the summed loss, from the step's number of selected and of all label tokens."""
        return max(1, selected if self.normalisation == "paper" else rows)


def share(k: float, n: int) -> int:
    """Returns ⌈k·n⌉ for k as a decimal number: 0.4 of 5 is 2, although 0.4 * 5 is 2.0000000000000004."""
    return min(n, math.ceil(round(k * n, 9)))


@dataclass(frozen=True)
class Objective:
    """DistillSpec, or with a selection AdaSPEC.

    Attributes:
        divergence: Loss per token. ΔL is measured in it at all steps, since the reference's side is computed once.
        selection: Which tokens are trained on. None: all.
        warmup: First steps, which use forward KL instead.
        accepted_only: A chain of drafting steps ends at the first token that is rejected.
    """

    divergence: Divergence = field(default_factory=Divergence)
    selection: Selection | None = None
    warmup: int = 0
    accepted_only: bool = False

    def divergence_at(self, step: int) -> Divergence:
        """Returns the loss per token of an optimiser step."""
        return Divergence("forward_kl") if step < self.warmup else self.divergence


def objective_of(draft: DraftSettings, steps: int) -> Objective:
    """Returns the objective of a draft that is trained for so many optimiser steps."""
    return Objective(
        Divergence(draft.divergence),
        Selection(draft.k, draft.scope, draft.normalisation) if draft.selects else None,
        round(draft.kl_first * steps),
        draft.accepted_only,
    )
