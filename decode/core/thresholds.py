"""What drafting confidence is held against: a constant, or a controller that learns from verified rounds."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from decode.core.trace import Round


class Threshold:
    """A value that drafting confidence must not fall below; what follows are the defaults of a constant one."""

    value: float

    def calibrate(self, confidence: float) -> float:
        """The confidence as it is compared with `value`."""
        return confidence

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

    Attributes:
        keep_at_cap: do not lower after a draft that filled the window (Draft & Verify's code; not in AdaSPEED).
    """

    start: float = 0.6
    alpha: float = 0.9
    step: float = 0.01
    beta1: float = 0.5
    beta2: float = 0.9
    keep_at_cap: bool = True
    window: int = 12
    value: float = field(init=False)
    rate: float = field(init=False)

    def __post_init__(self) -> None:
        self.reset()

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

    def __post_init__(self) -> None:
        self.reset()

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

    def __post_init__(self) -> None:
        self.reset()

    def observe(self, round: Round, confidence: list[float]) -> None:
        """Add accepted tokens and the first rejected one; refit once both kinds have been seen."""
        from sklearn.metrics import roc_curve

        seen = confidence[: round.tested]
        self.matches += [1] * round.accepted + [0] * (len(seen) - round.accepted)
        self.scores += seen
        del self.matches[: -self.limit], self.scores[: -self.limit]
        if len(self.scores) > 5 and 0 < sum(self.matches) < len(self.matches):
            fpr, tpr, values = roc_curve(self.matches, self.scores)
            best = int((fpr + 3 * (1 - tpr)).argmin())
            self.value = float(min(values[best], 1.0))

    def reset(self) -> None:
        """Back to the start."""
        self.value = self.start
        self.matches: list[int] = []
        self.scores: list[float] = []


@dataclass
class CostOptimal(Threshold):
    """Ours: one more token pays while P(all accepted) > R·(t_draft + Δt_verify).

    R is the running rate of tokens per second, t_draft the time of a drafted token, Δt_verify the growth of
    verification with one more token: renewal-reward optimality, with all three measured online, so there is nothing
    to tune. Confidence is first calibrated to acceptance by counting in bins.

    Attributes:
        decay: weight of the past in the running averages.
        prior: pseudo-counts that a bin starts with at its own confidence.
    """

    decay: float = 0.9
    prior: float = 8.0
    bins: int = 20
    value: float = field(init=False)
    table: list[list[float]] = field(init=False, repr=False)
    time: float = field(init=False, repr=False)
    tokens: float = field(init=False, repr=False)
    draft_time: float = field(init=False, repr=False)
    draft_tokens: float = field(init=False, repr=False)
    fit: list[float] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self.reset()

    def calibrate(self, confidence: float) -> float:
        """Estimated acceptance probability at this confidence."""
        hits, seen = self.table[min(self.bins - 1, int(confidence * self.bins))]
        return (hits + self.prior * confidence) / (seen + self.prior)

    def observe(self, round: Round, confidence: list[float]) -> None:
        """Update the calibration, the rate and the two costs."""
        for i, value in enumerate(confidence[: round.tested]):
            cell = self.table[min(self.bins - 1, int(value * self.bins))]
            cell[0] += i < round.accepted
            cell[1] += 1
        draft, verify = round.seconds
        if draft + verify <= 0:
            return
        keep, k = self.decay, round.drafted
        self.time = keep * self.time + draft + verify
        self.tokens = keep * self.tokens + round.accepted + 1
        self.draft_time = keep * self.draft_time + draft
        self.draft_tokens = keep * self.draft_tokens + k
        for i, x in enumerate((1.0, k, k * k, verify, k * verify)):
            self.fit[i] = keep * self.fit[i] + x
        n, sx, sxx, sy, sxy = self.fit
        spread = n * sxx - sx * sx
        slope = max(0.0, (n * sxy - sx * sy) / spread) if spread > 1e-9 else 0.0
        if self.draft_tokens > 0:
            self.value = self.tokens / self.time * (self.draft_time / self.draft_tokens + slope)

    def reset(self) -> None:
        """Back to the start."""
        self.value = 0.3
        self.table = [[0.0, 0.0] for _ in range(self.bins)]
        self.time = self.tokens = self.draft_time = self.draft_tokens = 0.0
        self.fit = [0.0] * 5
