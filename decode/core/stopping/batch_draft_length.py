"""How long the drafts of a round may be: the length, the same for all texts, that should give most tokens a second.

Which tokens are accepted is learned from earlier rounds; what a round costs is known before decoding. Where no length
pays, nothing is drafted, except in an occasional round that tests whether this has changed. A round's limit depends on
finished rounds alone, so that exact rules stay exact; but a sampled text then depends on the texts decoded with it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from decode.core.trace_metrics import Round


@dataclass(frozen=True)
class RoundCosts:
    """Seconds, or any other unit, of the parts of a round by batch size, bookkeeping included.

    Between measured batch sizes and widths costs are linear; below the first they are the first's, beyond
    the last they grow as between the last two.
    """

    step: Mapping[int, float]  # of a round without a draft, by batch size
    draft: Mapping[int, float]  # of the forward that drafts one more token of every text
    # of the round's rest where every text has n tokens to be read, by batch size and n
    verify: Mapping[int, Mapping[int, float]]

    @classmethod
    def of_ratios(cls, cost_ratio: float, verify_growth: float = 0.0) -> RoundCosts:
        """Costs that are known as c and the growth of the target's forward by one more token, at any batch size."""
        return cls({1: 1.0}, {1: cost_ratio}, {1: {1: 1.0, 2: 1.0 + verify_growth}})

    def plain(self, batch: float) -> float:
        """A round without a draft."""
        return between(self.step, batch)

    def drafting(self, texts: float) -> float:
        """A draft forward for so many texts."""
        return between(self.draft, texts)

    def verifying(self, batch: float, tokens: float) -> float:
        """The rest of a round whose texts have so many tokens to be read each, the pending one included."""
        return between({size: between(row, tokens) for size, row in self.verify.items()}, batch)

    def to_dict(self) -> dict[str, Any]:
        """For JSON, whose keys are texts."""
        return {
            "step": {str(b): value for b, value in self.step.items()},
            "draft": {str(b): value for b, value in self.draft.items()},
            "verify": {str(b): {str(n): value for n, value in row.items()} for b, row in self.verify.items()},
        }

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> RoundCosts:
        """From `to_dict`."""
        step, draft = ({int(b): float(v) for b, v in content[key].items()} for key in ("step", "draft"))
        rows = content["verify"].items()
        return cls(step, draft, {int(b): {int(n): float(v) for n, v in row.items()} for b, row in rows})


def between(values: Mapping[int, float], x: float) -> float:
    """A value between measured points, linear; the first one's below them, along the line of the last two beyond."""
    points = sorted(values)
    if len(points) == 1 or x <= points[0]:
        return values[points[0]]
    i = min(bisect_left(points, x), len(points) - 1)
    left, right = points[i - 1], points[i]
    return max(0.0, values[left] + (values[right] - values[left]) * (x - left) / (right - left))


EVERY = 16  # rounds between two choices
LOOK = 64  # rounds with drafts between two whose limit is larger than the chosen one
GAIN = 0.02  # share by which a draft has to be faster than none: costs are known no better
LOSS = 0.01  # share of the time that rounds may lose that only find out whether drafting pays again
FIRST, PRIOR, MEMORY = 0.7, 4.0, 512
"""Acceptance rate that the first position begins with (each other with the one before it), the observations that this
counts for, and those after which all of a position's counts are halved."""


class DraftLengths:
    """Chooses the longest draft of each round.

    Args:
        costs: of rounds by batch size.
        window: longest draft.

    Attributes:
        chosen: the best limit of late; 0: drafting does not pay.
        token_cost: of one more drafted token of every text, in rounds without a draft.
    """

    def __init__(self, costs: RoundCosts, window: int) -> None:
        self.costs, self.window = costs, window
        self._known: dict[int, _Costs] = {}
        self.reset()

    def reset(self) -> None:
        """Forget everything learned."""
        # of each position: drafts that reached it and those that could have; of those that did, the accepted ones
        self._drafted = [[0.0, 0.0] for _ in range(self.window)]
        self._accepted = [[0.0, 0.0] for _ in range(self.window)]
        self.chosen, self.token_cost, self._batch, self._rounds, self._with_draft = 0, 0.0, 0, 0, 0
        self._waited = self._price = 0.0
        self._learned = False

    def limit(self, batch: int) -> int:
        """The longest draft in the round of so many texts that begins."""
        if batch != self._batch or (self._learned and self._rounds >= min(EVERY, 1 + self._with_draft // 2)):
            self._choose(batch)
        self._rounds += 1
        if self.chosen:
            self._with_draft += 1
            wider = self.chosen + max(2, self.chosen // 2)
            return min(self.window, wider) if self._with_draft % LOOK == 0 else self.chosen
        self._waited += self._plain
        if LOSS * self._waited < self._price:
            return 0
        self._waited, self._rounds = 0.0, EVERY  # what this round shows counts at once
        return self._best

    def observe(self, rounds: Iterable[tuple[Round, int]]) -> None:
        """Learn from a round of the texts, each with the longest draft that it was allowed."""
        self._learned = True
        for result, allowed in rounds:
            drafted, accepted = result.drafted, result.accepted
            for i in range(min(drafted + 1, allowed)):
                _count(self._drafted[i], i < drafted)
            for i in range(min(accepted + 1, drafted)):
                _count(self._accepted[i], i < accepted)

    def _choose(self, batch: int) -> None:
        """The limit with most tokens a second, and what a round with it would lose where that is 0."""
        if batch not in self._known:
            self._known[batch] = _Costs(self.costs, batch, self.window)
        costs, self._batch, self._rounds, self._learned = self._known[batch], batch, 0, False
        plain = self._plain = costs.plain
        self.token_cost = costs.token
        reach = kept = 1.0  # shares of drafts that are as long, and whose tokens so far are all accepted
        longer, rate, tokens, drafted, spent = 1.0, FIRST, 1.0, 0.0, 0.0
        best = 0.0
        for i in range(self.window):
            longer, rate = _rate(self._drafted[i], longer), _rate(self._accepted[i], rate)
            reach, kept = reach * longer, kept * longer * rate
            some = 1 - (1 - reach) ** batch  # drafting goes on while one text does
            tokens, drafted = tokens + kept, drafted + reach
            spent += some * _at(costs.drafting, reach * batch / some - 1) if some else 0.0
            whole = spent + _at(costs.verifying, drafted)
            if tokens / whole > best:
                best, self._best, self._price = tokens / whole, i + 1, whole - tokens * plain
        self.chosen = self._best if best * plain > 1 + GAIN else 0


class _Costs:
    """`RoundCosts` of one batch size, as lists that are quick to read.

    Attributes:
        verifying: the rest of a round after 0, 1, ... drafted tokens of every text.
    """

    def __init__(self, costs: RoundCosts, batch: int, window: int) -> None:
        self.plain = costs.plain(batch)  # a round without a draft
        self.drafting = [costs.drafting(texts) for texts in range(1, batch + 1)]  # a draft forward for 1, 2, ... texts.
        self.verifying = [costs.verifying(batch, n) for n in range(1, window + 2)]
        reach = min(8, window)
        growth = (self.verifying[reach] - self.verifying[0]) / reach
        self.token = (self.drafting[-1] + max(0.0, growth)) / self.plain  # see `DraftLengths.token_cost`


def _at(values: list[float], place: float) -> float:
    """A value between those of two places, linear."""
    i = min(int(place), len(values) - 1)
    return values[i] if i + 1 == len(values) else values[i] + (values[i + 1] - values[i]) * (place - i)


def _count(cell: list[float], hit: bool) -> None:
    cell[0] += hit
    cell[1] += 1
    if cell[1] >= MEMORY:
        cell[:] = cell[0] / 2, cell[1] / 2


def _rate(cell: list[float], prior: float) -> float:
    return (cell[0] + PRIOR * prior) / (cell[1] + PRIOR)
