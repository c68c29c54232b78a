"""What rounds cost, and the draft length that pays for all texts of a batch together: the most tokens per second."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass

import numpy as np

from decode.core.round import Round
from decode.core.stop import count
from decode.files import Fields

EVERY = 16  # rounds between two choices of the draft length
LOOK = 64  # every so many rounds with drafts the limit is larger than the chosen one
GAIN = 0.02  # draft only if the predicted gain exceeds this: costs are known no better
LOSS = 0.01  # share of the time spent on rounds that only test whether drafting pays again
FIRST_RATE = 0.7  # prior acceptance rate of the first position; that of each other position is the one before it
PRIOR, MEMORY = 4.0, 512  # observations that a prior counts as, and those after which counts are halved
FAR = 8  # tokens of the draft that, beside one of a single token, tells what a further token costs


@dataclass(frozen=True)
class RoundCosts:
    """Seconds (or any other unit) of a round of the loop, by batch size and tokens drafted for each text; 0: no draft.

    They are linear between what was measured, constant below it, and beyond it grow as between the last two points.
    """

    seconds: Mapping[int, Mapping[int, float]]

    @classmethod
    def of_ratios(cls, cost_ratio: float, verify_growth: float = 0.0, *, block: bool = False) -> RoundCosts:
        """Unmeasured costs in rounds without a draft: c of a token (of a block: of a draft), and v(2) - v(1)."""
        first = 1 + cost_ratio + verify_growth
        return cls({1: {0: 1.0, 1: first, 2: first + verify_growth + (0 if block else cost_ratio)}})

    def round(self, batch: float, drafted: float) -> float:
        """A round in which so many tokens are drafted for each of so many texts."""
        return between({size: between(row, drafted) for size, row in self.seconds.items()}, batch)

    def prices(self, batch: float) -> tuple[float, float]:
        """A further drafted token of every text, and drafting at all, in rounds without a draft."""
        plain, first, far = (self.round(batch, k) for k in (0, 1, FAR))
        token = max(0.0, far - first) / (FAR - 1) / plain
        return token, max(0.0, first / plain - 1 - token)

    def steps(self, batch: int) -> list[float]:
        """A further drafted token of 0, 1, … texts of a batch, in rounds without a draft of one of its texts."""
        plain = self.round(batch, 0) / batch
        return [0.0, *(self.prices(n)[0] * self.round(n, 0) / plain for n in range(1, batch + 1))]

    def to_dict(self) -> Fields:
        """For JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, content: Fields) -> RoundCosts:
        """From `to_dict`, read from JSON, whose keys are strings."""
        return cls({int(size): {int(k): float(v) for k, v in row.items()} for size, row in content["seconds"].items()})


def between(values: Mapping[int, float], x: float) -> float:
    """A value between measured points, linear; the first below them, along the line of the last two beyond, >= 0."""
    points = sorted(values)
    if len(points) == 1 or x <= points[-1]:
        return float(np.interp(x, points, [values[point] for point in points]))
    low, high = points[-2:]
    return max(0.0, values[high] + (values[high] - values[low]) * (x - high) / (high - low))


@dataclass
class DraftLengths:
    """Chooses the longest draft of each round; `chosen` is 0 where drafting does not pay.

    A stop rule that weighs each token against its cost (`weighed`) knows more than the place of the token: its drafts
    are limited only where they do not pay as they are, which a first `EVERY` rounds show.
    """

    costs: RoundCosts
    window: int
    weighed: bool = False

    def __post_init__(self) -> None:
        self._rounds_of: dict[int, np.ndarray] = {}  # seconds of rounds of 0, 1, … drafted tokens, by batch size
        self.reset()

    def reset(self) -> None:
        """Forget everything learned."""
        # [hits, observations] of each position: drafts that reached it when they were allowed to, and accepted tokens
        self._drafted = [[0.0, 0.0] for _ in range(self.window)]
        self._accepted = [[0.0, 0.0] for _ in range(self.window)]
        self.chosen = self._batch = self._rounds = self._with_draft = 0
        self.block_cost = self._waited = self._loss = 0.0  # the first as of `RoundCosts.prices`
        self.step_costs = [0.0, 0.0]  # as of `RoundCosts.steps`
        self._learned = False

    def limit(self, batch: int) -> int:
        """The longest draft of the round that begins, for `batch` texts."""
        if batch != self._batch or (self._learned and self._rounds >= min(EVERY, 1 + self._with_draft // 2)):
            self._choose(batch)
        self._rounds += 1
        if self.chosen:
            self._with_draft += 1
            wider = self.chosen + max(2, self.chosen // 2)
            return min(self.window, wider) if self._with_draft % LOOK == 0 else self.chosen
        self._waited += self._rounds_of[batch][0]
        if LOSS * self._waited < self._loss:
            return 0
        self._waited, self._rounds = 0.0, EVERY  # this round tests whether drafting pays, and is learned from at once
        return self._best

    def observe(self, rounds: Iterable[tuple[Round, int]]) -> None:
        """Learn from a round of all texts, each given with the longest draft that it was allowed."""
        self._learned = True
        for result, allowed in rounds:
            for i in range(min(result.drafted + 1, allowed)):
                count(self._drafted[i], i < result.drafted, MEMORY)
            for i in range(min(result.accepted + 1, result.drafted)):
                count(self._accepted[i], i < result.accepted, MEMORY)

    def _choose(self, batch: int) -> None:
        """Set `chosen`, and the time that a round with the best draft loses against plain decoding if it is 0."""
        if batch not in self._rounds_of:
            self._rounds_of[batch] = np.array([self.costs.round(batch, k) for k in range(self.window + 1)])
        rounds = self._rounds_of[batch]
        self._batch, self._rounds, self._learned = batch, 0, False
        self.step_costs, self.block_cost = self.costs.steps(batch), self.costs.prices(batch)[1]
        # shares of the drafts that are this long, and of those whose tokens so far are all accepted
        longer = np.array(_rates(self._drafted, 1.0))
        reached, kept = longer.cumprod(), (longer * _rates(self._accepted, FIRST_RATE)).cumprod()
        # drafting goes on while one text of the batch does; a draft that ends before its first token costs one token
        longest = (1 - (1 - reached) ** batch).cumsum().clip(min=1)
        # a line beyond what was measured may fall to 0, but no draft makes a round cheaper
        seconds, tokens = np.interp(longest, range(self.window + 1), rounds).clip(min=rounds[0]), 1 + kept.cumsum()
        gains = tokens / seconds * rounds[0]
        if self.weighed and self._with_draft < EVERY:
            gains[-1] = math.inf
        best = self.window - 1 if self.weighed and gains[-1] > 1 + GAIN else int(gains.argmax())
        self._best, self._loss = best + 1, float(seconds[best] - tokens[best] * rounds[0])
        self.chosen = self._best if gains[best] > 1 + GAIN else 0


def _rates(cells: Iterable[list[float]], rate: float) -> list[float]:
    """The rate at each position; what is expected before anything is seen is the rate of the position before."""
    return [rate := (hits + PRIOR * rate) / (seen + PRIOR) for hits, seen in cells]
