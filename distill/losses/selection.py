"""Which rows of a batch are trained on: AdaSPEC's selection, and drafted tokens whose predecessors are all accepted.

AdaSPEC trains on the ⌈k·n⌉ label tokens with the largest ΔL: the draft's divergence minus the reference's. As in the
official code these are chosen among the tokens of a device's micro-batch.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from distill.losses.chunked import Rows, compare
from distill.losses.divergences import Divergence


def share(k: float, n: int) -> int:
    """Returns ⌈k·n⌉ for k as a decimal number: 0.07 of 100 is 7, although 0.07 * 100 is 7.000000000000001."""
    return min(n, math.ceil(round(k * n, 9)))


def top_k(delta: Tensor, k: float, groups: Sequence[int] | None = None) -> Tensor:
    """Returns the indices, ascending, of exactly ⌈k·n⌉ largest ΔL ``[n]``. Of equal values the first ones win.

    A threshold (``delta >= quantile``) would select every token where all are equal, as they are at the first step of a
    draft that starts as a copy of its reference. NaN counts as largest, so it shows in the loss.

    Args:
        delta: ΔL of the rows.
        k: Share of the rows that is chosen, in (0, 1].
        groups: Numbers of rows that are ranked by themselves, one after the other. None: all rows together.
    """
    chosen, start = [], 0
    for group in delta.split(list(groups or [len(delta)])):
        order = torch.sort(group, descending=True, stable=True).indices
        chosen.append(order[: share(k, len(group))].sort().values + start)
        start += len(group)
    return torch.cat(chosen)


def accepted_rows(rows: Rows, place: Tensor, positions: int, divergence: Divergence) -> Tensor:
    """Returns 1 for each row before which every token of the same draft is accepted, drawn from its α, else 0.

    Args:
        rows: Of a head with several drafting steps.
        place: Where each label token lies among all positions of the batch, ``[label tokens]``.
        positions: How many these are.
        divergence: Of which `compare` measures the rows.
    """
    start, first, groups = place[rows.at] - rows.step, 0, rows.groups or [len(rows)]
    alive, parts = torch.ones(positions, device=place.device), []
    for number, count in enumerate(groups, 1):
        begun = start[first : first + count]
        parts.append(alive[begun])
        if number < len(groups):
            only = torch.arange(first, first + count, device=place.device)
            alpha = compare(rows, divergence, only).alpha
            alive = torch.zeros_like(alive).index_copy(0, begun, parts[-1] * (torch.rand_like(alpha) < alpha))
        first += count
    return torch.cat(parts)
