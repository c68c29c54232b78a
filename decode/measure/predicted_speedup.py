"""The speedup that measured costs and acceptances predict; every prediction of the toolkit is computed here.

Costs are in one-token target forwards (`costs.cost_model`): c of a draft forward, v(n) of an n-token target forward,
o of the bookkeeping around them. With acceptance rate α, the same at every position, and draft length γ (Leviathan et
al., 2211.17192, theorem 3.8, with the cost of verification made explicit):

    tokens per round = (1 − α^(γ+1)) / (1 − α)
    speedup          = tokens per round / (γ·c + v(γ+1) + o)

Where acceptances are known position by position, `replay` goes through the texts instead of taking one α for all.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from decode.core.trace_metrics import Trace
from decode.measure.costs.cost_model import CostModel
from decode.measure.offline_acceptance import OfflineAlpha


def tokens_per_round(alpha: float, draft_length: int) -> float:
    """(1 − α^(γ+1)) / (1 − α), which is γ + 1 at α = 1."""
    return float(sum(alpha**i for i in range(draft_length + 1)))


def predicted_speedup(alpha: float, draft_length: int, c: float, v: Callable[[int], float], o: float = 0.0) -> float:
    """Speedup over one-token steps at a fixed draft length with acceptance α, the same at every position.

    Args:
        alpha: acceptance rate in [0, 1].
        draft_length: γ.
        c: a draft forward, in one-token target forwards.
        v: cost of an n-token target forward, in the same unit.
        o: bookkeeping of a round, in the same unit.
    """
    return tokens_per_round(alpha, draft_length) / (draft_length * c + v(draft_length + 1) + o)


def speedup_of_rounds(
    drafted: Sequence[int], accepted: Sequence[int], c: float, v: Callable[[int], float], o: float = 0.0
) -> float:
    """E[m + 1] / (c·E[k] + E[v(k + 1)] + o) over measured rounds, whatever ended their drafts."""
    spent = sum(c * k + v(k + 1) + o for k in drafted)
    return (sum(accepted) + len(accepted)) / spent if spent else float("nan")


def speedup_of_trace(trace: Trace, cost: CostModel, *, drafts_with_model: bool) -> float | None:
    """`predicted_speedup` of measured rounds: tokens over Σ (c·k + v(k + 1)).

    Args:
        trace: the rounds.
        cost: of the pair.
        drafts_with_model: a drafted token costs a forward of the draft, c; else what drafting it took, as timed.

    Returns:
        None where nothing was drafted, or no round was run.
    """
    drafted = sum(trace.drafted)
    if not drafted:
        return 1.0 if trace.rounds else None
    c = cost.cost_ratio if drafts_with_model else sum(trace.draft_seconds) / drafted / cost.target_seconds
    # tokens behind an end-of-text token were paid for, but are not text
    kept = trace.tokens / (sum(trace.accepted) + trace.rounds)
    return kept * speedup_of_rounds(trace.drafted, trace.accepted, c, cost.v)


def replay(
    accept: Sequence[float], draft_length: int, deeper: Sequence[Sequence[float]] = ()
) -> tuple[float, dict[int, float]]:
    """Expected rounds over a text whose position i is accepted with probability ``accept[i]`` once it is reached.

    Greedy acceptances are 0 or 1, and the result is then exactly what decoding this text does: runs of easy tokens,
    which one α for all positions does not see, are seen.

    Args:
        accept: of each position, as the first token of a draft.
        draft_length: of the drafts.
        deeper: the same as the second, third, … token; tokens further down are as the last.

    Returns:
        The expected number of rounds, and the expected number of rounds that draft k tokens, for each k (fewer than
        `draft_length` only where the text ends).
    """
    n, rows = len(accept), [accept, *deeper]
    reach = [0.0] * (n + 1)  # probability that a round starts at this position
    reach[0] = 1.0
    lengths: dict[int, float] = {}
    for s in range(n):
        here = reach[s]
        if not here:
            continue
        k = min(draft_length, n - s - 1)
        lengths[k] = lengths.get(k, 0.0) + here
        alive = here
        for depth in range(k):
            i, chance = s + depth, rows[min(depth, len(rows) - 1)]
            reach[i + 1] += alive * (1 - chance[i])  # the correction is token i
            alive *= chance[i]
        reach[s + k + 1] += alive  # the bonus is token s + k
    return sum(lengths.values()), lengths


def replayed_speedup(
    texts: Iterable[Sequence[float]],
    draft_length: int,
    c: float,
    v: Callable[[int], float],
    o: float = 0.0,
    deeper: Sequence[Sequence[Sequence[float]]] = (),
) -> float:
    """Speedup at a fixed draft length over texts with known acceptances, `deeper` ones by depth and text (`replay`)."""
    tokens, spent = 0, 0.0
    for i, accept in enumerate(texts):
        tokens += len(accept)
        lengths = replay(accept, draft_length, [of[i] for of in deeper])[1]
        spent += sum(r * (c * k + v(k + 1) + o) for k, r in lengths.items())
    return tokens / spent if spent else float("nan")


def best_length(speedups: dict[int, float]) -> int:
    """The draft length with the largest predicted speedup; 0 where no length reaches 1."""
    length = max(speedups, key=lambda k: speedups[k], default=0)
    return length if speedups and speedups[length] > 1 else 0


def break_even(draft_length: int, c: float, v: Callable[[int], float], o: float = 0.0) -> float | None:
    """The α from which a draft of this length gains; None where even α = 1 does not."""
    return least_alpha(lambda alpha: predicted_speedup(alpha, draft_length, c, v, o) >= 1)


def least_alpha(enough: Callable[[float], bool]) -> float | None:
    """The acceptance rate from which something holds, by bisection to 1e-6; None where even 1 is not enough."""
    if not enough(1.0):
        return None
    low, high = 0.0, 1.0
    while high - low > 1e-6:
        middle = (low + high) / 2
        low, high = (low, middle) if enough(middle) else (middle, high)
    return high


def predict(draft_length: int, alphas: Sequence[OfflineAlpha], cost: CostModel) -> dict[str, Any]:
    """One draft length: cost, break-even, and speedup from the mean α and from the texts themselves.

    Args:
        draft_length: of every round.
        alphas: acceptance as first drafted token, of feature heads then as second, third, ….
        cost: of the pair.
    """
    k, c, v, o = draft_length, cost.cost_ratio, cost.v, cost.overhead
    whole, (alpha, *others) = c + cost.draft_overhead, alphas
    deeper = [other.texts for other in others]
    return {
        "draft_length": k,
        "round_cost": c * k + v(k + 1),
        "break_even_alpha": break_even(k, whole, v, o),
        "predicted_speedup": predicted_speedup(alpha.mean, k, c, v),
        "replayed_speedup": replayed_speedup(alpha.texts, k, c, v, 0.0, deeper),
        "with_bookkeeping": replayed_speedup(alpha.texts, k, whole, v, o, deeper),
    }


def speedups_by_length(alphas: Sequence[OfflineAlpha], cost: CostModel, longest: int) -> dict[int, float]:
    """`with_bookkeeping` of `predict` for every draft length up to `longest`."""
    (alpha, *others), c = alphas, cost.cost_ratio + cost.draft_overhead
    deeper = [other.texts for other in others]
    return {k: replayed_speedup(alpha.texts, k, c, cost.v, cost.overhead, deeper) for k in range(1, longest + 1)}


def verdict(alpha: float, cost: CostModel, speedups: dict[int, float]) -> str:
    """One sentence: whether the pair can win on this machine, with what length, and what decides it."""
    c, o = cost.cost_ratio + cost.draft_overhead, cost.overhead
    best = best_length(speedups)
    needed = {k: a for k in speedups if k and (a := break_even(k, c, cost.v, o)) is not None}
    facts = f"α = {alpha:.3f}, c = {cost.cost_ratio:.3f}, v(2) = {cost.v(2):.2f}"
    if best:
        return (
            f"this pair should gain a factor of {speedups[best]:.2f} on this machine with draft length {best} "
            f"({facts}; it gains from α = {needed.get(best, 0.0):.2f} on)"
        )
    if not needed:
        spare = 2 - cost.v(2) - o - cost.draft_overhead
        cure = f"a draft with c below {spare:.2f} is needed" if spare > 0 else "no draft is small enough to change that"
        return (
            "this pair cannot win on this machine: drafting and verifying cost more than they could ever save, even if "
            f"every token were accepted ({facts}); {cure}"
        )
    length = min(needed, key=lambda k: needed[k])
    return (
        f"this pair cannot win on this machine: the least acceptance that pays is α = {needed[length]:.2f}, at draft "
        f"length {length} ({facts}); train the draft further, or take a smaller one"
    )
