"""When drafting stops: confidence × aggregate × threshold, under a window.

A stop rule that reads the sampled token keeps that token in the draft; dropping it would bias the output. A rule that
reads only the distribution may refuse to draft at all (`refuse=True`).
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from torch import Tensor

from decode.errors import UserError
from decode.trace import Round
from decode.verify import entropy


class Threshold:
    """A value that drafting confidence must not fall below; what follows are the defaults of a constant one."""

    value: float

    def __post_init__(self) -> None:
        self.reset()

    def calibrate(self, confidence: float) -> float:
        """The confidence as it is compared with `value`."""
        return confidence

    def price(self, token_cost: float) -> None:
        """What one more drafted token costs from now on, in rounds without a draft."""

    def observe(self, round: Round, confidence: list[float]) -> None:
        """Learn from a round, given the confidence of each drafted token."""

    def reset(self) -> None:
        """Back to the start."""


@dataclass
class Fixed(Threshold):
    """A constant."""

    value: float = 0.0


@dataclass
class TargetAcceptance(Threshold):
    """Draft & Verify's controller: raise the threshold while the moving acceptance rate is below `alpha`.

    AR ← β₁·AR + (1 − β₁)·m/k; g = value ± ε; value ← β₂·value + (1 − β₂)·g. One round moves the threshold by at
    most (1 − β₂)·ε, 0.001 with the paper's constants.
    """

    start: float = 0.6
    alpha: float = 0.9
    step: float = 0.01
    beta1: float = 0.5
    beta2: float = 0.9
    # do not lower after a draft that filled the window (Draft & Verify's code; not in AdaSPEED)
    keep_at_cap: bool = True
    window: int = 12
    value: float = field(init=False)
    rate: float = field(init=False)

    def observe(self, round: Round, confidence: list[float]) -> None:
        """Move towards the target acceptance."""
        if not round.drafted:
            return
        self.rate = self.beta1 * self.rate + (1 - self.beta1) * round.accepted / round.drafted
        if self.rate < self.alpha:
            goal = self.value + self.step
        elif self.keep_at_cap and round.drafted >= self.window:
            goal = self.value
        else:
            goal = self.value - self.step
        self.value = self.beta2 * self.value + (1 - self.beta2) * goal

    def reset(self) -> None:
        """Back to the start."""
        self.value, self.rate = self.start, 0.0


@dataclass
class MeanOfRejected(Threshold):
    """AdaSD's generation threshold: the mean confidence at first-rejected tokens; drafts to the window until one."""

    value: float = field(init=False)

    def observe(self, round: Round, confidence: list[float]) -> None:
        """Record the confidence of the first rejected token."""
        if round.accepted < len(confidence):
            self.total += confidence[round.accepted]
            self.count += 1
            self.value = self.total / self.count

    def reset(self) -> None:
        """Back to the start."""
        self.total, self.count, self.value = 0.0, 0, -math.inf


@dataclass
class Roc(Threshold):
    """Hugging Face's update: the threshold on the ROC curve that minimises fpr + 3·(1 − tpr) over the history."""

    start: float = 0.4
    limit: int = 4096
    value: float = field(init=False)

    def observe(self, round: Round, confidence: list[float]) -> None:
        """Add accepted tokens and the first rejected one; refit once both kinds have been seen."""
        seen = confidence[: round.tested]
        accepted = min(round.accepted, len(seen))  # nothing is seen of a copied draft
        self.matches += [1] * accepted + [0] * (len(seen) - accepted)
        self.scores += seen
        del self.matches[: -self.limit], self.scores[: -self.limit]
        if len(self.scores) > 5 and 0 < sum(self.matches) < len(self.matches):
            scores = np.array(self.scores)
            order = np.argsort(-scores, kind="stable")
            scores, hits = scores[order], np.array(self.matches)[order].cumsum()
            last = np.append(np.flatnonzero(np.diff(scores)), len(scores) - 1)  # of equal scores
            accepted, rejected = hits[last], last + 1 - hits[last]
            cost = rejected / rejected[-1] + 3 * (1 - accepted / accepted[-1])
            self.value = float(scores[last[cost.argmin()]])

    def reset(self) -> None:
        """Back to the start."""
        self.value = self.start
        self.matches: list[int] = []
        self.scores: list[float] = []


@dataclass
class CostOptimal(Threshold):
    """Ours: one more token pays while P(all accepted) > R·(c + Δv).

    c is the cost of a drafted token, Δv the growth of the target's forward by one more token, both in one-token target
    forwards; R = Σ(m + 1) / Σ(1 + k·(c + Δv)) is the running rate of tokens, so that the threshold is the one of
    renewal-reward optimality. The costs are given, for each batch size (`price`): a text does not depend on the load of
    the machine. Confidence is first calibrated to acceptance by counting in bins.
    """

    cost_ratio: float = 0.1  # c
    verify_growth: float = 0.0  # Δv
    decay: float = 0.9  # weight of the past in the running rate
    prior: float = 8.0  # pseudo-counts that a bin starts with at its own confidence
    bins: int = 20  # of confidences, equally wide
    memory: int = 1024  # tokens that a bin counts before all its counts are halved, so that it follows a long session
    value: float = field(init=False)
    token: float = field(init=False, repr=False)
    table: list[list[float]] = field(init=False, repr=False)
    time: float = field(init=False, repr=False)
    tokens: float = field(init=False, repr=False)

    def calibrate(self, confidence: float) -> float:
        """Estimated acceptance probability at this confidence."""
        hits, seen = self._bin(confidence)
        return (hits + self.prior * confidence) / (seen + self.prior)

    def _bin(self, confidence: float) -> list[float]:
        return self.table[min(self.bins - 1, int(confidence * self.bins))]

    def observe(self, round: Round, confidence: list[float]) -> None:
        """Update the calibration and the rate."""
        for i, value in enumerate(confidence[: round.tested]):
            cell = self._bin(value)
            cell[0] += i < round.accepted
            cell[1] += 1
            if cell[1] >= self.memory:
                cell[:] = cell[0] / 2, cell[1] / 2
        self.time = self.decay * self.time + 1 + round.drafted * self.token
        self.tokens = self.decay * self.tokens + round.accepted + 1
        self.value = self.tokens / self.time * self.token

    def price(self, token_cost: float) -> None:
        """See `Threshold.price`."""
        self.token = token_cost
        self.value = self.tokens / self.time * token_cost if self.time else token_cost

    def reset(self) -> None:
        """Back to the start: the rate of decoding without a draft."""
        self.value = self.token = self.cost_ratio + self.verify_growth
        self.table = [[0.0, 0.0] for _ in range(self.bins)]
        self.time = self.tokens = 0.0


@dataclass
class DraftedToken:
    """One drafted token as a stop rule sees it."""

    probs: Tensor  # the warped probabilities ``[vocab]`` that the token is drawn from
    token: Tensor | None  # the token (0-d long), or None before it is drawn
    logits: Tensor  # the unwarped logits ``[vocab]``
    hidden: Tensor  # the hidden state ``[width]`` that produced them
    greedy: bool = False  # decoding is greedy, so that `probs` is one-hot and says nothing of confidence


Confidence = Callable[[DraftedToken], float]


def token_probability(step: DraftedToken) -> float:
    """q(x) of the drafted token, unwarped (Draft & Verify, AdaSPEED)."""
    assert step.token is not None
    return step.logits.float().softmax(-1)[step.token].item()


def warped_token_probability(step: DraftedToken) -> float:
    """q(x) after warping; greedy decoding has nothing to warp and uses the unwarped one (Hugging Face)."""
    assert step.token is not None
    return token_probability(step) if step.greedy else step.probs[step.token].item()


def max_probability(step: DraftedToken) -> float:
    """max q, unwarped; reads the distribution only."""
    return step.logits.float().softmax(-1).amax().item()


def negative_entropy(step: DraftedToken) -> float:
    """−H(q) in bits (AdaSD stops where H exceeds its threshold); reads the distribution only.

    Greedy decoding takes the unwarped distribution, since a one-hot one has no entropy.
    """
    return -entropy(step.logits.float().softmax(-1) if step.greedy else step.probs).item()


@dataclass
class StopRule:
    """Stop once the aggregate of the confidences falls below the threshold, or the window is full."""

    window: int = 5  # the most tokens drafted in a round
    confidence: Confidence | None = None  # what is read at each token; None stops at the window only and costs nothing
    product: bool = False  # aggregate by the product over the draft (AdaSPEED) instead of the last value
    threshold: Threshold = field(default_factory=Fixed)  # constant or adaptive
    refuse: bool = False  # ask before drawing; only for confidences that read the distribution alone
    schedule: str = "constant"  # or Hugging Face's ``heuristic``: window + 2 after a full acceptance, else − 1

    def __post_init__(self) -> None:
        self._window = self.window
        self._aggregate = 1.0
        self.seen: list[float] = []

    def begin(self) -> None:
        """A new round starts."""
        self.seen, self._aggregate = [], 1.0

    def cap(self) -> int:
        """The most tokens to draft this round."""
        return self._window

    def _below(self, step: DraftedToken) -> bool:
        assert self.confidence is not None
        value = self.confidence(step)
        if math.isnan(value):
            raise UserError("the draft's logits are NaN; check its weights, or load it in bfloat16 or float32")
        self.seen.append(value)
        score = self.threshold.calibrate(value)
        self._aggregate = self._aggregate * score if self.product else score
        return self._aggregate < self.threshold.value

    def before(self, step: DraftedToken) -> bool:
        """Whether to stop before drawing from ``step.probs``."""
        if self.confidence is None or not self.refuse:
            return False
        stop = self._below(step)
        if stop:
            self.seen.pop()
        return stop

    def after(self, step: DraftedToken) -> bool:
        """Whether to stop after ``step.token``, which stays in the draft."""
        return self.confidence is not None and not self.refuse and self._below(step)

    def observe(self, round: Round) -> None:
        """Adapt to a verified round."""
        self.threshold.observe(round, self.seen)
        if self.schedule != "constant" and round.drafted:
            full = round.accepted == round.drafted
            self._window = self._window + 2 if full else max(1, self._window - 1)

    def reset(self) -> None:
        """Forget everything learned."""
        self.threshold.reset()
        self._window = self.window
        self.begin()


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
