"""How much a token's acceptance matters to decoding: weights of the rows' losses, from the draft's acceptances now.

Decoding drafts γ tokens a round. At position t of a text the next token is the (d + 1)-th of a draft, d < γ, or, at
d = γ, the bonus token that the target adds. With α(t) the chance that a drafted token is accepted there, d is a Markov
chain: d + 1 with chance α(t), else 0, and 0 after a bonus token. From it follow, exactly and for any α,

- π(t, d), the chance of depth d at position t, and with it that a draft is tested there, 1 − π(t, γ);
- W(t, d), the expected number of rounds that still begin, and R = W(0, 0), all rounds of the text;
- −∂R/∂α(t) = Σ over d < γ of π(t, d) · (W(t + 1, 0) − W(t + 1, d + 1)), the rounds that accepting the token saves.

Total variation, 1 − α, weighted by the last has the gradient of R itself: it trains the expected accepted length of
blocks of γ tokens, through their rejections, where a mean over tokens counts each alike.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from distill.config.drafts import WeighBy


@dataclass(frozen=True)
class BlockWeights:
    """Weights of a batch's rows."""

    by: WeighBy  # tested: the chance that decoding tests a drafted token there; rounds: the rounds it saves
    length: int  # γ

    def __call__(self, alpha: Tensor, sequence: Tensor) -> Tensor:
        """Weights whose mean is 1, ``[rows]``.

        Args:
            alpha: acceptance of each row, ``[rows]``.
            sequence: which example each row belongs to, ascending.
        """
        counts = [count for count in torch.bincount(sequence).tolist() if count]
        if not counts:
            return torch.ones_like(alpha)
        texts = pad_sequence(list(alpha.double().cpu().split(counts)), batch_first=True)
        inside = torch.arange(texts.shape[1]) < torch.tensor(counts)[:, None]
        found = (self.tested(texts) if self.by == "tested" else self.saved(texts, inside))[inside]
        return (found / found.mean().clamp_min(1e-12)).to(alpha.device, alpha.dtype)

    def depths(self, alpha: Tensor) -> Tensor:
        """π, ``[texts, time, γ + 1]``, of acceptances ``[texts, time]``."""
        now = alpha.new_zeros(len(alpha), self.length + 1)
        now[:, 0] = 1.0
        found = []
        for accepted in alpha.unbind(1):
            found.append(now)
            drafted = now[:, :-1]
            again = now[:, -1:] + drafted.sum(1, keepdim=True) * (1 - accepted[:, None])
            now = torch.cat([again, drafted * accepted[:, None]], 1)
        return torch.stack(found, 1)

    def tested(self, alpha: Tensor) -> Tensor:
        """1 − π(t, γ), ``[texts, time]``."""
        return 1 - self.depths(alpha)[:, :, -1]

    def rounds(self, alpha: Tensor, inside: Tensor) -> Tensor:
        """W, ``[texts, time + 1, γ + 1]``; 0 where a text has ended."""
        left = alpha.new_zeros(len(alpha), self.length + 1)
        found = [left]
        for accepted, here in zip(reversed(alpha.unbind(1)), reversed(inside.unbind(1))):
            chance, restart = accepted[:, None], left[:, :1]
            drafted = chance * left[:, 1:] + (1 - chance) * restart
            drafted[:, 0] += 1
            left = torch.cat([drafted, restart], 1) * here[:, None]
            found.append(left)
        return torch.stack(found[::-1], 1)

    def saved(self, alpha: Tensor, inside: Tensor) -> Tensor:
        """−∂R/∂α(t), ``[texts, time]``."""
        after = self.rounds(alpha, inside)[:, 1:]
        return (self.depths(alpha)[:, :, :-1] * (after[:, :, :1] - after[:, :, 1:])).sum(-1)
