"""Parts of block heads beside their layers: what scores a slot's tokens, convolutions, the confidence head.

A scorer turns the logits U that the target's output head makes of a block's slots into those that tokens are drafted
by, given the tokens before:

| scorer | of | reads | adds to U |
| --- | --- | --- | --- |
| `MarkovHead` | DSpark | the token before | W2·W1[x], for all ids |
| `MarkovHead` with candidates | DFlash 2 | the state and the token before | the same, for the likeliest ids alone |

Tensors are named as in the engines' files.
"""

from typing import Any

import torch
from torch import Tensor, nn

from decode.models.fast.weights import Function

# -- scorers -----------------------------------------------------------------------------------------------------------


class MarkovHead(nn.Module):
    """A bias of the logits by the token before: W2·m, with m = W1[x] (DSpark, section 3), of a selector P h ⊙ W1[x]."""

    def __init__(self, config: Any, rank: int, *, selects: bool) -> None:
        super().__init__()
        self.markov_w1 = nn.Embedding(config.vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, config.draft_vocab_size, bias=False)
        nn.init.zeros_(self.markov_w2.weight)
        self.hidden_projection = nn.Linear(config.hidden_size, rank, bias=False) if selects else None

    def forward(self, hidden: Tensor, before: Tensor) -> Tensor:
        """m ``[.., rank]`` from states ``[.., width]`` and W1's rows ``[.., rank]`` of the tokens before."""
        return before if self.hidden_projection is None else self.hidden_projection(hidden) * before


# -- beside them -------------------------------------------------------------------------------------------------------


class ConfidenceHead(nn.Module):
    """The log-odds that a drafted token is accepted, from h or [h; W1[x]] of its slot and the token before."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.proj = nn.Linear(width, 1)

    def forward(self, states: Tensor) -> Tensor:
        """``[.., width]``, or more elements of which only these are read, to ``[..]``."""
        return self.proj(states[..., : self.proj.in_features]).squeeze(-1)


class BlockConv(nn.Module):
    """Convolutions over the slots of a block, before and after a sublayer; new ones change nothing (DFlash 2).

    In slot k, channel c of the slot i before it is weighed by base[side, i, c] + (W x_k)[side, i, ⌊c / group⌋], with x
    what the sublayer would read.
    """

    def __init__(self, config: Any) -> None:
        super().__init__()
        taps, width, self.group = config.conv_kernel_size, config.hidden_size, config.conv_group_size
        base = torch.zeros(2, taps, width)
        base[:, 0] = 1
        self.base_kernel = nn.Parameter(base)
        self.kernel_projection = nn.Linear(width, 2 * taps * (width // self.group), bias=False)
        nn.init.zeros_(self.kernel_projection.weight)


def convolved(conv: Any, x: Tensor, slots: Tensor, sublayer: Function) -> Tensor:
    """A sublayer (attention or MLP, without the residual) of ``x [.., n, width]`` between its convolutions, if any.

    ``slots [n]`` is the place of each row in its block.
    """
    if conv is None:
        return sublayer(x)
    made = conv.kernel_projection(x).unflatten(-1, (*conv.base_kernel.shape[:2], -1, 1))
    before, after = (conv.base_kernel.unflatten(-1, (-1, conv.group)) + made).flatten(-2).unbind(-3)
    return _convolve(sublayer(_convolve(x, before, slots)), after, slots)


def _convolve(x: Tensor, kernel: Tensor, slots: Tensor) -> Tensor:
    """The sum of the slots before each of ``x [.., n, width]``, weighed by a kernel ``[.., n, taps, width]``."""
    first, *rest = kernel.unbind(-2)
    total = first * x
    for i, weight in enumerate(rest[: x.shape[-2] - 1], 1):
        before, weight = x[..., :-i, :], weight[..., i:, :]
        total[..., i:, :].addcmul_(weight * (slots[i:] >= i)[:, None], before)
    return total
