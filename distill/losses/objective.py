"""The training objective of a draft: its divergence, and the selection of tokens."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from torch import Tensor

from distill.config.drafts import DraftSettings
from distill.losses.chunked import LossRequest, TargetRows
from distill.losses.divergences import Divergence
from distill.losses.selection import Selection, delta_loss
from distill.models.lm_head import LMHead


@dataclass
class Drafted:
    """The label rows of one drafting step. A language model has one drafting step, a feature head several.

    Attributes:
        hidden: Last hidden states of the rows, ``[rows, hidden]``.
        head: Output head that they are for.
        target: The target's distributions of the rows, over the head's ids.
        sequence: Example of the batch that each row belongs to, ``[rows]``, ascending.
        labels: Label of each row, ``[rows]``.
        reference: The reference's divergence of each row, ``[rows]``, if tokens are selected.
        rows: Indices of these rows among the batch's label rows. None: all of them.
        mass: Probability that the target gives to the head's ids together, ``[rows]``. None: 1.
        learnable: 1 where the target's most probable token is one of the head's ids, ``[rows]``. None: everywhere.
        regression: Mean smooth L1 distance of EAGLE-1's states from the target's, a scalar.
        accepted: Rows whose token is accepted, set by the reader of this step before it asks for the next one. The
            chains of the other rows end. None: all continue.
    """

    hidden: Tensor
    head: LMHead
    target: TargetRows
    sequence: Tensor
    labels: Tensor
    reference: Tensor | None = None
    rows: Tensor | None = None
    mass: Tensor | None = None
    learnable: Tensor | None = None
    regression: Tensor | None = None
    accepted: Tensor | None = None


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
        return replace(self.divergence, name="forward_kl") if step < self.warmup else self.divergence

    def request(self, step: int, drafted: Drafted, *, metrics: bool) -> LossRequest:
        """Returns what to compute for the rows of a drafting step.

        Args:
            step: Optimiser step.
            drafted: The rows.
            metrics: Whether alpha and agreement are computed.
        """
        loss, selection = self.divergence_at(step), self.selection
        if selection is None:
            return LossRequest(loss, metrics=metrics, mass=drafted.mass)
        return LossRequest(
            loss,
            lambda values: selection.choose(delta_loss(values, drafted.reference)),
            None if self.divergence == loss else self.divergence,
            metrics,
            mass=drafted.mass,
        )


def objective_of(draft: DraftSettings, steps: int, temperature: float = 1.0) -> Objective:
    """Returns the objective of a draft.

    Args:
        draft: The draft's settings.
        steps: Optimiser steps of the training.
        temperature: Divisor of the logits.
    """
    return Objective(
        Divergence(draft.divergence, temperature=temperature),
        Selection(draft.k, draft.scope, draft.normalisation) if draft.selects else None,
        round(draft.kl_first * steps),
        draft.accepted_only,
    )
