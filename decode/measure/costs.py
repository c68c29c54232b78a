"""What decoding costs on this machine, timed on rounds of the loop itself, and the speedups that follow.

    predicted speedup = tokens · seconds of a round without a draft / Σ seconds of the rounds

where both sides of a benchmark take the time of reading the prompts besides.

A round of a draft length and batch size costs what such rounds took here, everything in them included (`RoundCosts`).
The rounds come from one acceptance rate α at every position (Leviathan et al., 2211.17192, theorem 3.8), from texts
whose acceptance is known position by position (`decode.measure.acceptance.replay`), or from decoding.
"""

import statistics
import time
from bisect import bisect_left
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, islice
from typing import TypeVar

import numpy as np

from decode.core.draft import Draft, Ids
from decode.core.lengths import RoundCosts
from decode.core.sampling import LogitsWarper, TorchRng
from decode.core.stop import StopRule
from decode.drafters.base import Drafter, DraftRequest, NoDrafter
from decode.files import Fields
from decode.loop import Method, Text, run
from decode.measure.acceptance import OfflineAlpha, replayed
from decode.methods import MethodInputs, build
from decode.models.api import Model, synchronize
from decode.options import MethodOptions

LENGTHS = (1, 2, 4, 8, 15)  # draft lengths that are timed
LONGEST = LENGTHS[-1]
WIDE = (*LENGTHS, 31, 63)  # numbers of tokens of drafts that cost nothing, among them trees
ROUNDS = 8  # timed rounds of a text; one before them warms up
TURNS, MOST_SECONDS = 17, 20.0  # texts of each method, the first of them to warm up; after the time two suffice
SCHEDULE = "num_speculative_tokens_per_batch_size"  # vLLM's name of draft lengths by batch size
MILLION = 10**6  # steps of α
Key = TypeVar("Key", bound=Hashable)


@dataclass
class Costs:
    """Costs of one pair, or of a target alone, on one machine."""

    rounds: RoundCosts  # in seconds; without a draft model, drafted tokens cost nothing but their verification
    cost_ratio: float  # c: drafting one token, in one-token target forwards; 0 without a draft model
    verify_cost: dict[int, float]  # v(n), verification of n - 1 drafted tokens and of the token before them
    context: int  # tokens before the rounds that were timed

    @property
    def least(self) -> float:
        """The smallest v(n), and rounds with a draft in those without one; below 1 the timing is wrong."""
        rounds = [seconds / row[0] for row in self.rounds.seconds.values() for k, seconds in row.items() if k]
        return min([*self.verify_cost.values(), *rounds])

    def to_dict(self) -> Fields:
        """For reports; v as a list of ``[n, v(n)]``."""
        content = {"cost_ratio": self.cost_ratio, "verify_cost": [[n, v] for n, v in sorted(self.verify_cost.items())]}
        return content | {"context": self.context, "round_costs": self.rounds.to_dict()}


@dataclass
class Copies(Drafter):
    """Drafts the last token of the text a number of times: what a round costs whose draft costs nothing."""

    count: int

    def draft(self, request: DraftRequest) -> Draft:
        """A chain of copies."""
        n = min(self.count, request.max_depth)
        return Draft(request.ids[-1:] * n)


def time_methods(
    target: Model, methods: Mapping[Key, Method], warp: LogitsWarper, prompts: Sequence[Ids], batch: int = 1
) -> dict[Key, tuple[float, ...]]:
    """Time rounds of several methods in turn, so that another load of the machine affects all of them alike.

    Returns:
        Seconds of a round, those of drafting and of verification in it, and drafted tokens of a text: of the rounds of
        a text the mean, of the texts the lower quartile, since other programs only ever make a measurement longer.
    """
    seen: dict[Key, list[tuple[float, ...]]] = {key: [] for key in methods}
    began = time.perf_counter()
    for turn in range(TURNS):
        if turn > 1 and time.perf_counter() - began > MOST_SECONDS:
            break
        for key, method in methods.items():
            budget = (ROUNDS + 1) * (method.stop.window + 2)  # so that no draft is cut
            texts = []
            for i in range(turn * batch, (turn + 1) * batch):
                rng = TorchRng(turn + i)
                texts.append(Text(target, method, warp, prompts[i % len(prompts)], max_new_tokens=budget, rng=rng))
            decoded = run(target, method, texts, batch)
            list(islice(decoded, batch))  # one round warms up
            start = time.perf_counter()
            rounds = [r for _, r in islice(decoded, ROUNDS * batch)]
            synchronize(target.device)
            spent, several = time.perf_counter() - start, len(rounds) / batch
            parts = [sum(r.seconds[part] for r in rounds) / several for part in (0, 1)]
            seen[key].append((spent / several, *parts, statistics.fmean(r.drafted for r in rounds)))
    return {key: tuple(np.quantile(times[1:], 0.25, axis=0).tolist()) for key, times in seen.items()}


def measure_costs(
    target: Model,
    draft: Model | None,
    warp: LogitsWarper,
    prompts: Sequence[Ids],
    lengths: Iterable[int] = LENGTHS,
    batch_sizes: Iterable[int] = (1,),
) -> Costs:
    """Time rounds of a pair; without a draft model, those of the target with drafts that cost nothing to make.

    The prompts should be as long as typical texts are in the middle. Where the context is short, fewer tokens than
    `lengths` are drafted. Batch size 1 is always measured.
    """
    room = min(runner.limit for runner in (target, draft) if runner is not None)
    longest = max(1, min(max(lengths), room // (2 * ROUNDS + 2) - 2))
    prompts = [ids[-max(1, room - (ROUNDS + 1) * (longest + 2)) :] for ids in prompts]
    methods = {0: Method("", NoDrafter(), StopRule(1))}
    for k in sorted({min(k, longest) for k in lengths}):
        inputs = MethodInputs(target, warp, draft, options=MethodOptions(draft_length=k))
        methods[k] = Method("", Copies(k), StopRule(k)) if draft is None else build("vanilla", inputs)
    seconds = {}
    for batch in sorted({1, *batch_sizes}, reverse=True):
        timed = time_methods(target, methods, warp, prompts, batch)
        # a block head drafts no more than its block, and where nothing is drafted there is no round of such a length
        seconds[batch] = {round(drafted): spent for spent, *_, drafted in timed.values()}
    plain, (_, drafting, _, _) = timed[0][2], timed[min(methods.keys() - {0})]
    verify = {round(drafted) + 1: verifying / plain for _, _, verifying, drafted in timed.values()}
    context = round(statistics.median(map(len, prompts)))
    return Costs(RoundCosts(seconds), drafting / plain if draft else 0.0, verify, context)


def speedup(tokens: float, rounds: Mapping[int, float], costs: RoundCosts, batch: int = 1) -> float:
    """Predicted speedup over rounds without a draft, of the tokens that a number of rounds by draft length wrote."""
    spent = sum(count * costs.round(batch, k) for k, count in rounds.items())
    return tokens * costs.round(batch, 0) / spent if spent else float("nan")


def predicted_speedup(alpha: float, draft_length: int, costs: RoundCosts) -> float:
    """`speedup` with acceptance rate α at every position: (1 − α^(n+1)) / (1 − α) tokens per round."""
    return speedup(sum(alpha**i for i in range(draft_length + 1)), {draft_length: 1}, costs)


def break_even(draft_length: int, costs: RoundCosts) -> float | None:
    """The α at which the predicted speedup of this length is 1, to 1e-6; None if it is below 1 even at α = 1."""
    least = bisect_left(range(MILLION), 1.0, key=lambda part: predicted_speedup(part / MILLION, draft_length, costs))
    return least / MILLION if predicted_speedup(1.0, draft_length, costs) >= 1 else None


def speedups_by_length(alphas: Sequence[OfflineAlpha], costs: RoundCosts, longest: int) -> dict[int, float]:
    """Speedups of all draft lengths up to `longest` on texts whose acceptance is known, by depth in the draft."""
    return {k: speedup(*replayed(alphas, k), costs) for k in range(1, longest + 1)}


def best_length(speedups: Mapping[int, float]) -> int:
    """The draft length with the largest speedup; 0 if none is above 1."""
    length = max(speedups, key=lambda k: speedups[k], default=0)
    return length if speedups and speedups[length] > 1 else 0


def verdict(alpha: float, costs: RoundCosts, speedups: Mapping[int, float]) -> str:
    """The best draft length with its speedup and break-even α, or the least α at which any length gains."""
    if best := best_length(speedups):
        facts = f"α = {alpha:.3f}, break-even α {break_even(best, costs) or 1:.2f}"
        return f"speedup {speedups[best]:.2f} at draft length {best} ({facts})"
    least = min(break_even(k, costs) or 2.0 for k in speedups)
    gains = f"the least break-even α is {least:.2f}" if least <= 1 else "not at any α"
    return f"no speedup: {gains} (α = {alpha:.3f})"


def forecast(costs: RoundCosts, alphas: Sequence[OfflineAlpha], longest: int) -> Fields:
    """Predicted speedups by batch size, over the same batch without a draft.

    Costs are interpolated between the measured batch sizes; `alphas` are by depth in the draft.

    Returns:
        ``batches``: rows of each measured batch size; vLLM's schedule of the best lengths, [first batch size, last
        batch size, drafted tokens]; ``round_costs``.
    """
    rounds = {k: replayed(alphas, k) for k in range(1, longest + 1)}
    batches, best = [], {}
    for size in range(1, max(costs.seconds) + 1):
        speedups = {k: speedup(*known, costs, size) for k, known in rounds.items()}
        length = best[size] = best_length(speedups)
        if size in costs.seconds:
            row = {"batch_size": size, "ms": 1e3 * costs.round(size, 0), "best_draft_length": length}
            batches.append(row | {"best_speedup": speedups.get(length, 1.0)})
    alike = ((length, list(sizes)) for length, sizes in groupby(best, key=best.__getitem__))
    schedule = [[sizes[0], sizes[-1], length] for length, sizes in alike]
    return {"batches": batches, SCHEDULE: schedule, "round_costs": costs.to_dict()}
