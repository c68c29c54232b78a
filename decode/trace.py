"""What happened: a record a round, and every metric as a function of the records."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice

import torch
from torch import Tensor

from decode.draft import Draft


def clustered_ratio(
    sums: Sequence[float], counts: Sequence[float], clusters: Sequence[int] | None = None
) -> tuple[float, float]:
    """Σsums / Σcounts over independent clusters (texts, or all texts of a prompt), and its linearised standard error.

    The positions of a text depend on each other, so a text is one observation; so do the texts of a prompt, so that a
    repeat of a deterministic text adds nothing.

    Args:
        sums: sum of the averaged values of each part.
        counts: number of positions of each part.
        clusters: the cluster that each part belongs to; each is its own if not given.

    Returns:
        The mean and its standard error; NaN where nothing was counted, or for the error of fewer than two clusters.
    """
    totals: dict[int, list[float]] = {}
    for cluster, s, c in zip(range(len(sums)) if clusters is None else clusters, sums, counts):
        total = totals.setdefault(cluster, [0.0, 0])
        total[0], total[1] = total[0] + s, total[1] + c
    kept = [(s, c) for s, c in totals.values() if c]
    n, whole = len(kept), sum(c for _, c in kept)
    if not whole:
        return math.nan, math.nan
    mean = sum(s for s, _ in kept) / whole
    if n < 2:
        return mean, math.nan
    spread = sum((s - mean * c) ** 2 for s, c in kept)
    return mean, math.sqrt(n / (n - 1) * spread) / whole


Values = Tensor | list[float]  # one number for each tested position


@dataclass
class Step:
    """One step of decoding, as handed to every adaptive part."""

    draft: Draft  # what was proposed
    path: list[int]  # accepted node indices, root to leaf
    token: int  # the token after the path: a correction, or the bonus token
    given_probs: Tensor | Callable[[], Tensor]  # gives `probs`; a function where they are rarely asked for
    logits: Tensor  # the same rows as `probs`, unwarped
    captured: Tensor | None = None  # the target's states that the drafter captures, of the same rows
    seconds: tuple[float, float] = (0.0, 0.0)  # time spent drafting and verifying
    # drafted tokens of every text whose round was made together with this one, its own included; empty: its own alone
    together: tuple[int, ...] = ()
    new: list[int] = field(default_factory=list)  # what the text grew by: `emitted`, cut at its end

    @cached_property
    def probs(self) -> Tensor:
        """Warped target rows ``[n + 1, vocab]``; row 0 follows the pending token, row i + 1 follows node i."""
        return self.given_probs() if callable(self.given_probs) else self.given_probs

    @property
    def drafted(self) -> int:
        """Number of drafted tokens k."""
        return len(self.draft)

    @property
    def depth(self) -> int:
        """Length of the draft's longest path; k on a chain."""
        return self.drafted if self.draft.is_chain else max(self.draft.depths(), default=0)

    @property
    def accepted(self) -> int:
        """Number of kept tokens m."""
        return len(self.path)

    @property
    def tested(self) -> int:
        """t = min(m + 1, k) on a chain; on a tree the depth reached, plus one if the node left had children."""
        if self.draft.is_chain:
            return min(self.accepted + 1, self.drafted)
        last = self.path[-1] if self.path else -1
        return self.accepted + (last in self.draft.parents)

    @property
    def emitted(self) -> list[int]:
        """The tokens this step adds to the text."""
        return [*(self.draft.ids[i] for i in self.path), self.token]

    @property
    def rejected(self) -> list[list[int]]:
        """For each token of `new` the drafted tokens that were rejected in its place."""
        whole = len(self.new) == len(self.path) + 1
        return [[] for _ in self.new[:-1]] + [self.rejected_at_end if whole else []] * bool(self.new)

    @property
    def rejected_at_end(self) -> list[int]:
        """The drafted tokens that were proposed for the place of the last emitted token."""
        last = self.path[-1] if self.path else -1
        return [t for t, parent in zip(self.draft.ids, self.draft.parents) if parent == last]

    @property
    def written_by(self) -> list[str]:
        """``draft``, ``correction`` (of a rejected draft) or ``target`` for each token of `new`."""
        return (["draft"] * self.accepted + ["correction" if self.rejected_at_end else "target"])[: len(self.new)]


@dataclass
class Trace:
    """Per-round records of one or more texts; tensors stay on the device until a metric is asked for."""

    drafted: list[int] = field(default_factory=list)  # k of each round
    accepted: list[int] = field(default_factory=list)  # m of each round
    tested: list[int] = field(default_factory=list)  # t of each round
    depth: list[int] = field(default_factory=list)  # longest path of each round's draft; its length on a chain
    cut: list[bool] = field(default_factory=list)  # the draft was shortened by budget, context or the text's end
    text: list[int] = field(default_factory=list)  # whose round it is; texts are the unit of standard errors
    # drafted tokens of each text that the round was made together with, its own included
    together: list[tuple[int, ...]] = field(default_factory=list)
    draft_seconds: list[float] = field(default_factory=list)
    verify_seconds: list[float] = field(default_factory=list)
    prefill_seconds: float = 0.0
    total_seconds: float = 0.0  # what the texts took; of what texts took together, each has its part
    tokens: int = 0
    # one value for each tested position of each round; None where nothing was measured
    overlap: list[Values | None] = field(default_factory=list)
    spent: list[Values | None] = field(default_factory=list)
    distance: list[Values | None] = field(default_factory=list)

    def close(
        self,
        step: Step,
        overlap: Values | None,
        spent: Values | None,
        distance: Values | None,
        *,
        cut: bool = False,
    ) -> None:
        """Add a step of the first text; what was measured holds one value for each tested position."""
        row = {
            "drafted": step.drafted,
            "accepted": step.accepted,
            "tested": step.tested,
            "depth": step.depth,
            "draft_seconds": step.seconds[0],
            "verify_seconds": step.seconds[1],
            "cut": cut,
            "text": 0,
            "together": step.together or (step.drafted,),
            "overlap": overlap,
            "spent": spent,
            "distance": distance,
        }
        for name, value in row.items():
            getattr(self, name).append(value)

    def extend(self, other: Trace, text: int | None = None) -> None:
        """Append the rounds of another trace, as those of text number `text`; without it, of texts not seen so far."""
        fresh = max(self.text, default=-1) + 1
        self.text += [fresh + own if text is None else text for own in other.text]
        for name, value in vars(other).items():
            if name != "text":
                setattr(self, name, getattr(self, name) + value)

    @property
    def rounds(self) -> int:
        """Target forwards after the prefill."""
        return len(self.drafted)

    def _mean(self, parts: list[Values | None]) -> tuple[float, float]:
        """Mean over positions, and its standard error over texts."""
        measured = [(text, torch.as_tensor(part)) for text, part in zip(self.text, parts) if part is not None]
        if not measured:
            return math.nan, math.nan
        values = torch.cat([part.flatten() for _, part in measured]).double().tolist()
        place = iter(values)
        sums = [sum(islice(place, part.numel())) for _, part in measured]
        return clustered_ratio(sums, [part.numel() for _, part in measured], [text for text, _ in measured])

    def metrics(self) -> dict[str, float]:
        """The numbers of reports, by their defined names (the formulas stand in `FORMULAS`)."""
        k, m, t, r = sum(self.drafted), sum(self.accepted), sum(self.tested), self.rounds
        alpha, alpha_se = self._mean(self.overlap)
        spent, _ = self._mean(self.spent)
        distance, _ = self._mean(self.distance)
        return {
            "rounds": r,
            "tokens": self.tokens,
            "alpha": alpha,
            "alpha_se": alpha_se,
            "accepted_per_tested": m / t if t else math.nan,
            "accepted_per_drafted": m / k if k else math.nan,
            "block_efficiency": (m + r) / r if r else math.nan,
            "drafted_per_round": k / r if r else math.nan,
            "tv_spent": 0.0 if math.isnan(spent) else spent,
            "js_distance": distance,
            "tokens_per_second": self.tokens / self.total_seconds if self.total_seconds else math.nan,
            "prefill_seconds": self.prefill_seconds,
            "draft_seconds": sum(self.draft_seconds),
            "verify_seconds": sum(self.verify_seconds),
            "total_seconds": self.total_seconds,
        }

    def acceptance_by_position(self) -> list[dict[str, float]]:
        """Acceptance at each draft position i, over the rounds whose draft neither budget nor text's end cut short.

        ``marginal`` is the share of these rounds (those that drafted anything) that accept i tokens or more, so that
        1 + Σ marginal is their mean number of tokens, the target's own included; ``conditional`` the share of those
        accepted among the ``tested`` ones, which drafted position i and accepted all before it. Errors are over texts.
        """
        rounds = zip(self.text, self.accepted, self.depth, self.cut)
        whole = [(text, m, d) for text, m, d, cut in rounds if d and not cut]

        def share(kept: list[tuple[int, bool]]) -> tuple[float, float]:
            return clustered_ratio([float(x) for _, x in kept], [1] * len(kept), [text for text, _ in kept])

        rows = []
        for i in range(max((d for _, _, d in whole), default=0)):
            tested = [(text, m > i) for text, m, d in whole if m >= i and d > i]
            conditional, conditional_se = share(tested)
            marginal, marginal_se = share([(text, m > i) for text, m, _ in whole])
            rows.append(
                {
                    "position": i + 1,
                    "rounds": len(whole),
                    "tested": len(tested),
                    "conditional": conditional,
                    "conditional_se": conditional_se,
                    "marginal": marginal,
                    "marginal_se": marginal_se,
                }
            )
        return rows


FORMULAS = {
    "alpha": "mean of Σₓ min(p(x), q(x)) over tested positions (greedy: agreement of the argmax)",
    "offline_alpha": "mean of Σₓ min(p(x), q(x)) over every response position of texts the target generated",
    "accepted_per_tested": "Σm / Σt",
    "accepted_per_drafted": "Σm / Σk",
    "block_efficiency": "Σ(m + 1) / rounds: tokens per target forward, bonus included",
    "tv_spent": "mean of a(x) − min(1, p(x)/q(x)) at the tested token, a(x) the rule's acceptance; 0 for exact rules",
    "js_distance": "mean of √JSD (base 2) between p and q at tested positions",
    "speedup": "tokens/s over the same loop without a drafter: median of the ratios paired by prompt",
    "speedup_vs_generate": "tokens/s over model.generate, paired by prompt, median",
    "cost_ratio": "c: one draft forward, in one-token target forwards",
    "verify_cost": "v(n): an n-token target forward, in one-token target forwards",
    "predicted_speedup": "tokens per round / (c · drafted + v(drafted + 1))",
}
