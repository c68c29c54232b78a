"""Divergences per token between the target's p and the draft's q, each with its gradient in closed form.

All work on rows of log-probabilities ``[rows, vocab]`` and give one value a row, so that selection, normalisation and
metrics can be put on top. α = Σ min(p, q) is the chance that the target accepts a token drawn from q, and total
variation is 1 - α, so the last four of `LOSSES` train acceptance itself; their gradient vanishes where q hardly
overlaps p, which is why they do better after, or together with, a KL term (Samarin et al., 2026, arXiv:2602.23881;
AdaSPEC's Table 4 shows what total variation does from a cold start).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from distill.config.drafts import DivergenceName

HYBRID_DECAY = 3.0  # η of the hybrid's weight exp(-η·α), the value of its paper


class TokenDistributions:
    """The two distributions of the same rows.

    Args:
        log_p: The target's log-probabilities ``[rows, vocab]``, in float32 or float64.
        log_q: The draft's.
    """

    _p: Tensor | None = None  # kept once they were needed; torch.compile does not know functools.cached_property
    _q: Tensor | None = None
    _alpha: Tensor | None = None

    def __init__(self, log_p: Tensor, log_q: Tensor) -> None:
        self.log_p, self.log_q = log_p, log_q

    @property
    def p(self) -> Tensor:
        """The target's probabilities, ``[rows, vocab]``."""
        if self._p is None:
            self._p = self.log_p.exp()  # softmax would be faster on a CPU, and lose digits where a row is saturated
        return self._p

    @property
    def q(self) -> Tensor:
        """The draft's probabilities, ``[rows, vocab]``."""
        if self._q is None:
            self._q = self.log_q.exp()
        return self._q

    @property
    def alpha(self) -> Tensor:
        """Σ min(p, q), ``[rows]``."""
        if self._alpha is None:
            self._alpha = torch.minimum(self.p, self.q).sum(-1)
        return self._alpha

    def at(self, rows: Tensor) -> TokenDistributions:
        """Some of the rows, by their indices."""
        part = TokenDistributions(self.log_p.index_select(0, rows), self.log_q.index_select(0, rows))
        part._p, part._q = (None if kept is None else kept.index_select(0, rows) for kept in (self._p, self._q))
        return part

    def agreement(self) -> Tensor:
        """1 where both have the same most probable token, ``[rows]``."""
        return (self.log_p.argmax(-1) == self.log_q.argmax(-1)).to(self.log_p.dtype)

    def accepted(self, mass: Tensor | None) -> Tensor:
        """α where p holds but a part ``mass [rows]`` of the target's probability, the rest being no id of the draft."""
        return self.alpha if mass is None else torch.minimum(self.p * mass[:, None], self.q).sum(-1)

    def spread(self, gradient: Tensor) -> Tensor:
        """A gradient by these distributions' logits as one by the draft's logits of all ids, ``[rows, vocab]``."""
        return gradient


class FoldedDistributions(TokenDistributions):
    """The target's k most probable ids as outcomes of their own, and all other ids as one outcome.

    The divergences of the folded distributions bound the true ones from below, and cost k + 1 values a row. The
    gradient by the logit of a folded id v is that of the common outcome times q(v) / q(others).

    Args:
        ids: The target's top ids, the most probable first, ``[rows, k]``.
        log_p: Their log-probabilities.
        logits: The draft's, divided by the temperature, ``[rows, vocab]``, in float32 or float64.
    """

    def __init__(self, ids: Tensor, log_p: Tensor, logits: Tensor) -> None:
        largest, self.best = logits.max(-1)
        q = logits.softmax(-1)
        log_sum = largest - q.gather(1, self.best[:, None])[:, 0].log()
        log_q = logits.gather(1, ids) - log_sum[:, None]
        self.ids, self.others = ids, q.scatter_(1, ids, 0.0)
        self.rest = self.others.sum(-1, keepdim=True).clamp_min(torch.finfo(q.dtype).tiny)
        if ids.shape[1] < logits.shape[1]:
            tail = (1 - log_p.exp().sum(-1, keepdim=True)).clamp_min(LEAST_TAIL)
            log_p, log_q = torch.cat([log_p, tail.log()], -1), torch.cat([log_q, self.rest.log()], -1)
        super().__init__(log_p, log_q)

    def at(self, rows: Tensor) -> FoldedDistributions:
        """Some of the rows, by their indices."""
        part = FoldedDistributions.__new__(FoldedDistributions)
        vars(part).update({name: value.index_select(0, rows) for name, value in vars(self).items()})
        return part

    def agreement(self) -> Tensor:
        """1 where both have the same most probable token, ``[rows]``."""
        return (self.ids[:, 0] == self.best).to(self.log_p.dtype)

    def spread(self, gradient: Tensor) -> Tensor:
        """See `TokenDistributions.spread`."""
        k = self.ids.shape[1]
        whole = self.others * (gradient[:, -1:] / self.rest)
        return whole.scatter_(1, self.ids, gradient[:, :k])


LEAST_TAIL = 1e-7  # the tail's probability at least: the accuracy of a float32 sum of 1


@dataclass(frozen=True)
class Divergence:
    """One of `LOSSES` with its parameters."""

    name: DivergenceName = "forward_kl"  # Which one
    beta: float = 0.5  # Of ``jsd``: the target's share in the mixture, between 0 and 1
    tv_weight: float = 2.0  # Of ``kl_tv``: the factor of total variation
    # Both models' logits are divided by it before the softmax. The loss is not multiplied by its square: under Adam a
    # constant factor changes nothing.
    temperature: float = 1.0

    def loss(self, pair: TokenDistributions) -> Tensor:
        """The divergence of every row, ``[rows]``; differentiable."""
        return LOSSES[self.name](pair, self)

    def gradient(self, pair: TokenDistributions) -> Tensor:
        """Of each row's loss with respect to the draft's logits after the temperature, ``[rows, vocab]``."""
        return GRADIENTS[self.name](pair, self)


def log_probs(logits: Tensor, vocab: int, temperature: float = 1.0) -> Tensor:
    """Log-probabilities of the first ``vocab`` ids ``[rows, vocab]``, in float32 (float64 stays).

    Log-probabilities in half precision lose the differences that selection ranks by.
    """
    wide = logits[:, :vocab].to(torch.promote_types(logits.dtype, torch.float32))
    return (wide if temperature == 1.0 else wide / temperature).log_softmax(-1)


def forward_kl(pair: TokenDistributions, _: Divergence) -> Tensor:
    """KL(p‖q) = Σ p (log p - log q): q has to cover every token that the target may choose."""
    return (pair.p * (pair.log_p - pair.log_q)).sum(-1)


def reverse_kl(pair: TokenDistributions, _: Divergence) -> Tensor:
    """KL(q‖p) = Σ q (log q - log p): q has to avoid what the target would not say."""
    return (pair.q * (pair.log_q - pair.log_p)).sum(-1)


def jsd(pair: TokenDistributions, of: Divergence) -> Tensor:
    """β·KL(p‖m) + (1 - β)·KL(q‖m) with m = β·p + (1 - β)·q: between the two KLs, and bounded."""
    log_m = _log_mixture(pair, of.beta)
    return of.beta * (pair.p * (pair.log_p - log_m)).sum(-1) + (1 - of.beta) * (pair.q * (pair.log_q - log_m)).sum(-1)


def tv(pair: TokenDistributions, _: Divergence) -> Tensor:
    """½ Σ |p - q| = 1 - α: the chance of a rejection."""
    return (pair.p - pair.q).abs().sum(-1) * 0.5


def neg_log_alpha(pair: TokenDistributions, _: Divergence) -> Tensor:
    """-log α: total variation's gradient divided by α, so rows that overlap little pull as hard as under KL."""
    return -_positive(pair.alpha).log()


def lk_hybrid(pair: TokenDistributions, of: Divergence) -> Tensor:
    """λ·KL(p‖q) + (1 - λ)·TV with λ = exp(-3α) a row, α held constant: KL while far apart, acceptance when near."""
    share = _hybrid_share(pair)
    return share * forward_kl(pair, of) + (1 - share) * tv(pair, of)


def kl_tv(pair: TokenDistributions, of: Divergence) -> Tensor:
    """KL(p‖q) + w·TV: KL shapes the whole distribution, total variation what is accepted."""
    return forward_kl(pair, of) + of.tv_weight * tv(pair, of)


LOSSES: dict[str, Callable[[TokenDistributions, Divergence], Tensor]] = {
    loss.__name__: loss for loss in (forward_kl, reverse_kl, jsd, tv, neg_log_alpha, lk_hybrid, kl_tv)
}
"""Loss per token by name."""


# A loss d(q) with slopes g = ∂d/∂q has the gradient q·(g - Σ q g) with respect to the logits of q = softmax(logits).


def _forward_kl_gradient(pair: TokenDistributions, _: Divergence) -> Tensor:
    return pair.q - pair.p


def _reverse_kl_gradient(pair: TokenDistributions, of: Divergence) -> Tensor:
    return pair.q * (pair.log_q - pair.log_p - reverse_kl(pair, of)[:, None])


def _jsd_gradient(pair: TokenDistributions, of: Divergence) -> Tensor:
    slope = pair.log_q - _log_mixture(pair, of.beta)
    return (1 - of.beta) * pair.q * (slope - (pair.q * slope).sum(-1, keepdim=True))


def _tv_gradient(pair: TokenDistributions, _: Divergence) -> Tensor:
    short = torch.heaviside(pair.p - pair.q, pair.p.new_tensor(0.5))  # where raising q raises α; half of it at a tie
    return pair.q * ((pair.q * short).sum(-1, keepdim=True) - short)


def _neg_log_alpha_gradient(pair: TokenDistributions, of: Divergence) -> Tensor:
    return _tv_gradient(pair, of) / _positive(pair.alpha)[:, None]


def _lk_hybrid_gradient(pair: TokenDistributions, of: Divergence) -> Tensor:
    share = _hybrid_share(pair)[:, None]
    return share * _forward_kl_gradient(pair, of) + (1 - share) * _tv_gradient(pair, of)


def _kl_tv_gradient(pair: TokenDistributions, of: Divergence) -> Tensor:
    return _forward_kl_gradient(pair, of) + of.tv_weight * _tv_gradient(pair, of)


GRADIENTS: dict[str, Callable[[TokenDistributions, Divergence], Tensor]] = {
    gradient.__name__[1:].removesuffix("_gradient"): gradient
    for gradient in (
        _forward_kl_gradient, _reverse_kl_gradient, _jsd_gradient, _tv_gradient, _neg_log_alpha_gradient,
        _lk_hybrid_gradient, _kl_tv_gradient,
    )
}  # fmt: skip
"""Gradient of each loss with respect to the draft's logits."""


def _log_mixture(pair: TokenDistributions, beta: float) -> Tensor:
    return torch.logaddexp(pair.log_p + math.log(beta), pair.log_q + math.log(1 - beta))


def _hybrid_share(pair: TokenDistributions) -> Tensor:
    return torch.exp(-HYBRID_DECAY * pair.alpha.detach())


def _positive(alpha: Tensor) -> Tensor:
    return alpha.clamp_min(torch.finfo(alpha.dtype).tiny)  # two distributions may not overlap at all in float32
