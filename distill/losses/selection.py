"""AdaSPEC's token selection: the ⌈k·n⌉ label tokens with the largest ΔL, and the normalisation of their loss."""

import math
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from distill.config.drafts import Normalisation, Scope


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
        """Returns the indices of the selected rows, ascending, from ΔL of each label token, ``[rows]``."""
        return top_share(delta, self.k)

    def count(self, counts: NDArray[np.int64]) -> int:
        """Returns how many tokens a whole optimiser step selects.

        Args:
            counts: Label tokens of every example, ``[micro-batches of all ranks, examples]``.
        """
        ranked = [counts.sum()] if self.scope == "global" else counts.sum(1)
        return sum(share(self.k, int(n)) for n in ranked)

    def divisor(self, selected: float, rows: int) -> float:
        """Returns the divisor of the summed loss, from the step's number of selected and of all label tokens."""
        return max(1, selected if self.normalisation == "paper" else rows)


def delta_loss(draft: Tensor, reference: Tensor | None) -> Tensor:
    """Returns ΔL, ``[rows]``: the draft's divergence minus the reference's."""
    assert reference is not None, "batches carry no reference_loss"
    return draft - reference


def top_share(values: Tensor, k: float) -> Tensor:
    """Returns the indices, ascending, of exactly ⌈k·n⌉ largest ``values [n]``. Of equal values the first ones win.

    A threshold (``values >= quantile``) would select every token where all are equal, as they are at the first step
    of a draft that starts as a copy of its reference. NaN counts as largest, so it shows in the loss.
    """
    order = torch.sort(values, descending=True, stable=True).indices[: share(k, len(values))]
    return order.sort().values


def share(k: float, n: int) -> int:
    """Returns ⌈k·n⌉ for k as a decimal number: 0.4 of 5 is 2, although 0.4 * 5 is 2.0000000000000004."""
    return min(n, math.ceil(round(k * n, 9)))
