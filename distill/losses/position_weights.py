"""How much a token's acceptance matters to decoding: weights of the rows' losses, from the draft's acceptances now.

Decoding drafts γ tokens a round. At position t of a text the next token is the (d + 1)-th of a draft, d < γ, or, at
d = γ, the bonus token that the target adds. With α(t, d) the chance that a token drafted there is accepted, d is a
Markov chain: d + 1 with chance α(t, d), else 0, and 0 after a bonus token. From it follow, exactly and for any α,

- π(t, d), the chance of depth d at position t, and so of testing the draft's (d + 1)-th token there;
- W(t, d), the expected number of rounds that still begin, and R = W(0, 0), all rounds of the text;
- −∂R/∂α(t, d) = π(t, d) · (W(t + 1, 0) − W(t + 1, d + 1)), the rounds that accepting the token saves.

Total variation, 1 − α, weighted by the last has the gradient of R itself: it trains the expected accepted length of
blocks of γ tokens, through their rejections, where a mean over tokens counts each alike. A draft model has one α(t)
for all depths, a feature head one for each drafting step that it is trained in, the last one's for those beyond.
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
        """Weights whose mean is 1, ``[rows, steps]``.

        Args:
            alpha: acceptance of each row in each drafting step, ``[rows, steps]``.
            sequence: which example each row belongs to, ascending.
        """
        counts = [count for count in torch.bincount(sequence).tolist() if count]
        if not counts:
            return torch.ones_like(alpha)
        step = torch.arange(self.length).clamp_max(alpha.shape[1] - 1)  # that tells the acceptance at each depth
        texts = pad_sequence(list(alpha.double().cpu()[:, step].split(counts)), batch_first=True)
        inside = torch.arange(texts.shape[1]) < torch.tensor(counts)[:, None]
        by_depth = (self.tested(texts) if self.by == "tested" else self.saved(texts, inside))[inside]
        found = torch.zeros(alpha.shape, dtype=by_depth.dtype).index_add_(1, step, by_depth)
        return (found / found.mean().clamp_min(1e-12)).to(alpha.device, alpha.dtype)

    def depths(self, alpha: Tensor) -> Tensor:
        """π, ``[texts, time, γ + 1]``, of acceptances ``[texts, time, γ]``."""
        now = alpha.new_zeros(len(alpha), self.length + 1)
        now[:, 0] = 1.0
        found = []
        for chance in alpha.unbind(1):
            found.append(now)
            accepted = now[:, :-1] * chance
            now = torch.cat([1 - accepted.sum(1, keepdim=True), accepted], 1)
        return torch.stack(found, 1)

    def tested(self, alpha: Tensor) -> Tensor:
        """π of what is drafted, ``[texts, time, γ]``."""
        return self.depths(alpha)[:, :, :-1]

    def rounds(self, alpha: Tensor, inside: Tensor) -> Tensor:
        """W, ``[texts, time + 1, γ + 1]``; 0 where a text has ended."""
        left = alpha.new_zeros(len(alpha), self.length + 1)
        found = [left]
        for chance, here in zip(reversed(alpha.unbind(1)), reversed(inside.unbind(1))):
            restart = left[:, :1]
            drafted = chance * left[:, 1:] + (1 - chance) * restart
            drafted[:, 0] += 1
            left = torch.cat([drafted, restart], 1) * here[:, None]
            found.append(left)
        return torch.stack(found[::-1], 1)

    def saved(self, alpha: Tensor, inside: Tensor) -> Tensor:
        """−∂R/∂α, ``[texts, time, γ]``."""
        after = self.rounds(alpha, inside)[:, 1:]
        return self.tested(alpha) * (after[:, :, :1] - after[:, :, 1:])
