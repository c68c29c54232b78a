"""What a round costs, measured, and what speedup follows from it.

Costs are in one-token target forwards: c of a draft forward, v(n) of an n-token target forward, o of the bookkeeping
around them. With acceptance rate α, the same at every position, and draft length γ (Leviathan et al., 2211.17192,
theorem 3.8, with the cost of verification made explicit):

    tokens per round = (1 − α^(γ+1)) / (1 − α)
    speedup          = tokens per round / (γ·c + v(γ+1) + o)
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from decode.core.device import synchronize
from decode.core.runner import Runner
from decode.models.foreign import ForeignRunner

LONGEST = 15
"""Draft lengths are compared up to here: v is measured for 1 to 16 tokens."""
BURST = 5
"""Most draft forwards in a row before a target forward is timed."""
SETTLE, STEADY = 0.03, 8
"""Seconds of one-token target forwards until the processor has settled, and how many are timed then."""


@dataclass
class CostModel:
    """Costs of one pair on one machine.

    Attributes:
        cost_ratio: c; 0 without a draft model.
        verify_cost: v(n) at the measured n, v(1) = 1.
        overhead: o, bookkeeping of a round beyond that of a plain step, in one-token target forwards.
        draft_overhead: bookkeeping of a drafted token, in the same unit; it adds to c.
        target_seconds: median time of a one-token target forward.
        draft_seconds: median time of a one-token draft forward.
        context: tokens in the caches while measuring.
    """

    cost_ratio: float
    verify_cost: dict[int, float]
    overhead: float = 0.0
    draft_overhead: float = 0.0
    target_seconds: float = 0.0
    draft_seconds: float = 0.0
    context: int = 0

    def v(self, n: float) -> float:
        """The cost of an n-token target forward; linear between measured points, and beyond the last one."""
        widths = sorted(self.verify_cost)
        if n in self.verify_cost:
            return self.verify_cost[int(n)]
        if len(widths) == 1:
            return self.verify_cost[widths[0]]
        high = next((i for i, w in enumerate(widths) if w > n), None)
        left, right = (widths[len(widths) // 2 - 1], widths[-1]) if high is None else (widths[high - 1], widths[high])
        a, b = self.verify_cost[left], self.verify_cost[right]
        return a + (b - a) * (n - left) / (right - left)

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> CostModel:
        """From a report's `to_dict`."""
        return cls(**{**content, "verify_cost": {int(n): float(v) for n, v in content["verify_cost"]}})

    def to_dict(self) -> dict[str, Any]:
        """For reports; v as a list of ``[n, v(n)]``."""
        return asdict(self) | {"verify_cost": [[n, v] for n, v in sorted(self.verify_cost.items())]}


class CostMeter:
    """Forwards of a pair, timed in the order in which decoding runs them.

    A one-token target forward follows several others, as without a draft; the draft's follow each other, and an n-token
    target forward follows n − 1 of them (at most `BURST`). Timed apart from each other the same forwards take up to
    twice as long or half as long, for what the caches of the processor hold. Turns may be spread over a benchmark, so
    that the costs meet the same load of the machine as the speeds do.

    Args:
        target: the target.
        draft: the draft model, if there is one.
        widths: the n of v(n).
        context: tokens before the measured ones; less where a model's context is shorter.
    """

    def __init__(
        self,
        target: Runner,
        draft: Runner | None = None,
        *,
        widths: Iterable[int] = range(1, LONGEST + 2),
        context: int = 128,
    ) -> None:
        self.target, self.draft = target, draft
        self.runners = [target] if draft is None or draft is target else [target, draft]
        room = min(runner.limit for runner in self.runners)
        self.widths = sorted({n for n in widths if 1 < n < room})
        longest = max([min(STEADY, room - 1), *self.widths])
        self.context = max(1, min(context, room - longest))
        dice = torch.Generator().manual_seed(0)
        if isinstance(draft, ForeignRunner):  # it drafts common tokens only, each of which is one of its own
            known = draft.vocabulary.target_ids.cpu()
        else:
            known = torch.arange(min(runner.vocab_size for runner in self.runners))
        self.tokens = known[torch.randint(len(known), (self.context + longest,), generator=dice)]
        self.plain: list[float] = []
        self.drafting: list[float] = []
        self.verifying: dict[int, list[float]] = {n: [] for n in self.widths}
        self.turns = 0

    @torch.inference_mode()
    def turn(self) -> None:
        """Time every forward once more; the caches are empty afterwards."""
        for runner in self.runners:
            runner.truncate(0)
            runner.reserve(len(self.tokens))
            runner.read(self.tokens[: self.context].to(runner.device), head=0)
        steps, settled = min(STEADY, len(self.tokens) - self.context), 0.0
        while settled < SETTLE:
            settled += sum(self._steps(self.target, steps))
        self.plain += self._steps(self.target, steps)
        for i in range(len(self.widths)):
            n = self.widths[(i + self.turns) % len(self.widths)]
            if self.draft is not None:
                self.drafting += self._steps(self.draft, min(n - 1, BURST))
            if self.draft is None or not self.turns:
                self._time(self.target, n)
                self.target.truncate(self.context)
            self.verifying[n].append(self._time(self.target, n))
            self.target.truncate(self.context)
        for runner in self.runners:
            runner.truncate(0)
        self.turns += 1

    def _steps(self, runner: Runner, count: int) -> list[float]:
        times = [self._time(runner, 1) for _ in range(count)]
        runner.truncate(self.context)
        return times

    def _time(self, runner: Runner, n: int) -> float:
        feed = self.tokens[runner.length : runner.length + n].to(runner.device)
        synchronize(runner.device)
        began = time.perf_counter()
        runner.read(feed, head=1 if n == 1 else None)
        synchronize(runner.device)
        return time.perf_counter() - began

    def cost(self) -> CostModel:
        """Medians over all turns so far."""
        one = statistics.median(self.plain)
        spent = statistics.median(self.drafting) if self.drafting else 0.0
        verify = {1: 1.0} | {n: statistics.median(times) / one for n, times in self.verifying.items()}
        return CostModel(spent / one, verify, target_seconds=one, draft_seconds=spent, context=self.context)

    def run(self, repeats: int = 21, seconds: float = 5.0) -> CostModel:
        """Up to `repeats` turns; after the first few (five in all), none begins once `seconds` have passed."""
        began = time.perf_counter()
        for turn in range(repeats):
            if self.turns >= 5 and turn and time.perf_counter() - began > seconds:
                break
            self.turn()
        return self.cost()


def measure_cost(
    target: Runner,
    draft: Runner | None = None,
    *,
    widths: Iterable[int] = range(1, LONGEST + 2),
    context: int = 128,
    repeats: int = 21,
    seconds: float = 5.0,
) -> CostModel:
    """Costs of one pair, or of the target alone (see `CostMeter` and its `run`)."""
    return CostMeter(target, draft, widths=widths, context=context).run(repeats, seconds)


# -- formulas ------------------------------------------------------------------------------------------------------


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


def replay(accept: Sequence[float], draft_length: int) -> tuple[float, dict[int, float]]:
    """Expected rounds over a text whose position i is accepted with probability ``accept[i]`` once it is reached.

    Greedy acceptances are 0 or 1, and the result is then exactly what decoding this text does: runs of easy tokens,
    which one α for all positions does not see, are seen.

    Returns:
        The expected number of rounds, and the expected number of rounds that draft k tokens, for each k (fewer than
        `draft_length` only where the text ends).
    """
    n = len(accept)
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
        for i in range(s, s + k):
            reach[i + 1] += alive * (1 - accept[i])  # the correction is token i
            alive *= accept[i]
        reach[s + k + 1] += alive  # the bonus is token s + k
    return sum(lengths.values()), lengths


def replayed_speedup(
    texts: Iterable[Sequence[float]], draft_length: int, c: float, v: Callable[[int], float], o: float = 0.0
) -> float:
    """Speedup at a fixed draft length over texts with known acceptances (`replay`)."""
    tokens, spent = 0, 0.0
    for accept in texts:
        tokens += len(accept)
        spent += sum(r * (c * k + v(k + 1) + o) for k, r in replay(accept, draft_length)[1].items())
    return tokens / spent if spent else float("nan")


def best_length(speedups: dict[int, float]) -> int:
    """The draft length with the largest predicted speedup; 0 where no length reaches 1."""
    length = max(speedups, key=lambda k: speedups[k], default=0)
    return length if speedups and speedups[length] > 1 else 0


def break_even(draft_length: int, c: float, v: Callable[[int], float], o: float = 0.0) -> float | None:
    """The α from which a draft of this length gains, by bisection; None where even α = 1 does not."""
    if predicted_speedup(1.0, draft_length, c, v, o) < 1:
        return None
    low, high = 0.0, 1.0
    while high - low > 1e-6:
        middle = (low + high) / 2
        if predicted_speedup(middle, draft_length, c, v, o) >= 1:
            high = middle
        else:
            low = middle
    return high


def verdict(alpha: float, cost: CostModel, speedups: dict[int, float]) -> str:
    """One sentence: whether the pair can win on this machine, with what length, and what it hangs on.

    Args:
        alpha: offline acceptance rate.
        cost: the pair's costs.
        speedups: predicted speedup by draft length.
    """
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
