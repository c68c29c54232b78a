"""Acceptance rules, and the verification of chains and trees: which drafted nodes are kept, which token follows."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from decode.core.draft import Draft, Drafts, Ids, fetch, upload
from decode.core.round import Round
from decode.core.sampling import History, LogitsWarper, Numbers, Prefixes, one_hot
from decode.errors import UserError

LN2 = math.log(2)
Raw = tuple[Tensor, Tensor]  # unwarped logits of target and draft, ``[k, vocab]`` each


def pick(rows: Tensor, tokens: Tensor) -> Tensor:
    """The element of each row that a token names: ``[..]`` from ``[.., vocab]``."""
    return rows.gather(-1, tokens[..., None]).squeeze(-1)


def at(rows: Tensor, index: Tensor) -> Tensor:
    """The row of each text at its own index ``[n]``: ``[n, ..]`` from ``[n, k, ..]``."""
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

    def __init_subclass__(cls) -> None:
        """What is derived from an exact rule is not exact, unless it says so itself."""
        cls.exact = cls.__dict__.get("exact", False)

    def __init__(self, options: Any = None, greedy: bool = False) -> None:
        """By name a rule is made with the `decode.options.MethodOptions` and whether decoding is greedy."""

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

    exact = True

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
        w_a, w_r = {"midpoint": (1, 1), "a": (1, 0), "b": (n_a, n_r), "c": self.sequences}[self.variant]
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
        return (kept - kept.sum(-1, keepdim=True) * p).abs().sum(-1) / 2


MEASURED = ("overlap", "spent", "distance")


@dataclass
class Verified:
    """What is kept of one text's draft."""

    path: list[int]  # the accepted nodes
    token: int  # the token after them
    # at the tested positions; None where nothing was measured
    overlap: list[float] | None = None
    spent: list[float] | None = None
    distance: list[float] | None = None


def follow(draft: Draft, choose: Callable[[int, Ids], int]) -> tuple[Ids, int]:
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

    Chains are verified by `AcceptanceRule.keep`. In trees, and in greedy drafts that have to be exact, the target's own
    choice after the pending token is followed from node to node; the choice that leaves the draft is emitted. Each
    emitted token is a draw from its own row of p, so the output has the target's distribution whatever the tree.

    Args:
        drafts: of the round.
        tokens: what the target has read, the pending token of each text and its draft, long ``[rows]``.
        logits: the target's after each of them, ``[rows, vocab]``.
        warp: logits to probabilities.
        rules: of each text, of one kind.
        rngs: of each text.
        histories: of each text, without its draft.
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
        self._results: dict[str, Tensor] = {}  # what the host reads
        if drafts.trees is None and drafts.tokens.shape[1]:
            self._results["ids"] = drafts.tokens
        if warp.greedy and rules[0].exact:
            self._results["choices"] = top = warp.top(logits, self._prefixes())
            self._results["largest"] = pick(logits, top)
            return
        self._results["largest"] = logits.amax(-1)
        self._numbers = rngs[0].together(rngs, [n + 1 for n in self.lengths], logits.device)
        p = warp(logits, self._prefixes())
        if drafts.trees is None:
            self._launch_chains(p)
        else:
            self._launch_trees(p, drafts.trees)

    def _prefixes(self) -> Prefixes | None:
        """The tokens before each row."""
        if not self.warp.needs_prefix:
            return None
        places, lengths, longest = list[list[int]](), list[int](), max(self.lengths)
        for start, draft in zip(self.starts, self.drafts.trees or [Draft([0] * n) for n in self.lengths]):
            for path in draft.paths():  # filled up with the pending token
                places.append([start + at for at in path] + [start] * (longest - len(path)))
                lengths.append(len(path))
        paths = self.tokens[upload(places, self.tokens.device)]
        return Prefixes(self.histories, [n + 1 for n in self.lengths], paths, lengths)

    def _launch_trees(self, p: Tensor, trees: Sequence[Draft]) -> None:
        """Draw the target's token after every row; on a CPU a draw waits until its row is reached."""
        self._p = p
        owners = [text for text, n in enumerate(self.lengths) for _ in range(n + 1)]
        parents = [start + parent + 1 for start, tree in zip(self.starts, trees) for parent in tree.parents]
        nodes = [start + 1 + node for start, n in zip(self.starts, self.lengths) for node in range(n)]
        above, places = upload([parents, nodes], p.device)
        self._results["masses"] = p[above, self.tokens[places]]
        if not p.is_cpu:
            depths = [depth for tree in trees for depth in [0, *tree.depths()]]
            self._results["choices"] = self._numbers.draw(p, depths, owners)

    def _followed(self, drafts: Sequence[Draft], results: dict[str, Any]) -> list[Verified]:
        """Follow the choices through the drafts."""
        found, choices, masses = list[Verified](), results.get("choices"), results.get("masses", [])
        for text, (draft, start) in enumerate(zip(drafts, self.starts)):

            def choose(row: int, path: Ids) -> int:
                at = start + row  # noqa: B023
                if choices is not None:
                    return choices[at]
                return int(self._numbers.draw(self._p[at : at + 1], len(path), [text]))  # noqa: B023

            path, token = follow(draft, choose)
            if self.warp.greedy:
                shared = [1.0] * len(path) + [0.0] * ((path[-1] if path else -1) in draft.parents)
            else:  # under a one-hot q, Σ min(p, q) is p of all tokens drafted at a position
                children, first = draft.children(), start - text
                tested = [children[node + 1].values() for node in (-1, *path)]
                shared = [sum(masses[first + node] for node in nodes) for nodes in tested if nodes]
            found.append(Verified(path, token, shared or None))
        return found

    def _launch_chains(self, p: Tensor) -> None:
        """Decide how much of each chain is kept, and draw the token after it."""
        drafts, x, device = self.drafts, self.drafts.tokens, p.device
        if not x.shape[1]:
            self._results |= {"kept": upload(self.lengths, device), "token": self._numbers.draw(p)}
            return
        p, rule = self._padded(p), self.rules[0].of_texts(self.rules, device)
        before, q = p[:, :-1], one_hot(x.flatten(), p).unflatten(0, x.shape)
        copied = upload([[i in drafts.copied] for i in range(len(x))], device, torch.bool)[..., None]
        raw, distance = q, before[..., 0]
        if not rule.exact:
            raw = q.log() if drafts.logits is None else torch.where(copied, q.log(), drafts.logits)
        if drafts.probs is not None:
            q = torch.where(copied, q, drafts.probs)
        if not rule.exact:
            distance = rule.distance(before, q, (self._padded(self.logits)[:, :-1], raw))
        accept = rule.accept_prob(before, q, x, distance)
        kept, weights = rule.keep(p, q, x, accept, self.lengths, self._numbers)
        self._results |= {"kept": kept, "token": self._numbers.draw(weights), "overlap": overlap(before, q)}
        if not rule.exact:
            self._results |= {"spent": rule.tv_spent(before, q, x, accept), "distance": distance}

    def _padded(self, rows: Tensor) -> Tensor:
        """``[B, k + 1, ..]`` from the rows of all texts; those that a text lacks are its last one."""
        k = self.drafts.tokens.shape[1]
        if min(self.lengths) == k:
            return rows.unflatten(0, (len(self.lengths), k + 1))
        places = [[start + min(i, n) for i in range(k + 1)] for start, n in zip(self.starts, self.lengths)]
        return rows[upload(places, rows.device)]

    def _decided(self, results: dict[str, Any]) -> list[Verified]:
        """Hand out what was decided of chains."""
        found = []
        for i, (m, token, n) in enumerate(zip(results["kept"], results["token"], self.lengths)):
            measured = [results[name][i][: min(m + 1, n)] or None if name in results else None for name in MEASURED]
            found.append(Verified(list(range(m)), token, *measured))
        return found

    def read(self) -> tuple[list[Draft], list[Verified]]:
        """The drafts of all texts on the host, and what is kept of each; an accelerator is waited for once.

        Raises:
            UserError: logits of NaN or +inf.
        """
        results = dict(zip(self._results, fetch(*self._results.values())))
        if not math.isfinite(sum(results["largest"])):
            row = next(row for row, value in enumerate(results["largest"]) if not math.isfinite(value))
            text = self.histories[bisect_right(self.starts, row) - 1]
            raise UserError(
                f"the target's logits are NaN or +inf after {len(text.ids)} tokens; check its weights, or load it in "
                "bfloat16 or float32"
            )
        drafts = self.drafts.on_host(results.get("ids", [[]] * len(self.lengths)))
        return drafts, self._decided(results) if "kept" in results else self._followed(drafts, results)
