"""Weights of the slots of a block: by their place, or by how likely the draft is accepted up to them.

Rows are the slots of one block after the other, each block's from its first drafted token on; ``slots [rows]`` is the
place of each. A slot that has no weight still stands before later ones.
"""

from __future__ import annotations

import torch
from torch import Tensor

from distill.config.drafts import SlotWeights

SMOOTHING = 0.5  # a of D-PACE (arXiv 2605.18810)


def gamma(drafts: int) -> float:
    """Returns γ of exp(−i/γ) as published: 7 for blocks of 16, 5 of 10, 4 of 8 and of DSpark's 7."""
    return 7.0 if drafts >= 15 else 5.0 if drafts >= 9 else 4.0


def decay(slots: Tensor, drafts: int) -> Tensor:
    """Returns exp(−i/γ) of every row, ``[rows]``."""
    return torch.exp(-slots / gamma(drafts))


def reached(values: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
    """Returns by row the product of its block's values before it, and what its own value multiplies after it.

    With acceptance rates aᵢ as values the first is the probability Rᵢ that slot i is reached, and the second Sᵢ =
    1 + aᵢ₊₁·(1 + aᵢ₊₂·(…)), so that the expected accepted length Σⱼ ∏ᵢ≤ⱼ aᵢ has the derivative Rᵢ·Sᵢ by aᵢ.
    """
    block, count = (slots == 0).cumsum(0) - 1, int(slots.max()) + 1 if len(slots) else 0
    table = values.new_zeros(int(block[-1]) + 1 if len(slots) else 0, count + 1)
    table[block, slots] = values
    before = torch.cat([torch.ones_like(table[:, :1]), table[:, :-1].cumprod(1)], 1)
    after = torch.ones_like(table)
    for i in range(count - 1, -1, -1):
        after[:, i] = 1 + table[:, i + 1] * after[:, i + 1]
    return before[block, slots], after[block, slots]


def slot_weights(kind: SlotWeights, alpha: Tensor, label: Tensor, slots: Tensor, drafts: int) -> Tensor:
    """Returns the factor of every row's loss, ``[rows]``, whose mean is 1 but for ``length``.

    Args:
        kind: See `distill.config.drafts.DraftSettings.slot_weights`.
        alpha: Acceptance rates of the rows.
        label: The draft's probabilities of the text's own tokens.
        slots: Places of the rows in their blocks.
        drafts: Drafted tokens of a block.
    """
    if kind == "length":  # tv with these has the gradient of −Σ∏α, averaged over the blocks
        before, after = reached(alpha, slots)
        return before * after * (len(slots) / (slots == 0).sum())
    if kind == "dpace":
        values = (1 - SMOOTHING) * label + SMOOTHING
        before, after = reached(values, slots)
        found = before * values * after
    else:
        found = decay(slots, drafts)
    return found / found.mean()
