"""Acceptance rules, and the verification of chains and trees: which drafted nodes are kept, which token follows."""

import math
from dataclasses import dataclass, field
from itertools import accumulate

import torch
from torch import Tensor

from decode.core.draft import Draft
from decode.core.round import Round, Values
from decode.core.sampling import Rng, Rows, one_hot

LN2 = math.log(2)
Raw = tuple[Tensor, Tensor]  # unwarped logits of target and draft, ``[k, vocab]`` each


def pick(rows: Tensor, tokens: Tensor) -> Tensor:
    """``rows[i, tokens[i]]``: ``[k]`` from ``[k, vocab]``."""
    return rows.gather(-1, tokens[:, None]).squeeze(-1)


def ratio(p: Tensor, q: Tensor, x: Tensor) -> Tensor:
    """min(1, p(x)/q(x)) ``[k]``: the exact acceptance probability (Leviathan et al., algorithm 1)."""
    return (pick(p, x) / pick(q, x)).clamp(max=1.0)


def overlap(p: Tensor, q: Tensor) -> Tensor:
    """Σₓ min(p, q) ``[n]`` over the shared ids of ``p, q [n, vocab]``."""
    shared = min(p.shape[-1], q.shape[-1])
    return torch.minimum(p[:, :shared], q[:, :shared].to(p.device)).sum(-1)


def js_distance(p: Tensor, q: Tensor) -> Tensor:
    """Jensen–Shannon distance √JSD in base 2 along the last axis; in [0, 1], a token of probability 0 adds 0."""
    m = (p + q) / 2
    jsd = (torch.xlogy(p, p / m.clamp_min(1e-38)) + torch.xlogy(q, q / m.clamp_min(1e-38))).sum(-1) / 2
    return (jsd / LN2).clamp_min(0).sqrt()


def entropy(p: Tensor) -> Tensor:
    """Shannon entropy in bits along the last axis."""
    return torch.special.entr(p).sum(-1) / LN2


def softmax(raw: Raw) -> Raw:
    """The unwarped distributions, in float32."""
    return raw[0].float().softmax(-1), raw[1].float().softmax(-1)


class AcceptanceRule:
    """Which drafted tokens are kept, and how a rejected position is corrected."""

    exact: bool = False  # the output has the target's distribution
    needs_raw: bool = False  # `distance` may look at the unwarped logits
    unwarped: bool = False  # `distance` compares the distributions before warping, which greedy decoding needs
    corrects_from_p: bool = False  # a rejected token is replaced by one from p, not from the residual

    @property
    def is_exact_now(self) -> bool:
        """Whether the rule decides as the exact one does, for now."""
        return self.exact

    def distance(self, p: Tensor, q: Tensor, raw: Raw) -> Tensor:
        """Jensen–Shannon distance ``[k]`` of each position's distributions."""
        return js_distance(*(softmax(raw) if self.unwarped else (p, q)))

    def accept_prob(self, p: Tensor, q: Tensor, x: Tensor, distance: Tensor) -> Tensor:
        """Probability ``[k]`` of keeping each drafted token ``x [k]``.

        Args:
            p: the target's warped rows ``[k, vocab]``.
            q: the draft's.
            x: the drafted tokens.
            distance: `distance` at each position.
        """
        return ratio(p, q, x)

    def residual(self, p: Tensor, q: Tensor) -> Tensor:
        """Weights ``[vocab]`` of the token that replaces a rejected one: [p − q]₊, or p where that has no mass."""
        if self.corrects_from_p:
            return p
        rest = (p - q).clamp_min_(0)
        return torch.where(rest.sum() > 0, rest, p)

    def keep(self, p: Tensor, q: Tensor, x: Tensor, accept: Tensor, rng: Rng) -> tuple[int, Tensor]:
        """The number of drafted tokens that are kept, and the weights ``[vocab]`` of the token after them.

        Args:
            p: the target's warped rows ``[k + 1, vocab]``.
            q: the draft's, ``[k, vocab]``.
            x: the drafted tokens.
            accept: `accept_prob` of each.
            rng: draws.
        """
        m = int(rng.first_reject(accept))  # the host waits here and for the token, never for each drafted one
        return m, p[m] if m == len(x) else self.residual(p[m], q[m])

    def tv_spent(self, p: Tensor, q: Tensor, x: Tensor, accept: Tensor) -> Tensor:
        """Estimate ``[k]`` of the total variation from p that the rule causes: a(x) − min(1, p(x)/q(x))."""
        return accept - ratio(p, q, x)

    def start(self) -> None:
        """A new text begins."""

    def observe(self, round: Round) -> None:
        """Learn from a verified round."""


class Exact(AcceptanceRule):
    """Keep x with probability min(1, p(x)/q(x)); lossless (Leviathan et al. 2211.17192, Chen et al. 2302.01318)."""

    exact = True


class BlockVerification(Exact):
    """Keep as much of a sampled chain as a lossless rule can, by judging its tokens together (Sun et al. 2403.10444).

    With P₀ = 1, Pᵢ = min(1, Pᵢ₋₁ p(xᵢ)/q(xᵢ)) and Rᵢ = Σ[Pᵢ p − q]₊ at the position after xᵢ, the first i of n tokens
    pass with probability Rᵢ/(Rᵢ + 1 − Pᵢ), all n with Pₙ. The most that pass are kept, whatever failed before them, and
    [Pᵢ p − q]₊ gives the token that follows. So i tokens or more are kept with probability Pᵢ; verification by tokens
    keeps them with ∏ min(1, p/q), which is no larger and is the same for n = 1 and for a deterministic draft.
    """

    def keep(self, p: Tensor, q: Tensor, x: Tensor, accept: Tensor, rng: Rng) -> tuple[int, Tensor]:
        """See `AcceptanceRule.keep`; `accept` is not read."""
        n, ratios = len(x), (pick(p, x) / pick(q, x)).tolist()
        reach = list(accumulate(ratios, lambda reach, r: min(1.0, reach * r), initial=1.0))
        first = n + 1 - reach[::-1].index(1.0)  # where Pᵢ = 1 the first i tokens pass, so that fewer are never kept
        if first > n:
            return n, p[n]
        fail = p.new_tensor([1 - r for r in reach[first:]])
        rest = ((1 - fail[:-1, None]) * p[first:n] - q[first:]).clamp_min_(0).sum(-1)
        fail[:-1] /= rest + fail[:-1]
        # the tests are independent: read from the end, the first that does not fail is the longest part that passes
        m = n - int(rng.first_reject(fail.flip(0)))
        return m, p[n] if m == n else self.residual(reach[m] * p[m], q[m])


@dataclass
class Ears(AcceptanceRule):
    """EARS: keep x where u − β(1 − max p) <= p(x)/q(x); tokens with p(x) = 0 are never kept.

    β = 0 is the exact rule, bit for bit. The paper uses 0.05 to 0.2; its greedy requests bypass the tolerance, and
    so do these, since one-hot p has max p = 1.
    """

    beta: float = 0.1

    @property
    def is_exact_now(self) -> bool:
        """At β = 0."""
        return self.beta == 0

    def accept_prob(self, p: Tensor, q: Tensor, x: Tensor, distance: Tensor) -> Tensor:
        """min(1, p(x)/q(x) + β(1 − max p)) where p(x) > 0."""
        tolerance = self.beta * (1 - p.amax(-1))
        px = pick(p, x)
        return torch.where(px > 0, (px / pick(q, x) + tolerance).clamp(max=1.0), px)


@dataclass
class JensenShannon(AcceptanceRule):
    """AdaSD's rule: keep x by the exact rule or where D(p, q) < θ, θ learned from accepted and rejected positions.

    θ is 0, hence the rule exact, until an accepted and a rejected distance have been seen. One rejected position is
    recorded a round. Greedy decoding compares the unwarped distributions, since one-hot ones are at distance 0 or 1.
    """

    # ``midpoint`` of the two means (the paper's choice), or its ablations ``a`` (mean of the accepted), ``b`` (means
    # weighted by tokens), ``c`` (means weighted by sequences that had one)
    variant: str = "midpoint"
    threshold: float | None = None  # a fixed θ instead of a learned one
    unwarped: bool = False
    accepted: list[float] = field(default_factory=lambda: [0.0, 0.0])
    rejected: list[float] = field(default_factory=lambda: [0.0, 0.0])
    sequences: list[int] = field(default_factory=lambda: [0, 0])
    needs_raw = True

    def __post_init__(self) -> None:
        self._seen = [False, False]

    @property
    def is_exact_now(self) -> bool:
        """While θ is 0."""
        return self.theta <= 0

    @property
    def theta(self) -> float:
        """The threshold in force."""
        if self.threshold is not None:
            return self.threshold
        (sum_a, n_a), (sum_r, n_r) = self.accepted, self.rejected
        if not n_a or not n_r:
            return 0.0
        weights = {"midpoint": (1, 1), "a": (1, 0), "b": (n_a, n_r), "c": self.sequences}
        w_a, w_r = weights[self.variant]
        return (w_a * (sum_a / n_a) + w_r * (sum_r / n_r)) / (w_a + w_r)

    def accept_prob(self, p: Tensor, q: Tensor, x: Tensor, distance: Tensor) -> Tensor:
        """1 where D(p, q) < θ, min(1, p(x)/q(x)) elsewhere."""
        return torch.where(distance < self.theta, torch.ones_like(p[:, 0]), ratio(p, q, x))

    def observe(self, round: Round) -> None:
        """Record the distances of the accepted positions and of the first rejected one."""
        if self.threshold is not None or round.distance is None:
            return
        distances = torch.as_tensor(round.distance).tolist()
        kept = distances[: round.accepted], distances[round.accepted :]
        for which, (sums, values) in enumerate(zip((self.accepted, self.rejected), kept)):
            sums[0] += sum(values)
            sums[1] += len(values)
            self.sequences[which] += bool(values) and not self._seen[which]
            self._seen[which] |= bool(values)

    def start(self) -> None:
        """A new sequence begins (variant c counts them)."""
        self._seen = [False, False]


@dataclass
class Fuzzy(AcceptanceRule):
    """Fuzzy speculative decoding: keep x where a divergence of the unwarped p and q is at most T.

    The decision ignores the token, so a rejected position is drawn from p, and the price of a kept one is TV(p, q).
    """

    threshold: float = 0.4  # T; the divergence is the Jensen–Shannon divergence in nats (FSD's example for js: 0.4)
    needs_raw = unwarped = corrects_from_p = True

    def accept_prob(self, p: Tensor, q: Tensor, x: Tensor, distance: Tensor) -> Tensor:
        """1 where JSD(p, q) <= T, else 0."""
        return (distance.square() * LN2 <= self.threshold).to(p.dtype)

    def tv_spent(self, p: Tensor, q: Tensor, x: Tensor, accept: Tensor) -> Tensor:
        """TV(p, q) where the draft is kept."""
        return accept * (1 - overlap(p, q))


@dataclass
class Typical(AcceptanceRule):
    """Medusa's typical acceptance: keep x where p(x) > min(ε, δ·exp(−H(p))), H in nats.

    Under one-hot p (greedy) this is the exact match.
    """

    epsilon: float = 0.09
    delta: float = 0.3
    corrects_from_p = True

    def _limit(self, p: Tensor) -> Tensor:
        return (self.delta * torch.exp(-entropy(p) * LN2)).clamp(max=self.epsilon)

    def accept_prob(self, p: Tensor, q: Tensor, x: Tensor, distance: Tensor) -> Tensor:
        """1 where p(x) exceeds the limit, else 0."""
        return (pick(p, x) > self._limit(p)).to(p.dtype)

    def tv_spent(self, p: Tensor, q: Tensor, x: Tensor, accept: Tensor) -> Tensor:
        """TV between what is emitted, q·a + (1 − Σ q·a)·p, and p."""
        kept = q * (p > self._limit(p)[:, None])
        mass = kept.sum(-1, keepdim=True)
        return (kept - mass * p).abs().sum(-1) / 2


Measured = tuple[Values | None, Values | None, Values | None]
"""Overlap, total variation spent and Jensen–Shannon distance at the tested positions."""


def verify(draft: Draft, p: Rows, logits: Tensor, rule: AcceptanceRule, rng: Rng) -> tuple[list[int], int, Measured]:
    """Verify a draft by an acceptance rule.

    Args:
        draft: of n tokens; a chain where the rule is relaxed.
        p: warped target rows ``[n + 1, vocab]``; a tensor where the draft has probabilities or the rule is relaxed.
        logits: the same rows, unwarped.
        rule: decides which tokens are kept.
        rng: draws.

    Returns:
        The accepted nodes, the token after them, and what was measured at the tested positions.
    """
    k = len(draft)
    if draft.probs is None and (rule.is_exact_now or not k):
        path, token = verify_tree(draft, p, rng)
        # under a one-hot q, Σ min(p, q) is the target's probability of all tokens drafted at a position
        below = [(row, list(draft.children[row])) for row in (0, *(node + 1 for node in path))]
        masses = [p[row][tokens].sum() for row, tokens in below if tokens]
        shared = torch.stack(masses) if masses else None
        if rule.exact or shared is None or not draft.is_chain:
            return path, token, (shared, None, None)
        p, q, _ = _rows(draft, p)
        t = len(masses)
        return path, token, (shared, torch.zeros_like(shared), rule.distance(p[:t], q[:t], _raw(draft, q, logits, t)))
    p, q, x = _rows(draft, p)
    distance = p.new_zeros(k) if rule.exact else rule.distance(p[:k], q, _raw(draft, q, logits, k))
    accept = rule.accept_prob(p[:k], q, x, distance)
    m, weights = rule.keep(p, q, x, accept, rng)
    token = int(rng.draw(weights))
    t = min(m + 1, k)
    shared = overlap(p[:t], q[:t])
    if rule.exact:
        return list(range(m)), token, (shared, None, None)
    return list(range(m)), token, (shared, rule.tv_spent(p[:t], q[:t], x[:t], accept[:t]), distance[:t])


def _rows(draft: Draft, p: Rows) -> tuple[Tensor, Tensor, Tensor]:
    """p, q and the tokens of a chain, on one device; a deterministic draft has a one-hot q."""
    assert isinstance(p, Tensor) and draft.is_chain, "relaxed rules verify chains"  # noqa: PT018
    x = draft.tokens.to(p.device)
    return p, one_hot(x, p) if draft.probs is None else draft.probs, x


def _raw(draft: Draft, q: Tensor, logits: Tensor, count: int) -> Raw:
    """The unwarped logits of the first positions; a draft without any is as certain as its q."""
    return logits[:count], (q.log() if draft.logits is None else draft.logits)[:count]


def verify_greedy(draft: Draft, top: Tensor) -> tuple[list[int], int, list[float]]:
    """Exact verification where all distributions are one-hot: tokens are compared on the host.

    Args:
        draft: a chain or tree of n tokens.
        top: the target's token after the pending one and after each drafted one, ``[n + 1]``.

    Returns:
        The accepted nodes, the token after them, and Σ min(p, q) at the tested positions.
    """
    expected, row = top.tolist(), 0
    path: list[int] = []
    agreed: list[float] = []
    while children := draft.children[row]:
        node = children.get(expected[row])
        agreed.append(float(node is not None))
        if node is None:
            break
        path.append(node)
        row = node + 1
    return path, expected[row], agreed


def verify_tree(draft: Draft, p: Rows, rng: Rng) -> tuple[list[int], int]:
    """Exact verification of a deterministic tree: one draw a node; the draw that leaves the tree is emitted.

    Each emitted token is a draw from its own row of p, so the output has the target's distribution whatever the tree.

    Args:
        draft: tokens and parents; no probabilities.
        p: warped target rows ``[n + 1, vocab]``.
        rng: draws.

    Returns:
        The accepted path and the token after it.
    """
    # on an accelerator one draw for all rows and one transfer to the host; on a CPU rows are drawn as they are reached
    draws = rng.draw(p).tolist() if isinstance(p, Tensor) and not p.is_cpu else None
    path: list[int] = []
    row = 0
    while True:
        token = int(rng.draw(p[row])) if draws is None else draws[row]
        node = draft.children[row].get(token)
        if node is None:
            return path, token
        path.append(node)
        row = node + 1
