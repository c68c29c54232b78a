"""Speedups predicted from measured costs (`CostModel`) and acceptances.

All predictions are tokens over the cost of the rounds that give them:

    speedup = tokens · plain step / Σ rounds · (k·c + v(k + 1) + bookkeeping)

The rounds come from an acceptance rate α that is the same at every position (Leviathan et al., 2211.17192, theorem
3.8), from a `replay` of acceptances known position by position, or from measured rounds.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from decode.bench.costs import CostModel, round_costs
from decode.bench.offline_acceptance import DEPTH, OfflineAlpha
from decode.trace import Trace, clustered_ratio


def speedup(tokens: float, rounds: Mapping[int, float], cost: CostModel) -> float:
    """Predicted speedup over plain steps.

    Args:
        tokens: emitted in all rounds.
        rounds: number of rounds by drafted tokens k.
        cost: of the pair.
    """
    spent = sum(count * cost.of_round(k) for k, count in rounds.items())
    return tokens * cost.plain / spent if spent else float("nan")


def predicted_speedup(alpha: float, draft_length: int, cost: CostModel) -> float:
    """`speedup` with acceptance rate α at every position: (1 − α^(k+1)) / (1 − α) tokens per round."""
    return speedup(sum(alpha**i for i in range(draft_length + 1)), {draft_length: 1}, cost)


def break_even(draft_length: int, cost: CostModel) -> float | None:
    """The α at which the predicted speedup of this length is 1, to 1e-6; None if it is below 1 even at α = 1."""
    if predicted_speedup(1.0, draft_length, cost) < 1:
        return None
    low, high = 0.0, 1.0
    while high - low > 1e-6:
        middle = (low + high) / 2
        low, high = (low, middle) if predicted_speedup(middle, draft_length, cost) >= 1 else (middle, high)
    return high


def replay(
    accept: Sequence[float], draft_length: int, deeper: Sequence[Sequence[float]] = ()
) -> tuple[float, dict[int, float]]:
    """Expected rounds over a text whose position i is accepted with probability ``accept[i]`` once it is reached.

    Greedy acceptances are 0 or 1, and the result is then exactly the rounds that decode this text. Unlike one α for
    all positions, this accounts for runs of easy tokens.

    Args:
        accept: acceptance of each position as the first token of a draft.
        draft_length: of the drafts.
        deeper: the same as the second, third, … token; deeper tokens have the last one's acceptance.

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


def rounds_of_texts(alphas: Sequence[OfflineAlpha], draft_length: int) -> list[dict[int, float]]:
    """Rounds by drafted tokens of each text; `alphas` by depth in the draft (see `replay`)."""
    by_depth = [alpha.kept or alpha.texts for alpha in alphas]
    return [replay(first, draft_length, deeper)[1] for first, *deeper in zip(*by_depth)]


def replayed(alphas: Sequence[OfflineAlpha], draft_length: int) -> tuple[int, dict[int, float]]:
    """Tokens of all texts and their rounds by drafted tokens (see `rounds_of_texts`)."""
    rounds: dict[int, float] = {}
    for text in rounds_of_texts(alphas, draft_length):
        for k, count in text.items():
            rounds[k] = rounds.get(k, 0.0) + count
    return sum(alphas[0].counts), rounds


def offline_accepted_length(alphas: Sequence[OfflineAlpha], draft_length: int | None = None) -> float:
    """Tokens per round of texts that are `replayed`, the target's own token included.

    Args:
        alphas: by depth in the draft.
        draft_length: None: as many as `alphas`, at least `DEPTH`.
    """
    tokens, rounds = replayed(alphas, draft_length or max(DEPTH, len(alphas)))
    return tokens / max(1, sum(rounds.values()))


def paired_lengths(a: Sequence[OfflineAlpha], b: Sequence[OfflineAlpha]) -> dict[str, float]:
    """Difference in `offline_accepted_length` of b over a on the same texts, with its standard error.

    It is the difference in rounds per token times both lengths, and its error that of the rounds, paired by text.
    """
    draft_length, product = max(DEPTH, len(a)), offline_accepted_length(a) * offline_accepted_length(b)
    rounds = [[sum(text.values()) for text in rounds_of_texts(of, draft_length)] for of in (a, b)]
    fewer, se = clustered_ratio([x - y for x, y in zip(*rounds)], a[0].counts, a[0].prompts or None)
    return {"difference": product * fewer, "se": product * se}


def replayed_speedup(texts: Iterable[Sequence[float]], draft_length: int, c: float, v: Callable[[int], float]) -> float:
    """Speedup of a draft length over texts with known acceptances, without bookkeeping."""
    cost = CostModel(c, {n: v(n) for n in range(1, draft_length + 2)})
    return speedup(*replayed([OfflineAlpha([list(text) for text in texts])], draft_length), cost)


def speedups_by_length(alphas: Sequence[OfflineAlpha], cost: CostModel, longest: int) -> dict[int, float]:
    """Replayed speedups of all draft lengths up to `longest`."""
    return {k: speedup(*replayed(alphas, k), cost) for k in range(1, longest + 1)}


def best_length(speedups: Mapping[int, float]) -> int:
    """The draft length with the largest speedup; 0 if none is above 1."""
    length = max(speedups, key=lambda k: speedups[k], default=0)
    return length if speedups and speedups[length] > 1 else 0


def speedup_of_trace(trace: Trace, cost: CostModel, *, drafts_with_model: bool) -> float | None:
    """`speedup` of measured rounds without bookkeeping.

    Args:
        trace: the rounds.
        cost: of the pair.
        drafts_with_model: a drafted token costs c; otherwise the measured time of drafting it.

    Returns:
        None for tokens drafted in no round.
    """
    drafted = sum(trace.drafted)
    if not drafted:
        return 1.0 if trace.rounds else None
    c = cost.cost_ratio if drafts_with_model else sum(trace.draft_seconds) / drafted / cost.target_seconds
    per_block = cost.per_block and drafts_with_model
    known = CostModel(c, cost.verify_cost, read_again=cost.read_again, per_block=per_block)
    return speedup(trace.tokens, Counter(trace.drafted), known)


def verdict(alpha: float, cost: CostModel, speedups: Mapping[int, float]) -> str:
    """The best draft length with its speedup and break-even α, or the least α at which any length gains."""
    best, facts = best_length(speedups), f"α = {alpha:.3f}, c = {cost.cost_ratio:.3f}, v(2) = {cost.v(2):.2f}"
    needed = {k: least for k in speedups if (least := break_even(k, cost)) is not None}
    if best:
        return f"speedup {speedups[best]:.2f} at draft length {best} ({facts}, break-even α {needed.get(best, 0):.2f})"
    gains = f"the least break-even α is {min(needed.values()):.2f}" if needed else "not at any α"
    return f"no speedup: {gains} ({facts})"


SCHEDULE = "num_speculative_tokens_per_batch_size"  # vLLM's name of draft lengths by batch size


def forecast(
    costs: Sequence[CostModel], alphas: Sequence[OfflineAlpha], longest: int, allowed: int | None = None
) -> dict[str, Any]:
    """Predicted speedups of a pair by batch size, over the same batch without a draft.

    Args:
        costs: measured, one for each batch size, in increasing order; costs between them are interpolated.
        alphas: acceptance by depth in the draft.
        longest: largest draft length.
        allowed: largest draft length of the schedule; vLLM takes none above its ``num_speculative_tokens``.

    Returns:
        ``batches``: costs, speedups and goodput (tokens/s of all sequences) at each measured batch size; vLLM's
        schedule of the best lengths, [first batch size, last batch size, drafted tokens]; ``round_costs``.
    """
    seconds, rounds = round_costs(costs), {k: replayed(alphas, k) for k in range(1, longest + 1)}

    def speedups(batch: int) -> dict[int, float]:
        found = {}
        for k, (tokens, lengths) in rounds.items():
            spent = sum(
                n
                * (
                    drafted * seconds.drafting(batch)
                    + (drafted > 0) * seconds.blocks(batch)
                    + seconds.verifying(batch, drafted + 1)
                )
                for drafted, n in lengths.items()
            )
            found[k] = tokens * seconds.plain(batch) / spent
        return found

    batches: list[dict[str, Any]] = []
    for cost in costs:
        found, plain = speedups(cost.batch), cost.batch / seconds.plain(cost.batch)
        best = best_length(found)
        row: dict[str, Any] = {
            "batch_size": cost.batch,
            "ms": 1e3 * cost.target_seconds,
            "v2": cost.v(2),
            "v5": cost.v(5),
        }
        row |= {"best_draft_length": best, "best_speedup": found.get(best, 1.0), "goodput_without_draft": plain}
        lengths = [{"draft_length": k, "predicted_speedup": s} for k, s in found.items()]
        row |= {"best_goodput": plain * row["best_speedup"], "draft_lengths": lengths}
        batches.append(cost.to_dict() | row)
    schedule: list[list[int]] = []
    for size in range(1, costs[-1].batch + 1):
        found = {k: s for k, s in speedups(size).items() if k <= (allowed or longest)}
        best, before = best_length(found), schedule[-1][2] if schedule else 0
        if schedule and before == best:
            schedule[-1][1] = size
        else:
            schedule.append([size, size, best])
    return {"batches": batches, SCHEDULE: schedule, "round_costs": seconds.to_dict()}
