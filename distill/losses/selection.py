"""Which rows of a batch are trained on: AdaSPEC's selection, and drafted tokens whose predecessors are all accepted.

AdaSPEC trains on the ⌈k·n⌉ label tokens with the largest ΔL: the draft's divergence minus the reference's. As in the
official code these are chosen among the tokens of a device's micro-batch.
"""

import math

import torch
from torch import Tensor

from distill.losses.chunked import Rows, compare
from distill.losses.divergences import Divergence
from distill.networks.lm_head import places


def share(k: float, n: int) -> int:
    """Returns ⌈k·n⌉ for k as a decimal number: 0.07 of 100 is 7, although 0.07 * 100 is 7.000000000000001."""
    return min(n, math.ceil(round(k * n, 9)))


def top_k(delta: Tensor, k: float, step: Tensor | None = None) -> Tensor:
    """Returns the indices, ascending, of exactly ⌈k·n⌉ largest ΔL ``[n]``. Of equal values the first ones win.

    A threshold (``delta >= quantile``) would select every token where all are equal, as they are at the first step of a
    draft that starts as a copy of its reference. NaN counts as largest, so it shows in the loss.

    Args:
        delta: ΔL of the rows.
        k: Share of the rows that is chosen, in (0, 1].
        step: Drafting step of each row, ``[n]``: each is ranked by itself. None: all rows together.
    """
    order = torch.sort(delta, descending=True, stable=True).indices
    if step is None:
        return order[: share(k, len(order))].sort().values
    counts = torch.bincount(step, minlength=1).tolist()
    groups = order[step[order].sort(stable=True).indices].split(counts)
    return torch.cat([group[: share(k, len(group))] for group in groups]).sort().values


def reach(alpha: Tensor, slots: Tensor) -> Tensor:
    """Returns the probability that each slot of a block is reached, ``[rows]``: the product of its block's α before it.

    Args:
        alpha: Acceptance rate of each row.
        slots: Place of each row in its block; rows are those of one block after the other, each from slot 0 on.
    """
    block = (slots == 0).cumsum(0) - 1
    table = alpha.new_ones(int(block[-1]) + 1, int(slots.max()) + 2)
    table[block, slots + 1] = alpha
    return table.cumprod(1)[block, slots]


def by_reach(delta: Tensor, alpha: Tensor, slots: Tensor) -> Tensor:
    """Returns the ranking of a block's slots: ΔL above the batch's smallest, times the probability to be reached.

    The product with ΔL itself would rank a slot of negative ΔL the higher the less it is reached.
    """
    return (delta - delta.min()) * reach(alpha, slots) if len(delta) else delta


def accepted_rows(rows: Rows, place: Tensor, divergence: Divergence) -> Tensor:
    """Returns the rows, ascending, before which every token of the same draft is accepted, drawn from its α.

    Args:
        rows: Of a head with several drafting steps.
        place: Where each label token lies among all tokens of the batch, ``[label tokens]``.
        divergence: Of which `compare` measures the rows.
    """
    start, alive = place[rows.at] - rows.step, places(rows.step == 0)
    chosen = [alive]
    while len(following := places(rows.step == len(chosen))):
        alpha = compare(rows, divergence, alive).alpha
        accepted = start[alive[torch.rand_like(alpha) < alpha]]
        alive = following[torch.isin(start[following], accepted)]
        chosen.append(alive)
    return torch.cat(chosen).sort().values
