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

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce

import torch
from torch import Tensor

from distill.config import DivergenceName
from distill.lm_head import LMHead

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
RowIndex = slice | Tensor  # a range of rows, or indices


class TokenDistributions:
    """Distributions of target and draft for the same rows.

    Args:
        log_p: The target's log-probabilities ``[rows, vocab]``, in float32 or float64.
        log_q: The draft's log-probabilities.
    """

    _p: Tensor | None = None  # computed when first needed; torch.compile does not support functools.cached_property
    _q: Tensor | None = None
    _alpha: Tensor | None = None
    labels: Tensor | None = None  # the text's own tokens ``[rows]``, see `TargetRows`

    def __init__(self, log_p: Tensor, log_q: Tensor) -> None:
        self.log_p, self.log_q = log_p, log_q

    @property
    def p(self) -> Tensor:
        """The target's probabilities, ``[rows, vocab]``."""
        if self._p is None:
            self._p = self.log_p.exp()  # softmax would be faster on a CPU, and lose digits in saturated rows
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
        """Returns the distributions of some rows."""
        part: TokenDistributions = object.__new__(type(self))
        vars(part).update(
            {name: value.index_select(0, rows) for name, value in vars(self).items() if value is not None}
        )
        return part

    def label_loss(self) -> Tensor:
        """Returns −log q of the text's own tokens, ``[rows]``; 0 where the draft has no logit of it."""
        log_q = self.log_q_of(self.text.clamp_min(0)[:, None])
        return -log_q[:, 0].where(self.text >= 0, 0.0)

    def log_q_of(self, ids: Tensor) -> Tensor:
        """Returns the draft's log-probabilities of some ids, ``[rows, ids]``."""
        return self.log_q.gather(1, ids)

    @property
    def text(self) -> Tensor:
        """The text's own tokens, ``[rows]``; -1 where the draft has no logit of one."""
        assert self.labels is not None, "the target's rows have no labels"
        return self.labels

    def all_q(self) -> Tensor:
        """Returns the draft's probabilities of all its ids, ``[rows, vocab]``, in new memory."""
        return self.q.clone()

    def label_gradient(self) -> Tensor:
        """Returns the gradient of `label_loss` with respect to the draft's logits, ``[rows, vocab]``."""
        known = (self.text >= 0).to(self.log_q.dtype)[:, None]
        return (self.all_q() * known).scatter_add_(1, self.text.clamp_min(0)[:, None], -known)

    def agreement(self) -> Tensor:
        """Returns 1 where both have the same most probable token, ``[rows]``."""
        return (self.log_p.argmax(-1) == self.log_q.argmax(-1)).to(self.log_p.dtype)

    def accepted(self, mass: Tensor | None) -> Tensor:
        """Returns α, ``[rows]``, where p holds a share ``mass [rows]`` of the target's probability. None: all of it."""
        return self.alpha if mass is None else torch.minimum(self.p * mass[:, None], self.q).sum(-1)

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
        largest, self.best = logits.max(-1)
        q = logits.softmax(-1)
        self.logits, self.log_sum = logits, largest - q.gather(1, self.best[:, None])[:, 0].log()
        log_q = self.log_q_of(ids)
        self.ids, self.others = ids, q.scatter_(1, ids, 0.0)
        self.rest = self.others.sum(-1, keepdim=True).clamp_min(torch.finfo(q.dtype).tiny)
        if ids.shape[1] < logits.shape[1]:
            tail = (1 - log_p.exp().sum(-1, keepdim=True)).clamp_min(LEAST_TAIL)
            log_p, log_q = torch.cat([log_p, tail.log()], -1), torch.cat([log_q, self.rest.log()], -1)
        super().__init__(log_p, log_q)

    def agreement(self) -> Tensor:
        """See `TokenDistributions.agreement`."""
        return (self.ids[:, 0] == self.best).to(self.log_p.dtype)

    def log_q_of(self, ids: Tensor) -> Tensor:
        """See `TokenDistributions.log_q_of`."""
        return self.logits.gather(1, ids) - self.log_sum[:, None]

    def all_q(self) -> Tensor:
        """See `TokenDistributions.all_q`."""
        return self.others.scatter(1, self.ids, self.q[:, : self.ids.shape[1]])

    def spread(self, gradient: Tensor) -> Tensor:
        """See `TokenDistributions.spread`."""
        k = self.ids.shape[1]
        spread = self.others * (gradient[:, -1:] / self.rest)
        return spread.scatter_(1, self.ids, gradient[:, :k])


class LabelDistributions(TokenDistributions):
    """The draft's distributions where of the target's only the text's own tokens are known."""

    def __init__(self, log_q: Tensor) -> None:
        super().__init__(log_q, log_q)

    def agreement(self) -> Tensor:
        """Returns 1 where the text's own token is the draft's most probable one, ``[rows]``."""
        return (self.log_q.argmax(-1) == self.text).to(self.log_q.dtype)


def pick(values: Tensor, place: RowIndex) -> Tensor:
    """Returns some of the rows: a view of a range, a copy of indexed ones."""
    return values[place] if isinstance(place, slice) else values.index_select(0, place)


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
    """

    values: Tensor | None
    vocab: int
    head: LMHead | None = None
    ids: Tensor | None = None
    labels: Tensor | None = None

    def at(self, rows: RowIndex) -> TargetRows:
        """Returns some of the rows."""
        values, ids, labels = (None if t is None else pick(t, rows) for t in (self.values, self.ids, self.labels))
        return TargetRows(values, self.vocab, self.head, ids, labels)

    def log_probs(self, vocab: int) -> Tensor:
        """Returns the log-probabilities of the first ``vocab`` ids, ``[rows, vocab]``, where all of them are known."""
        assert self.values is not None
        if self.head is None:
            return self.values
        return log_probs(self.head.first(self.values.to(self.head.linear.weight.dtype), vocab), vocab)

    def compare(self, logits: Tensor) -> TokenDistributions:
        """Returns the rows' distributions and the draft's ``logits [rows, vocab]`` in the cheapest form to compare."""
        if self.values is None:
            pair: TokenDistributions = LabelDistributions(logits.log_softmax(-1))
        elif self.ids is not None:
            pair = FoldedDistributions(self.ids.long(), self.values.to(logits.dtype), logits)
        else:
            log_q = logits.log_softmax(-1)
            pair = TokenDistributions(self.log_probs(log_q.shape[1]).to(log_q.dtype), log_q)
        pair.labels = self.labels
        return pair


@dataclass(frozen=True)
class Divergence:
    """A divergence of the table above.

    Attributes:
        name: Which one.
    """

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
        if not label:
            return pair.spread(_weighted((kl, lambda: pair.q - pair.p), (tv, lambda: _tv_gradient(pair))))
        return _weighted((tv, lambda: pair.spread(_tv_gradient(pair))), (label, pair.label_gradient))

    def _weights(self, pair: TokenDistributions) -> tuple[Weight, Weight, float]:
        if self.name == "lk_hybrid":
            share = torch.exp(-HYBRID_DECAY * pair.alpha.detach())
            return share, 1 - share, 0
        return WEIGHTS[self.name]


Weight = Tensor | float


def _weighted(*terms: tuple[Weight, Callable[[], Tensor]]) -> Tensor:
    """Returns the weighted sum of those terms whose weight is not the number 0."""
    there = [(weight, term()) for weight, term in terms if isinstance(weight, Tensor) or weight]
    return reduce(operator.add, [t if isinstance(w, float | int) and w == 1 else w * t for w, t in there])


def _tv_gradient(pair: TokenDistributions) -> Tensor:
    below = torch.heaviside(pair.p - pair.q, pair.p.new_tensor(0.5))  # where raising q raises α; half at a tie
    return pair.q * ((pair.q * below).sum(-1, keepdim=True) - below)


def log_probs(logits: Tensor, vocab: int) -> Tensor:
    """Returns log-probabilities of the first ``vocab`` ids, ``[rows, vocab]``, in float32 (float64 stays).

    Log-probabilities in half precision lose the differences that the selection ranks by.
    """
    return logits[:, :vocab].to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)


def _log_mixture(pair: TokenDistributions) -> Tensor:
    return torch.logaddexp(pair.log_p + math.log(0.5), pair.log_q + math.log(0.5))


def _positive(alpha: Tensor) -> Tensor:
    return alpha.clamp_min(torch.finfo(alpha.dtype).tiny)  # two distributions may not overlap at all in float32
