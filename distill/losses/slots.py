"""Weights of the slots of a block.

Rows are the slots of one block after the other, each block's from its first drafted token on; ``slots [rows]`` is the
place of each. A slot that has no weight still stands before later ones.
"""

from __future__ import annotations

import torch
from torch import Tensor


def decay(slots: Tensor, drafts: int) -> Tensor:
    """Returns exp(−i/γ) of every row, ``[rows]``, γ as published: 7 for blocks of 16, 5 of 10, 4 of 8."""
    gamma = 7.0 if drafts >= 15 else 5.0 if drafts >= 9 else 4.0
    return torch.exp(-slots / gamma)


def reached(alpha: Tensor, slots: Tensor) -> Tensor:
    """Returns the probability that each slot is reached, ``[rows]``: the product of its block's α before it."""
    block, count = (slots == 0).cumsum(0) - 1, int(slots.max()) + 1 if len(slots) else 0
    table = alpha.new_ones(int(block[-1]) + 1 if len(slots) else 0, count + 1)
    table[block, slots + 1] = alpha
    return table.cumprod(1)[block, slots]
