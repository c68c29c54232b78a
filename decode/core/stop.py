"""When drafting stops: confidence × aggregate × threshold within a window.

A stop rule that reads the drawn token keeps that token in the draft; dropping it would bias the output. A rule that
reads only the distribution may refuse to draw (`StopRule.refuse`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from torch import Tensor

from decode.core.round import Round
from decode.core.verify import entropy
from decode.errors import UserError


class Threshold:
    """A value below which the confidence ends a draft. The methods here are those of a constant one."""

    value: float

    def calibrate(self, confidence: float) -> float:
        """The confidence as it is compared with `value`."""
        return confidence

    def price(self, token_cost: float, block_cost: float) -> None:
        """Set the costs of one more drafted token and of drafting at all, in rounds without a draft."""

    def observe(self, round: Round) -> None:
        """Learn from a round, whose draft holds the confidence of each drafted token."""


@dataclass
class Fixed(Threshold):
    """A constant."""

    value: float = 0.0


@dataclass
class TargetAcceptance(Threshold):
    """Draft & Verify's controller: raises the threshold while the moving acceptance rate is below `alpha`.

    AR ← β₁·AR + (1 − β₁)·m/k; g = value ± ε; value ← β₂·value + (1 − β₂)·g, with k the draft's depth. One round moves
    the threshold by at most (1 − β₂)·ε, 0.001 with the paper's constants.
    """

    value: float = 0.6
    alpha: float = 0.9
    step: float = 0.01
    beta1: float = 0.5
    beta2: float = 0.9
    keep_at: int | None = 12  # drafts of this length do not lower the threshold (Draft & Verify's code; not AdaSPEED)
    rate: float = 0.0

    def observe(self, round: Round) -> None:
        """Move towards the target acceptance."""
        if not (depth := round.depth):
            return
        self.rate = self.beta1 * self.rate + (1 - self.beta1) * round.accepted / depth
        goal = self.value
        if self.rate < self.alpha:
            goal += self.step
        elif self.keep_at is None or depth < self.keep_at:
            goal -= self.step
        self.value = self.beta2 * self.value + (1 - self.beta2) * goal


@dataclass
class MeanOfRejected(Threshold):
    """AdaSD's generation threshold: the mean confidence of first-rejected tokens, −∞ before the first."""

    value: float = -math.inf
    total: float = 0.0
    count: int = 0

    def observe(self, round: Round) -> None:
        """Record the confidence of the first rejected token."""
        confidence = round.draft.confidence
        if round.accepted < len(confidence):
            self.total += confidence[round.accepted]
            self.count += 1
            self.value = self.total / self.count


@dataclass
class Roc(Threshold):
    """Hugging Face's update: the threshold on the ROC curve that minimises fpr + 3·(1 − tpr) over the history."""

    value: float = 0.4
    limit: int = 4096  # tokens of the history
    matches: list[int] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)

    def observe(self, round: Round) -> None:
        """Add the accepted tokens and the first rejected one; refit once both kinds have been seen."""
        seen = round.draft.confidence[: round.tested]
        accepted = min(round.accepted, len(seen))  # copied drafts have no confidence
        self.matches += [1] * accepted + [0] * (len(seen) - accepted)
        self.scores += seen
        del self.matches[: -self.limit], self.scores[: -self.limit]
        if len(self.scores) > 5 and 0 < sum(self.matches) < len(self.matches):
            values, place = np.unique(-np.array(self.scores), return_inverse=True)
            kept = np.bincount(place, self.matches).cumsum()  # accepted tokens with at least this confidence
            refused = np.bincount(place).cumsum() - kept
            self.value = -float(values[(refused / refused[-1] + 3 * (1 - kept / kept[-1])).argmin()])


@dataclass
class CostOptimal(Threshold):
    """One more drafted token pays while P(all drafted tokens are accepted) > R·cost (ours).

    cost is the time of one more drafted token, the growth of the target's forward included, in one-token target
    forwards; R = Σ(m + 1) / Σ(1 + k·cost) is the running rate of tokens, which makes the threshold optimal in the sense
    of renewal rewards. A block head's forward is a part of the round and not of its tokens. Costs are set (`price`),
    not timed while decoding: a text does not depend on the load of the machine. Confidences are calibrated to
    acceptance probabilities by counts in bins of equal width.
    """

    cost: float = 0.1
    decay: float = 0.9  # weight of the past in the running rate
    prior: float = 8.0  # pseudo-counts that a bin starts with at its own confidence
    bins: int = 20
    memory: int = 1024  # observations of a bin after which its counts are halved
    value: float = field(init=False)
    time: float = 0.0
    tokens: float = 0.0

    def __post_init__(self) -> None:
        self.table = [[0.0, 0.0] for _ in range(self.bins)]
        self.price(self.cost, 0.0)

    def _bin(self, confidence: float) -> list[float]:
        return self.table[min(self.bins - 1, int(confidence * self.bins))]

    def calibrate(self, confidence: float) -> float:
        """Estimated acceptance probability at this confidence."""
        hits, seen = self._bin(confidence)
        return (hits + self.prior * confidence) / (seen + self.prior)

    def observe(self, round: Round) -> None:
        """Update the calibration and the rate of tokens."""
        for i, value in enumerate(round.draft.confidence[: round.tested]):
            count(self._bin(value), i < round.accepted, self.memory)
        self.time = self.decay * self.time + 1 + self.block_cost + round.drafted * self.cost
        self.tokens = self.decay * self.tokens + round.accepted + 1
        self.price(self.cost, self.block_cost)

    def price(self, token_cost: float, block_cost: float) -> None:
        """See `Threshold.price`."""
        self.cost, self.block_cost = token_cost, block_cost
        self.value = self.tokens / self.time * token_cost if self.time else token_cost


def count(cell: list[float], hit: bool, memory: float) -> None:
    """Add an observation to ``[hits, observations]``; both are halved after `memory` observations."""
    cell[0] += hit
    cell[1] += 1
    if cell[1] >= memory:
        cell[:] = cell[0] / 2, cell[1] / 2


@dataclass
class DraftedToken:
    """A drafted token as stop rules see it."""

    probs: Tensor  # warped probabilities ``[vocab]`` that the token is drawn from
    token: Any  # token id (0-d long), None before it is drawn
    logits: Tensor  # unwarped logits ``[vocab]``
    hidden: Tensor  # hidden state ``[width]`` that the logits are computed from
    greedy: bool = False  # `probs` is one-hot and carries no confidence
    accepted: float | None = None  # the draft's own estimate, made without `token`, that the target accepts it


Confidence = Callable[[DraftedToken], float]


def probability(log_odds: float) -> float:
    """The logistic function, without overflow."""
    return 1 / (1 + math.exp(-max(-50.0, min(50.0, log_odds))))


def token_probability(drafted: DraftedToken) -> float:
    """q(x) of the drafted token, unwarped (Draft & Verify, AdaSPEED)."""
    return drafted.logits.float().softmax(-1)[drafted.token].item()


def warped_token_probability(drafted: DraftedToken) -> float:
    """q(x) after warping (Hugging Face); unwarped in greedy decoding."""
    return token_probability(drafted) if drafted.greedy else drafted.probs[drafted.token].item()


def max_probability(drafted: DraftedToken) -> float:
    """Max q, unwarped; reads the distribution only."""
    return drafted.logits.float().softmax(-1).amax().item()


def own_estimate(drafted: DraftedToken) -> float:
    """What a block head's confidence head says; reads no token.

    Raises:
        UserError: the draft has no such head.
    """
    if drafted.accepted is None:
        raise UserError(
            "this stop rule reads the draft's confidence head, and the draft has none: give a DSpark head that was "
            "trained with one (student.block.confidence), or choose another stop rule, such as cost-optimal"
        )
    return drafted.accepted


def negative_entropy(drafted: DraftedToken) -> float:
    """−H(q) in bits, of the unwarped distribution in greedy decoding (AdaSD); reads the distribution only."""
    return -entropy(drafted.logits.float().softmax(-1) if drafted.greedy else drafted.probs).item()


@dataclass
class StopRule:
    """Ends a draft when the aggregate of the confidences falls below the threshold, or at the window."""

    window: int = 5  # longest draft of this round
    confidence: Confidence | None = None  # read at each token; None: only the window ends a draft
    product: bool = False  # aggregate by the product over the draft (AdaSPEED) instead of the last value
    threshold: Threshold = field(default_factory=Fixed)
    refuse: bool = False  # compare before the token is drawn; only for confidences that read the distribution alone
    heuristic: bool = False  # Hugging Face's schedule: window + 2 after a full acceptance, else − 1

    def watch(self) -> Watch:
        """The rule at the start of a draft."""
        return Watch(self)

    def observe(self, round: Round) -> None:
        """Adapt to a verified round."""
        self.threshold.observe(round)
        if self.heuristic and round.drafted:
            self.window = self.window + 2 if round.accepted == round.depth else max(1, self.window - 1)


@dataclass
class Watch:
    """A stop rule that looks at one draft, token by token."""

    rule: StopRule
    seen: list[float] = field(default_factory=list)  # the confidence of each token that stays in the draft
    aggregate: float = 1.0

    def _below(self, drafted: DraftedToken) -> bool:
        rule = self.rule
        if rule.confidence is None:
            return False
        value = rule.confidence(drafted)
        if math.isnan(value):
            raise UserError("the draft's logits are NaN; check its weights, or load it in bfloat16 or float32")
        score = rule.threshold.calibrate(value)
        self.aggregate = self.aggregate * score if rule.product else score
        below = self.aggregate < rule.threshold.value
        if not (below and rule.refuse):
            self.seen.append(value)
        return below

    def before(self, drafted: DraftedToken) -> bool:
        """Whether to stop before drawing from ``drafted.probs``."""
        return self.rule.refuse and self._below(drafted)

    def after(self, drafted: DraftedToken) -> bool:
        """Whether to stop after ``drafted.token``, which stays in the draft."""
        return not self.rule.refuse and self._below(drafted)
