"""What a draft, of whatever kind, says of a batch in one drafting step, with everything that its loss is made of."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from distill.losses.chunked_kl import TargetRows
from distill.models.lm_head import LMHead


@dataclass
class Drafted:
    """The label rows of a drafting step; a language model has one step.

    Attributes:
        hidden: last hidden states at the rows, ``[rows, hidden]``.
        head: their output head.
        target: the target's distributions of the rows, over the head's ids.
        sequence: the example of the batch that each row belongs to, ascending.
        labels: the rows' labels, ``[rows]``.
        reference: the reference's divergences, where there is a selection.
        rows: which of the batch's label rows these are; None: all.
        mass: probability that the target gives to the head's ids together; None: 1.
        learnable: 1 where the target's most probable token is one of them; None: everywhere.
        regression: mean distance of the states from the target's, of EAGLE-1, a scalar.
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

    def gap(self, losses: Tensor) -> Tensor:
        """ΔL of the rows, ``[rows]``: the draft's divergences less the reference's."""
        assert self.reference is not None, "batches carry no reference_loss"
        return losses - self.reference
