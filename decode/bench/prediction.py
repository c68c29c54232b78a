"""The speedup that measured costs and acceptances predict; every prediction of the toolkit is computed here.

Costs are in one-token target forwards (`costs.cost_model`): c of a draft forward, v(n) of an n-token target forward,
o of the bookkeeping around them. With acceptance rate α, the same at every position, and draft length γ (Leviathan et
al., 2211.17192, theorem 3.8, with the cost of verification made explicit):

    tokens per round = (1 − α^(γ+1)) / (1 − α)
    speedup          = tokens per round / (γ·c + v(γ+1) + o)

Where acceptances are known position by position, `replay` goes through the texts instead of taking one α for all.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from decode.bench.costs import CostModel, round_costs
from decode.bench.offline_acceptance import OfflineAlpha
from decode.stopping import RoundCosts
from decode.trace import Trace


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


EVEN = 0.01  # share of the speedup by which lengths may differ that count as equally fast
Schedule = list[list[int]]
"""vLLM's ``num_speculative_tokens_per_batch_size``: entries [first batch size, last batch size, drafted tokens], which
begin at 1, are sorted and do not overlap. Beyond the last entry vLLM drafts as in it."""


@dataclass
class BatchForecast:
    """Predictions of one pair by batch size."""

    costs: Sequence[CostModel]  # measured, one a batch size
    # for each draft length the tokens of the texts, and how many rounds draft so many tokens
    rounds: Mapping[int, tuple[int, Mapping[int, float]]]
    longest: int  # longest draft that is predicted

    @cached_property
    def seconds(self) -> RoundCosts:
        """The parts of a round by batch size."""
        return round_costs(self.costs)

    def speedups(self, batch: int, longest: int | None = None) -> dict[int, float]:
        """Predicted speedup of every draft length over the same batch without a draft; between measured sizes too."""
        costs, found = self.seconds, {}
        draft, plain = costs.drafting(batch), costs.plain(batch)
        for k in range(1, min(longest or self.longest, self.longest) + 1):
            tokens, lengths = self.rounds[k]
            spent = sum(r * (draft * n + costs.verifying(batch, n + 1)) for n, r in lengths.items())
            found[k] = tokens * plain / spent
        return found

    def best(self, batch: int, longest: int | None = None) -> int:
        """The draft length with the largest predicted speedup; 0 where none gains."""
        return best_length(self.speedups(batch, longest))

    @property
    def sizes(self) -> list[int]:
        """The measured batch sizes."""
        return [cost.batch for cost in self.costs]

    @property
    def losing_from(self) -> int | None:
        """The batch size from which no draft length gains, up to the largest measured; None where one does there."""
        losing = None
        for size in range(self.sizes[-1], 0, -1):
            if self.best(size):
                break
            losing = size
        return losing

    def schedule(self, longest: int | None = None) -> Schedule:
        """vLLM's ``num_speculative_tokens_per_batch_size`` up to the largest measured batch size.

        The length of the batch size before stays where it is within `EVEN` of the best one.
        """
        entries: Schedule = []
        for size in range(1, self.sizes[-1] + 1):
            speedups = self.speedups(size, longest)
            best = best_length(speedups)
            before = entries[-1][2] if entries else 0
            if best and before and speedups[before] >= max(1.0, (1 - EVEN) * speedups[best]):
                best = before
            if entries and entries[-1][2] == best:
                entries[-1][1] = size
            else:
                entries.append([size, size, best])
        return entries

    def rows(self) -> list[dict[str, Any]]:
        """For each measured batch size its costs, and speedup and goodput of every draft length."""
        found = []
        for cost in self.costs:
            plain, speedups = cost.batch / self.seconds.plain(cost.batch), self.speedups(cost.batch)
            best = best_length(speedups)
            lengths = [{"draft_length": k, "predicted_speedup": s, "goodput": s * plain} for k, s in speedups.items()]
            found.append(
                cost.to_dict()
                | {
                    "batch_size": cost.batch,
                    "goodput_without_draft": plain,
                    "best_draft_length": best,
                    "best_speedup": speedups.get(best, 1.0),
                    "best_goodput": plain * speedups.get(best, 1.0),
                    "draft_lengths": lengths,
                }
            )
        return found

    def verdict(self) -> str:
        """In a sentence: what to draft at which batch size, and from which on nothing."""
        parts = [
            f"{k} tokens at batch {first}{f' to {last}' if last > first else ''}"
            for first, last, k in self.schedule()
            if k
        ]
        if not parts:
            return f"drafting loses at every batch size up to {self.sizes[-1]}"
        end = f"drafting loses from batch {self.losing_from} on" if self.losing_from else ""
        return (
            f"best draft length: {', '.join(parts)}; {end or f'drafting gains up to batch {self.sizes[-1]} at least'}"
        )

    def to_dict(self, longest: int | None = None) -> dict[str, Any]:
        """For JSON: the rows, vLLM's schedule of drafts up to `longest`, from where drafting loses, and the costs.

        Args:
            longest: the schedule's longest draft: vLLM wants none above ``num_speculative_tokens``.
        """
        return {
            "batches": self.rows(),
            "num_speculative_tokens_per_batch_size": self.schedule(longest),
            "drafting_loses_from_batch_size": self.losing_from,
            "round_costs": self.seconds.to_dict(),
        }


def forecast(costs: Iterable[CostModel], alphas: Sequence[OfflineAlpha], longest: int) -> BatchForecast:
    """Predictions from the costs of several batch sizes and acceptances position by position, by depth in the draft."""
    alpha, *deeper = alphas
    rounds: dict[int, tuple[int, Mapping[int, float]]] = {}
    for k in range(1, longest + 1):
        lengths: dict[int, float] = {}
        for i, text in enumerate(alpha.texts):
            for n, r in replay(text, k, [of.texts[i] for of in deeper])[1].items():
                lengths[n] = lengths.get(n, 0.0) + r
        rounds[k] = sum(alpha.counts), lengths
    return BatchForecast(sorted(costs, key=lambda cost: cost.batch), rounds, longest)
