"""When drafting stops: confidence × aggregate × threshold, under a window.

A stop rule that reads the sampled token keeps that token in the draft; dropping it would bias the output. A rule that
reads only the distribution may refuse to draft at all (`refuse=True`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from torch import Tensor

from .rules import entropy

if TYPE_CHECKING:
    from .trace import Round


@dataclass
class Step:
    """One drafted token as a stop rule sees it.

    Attributes:
        probs: the warped law ``[vocab]`` the token was drawn from.
        token: the token (0-d long), or None before it is drawn.
        logits: the unwarped logits ``[vocab]``.
        hidden: the hidden state ``[width]`` that produced them.
    """

    probs: Tensor
    token: Tensor | None
    logits: Tensor
    hidden: Tensor


Confidence = Callable[[Step], float]


def token_probability(step: Step) -> float:
    """q(x) of the drafted token, unwarped (Draft & Verify, AdaSPEED)."""
    assert step.token is not None
    return step.logits.float().softmax(-1)[step.token].item()


def warped_token_probability(step: Step) -> float:
    """q(x) after warping; greedy decoding has nothing to warp and uses the unwarped one (Hugging Face)."""
    assert step.token is not None
    value = step.probs[step.token].item()
    return value if value < 1.0 else token_probability(step)


def max_probability(step: Step) -> float:
    """max q, unwarped; reads the distribution only."""
    return step.logits.float().softmax(-1).amax().item()


def negative_entropy(step: Step) -> float:
    """−H(q) in bits (AdaSD stops where H exceeds its threshold); reads the distribution only.

    Greedy decoding takes the unwarped distribution, since a one-hot one has no entropy.
    """
    value = -entropy(step.probs).item()
    return value if value < 0 else -entropy(step.logits.float().softmax(-1)).item()


class Threshold(Protocol):
    """A value that drafting confidence must not fall below."""

    value: float

    def observe(self, round: Round, confidence: list[float]) -> None:
        """Learn from a round, given the confidence of each drafted token."""
        ...

    def reset(self) -> None:
        """Back to the start."""
        ...


@dataclass
class Fixed:
    """A constant."""

    value: float = 0.0

    def observe(self, round: Round, confidence: list[float]) -> None:
        """Nothing to learn."""

    def reset(self) -> None:
        """Nothing to forget."""


@dataclass
class TargetAcceptance:
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
class MeanOfRejected:
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
class Roc:
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
class CostOptimal:
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


@dataclass
class StopRule:
    """Stop once the aggregate of the confidences falls below the threshold, or the window is full.

    Attributes:
        window: the most tokens drafted in a round.
        confidence: what is read at each token; None stops at the window only and costs nothing.
        product: aggregate by the product over the draft (AdaSPEED) instead of the last value.
        threshold: constant or adaptive.
        refuse: ask before drawing; only for confidences that read the distribution alone.
        schedule: ``constant``, or Hugging Face's ``heuristic`` (window + 2 after a full acceptance, else − 1) and
            ``heuristic_transient`` (the same, reset for every text).
    """

    window: int = 5
    confidence: Confidence | None = None
    product: bool = False
    threshold: Threshold = field(default_factory=Fixed)
    refuse: bool = False
    schedule: str = "constant"

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

    def _below(self, step: Step) -> bool:
        assert self.confidence is not None
        value = self.confidence(step)
        self.seen.append(value)
        calibrate = getattr(self.threshold, "calibrate", None)
        score = calibrate(value) if calibrate else value
        self._aggregate = self._aggregate * score if self.product else score
        return self._aggregate < self.threshold.value

    def before(self, step: Step) -> bool:
        """Whether to stop before drawing from ``step.probs``."""
        if self.confidence is None or not self.refuse:
            return False
        stop = self._below(step)
        if stop:
            self.seen.pop()
        return stop

    def after(self, step: Step) -> bool:
        """Whether to stop after ``step.token``, which stays in the draft."""
        return self.confidence is not None and not self.refuse and self._below(step)

    def observe(self, round: Round) -> None:
        """Adapt to a verified round."""
        self.threshold.observe(round, self.seen)
        if self.schedule != "constant":
            full = round.accepted == round.drafted
            self._window = self._window + 2 if full else max(1, self._window - 1)

    def start(self) -> None:
        """A new text begins."""
        if self.schedule == "heuristic_transient":
            self._window = self.window

    def reset(self) -> None:
        """Forget everything learned."""
        self.threshold.reset()
        self._window = self.window
        self.begin()
