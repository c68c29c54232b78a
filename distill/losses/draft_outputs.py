"""What a draft, of whatever kind, says of a batch in one drafting step, with everything that its loss is made of."""

from dataclasses import dataclass

from torch import Tensor

from distill.losses.chunked_kl import TargetRows
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
