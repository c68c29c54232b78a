"""AdaSPEC's token selection: the ⌈k·n⌉ label tokens with the largest ΔL, and the loss over them."""

import math
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from distill.config.drafts import Normalisation, Scope


@dataclass(frozen=True)
class Selection:
    """Which label tokens count, and how their loss is normalised."""

    k: float = 0.4  # Share of tokens selected, in (0, 1]
    # ``microbatch`` ranks all label tokens of the batch together, as the official code does; ``sequence`` ranks within
    # each example; ``global`` ranks those of the whole optimiser step, over all ranks and micro-batches
    # (`distill.data.batches` does, where there are several)
    scope: Scope = "microbatch"
    # ``paper`` divides by the step's selected tokens: their mean. ``response`` is the paper's 1/(k·|y|) for every
    # response y, averaged over the step's responses. ``official`` divides by all label tokens, as the official code
    # does, a loss k times as large.
    normalisation: Normalisation = "official"

    def choose(self, delta: Tensor, sequence: Tensor) -> Tensor:
        """Indices of the selected rows, ascending.

        Args:
            delta: ΔL of each label token, ``[rows]``.
            sequence: Which example of the batch each row belongs to, ``[rows]``, ascending.
        """
        if self.scope != "sequence":
            return top_share(delta, self.k)
        counts = torch.bincount(sequence).tolist() if len(sequence) else []
        starts = torch.tensor([0, *counts]).cumsum(0).tolist()
        parts = [start + top_share(part, self.k) for start, part in zip(starts, delta.split(counts))]
        return torch.cat(parts) if parts else torch.empty(0, dtype=torch.long, device=delta.device)

    def count(self, counts: NDArray[np.int64]) -> int:
        """Tokens selected in a whole optimiser step.

        Args:
            counts: Label tokens of every example, ``[micro-batches of all ranks, examples]``.
        """
        ranked = {"global": counts.sum(keepdims=True), "microbatch": counts.sum(1), "sequence": counts}[self.scope]
        return sum(share(self.k, n) for n in ranked.ravel().tolist())

    def divisor(self, selected: int, rows: int) -> int:
        """What the selected tokens' summed loss is divided by, from their number and that of all label tokens."""
        return 1 if self.normalisation == "response" else max(1, selected if self.normalisation == "paper" else rows)

    def weights(self, sequence: Tensor, responses: int | None = None) -> Tensor | None:
        """Factors of the rows' losses in their sum, ``[rows]``: 1/(k·|y|·responses) of ``response``; else None, for 1.

        Args:
            sequence: Which example of the batch each row belongs to, ``[rows]``.
            responses: Examples with labels in the whole optimiser step; None: those of the batch.
        """
        if self.normalisation != "response":
            return None
        lengths = torch.bincount(sequence)
        count = int((lengths > 0).sum()) if responses is None else responses
        return 1 / (self.k * lengths[sequence].float() * max(1, count))


def delta_loss(draft: Tensor, reference: Tensor | None) -> Tensor:
    """ΔL of the rows, ``[rows]``: the draft's divergences less the reference's."""
    assert reference is not None, "batches carry no reference_loss"
    return draft - reference


def top_share(values: Tensor, k: float) -> Tensor:
    """Indices, ascending, of exactly ⌈k·n⌉ largest of ``values [n]``; among equals the lowest index wins.

    A threshold (``values >= quantile``) would select every token where all are equal, as they are at the first step
    of a draft that starts as a copy of its reference. NaN counts as largest, so that it shows in the loss.
    """
    count = share(k, len(values))
    order = torch.sort(values, descending=True, stable=True).indices[:count]
    return order.sort().values


def share(k: float, n: int) -> int:
    """⌈k·n⌉, with k taken as the decimal that was written: 0.4 of 5 is 2 although 0.4 * 5 is 2.0000000000000004."""
    return min(n, math.ceil(round(k * n, 9)))
