"""What happened in a round of decoding, and every metric as a function of rounds."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from decode.core.draft import Draft, Ids


@dataclass(frozen=True)
class Round:
    """A verified round. It is made once and never changed; the list of a text's rounds is its trace.

    It holds what the text can hold: nothing of a draft behind a token, a string or a budget that ends the text counts.
    """

    draft: Draft  # what was proposed
    path: list[int]  # accepted nodes, root to leaf
    token: int  # the token after the path: a correction, or the bonus token
    new: Ids  # what the text grew by: the accepted tokens and this one, or those up to the text's end
    cut: bool = False  # the draft was shortened by the budget, the context or the text's end
    seconds: tuple[float, float] = (0.0, 0.0)  # drafting and verifying; of texts decoded together, an equal share
    # measured at the tested positions; None where nothing was
    overlap: list[float] | None = None  # Σ min(p, q)
    spent: list[float] | None = None  # total variation spent by a relaxed rule
    distance: list[float] | None = None  # Jensen–Shannon distance, as the acceptance rule measures it

    @property
    def drafted(self) -> int:
        """Number of drafted tokens n."""
        return len(self.draft)

    @property
    def depth(self) -> int:
        """Length of the draft's longest path; n on a chain."""
        return self.draft.depth

    @property
    def accepted(self) -> int:
        """Number of accepted tokens m."""
        return len(self.path)

    @property
    def tested(self) -> int:
        """The depth reached, plus one if the node left had children; on a chain t = min(m + 1, n)."""
        return self.accepted + (self.last in self.draft.parents)

    @property
    def last(self) -> int:
        """The last accepted node; -1, the pending token, where there is none."""
        return self.path[-1] if self.path else -1

    @property
    def rejected_at_end(self) -> Ids:
        """The drafted tokens that were proposed for the place of the last emitted token."""
        return [token for token, parent in zip(self.draft.ids, self.draft.parents) if parent == self.last]

    @property
    def rejected(self) -> list[Ids]:
        """For each token of `new` the drafted tokens that were rejected in its place."""
        at_end = self.rejected_at_end if len(self.new) == len(self.path) + 1 else []
        return [*([] for _ in self.new[1:]), at_end]

    @property
    def written_by(self) -> list[str]:
        """``draft``, ``correction`` (of a rejected draft) or ``target`` for each token of `new`."""
        return (["draft"] * self.accepted + ["correction" if self.rejected_at_end else "target"])[: len(self.new)]


def clustered_ratio(
    sums: Sequence[float], counts: Sequence[float], clusters: Sequence[int] = ()
) -> tuple[float, float]:
    """Σsums / Σcounts over independent clusters (texts, or all texts of a prompt), and its linearised standard error.

    The positions of a text depend on each other, so a text is one observation; so do the texts of a prompt, so that a
    repeat of a deterministic text adds nothing. Each part is its own cluster if none are given. The mean is NaN where
    nothing was counted, its error that of fewer than two clusters.
    """
    _, place = np.unique(clusters or range(len(sums)), return_inverse=True)
    totals, counted = np.bincount(place, sums), np.bincount(place, counts)
    n, positions = np.count_nonzero(counted), counted.sum()
    if not positions:
        return math.nan, math.nan
    mean = float(totals.sum() / positions)
    if n < 2:
        return mean, math.nan
    return mean, math.sqrt(n / (n - 1) * ((totals - mean * counted) ** 2).sum()) / float(positions)


Texts = Sequence[Sequence[Round]]  # the rounds of each text


def metrics(texts: Texts, clusters: Sequence[int] = ()) -> dict[str, float]:
    """The numbers of reports, by their defined names (see `FORMULAS`); clusters are the unit of standard errors."""

    def mean(name: str) -> tuple[float, float]:  # over positions
        parts = [[value for r in rounds for value in getattr(r, name) or ()] for rounds in texts]
        return clustered_ratio([*map(sum, parts)], [*map(len, parts)], clusters)

    rounds = [r for each in texts for r in each]
    tokens = sum(len(r.new) for r in rounds)
    n, m, t = (sum(getattr(r, name) for r in rounds) for name in ("drafted", "accepted", "tested"))
    (alpha, alpha_se), (spent, _), (distance, _) = map(mean, ("overlap", "spent", "distance"))
    return {
        "rounds": len(rounds),
        "tokens": tokens,
        "alpha": alpha,
        "alpha_se": alpha_se,
        "accepted_per_tested": m / t if t else math.nan,
        "accepted_per_drafted": m / n if n else math.nan,
        "accepted_length": tokens / len(rounds) if rounds else math.nan,
        "drafted_per_round": n / len(rounds) if rounds else math.nan,
        "tv_spent": 0.0 if math.isnan(spent) else spent,
        "js_distance": distance,
        "draft_seconds": sum(r.seconds[0] for r in rounds),
        "verify_seconds": sum(r.seconds[1] for r in rounds),
    }


def acceptance_by_position(texts: Texts) -> list[dict[str, float]]:
    """Acceptance at each draft position i, over the rounds whose draft neither budget nor text's end cut short.

    ``marginal`` is the share of these rounds (those that drafted anything) that accept i tokens or more, so that
    1 + Σ marginal is their mean number of tokens, the target's own included; ``conditional`` the share of those
    accepted among the ``tested`` ones, which drafted position i and accepted all before it.
    """
    full = [(r.accepted, r.depth) for rounds in texts for r in rounds if r.drafted and not r.cut]
    rows = []
    for i in range(max((depth for _, depth in full), default=0)):
        tested = [m > i for m, depth in full if m >= i and depth > i]
        rows.append(
            {
                "position": i + 1,
                "rounds": len(full),
                "tested": len(tested),
                "conditional": sum(tested) / len(tested) if tested else math.nan,
                "marginal": sum(m > i for m, _ in full) / len(full),
            }
        )
    return rows


FORMULAS = {
    "alpha": "mean of Σₓ min(p(x), q(x)) over tested positions; of a drafted argmax its p (greedy: agreement)",
    "offline_alpha": "mean of Σₓ min(p(x), q(x)) over every response position of texts the target generated",
    "accepted_per_tested": "Σm / Σt: accepted over tested tokens; a round that drafts n tests t = min(m + 1, n)",
    "accepted_per_drafted": "Σm / Σn: accepted over drafted tokens",
    "accepted_length": "Σe / rounds: tokens e that a round writes, per target forward, bonus included",
    "tv_spent": "mean of a(x) − min(1, p(x)/q(x)) at the tested token, a(x) the rule's acceptance; 0 for exact rules",
    "js_distance": "mean of √JSD (base 2) between p and q at tested positions",
    "speedup": "tokens/s over the same loop without a drafter: median of the ratios paired by prompt",
    "speedup_vs_generate": "tokens/s over model.generate, paired by prompt, median",
    "cost_ratio": "c: one draft forward, in one-token target forwards",
    "verify_cost": "v(n): an n-token target forward, in one-token target forwards",
    "predicted_speedup": "tokens per round over the seconds of a real round, in those of a round without a draft; "
    "in a benchmark both sides also read the prompts",
}
