"""What drafting confidence is held against: a constant, or a controller that learns from verified rounds."""

import math
from dataclasses import dataclass, field

import numpy as np

from decode.core.trace_metrics import Round


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
