"""Divergences per token between the target's p and the draft's q.

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

import hashlib
import math
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

from decode.errors import UserError, named
from distill.config.base import Values
from distill.networks.lm_head import LMHead

HYBRID_DECAY = 3.0  # η of the hybrid's weight λ = exp(−η·α), from its paper
LEAST_TAIL = 1e-7  # smallest probability of a tail: the accuracy of a float32 sum of 1


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

    @torch.no_grad()
    def log_probs(self, vocab: int) -> Tensor:
        """Returns the log-probabilities of the first ``vocab`` ids, ``[rows, vocab]``, where all of them are known."""
        assert self.values is not None
        if self.head is None:
            return self.values
        return log_probs(self.head(self.values.to(self.head.linear.weight.dtype), vocab))

    def compare(self, logits: Tensor) -> "TokenDistributions":
        """Returns the rows' distributions and the draft's, whose ``logits [rows, vocab]`` are float32 or float64.

        With ids they are those of the k ids and of one outcome for all others. Their divergences bound the true ones
        from below, and cost k + 1 values per row.
        """
        if self.ids is None:
            log_q = logits.log_softmax(-1)
            # without values the text's own tokens alone are known of the target
            log_p = log_q if self.values is None else self.log_probs(log_q.shape[1]).to(log_q.dtype)
            return TokenDistributions(log_p, log_q, self, log_q)
        assert self.values is not None
        ids, log_p = self.ids.long(), self.values.to(logits.dtype)
        outcomes = logits.gather(1, ids)
        if ids.shape[1] < logits.shape[1]:
            others = logits.scatter(1, ids, -torch.inf).logsumexp(-1, keepdim=True)
            tail = (1 - log_p.exp().sum(-1, keepdim=True)).clamp_min(LEAST_TAIL)
            log_p, outcomes = torch.cat([log_p, tail.log()], -1), torch.cat([outcomes, others], -1)
        return TokenDistributions(log_p, outcomes.log_softmax(-1), self, logits)


@dataclass
class TokenDistributions:
    """Distributions of target and draft for the same rows.

    Attributes:
        log_p: The target's log-probabilities ``[rows, outcomes]``, in float32 or float64.
        log_q: The draft's.
        target: What else is known of the target.
        logits: The draft's logits of all ids, up to a constant of each row, ``[rows, vocab]``.
    """

    log_p: Tensor
    log_q: Tensor
    target: TargetRows
    logits: Tensor

    @property
    def p(self) -> Tensor:
        """The target's probabilities, ``[rows, outcomes]``."""
        return self.log_p.exp()

    @property
    def q(self) -> Tensor:
        """The draft's, ``[rows, outcomes]``."""
        return self.log_q.exp()  # softmax would be faster on a CPU, and lose digits in saturated rows

    @property
    def alpha(self) -> Tensor:
        """Σ min(p, q), ``[rows]``."""
        return torch.minimum(self.p, self.q).sum(-1)

    def kl(self) -> Tensor:
        """Returns KL(p‖q), ``[rows]``."""
        return (self.p * (self.log_p - self.log_q)).sum(-1)

    def tv(self) -> Tensor:
        """Returns the total variation, ``[rows]``."""
        return (self.p - self.q).abs().sum(-1) * 0.5

    def label_loss(self) -> Tensor:
        """Returns −log q of the text's own tokens, ``[rows]``; 0 where the draft has no logit of it."""
        labels = self.target.labels
        assert labels is not None
        log_q = self.log_q if self.target.ids is None else self.logits.log_softmax(-1)
        return functional.nll_loss(log_q, labels, reduction="none", ignore_index=-1)

    def accepted(self) -> tuple[Tensor, Tensor, Tensor]:
        """Returns the acceptance of each row by how its token is drafted, ``[rows]`` each.

        Returns:
            Σ min(p, q), if it is drawn from q; p of the draft's most probable token, 0 where it is not known; and 1
            where that token is the target's most probable one.
        """
        target, p, ids = self.target, self.p, self.target.ids
        p, drafted = p if target.mass is None else p * target.mass[:, None], self.logits.argmax(-1, keepdim=True)
        best = self.log_p.argmax(-1) if ids is None else ids[:, 0]
        if target.values is None:
            assert target.labels is not None
            best = target.labels
        same = best.eq(drafted[:, 0]).to(p.dtype)
        same = same if target.learnable is None else same * target.learnable
        there = p.gather(1, drafted) if ids is None else p[:, : ids.shape[1]] * (ids == drafted)
        return torch.minimum(p, self.q).sum(-1), there.sum(-1), same


def reverse_kl(pair: TokenDistributions) -> Tensor:
    """Returns KL(q‖p), ``[rows]``."""
    return (pair.q * (pair.log_q - pair.log_p)).sum(-1)


def jsd(pair: TokenDistributions) -> Tensor:
    """Returns the Jensen–Shannon divergence, ``[rows]``."""
    log_m = torch.logaddexp(pair.log_p + math.log(0.5), pair.log_q + math.log(0.5))
    return 0.5 * ((pair.p * (pair.log_p - log_m)).sum(-1) + (pair.q * (pair.log_q - log_m)).sum(-1))


def neg_log_alpha(pair: TokenDistributions) -> Tensor:
    """Returns −log α, ``[rows]``."""
    alpha = pair.alpha
    return -alpha.clamp_min(torch.finfo(alpha.dtype).tiny).log()  # there may be no overlap at all in float32


def lk_hybrid(pair: TokenDistributions) -> Tensor:
    """Returns λ·KL(p‖q) + (1 − λ)·tv, ``[rows]``."""
    share = torch.exp(-HYBRID_DECAY * pair.alpha.detach())
    return share * pair.kl() + (1 - share) * pair.tv()


DIVERGENCES: dict[str, Callable[[TokenDistributions], Tensor]] = {
    "forward_kl": TokenDistributions.kl,
    "reverse_kl": reverse_kl,
    "jsd": jsd,
    "tv": TokenDistributions.tv,
    "neg_log_alpha": neg_log_alpha,
    "lk_hybrid": lk_hybrid,
    "kl_tv": lambda pair: pair.kl() + 2 * pair.tv(),
    "cross_entropy": TokenDistributions.label_loss,
    "dspark": lambda pair: 1.8 * pair.tv() + 0.1 * pair.label_loss(),
}
"""The divergences of the table above; each returns one of every row, ``[rows]``, and is differentiable."""


class Divergence:
    """A divergence by its name in `DIVERGENCES`, or a function of the user's, ``module.name``, of `TokenDistributions`.

    Attributes:
        loss: The function.

    Raises:
        UserError: There is none of this name.
    """

    def __init__(self, name: str = "forward_kl") -> None:
        self.name, self.loss = name, named("divergence", name, DIVERGENCES)

    @property
    def key(self) -> str:
        """The name, and a hash of the files of a function of the user's: what is trained with it depends on both.

        They are those of the module that is named and of the one that defines the function.

        Raises:
            UserError: There is no such file.
        """
        if "." not in self.name:
            return self.name
        parents = accumulate(re.split("[.:]", self.name), "{}.{}".format)
        named_in = [name for name in parents if name in sys.modules][-1]
        defined_in = getattr(self.loss, "__module__", None) or named_in
        modules = sorted({named_in, defined_in} - {"functools"})  # where partial is defined
        try:
            texts = [Path(str(getattr(sys.modules[name], "__file__", None))).read_bytes() for name in modules]
        except (OSError, KeyError) as error:
            raise UserError(
                f"divergence {self.name!r} is {self.loss!r}, expected a function of a module file, by which a run "
                "knows what it was trained with: write it into a file and give module.name"
            ) from error
        return self.name + hashlib.sha256(b"".join(texts)).hexdigest()


def log_probs(logits: Tensor) -> Tensor:
    """Returns log-probabilities ``[rows, vocab]`` in float32 (float64 stays): halves are too rough to rank by."""
    return logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)
