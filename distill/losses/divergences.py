"""Divergences per token between the target's p and the draft's q, and their gradients in closed form.

All functions take rows of log-probabilities ``[rows, vocab]`` and return one value per row. α = Σ min(p, q) is the
probability that the target accepts a token drawn from q, and total variation is 1 − α, so divergences with tv or α
train the acceptance rate. Their gradient vanishes where q hardly overlaps p, so they work better after a KL term, or
together with one (Samarin et al., 2026, arXiv:2602.23881; AdaSPEC, Table 4).

| name | per token | elsewhere (vLLM speculators; SpecForge) |
| --- | --- | --- |
| forward_kl | KL(p‖q) = Σ p (log p − log q) | ``kl_div``; soft cross-entropy (same gradient) |
| reverse_kl | KL(q‖p) = Σ q (log q − log p) | ``rkl`` |
| jsd | (KL(p‖m) + KL(q‖m)) / 2, m = (p + q) / 2 | ``jsd`` |
| tv | ½ Σ abs(p − q) = 1 − α | ``tv`` |
| neg_log_alpha | −log α | ``nla``; LK loss, ``alpha`` |
| lk_hybrid | λ·KL(p‖q) + (1 − λ)·tv, λ = exp(−3α) held constant | ``lk_hybrid``; LK loss, ``lambda`` |
| kl_tv | KL(p‖q) + 2·tv | a weighted sum of ``kl_div`` and ``tv`` |
| cross_entropy | −log q(x), x the text's own token | ``ce``, which takes the argmax of p as x |
| dspark | 0.1·cross_entropy + 0.9·‖p − q‖₁ (twice tv) | DSpark (2607.05147); ``{"ce": 0.1, "tv": 1.8}`` |
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from distill.config.base import DivergenceName, Values
from distill.networks.lm_head import LMHead

WEIGHTS: dict[DivergenceName, tuple[float, float, float]] = {
    "forward_kl": (1, 0, 0),
    "tv": (0, 1, 0),
    "kl_tv": (1, 2, 0),
    "cross_entropy": (0, 0, 1),
    "dspark": (0, 1.8, 0.1),
}
"""Of KL(p‖q), total variation and the cross-entropy of the text's own token, in the divergences that are their sums."""
HYBRID_DECAY = 3.0  # η of the hybrid's weight λ = exp(−η·α), from its paper
LEAST_TAIL = 1e-7  # smallest probability of a tail: the accuracy of a float32 sum of 1


class TokenDistributions:
    """Distributions of target and draft for the same rows.

    Args:
        log_p: The target's log-probabilities ``[rows, vocab]``, in float32 or float64.
        log_q: The draft's log-probabilities.

    Attributes:
        p: The target's probabilities, ``[rows, vocab]``.
        q: The draft's.
    """

    best: Tensor | None = None  # the target's most probable token ``[rows]``; None: not known yet
    best_drafted: Tensor | None = None  # the draft's
    labels: Any = None  # of `TargetRows`, as are the next two
    mass: Tensor | None = None
    learnable: Tensor | None = None

    def __init__(self, log_p: Tensor, log_q: Tensor) -> None:
        self.log_p, self.log_q = log_p, log_q
        self.q = log_q.exp()  # softmax would be faster on a CPU, and lose digits in saturated rows
        self.p = self.q if log_p is log_q else log_p.exp()

    @property
    def alpha(self) -> Tensor:
        """Σ min(p, q), ``[rows]``."""
        return torch.minimum(self.p, self.q).sum(-1)

    def label_loss(self) -> Tensor:
        """Returns −log q of the text's own tokens, ``[rows]``; 0 where the draft has no logit of it."""
        log_q = self.log_q_of(self.labels.clamp_min(0)[:, None])
        return -log_q[:, 0].where(self.labels >= 0, 0.0)

    def log_q_of(self, ids: Tensor) -> Tensor:
        """Returns the draft's log-probabilities of some ids, ``[rows, ids]``."""
        return self.log_q.gather(1, ids)

    def all_q(self) -> Tensor:
        """Returns the draft's probabilities of all its ids, ``[rows, vocab]``."""
        return self.q

    def label_gradient(self) -> Tensor:
        """Returns the gradient of `label_loss` with respect to the draft's logits, ``[rows, vocab]``."""
        known = (self.labels >= 0).to(self.log_q.dtype)[:, None]
        return (self.all_q() * known).scatter_add_(1, self.labels.clamp_min(0)[:, None], -known)

    def agreement(self) -> Tensor:
        """Returns 1 where the draft's most probable token is the target's, ``[rows]``."""
        target = self.log_p.argmax(-1) if self.best is None else self.best
        draft = self.log_q.argmax(-1) if self.best_drafted is None else self.best_drafted
        same = (target == draft).to(self.log_q.dtype)
        return same if self.learnable is None else same * self.learnable

    def accepted(self) -> Tensor:
        """Returns Σ min of the target's and the draft's probabilities, ``[rows]``, where p holds the share ``mass``."""
        return self.alpha if self.mass is None else torch.minimum(self.p * self.mass[:, None], self.q).sum(-1)

    def spread(self, gradient: Tensor) -> Tensor:
        """Converts a gradient by these outcomes' logits to one by the draft's logits of all ids, ``[rows, vocab]``."""
        return gradient


class FoldedDistributions(TokenDistributions):
    """Distributions over the target's k most probable ids, and one outcome for all other ids.

    The divergences of the folded distributions bound the true ones from below, and cost k + 1 values per row. The
    gradient by the logit of a folded id v is that of the common outcome times q(v) / q(others).

    Args:
        ids: The target's top ids, the most probable first, ``[rows, k]``.
        log_p: Their log-probabilities.
        logits: The draft's logits, ``[rows, vocab]``, in float32 or float64.
    """

    def __init__(self, ids: Tensor, log_p: Tensor, logits: Tensor) -> None:
        largest, self.best_drafted = logits.max(-1)
        q = logits.softmax(-1)
        self.logits, self.log_sum = logits, largest - q.gather(1, self.best_drafted[:, None])[:, 0].log()
        log_q = self.log_q_of(ids)
        self.ids, self.best, self.others = ids, ids[:, 0], q.scatter_(1, ids, 0.0)
        self.rest = self.others.sum(-1, keepdim=True).clamp_min(torch.finfo(q.dtype).tiny)
        if ids.shape[1] < logits.shape[1]:
            tail = (1 - log_p.exp().sum(-1, keepdim=True)).clamp_min(LEAST_TAIL)
            log_p, log_q = torch.cat([log_p, tail.log()], -1), torch.cat([log_q, self.rest.log()], -1)
        super().__init__(log_p, log_q)

    def log_q_of(self, ids: Tensor) -> Tensor:
        """See `TokenDistributions.log_q_of`."""
        return self.logits.gather(1, ids) - self.log_sum[:, None]

    def all_q(self) -> Tensor:
        """See `TokenDistributions.all_q`."""
        return self.others.scatter(1, self.ids, self.q[:, : self.ids.shape[1]])

    def spread(self, gradient: Tensor) -> Tensor:
        """See `TokenDistributions.spread`."""
        spread = self.others * (gradient[:, -1:] / self.rest)
        return spread.scatter_(1, self.ids, gradient[:, : self.ids.shape[1]])


@dataclass
class TargetRows:
    """The target's distributions at some label rows, in the form in which its signal holds them.

    Attributes:
        values: With a head the last hidden states ``[rows, hidden]``, from which logits are computed for a few rows at
            a time. With ids the log-probabilities of these, ``[rows, k]``. Otherwise those of all ids, ``[rows,
            vocab]``. None: only the text's own tokens are known, for the cross-entropy.
        vocab: Number of ids that the target knows.
        head: The target's output head.
        ids: The k most probable ids of each row, the most probable first.
        labels: The text's own token of each row as one of the draft's ids, ``[rows]``; -1 where it has no such id.
        mass: Probability that the target gives to the draft's ids together, ``[rows]``. None: 1.
        learnable: 1 where the target's most probable token is one of them, ``[rows]``. None: everywhere.
    """

    values: Tensor | None
    vocab: int
    head: LMHead | None = None
    ids: Tensor | None = None
    labels: Tensor | None = None
    mass: Tensor | None = None
    learnable: Tensor | None = None

    def at(self, rows: Tensor) -> "TargetRows":
        """Returns some of the rows."""
        some: Values = {name: each[rows] for name, each in vars(self).items() if isinstance(each, Tensor)}
        return replace(self, **some)

    def log_probs(self, vocab: int) -> Tensor:
        """Returns the log-probabilities of the first ``vocab`` ids, ``[rows, vocab]``, where all of them are known."""
        assert self.values is not None
        if self.head is None:
            return self.values
        return log_probs(self.head(self.values.to(self.head.linear.weight.dtype), vocab))

    def compare(self, logits: Tensor) -> TokenDistributions:
        """Returns the rows' distributions and the draft's ``logits [rows, vocab]`` in the cheapest form to compare."""
        if self.values is None:
            log_q = logits.log_softmax(-1)
            pair = TokenDistributions(log_q, log_q)  # of the target's the text's own tokens alone are known
            pair.best = self.labels
        elif self.ids is not None:
            pair = FoldedDistributions(self.ids.long(), self.values.to(logits.dtype), logits)
        else:
            log_q = logits.log_softmax(-1)
            pair = TokenDistributions(self.log_probs(log_q.shape[1]).to(log_q.dtype), log_q)
        pair.labels, pair.mass, pair.learnable = self.labels, self.mass, self.learnable
        return pair


Weight = Tensor | float


@dataclass(frozen=True)
class Divergence:
    """A divergence of the table above."""

    name: DivergenceName = "forward_kl"

    def loss(self, pair: TokenDistributions) -> Tensor:
        """Returns the divergence of every row, ``[rows]``; differentiable."""
        if self.name == "neg_log_alpha":
            return -_positive(pair.alpha).log()
        if self.name == "reverse_kl":
            return (pair.q * (pair.log_q - pair.log_p)).sum(-1)
        if self.name == "jsd":
            log_m = _log_mixture(pair)
            return 0.5 * (pair.p * (pair.log_p - log_m)).sum(-1) + 0.5 * (pair.q * (pair.log_q - log_m)).sum(-1)
        kl, tv, label = self._weights(pair)
        return _weighted(
            (kl, lambda: (pair.p * (pair.log_p - pair.log_q)).sum(-1)),
            (tv, lambda: (pair.p - pair.q).abs().sum(-1) * 0.5),
            (label, pair.label_loss),
        )

    def gradient(self, pair: TokenDistributions) -> Tensor:
        """Returns the gradient of every row's loss with respect to the draft's logits, ``[rows, vocab]``.

        A loss d(q) with slopes g = ∂d/∂q has the gradient q·(g − Σ q g) with respect to the logits of q.
        """
        if self.name == "reverse_kl":
            return pair.spread(pair.q * (pair.log_q - pair.log_p - self.loss(pair)[:, None]))
        if self.name == "jsd":
            slope = pair.log_q - _log_mixture(pair)
            return pair.spread(0.5 * pair.q * (slope - (pair.q * slope).sum(-1, keepdim=True)))
        if self.name == "neg_log_alpha":
            return pair.spread(_tv_gradient(pair) / _positive(pair.alpha)[:, None])
        kl, tv, label = (w[:, None] if isinstance(w, Tensor) else w for w in self._weights(pair))
        if label:
            return _weighted((tv, lambda: pair.spread(_tv_gradient(pair))), (label, pair.label_gradient))
        return pair.spread(_weighted((kl, lambda: pair.q - pair.p), (tv, lambda: _tv_gradient(pair))))

    def _weights(self, pair: TokenDistributions) -> tuple[Weight, Weight, float]:
        if self.name == "lk_hybrid":
            share = torch.exp(-HYBRID_DECAY * pair.alpha.detach())
            return share, 1 - share, 0
        return WEIGHTS[self.name]


def _weighted(*terms: tuple[Weight, Callable[[], Tensor]]) -> Tensor:
    """Returns the weighted sum of those terms whose weight is not the number 0."""
    there = [(weight, term()) for weight, term in terms if isinstance(weight, Tensor) or weight]
    weighted = [w * t if isinstance(w, Tensor) or w != 1 else t for w, t in there]
    return sum(weighted[1:], weighted[0])


def _tv_gradient(pair: TokenDistributions) -> Tensor:
    below = torch.heaviside(pair.p - pair.q, pair.p.new_full((), 0.5))  # where raising q raises α; half at a tie
    return pair.q * ((pair.q * below).sum(-1, keepdim=True) - below)


def log_probs(logits: Tensor) -> Tensor:
    """Returns log-probabilities ``[rows, vocab]`` in float32 (float64 stays): halves are too rough to rank by."""
    return logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)


def _log_mixture(pair: TokenDistributions) -> Tensor:
    return torch.logaddexp(pair.log_p + math.log(0.5), pair.log_q + math.log(0.5))


def _positive(alpha: Tensor) -> Tensor:
    return alpha.clamp_min(torch.finfo(alpha.dtype).tiny)  # two distributions may not overlap at all in float32
