"""Acceptance rules, and the verification of chains and trees: which drafted nodes are kept, which token follows."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from decode.core.draft import Draft, Drafts, Ids, fetch, upload
from decode.core.round import Round
from decode.core.sampling import History, LogitsWarper, Numbers, Prefixes, argmax, one_hot

LN2 = math.log(2)
Raw = tuple[Tensor, Tensor]  # unwarped logits of target and draft, ``[k, vocab]`` each


def pick(rows: Tensor, tokens: Tensor) -> Tensor:
    """The element of each row that a token names: ``[..]`` from ``[.., vocab]``."""
    return rows.gather(-1, tokens[..., None]).squeeze(-1)


def at(rows: Tensor, index: Tensor) -> Tensor:
    """The row of each text at its own index ``[n]``: ``[n, ..]`` from ``[n, k, ..]``."""
    if len(rows) == 1 and rows.is_cpu:
        return rows[:, int(index)]
    return rows[torch.arange(len(rows), device=rows.device), index]


def ratio(p: Tensor, q: Tensor, x: Tensor) -> Tensor:
    """min(1, p(x)/q(x)) ``[..]``: the exact acceptance probability (Leviathan et al., algorithm 1)."""
    return (pick(p, x) / pick(q, x)).clamp(max=1.0)


def overlap(p: Tensor, q: Tensor) -> Tensor:
    """Σₓ min(p, q) ``[..]`` over the shared ids of ``p, q [.., vocab]``."""
    shared = min(p.shape[-1], q.shape[-1])
    return torch.minimum(p[..., :shared], q[..., :shared].to(p.device)).sum(-1)


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
    """Which drafted tokens are kept, and how a rejected position is corrected.

    # Shapes
    n texts of a round, k drafted tokens; rows past a text's own tokens are filled up with any numbers.
    """

    exact: bool = False  # the output has the target's distribution
    unwarped: bool = False  # `distance` compares the distributions before warping, which greedy decoding needs
    corrects_from_p: bool = False  # a rejected token is replaced by one from p, not from the residual

    @property
    def is_exact_now(self) -> bool:
        """Whether the rule decides as the exact one does, for now."""
        return self.exact

    def of_texts(self, rules: Sequence[Any], device: torch.device) -> AcceptanceRule:
        """The rule that decides for texts together, each of which may have learned another one."""
        return self

    def distance(self, p: Tensor, q: Tensor, raw: Raw) -> Tensor:
        """Jensen–Shannon distance ``[.., k]`` of each position's distributions."""
        return js_distance(*(softmax(raw) if self.unwarped else (p, q)))

    def accept_prob(self, p: Tensor, q: Tensor, x: Tensor, distance: Tensor) -> Tensor:
        """Probability ``[.., k]`` of keeping each drafted token ``x [.., k]``.

        Args:
            p: the target's warped rows ``[.., k, vocab]``.
            q: the draft's.
            x: the drafted tokens.
            distance: `distance` at each position.
        """
        return ratio(p, q, x)

    def residual(self, p: Tensor, q: Tensor) -> Tensor:
        """Weights ``[.., vocab]`` of the token that replaces a rejected one: [p − q]₊, or p where that has no mass."""
        if self.corrects_from_p:
            return p
        rest = (p - q).clamp_min_(0)
        return torch.where(rest.sum(-1, keepdim=True) > 0, rest, p)

    def keep(
        self, p: Tensor, q: Tensor, x: Tensor, accept: Tensor, lengths: Sequence[int], numbers: Numbers
    ) -> tuple[Tensor, Tensor]:
        """How many drafted tokens are kept ``[n]``, and the weights ``[n, vocab]`` of the token after them.

        Args:
            p: the target's warped rows ``[n, k + 1, vocab]``.
            q: the draft's, ``[n, k, vocab]``.
            x: the drafted tokens, ``[n, k]``.
            accept: `accept_prob` of each.
            lengths: drafted tokens of each text.
            numbers: the texts' choices from number 1 on.
        """
        m = numbers.accepted(accept, lengths, 1)
        return m, self._after(p, q, m, lengths)

    def _after(self, p: Tensor, q: Tensor, m: Tensor, lengths: Sequence[int], scale: Tensor | None = None) -> Tensor:
        """Weights of the token after the m kept ones: the residual, with p scaled, or p where all were kept."""
        row, n = at(p, m), upload(lengths, p.device)
        if p.is_cpu and bool((m == n).all()):
            return row
        rest = self.residual(row if scale is None else row * at(scale, m)[:, None], at(q, m.clamp(max=q.shape[1] - 1)))
        return torch.where((m == n)[:, None], row, rest)

    def tv_spent(self, p: Tensor, q: Tensor, x: Tensor, accept: Tensor) -> Tensor:
        """Estimate ``[.., k]`` of the total variation from p that the rule causes: a(x) − min(1, p(x)/q(x))."""
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

    def keep(
        self, p: Tensor, q: Tensor, x: Tensor, accept: Tensor, lengths: Sequence[int], numbers: Numbers
    ) -> tuple[Tensor, Tensor]:
        """See `AcceptanceRule.keep`; `accept` is not read."""
        k, n = x.shape[1], upload(lengths, p.device)[:, None]
        logs = (pick(p[:, :-1], x) / pick(q, x)).double().log().cumsum(1)
        # Pᵢ = exp(Sᵢ − max(0, S₁, …, Sᵢ)), which is 1, to the last bit, where Sᵢ is the largest
        reach = F.pad((logs - logs.cummax(1).values.clamp_min(0)).exp(), (1, 0), value=1.0).to(p.dtype)
        rest = (reach[:, :-1, None] * p[:, :-1] - q).clamp_min_(0).sum(-1)
        miss = 1 - reach
        fail = (miss[:, :-1] / (rest + miss[:, :-1])).nan_to_num(nan=0.0)
        # the tests are independent: read from the end, the first that does not fail is the longest part that passes
        place = n - torch.arange(k, device=p.device)
        turned = torch.where(place == n, miss.gather(1, n), fail.gather(1, place.clamp(0, k - 1)))
        m = n[:, 0] - numbers.accepted(turned, lengths, 1)
        return m, self._after(p, q, m, lengths, reach)


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
    threshold: Any = None  # a fixed θ instead of a learned one, a number or one for each text, ``[n, 1]``
    unwarped: bool = False
    accepted: list[float] = field(default_factory=lambda: [0.0, 0.0])
    rejected: list[float] = field(default_factory=lambda: [0.0, 0.0])
    sequences: list[int] = field(default_factory=lambda: [0, 0])

    def __post_init__(self) -> None:
        self._seen = [False, False]

    @property
    def is_exact_now(self) -> bool:
        """While θ is 0."""
        return self.theta <= 0

    def of_texts(self, rules: Sequence[Any], device: torch.device) -> AcceptanceRule:
        """See `AcceptanceRule.of_texts`."""
        return replace(self, threshold=upload([[rule.theta] for rule in rules], device, torch.float64))

    @property
    def theta(self) -> Any:
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
        return torch.where(distance < self.theta, torch.ones_like(p[..., 0]), ratio(p, q, x))

    def observe(self, round: Round) -> None:
        """Record the distances of the accepted positions and of the first rejected one."""
        if self.threshold is not None or round.distance is None:
            return
        kept = round.distance[: round.accepted], round.distance[round.accepted :]
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
    unwarped = corrects_from_p = True

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
        kept = q * (p > self._limit(p)[..., None])
        mass = kept.sum(-1, keepdim=True)
        return (kept - mass * p).abs().sum(-1) / 2


@dataclass
class Verified:
    """What is kept of one text's draft."""

    path: list[int]  # the accepted nodes
    token: int  # the token after them
    # at the tested positions; None where nothing was measured
    overlap: list[float] | None = None
    spent: list[float] | None = None
    distance: list[float] | None = None


class NotFiniteError(ValueError):
    """The target's logits are NaN or +inf.

    Attributes:
        text: number of the first text whose logits are.
    """

    def __init__(self, text: int) -> None:
        super().__init__(f"logits of text {text} are not finite")
        self.text = text


def follow(draft: Draft, choose: Callable[[int, list[int]], int]) -> tuple[list[int], int]:
    """The path of a deterministic draft that the target's own choices take, and the choice that leaves the draft.

    `choose` is given a row, 0 after the pending token and i + 1 after node i, and the nodes down to it; it is called
    once for each row that the path reaches.
    """
    children, path, row = draft.children(), list[int](), 0
    while True:
        token = choose(row, path)
        node = children[row].get(token)
        if node is None:
            return path, token
        path.append(node)
        row = node + 1


class Verification:
    """The verification of a round's drafts, launched for all texts at once; the host reads its result once (`read`).

    Drawn drafts, and chains of a relaxed rule, are verified by `AcceptanceRule.keep`. In a deterministic draft the
    target's own choice after the pending token is followed from node to node; the choice that leaves the draft is
    emitted. Each emitted token is a draw from its own row of p, so the output has the target's distribution whatever
    the tree. On a CPU such a row is warped and drawn from when it is reached.

    Args:
        drafts: of the round.
        tokens: what the target has read, the pending token of each text and its draft, long ``[rows]``.
        logits: the target's after each of them, ``[rows, vocab]``.
        warp: logits to probabilities.
        rules: of each text, of one kind.
        rngs: of each text.
        histories: of each text, without its draft; read where the warp needs a prefix.
    """

    def __init__(
        self,
        drafts: Drafts,
        tokens: Tensor,
        logits: Tensor,
        warp: LogitsWarper,
        rules: Sequence[AcceptanceRule],
        rngs: Sequence[Any],
        histories: Sequence[History],
    ) -> None:
        self.drafts, self.tokens, self.logits, self.warp = drafts, tokens, logits, warp
        self.rules, self.histories, self.lengths = rules, histories, drafts.lengths
        self.starts = [0, *accumulate(n + 1 for n in self.lengths)]
        exact = rules[0].exact
        self.chains = [
            i
            for i, (n, rule) in enumerate(zip(self.lengths, rules))
            if n and (i in drafts.drawn or not rule.is_exact_now)
        ]
        self.walks = [i for i in range(len(rules)) if i not in {*self.chains}]
        self.top = argmax(logits) if warp.greedy and not warp.needs_prefix else None
        largest = logits.amax(-1) if self.top is None else pick(logits, self.top)
        self._results = [largest.sum(dtype=torch.float32)]
        self._ids_at = self._add(drafts.tokens) if drafts.drafts is None else 0
        if self.walks:
            self._launch_walks(rngs, measures=not exact)
        if self.chains:
            self._launch_chains([rngs[i] for i in self.chains])

    def _add(self, *results: Tensor) -> int:
        """Have the host read these too; where they will be."""
        self._results += results
        return len(self._results) - len(results)

    def _rows(self, texts: Sequence[int], values: Tensor) -> Tensor:
        """The rows of ``values [rows, ..]`` that belong to these texts."""
        if len(texts) == len(self.rules):
            return values
        return values.index_select(
            0, upload([r for i in texts for r in range(self.starts[i], self.starts[i + 1])], values.device)
        )

    def _prefixes(self, texts: Sequence[int]) -> Prefixes | None:
        """The tokens before each row of these texts."""
        if not self.warp.needs_prefix:
            return None
        drafts, places, lengths = self.drafts.drafts, list[list[int]](), list[int]()
        for i in texts:
            chain = drafts is None or drafts[i].is_chain
            paths = [range(1, row + 1) for row in range(self.lengths[i] + 1)] if chain else drafts[i].paths()  # type: ignore[index]
            longest, start = max(self.lengths), self.starts[i]  # a path is filled up with the pending token
            places += [[start + at for at in path] + [start] * (longest - len(path)) for path in paths]
            lengths += map(len, paths)
        paths = self.tokens[upload(places, self.tokens.device)]
        return Prefixes([self.histories[i] for i in texts], [self.lengths[i] + 1 for i in texts], paths, lengths)

    # -- deterministic drafts ------------------------------------------------------------------------------------------

    def _launch_walks(self, rngs: Sequence[Any], *, measures: bool) -> None:
        """Choose the target's token after every row, where not only those that are reached are."""
        texts, device, drafts = self.walks, self.logits.device, self.drafts.drafts
        self._numbers: Any = None
        self._p: Tensor | None = None
        self._walks_at = self._masses_at = self._distances_at = 0
        if self.warp.greedy:
            top = self.warp.top(self.logits, self._prefixes(range(len(self.rules)))) if self.top is None else self.top
            self._walks_at = self._add(self._rows(texts, top))
            if not measures:
                return
        else:
            counts = [1 + (self.lengths[i] if drafts is None else drafts[i].depth) for i in texts]
            self._numbers = rngs[0].together([rngs[i] for i in texts], counts, device)
            if self.logits.is_cpu and not measures:
                return
        self._p = p = self.warp(self._rows(texts, self.logits), self._prefixes(texts))
        rows = [(at, depth) for at, i in enumerate(texts) for depth in [0, *self._draft(i).depths()]]
        if not self.warp.greedy and not p.is_cpu:
            owners, steps = zip(*rows)
            self._walks_at = self._add(self._numbers.draw(p, steps, owners))
        above, mine, at = list[int](), list[int](), 0
        for i in texts:
            above += [at + parent + 1 for parent in self._draft(i).parents]
            mine += range(self.starts[i] + 1, self.starts[i + 1])
            at += self.lengths[i] + 1
        before, tokens = p.index_select(0, upload(above, device)), self.tokens.index_select(0, upload(mine, device))
        self._masses_at = self._add(pick(before, tokens))
        if measures:
            q, logits = one_hot(tokens, p), self._rows(texts, self.logits).index_select(0, upload(above, device))
            raw = q.log()
            if self.drafts.logits is not None:
                k = self.drafts.tokens.shape[1]
                nodes = [i * k + node for i in texts for node in range(self.lengths[i])]
                raw = self.drafts.logits.flatten(0, 1).index_select(0, upload(nodes, device))
            self._distances_at = self._add(self.rules[0].distance(before, q, (logits, raw)))

    def _draft(self, text: int) -> Draft:
        """The shape of a text's draft; of a chain on the device without its tokens."""
        return Draft([0] * self.lengths[text]) if self.drafts.drafts is None else self.drafts.drafts[text]

    def _read_walks(self, found: list[Verified], drafts: Sequence[Draft], results: list[Any]) -> None:
        """Follow the choices through the drafts."""
        first = node_at = 0
        for at, i in enumerate(self.walks):
            draft, ids, rows = drafts[i], drafts[i].ids, dict[int, Tensor]()

            def choose(row: int, path: Ids) -> int:
                if self._walks_at:
                    return results[self._walks_at][first + row]  # noqa: B023
                rows[row] = self._row(i, first + row, row, [ids[node] for node in path])  # noqa: B023
                return int(self._numbers.draw(rows[row], len(path), [at]))  # noqa: B023

            path, token = follow(draft, choose)
            # under a one-hot q, Σ min(p, q) is p of all tokens drafted at a position
            masses, table = list[float](), draft.children()
            for depth, row in enumerate([0, *(node + 1 for node in path)]):
                if not (below := table[row]):
                    continue
                if self._masses_at:
                    masses.append(sum(results[self._masses_at][node_at + node] for node in below.values()))
                else:
                    masses.append(float(rows[row][0, list(below)].sum()) if rows else float(depth < len(path)))
            found[i] = Verified(path, token, masses or None)
            if self._distances_at and masses and draft.is_chain:
                distances = results[self._distances_at][node_at : node_at + len(masses)]
                found[i] = replace(found[i], spent=[0.0] * len(masses), distance=distances)
            first, node_at = first + len(draft) + 1, node_at + len(draft)

    def _row(self, text: int, at: int, row: int, path: Ids) -> Tensor:
        """p after a node of a text, ``[1, vocab]``, `at` among the rows that are walked."""
        if self._p is not None:
            return self._p[at : at + 1]
        place, prefixes = self.starts[text] + row, None
        if self.warp.needs_prefix:
            prefixes = Prefixes([self.histories[text]], None, upload([path], self.logits.device) if path else None)
        return self.warp(self.logits[place : place + 1], prefixes)

    # -- drawn drafts, and relaxed rules -------------------------------------------------------------------------------

    def _launch_chains(self, rngs: Sequence[Any]) -> None:
        """Decide how much of each chain is kept, and draw the token after it."""
        texts, lengths, device = self.chains, [self.lengths[i] for i in self.chains], self.logits.device
        rule = self.rules[0].of_texts([self.rules[i] for i in texts], device)
        k = max(lengths)
        x = self._of_chains(self.drafts.tokens)[:, :k]
        p = self._padded(self.warp(self._rows(texts, self.logits), self._prefixes(texts)), lengths)
        q, raw = self._drawn_from(x, p)
        logits = None if rule.exact else self._padded(self._rows(texts, self.logits), lengths)[:, :k]
        distance = q if logits is None else rule.distance(p[:, :k], q, (logits, q.log() if raw is None else raw))
        accept = rule.accept_prob(p[:, :k], q, x, distance)
        numbers = rngs[0].together(rngs, [n + 1 for n in lengths], device)
        m, weights = rule.keep(p, q, x, accept, lengths, numbers)
        t = min(int(m.max()) + 1, k) if p.is_cpu else k  # where reading is free, only what was tested is measured
        shared = overlap(p[:, :t], q[:, :t])
        self._chains_at = self._add(m, numbers.draw(weights), shared)
        if not rule.exact:
            self._add(rule.tv_spent(p[:, :t], q[:, :t], x[:, :t], accept[:, :t]), distance[:, :t])

    def _padded(self, rows: Tensor, lengths: Sequence[int]) -> Tensor:
        """``[n, k + 1, ..]`` from the rows of n texts; those that a text lacks are its last one."""
        k = max(lengths)
        if min(lengths) == k:
            return rows.unflatten(0, (len(lengths), k + 1))
        firsts = accumulate((n + 1 for n in lengths), initial=0)
        return rows[
            upload([[first + min(i, n) for i in range(k + 1)] for first, n in zip(firsts, lengths)], rows.device)
        ]

    def _drawn_from(self, x: Tensor, p: Tensor) -> tuple[Tensor, Tensor | None]:
        """The distributions of the drafted tokens ``x [n, k]``, of deterministic chains one-hot, and raw logits."""
        drafts, k = self.drafts, x.shape[1]
        q = (
            one_hot(x.flatten(), p).unflatten(0, x.shape)
            if drafts.probs is None
            else self._of_chains(drafts.probs)[:, :k]
        )
        return q, None if drafts.logits is None else self._of_chains(drafts.logits)[:, :k]

    def _of_chains(self, values: Tensor) -> Tensor:
        """Of ``values [B, ..]`` those of the texts whose drafts are verified as chains."""
        whole = len(self.chains) == len(values)
        return values if whole else values.index_select(0, upload(self.chains, values.device))

    def _read_chains(self, found: list[Verified], results: list[Any]) -> None:
        """Hand out what was decided."""
        results = results[self._chains_at :]
        for i, m, token, *measured in zip(self.chains, *results):
            t = min(m + 1, self.lengths[i])
            found[i] = Verified(list(range(m)), token, *(values[:t] if t else None for values in measured))

    def read(self) -> tuple[list[Draft], list[Verified]]:
        """The drafts of all texts on the host, and what is kept of each; an accelerator is waited for once.

        Raises:
            NotFiniteError: logits of NaN or +inf.
        """
        results = fetch(*self._results)
        if not math.isfinite(results[0]):
            texts = self.logits.split([n + 1 for n in self.lengths])
            sums = [rows.amax(-1).sum(dtype=torch.float32).item() for rows in texts]
            raise NotFiniteError(next(i for i, value in enumerate(sums) if not math.isfinite(value)))
        drafts = self.drafts.on_host(results[self._ids_at])
        found: list[Any] = [None] * len(drafts)
        if self.walks:
            self._read_walks(found, drafts, results)
        if self.chains:
            self._read_chains(found, results)
        return drafts, found
