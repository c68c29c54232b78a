"""When drafting stops: confidence × aggregate × threshold within a window.

A stop rule that reads the drawn token keeps that token in the draft; dropping it would bias the output. A rule that
reads only distributions may refuse to draw (`StopRule.refuse`): they depend on tokens that stay, in every text of a
batch.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor

from decode.core.round import Round
from decode.core.verify import entropy, pick
from decode.errors import UserError


class Threshold:
    """A value below which the confidence ends a draft. The methods here are those of a constant one."""

    value: float

    def calibrate(self, confidence: float) -> float:
        """The confidence as it is compared with `value`."""
        return confidence

    def price(self, step_costs: Sequence[float], block_cost: float) -> None:
        """Set the costs of one more token of 0, 1, … texts of a batch, and of drafting at all, in rounds of a text."""

    def weigh(self, scores: Sequence[float]) -> None:
        """Set `value` for the next token of several drafts, whose confidences have these aggregates."""

    def observe(self, round: Round) -> None:
        """Learn from a round, whose draft holds the confidence of each drafted token."""


@dataclass
class Fixed(Threshold):
    """A constant."""

    value: float = 0.0


@dataclass
class TargetAcceptance(Threshold):
    """Draft & Verify's controller: raises the threshold while the moving acceptance rate is below `alpha`.

    AR ← β₁·AR + (1 − β₁)·m/n; g = value ± ε; value ← β₂·value + (1 − β₂)·g, with n the draft's depth. One round moves
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
    """One more drafted token pays while P(it and all before it are accepted) > R·cost (ours).

    cost is the time of one more drafted token, the growth of the target's forward included, in one-token target
    forwards; R = Σ(m + 1) / Σ(1 + n·cost) is the running rate of tokens, which makes the threshold optimal in the sense
    of renewal rewards. Texts that draft their next tokens at once share the cost of the step: the sum of their
    probabilities has to pay for it. The forward of a draft that has but one is a part of the round and not of its
    tokens. Costs are set (`price`), not timed while decoding: a text does not depend on the load of the machine.

    A confidence c stands for the acceptance probability σ(w·log(c/(1 − c)) + b). From w = 1 and b = 0, the draft's own
    estimate, both follow the tested tokens by Newton steps with second derivatives of a bounded memory, similar to
    vLLM's adaptive verification. A token that is not drafted yet has the running acceptance rate of all.
    """

    cost: float = 0.1
    drafted: bool = True  # the confidence is that of the last token of the draft, not of the next one
    decay: float = 0.98  # weight of the past in the running rates
    every: int = 10  # rounds between two Newton steps
    prior: float = 20.0  # second derivative of the start
    memory: float = 1000.0  # tested tokens that are remembered
    value: float = field(init=False)
    time: float = 0.0
    tokens: float = 0.0

    def __post_init__(self) -> None:
        self.slope, self.offset, self.information = 1.0, 0.0, np.zeros((2, 2))
        self.accepted = self.tested = self.rounds = 0.0
        self.window = list[tuple[float, bool]]()  # log-odds of the tokens tested since the last step
        self.price([0.0, self.cost], 0.0)

    def calibrate(self, confidence: float) -> float:
        """Estimated acceptance probability at this confidence."""
        return sigmoid(self.slope * log_odds(confidence) + self.offset)

    def observe(self, round: Round) -> None:
        """Update the estimate and the rates."""
        seen = enumerate(round.draft.confidence[: round.tested])
        self.window += [(log_odds(value), i < round.accepted) for i, value in seen]
        self.rounds += 1
        if self.rounds >= self.every and self.window:
            self._step()
        self.time = self.decay * self.time + 1 + self.block_cost + round.drafted * self.cost
        self.tokens = self.decay * self.tokens + round.accepted + 1
        self.tested = self.decay * self.tested + round.tested
        self.accepted = self.decay * self.accepted + round.accepted
        self.price(self.step_costs, self.block_cost)

    def _step(self) -> None:
        """A Newton step of the estimate."""
        odds, accepted = np.array(self.window).T
        x = np.stack([odds, np.ones_like(odds)])
        p = np.array([sigmoid(z) for z in self.slope * odds + self.offset])
        self.information = (1 - 1 / self.memory) ** len(odds) * self.information + x * p * (1 - p) @ x.T
        step = np.linalg.solve(self.information + self.prior * np.eye(2), x @ (accepted - p))
        self.slope, self.offset = max(0.0, self.slope + float(step[0])), self.offset + float(step[1])
        self.rounds, self.window = 0, []

    def price(self, step_costs: Sequence[float], block_cost: float) -> None:
        """See `Threshold.price`."""
        self.step_costs, self.block_cost = step_costs, block_cost
        self.cost = step_costs[-1] / (len(step_costs) - 1)
        self.rate = self.tokens / self.time if self.time else 1.0
        if self.drafted:
            self.rate *= (self.tested + 1) / (self.accepted + 1)
        self.value = self.rate * self.cost

    def weigh(self, scores: Sequence[float]) -> None:
        """Admit the likeliest tokens, as many as maximise the sum of their probabilities less R times their cost."""
        ranked, costs = sorted(scores, reverse=True), self.step_costs
        if len(costs) <= len(ranked):  # of one text
            costs = [self.cost * n for n in range(len(ranked) + 1)]
        gains = [total - self.rate * cost for total, cost in zip(accumulate(ranked, initial=0.0), costs)]
        best = gains.index(max(gains))
        self.value = ranked[best - 1] if best else math.inf


def log_odds(probability: float) -> float:
    """log(p / (1 − p)), of probabilities that single precision tells from 0 and 1."""
    p = min(max(probability, 1e-7), 1 - 1e-7)
    return math.log(p / (1 - p))


def sigmoid(odds: float) -> float:
    """The probability of log-odds."""
    return 0.5 + 0.5 * math.tanh(0.5 * odds)


def count(cell: list[float], hit: bool, memory: float) -> None:
    """Add an observation to ``[hits, observations]``; both are halved after `memory` observations."""
    cell[0] += hit
    cell[1] += 1
    if cell[1] >= memory:
        cell[:] = cell[0] / 2, cell[1] / 2


@dataclass
class DraftedTokens:
    """The next tokens of several drafts, as stop rules see them."""

    probs: Tensor  # warped probabilities ``[n, vocab]`` that the tokens are drawn from
    logits: Tensor  # unwarped logits ``[n, vocab]``
    hidden: Tensor  # hidden states ``[n, width]`` that the logits are computed from
    tokens: Tensor | None = None  # ids ``[n]``, None before they are drawn
    greedy: bool = False  # `probs` is one-hot and carries no confidence


Confidence = Callable[[DraftedTokens], Tensor]
"""A number for each token, ``[n]``."""


def token_probability(drafted: DraftedTokens) -> Tensor:
    """q(x) of the drafted token, unwarped (Draft & Verify, AdaSPEED)."""
    assert drafted.tokens is not None
    return pick(drafted.logits.float().softmax(-1), drafted.tokens)


def warped_token_probability(drafted: DraftedTokens) -> Tensor:
    """q(x) after warping (Hugging Face); unwarped in greedy decoding."""
    if drafted.greedy or drafted.tokens is None:
        return token_probability(drafted)
    return pick(drafted.probs, drafted.tokens)


def max_probability(drafted: DraftedTokens) -> Tensor:
    """Max q, unwarped; reads the distribution only."""
    return drafted.logits.float().softmax(-1).amax(-1)


def negative_entropy(drafted: DraftedTokens) -> Tensor:
    """−H(q) in bits, of the unwarped distribution in greedy decoding (AdaSD); reads the distribution only."""
    return -entropy(drafted.logits.float().softmax(-1) if drafted.greedy else drafted.probs)


@dataclass
class StopRule:
    """Ends a draft when the aggregate of the confidences falls below the threshold, or at the window."""

    window: int = 5  # longest draft of this round
    confidence: Confidence | None = None  # read at each token; None: only the window ends a draft
    product: bool = False  # aggregate by the product over the draft (AdaSPEED) instead of the last value
    threshold: Threshold = field(default_factory=Fixed)
    refuse: bool = False  # compare before the token is drawn; only for confidences that read the distribution alone
    heuristic: bool = False  # Hugging Face's schedule: window + 2 after a full acceptance, else − 1

    def observe(self, round: Round) -> None:
        """Adapt to a verified round."""
        self.threshold.observe(round)
        if self.heuristic and round.drafted:
            self.window = self.window + 2 if round.accepted == round.depth else max(1, self.window - 1)


class Watch:
    """The stop rules of several texts, of one kind, as they look at their drafts token by token.

    On an accelerator the host takes the confidences that have arrived and never waits before `finish`: a draft may go
    on for some tokens behind its end, which are cut off.

    Attributes:
        seen: of each text the confidence of each token that stays in its draft.
        lengths: of the drafts that have ended, by text.
    """

    def __init__(self, rules: Sequence[StopRule]) -> None:
        self.rules, self.seen, self.lengths = rules, [list[float]() for _ in rules], dict[int, int]()
        self._aggregates = [1.0] * len(rules)
        self._sent: deque[tuple[Sequence[int], Tensor, Any]] = deque()

    def look(self, texts: Sequence[int], drafted: DraftedTokens) -> None:
        """Read the confidences of the next token of these texts."""
        confidence, event = self.rules[0].confidence, None
        assert confidence is not None
        values = confidence(drafted)
        if not values.is_cpu:
            event, values = torch.cuda.Event(), values.to("cpu", non_blocking=True)
            event.record(torch.cuda.current_stream(drafted.logits.device))
        self._sent.append((texts, values, event))
        while self._sent and (self._sent[0][2] is None or self._sent[0][2].query()):
            self._take()

    def finish(self) -> None:
        """Take all confidences."""
        if self._sent:
            self._sent[-1][2].synchronize()
        while self._sent:
            self._take()

    def _take(self) -> None:
        texts, values, _ = self._sent.popleft()
        going = {text: value for text, value in zip(texts, values.tolist()) if text not in self.lengths}
        for text, value in going.items():
            if math.isnan(value):
                raise UserError("the draft's logits are NaN; check its weights, or load it in bfloat16 or float32")
            rule = self.rules[text]
            score = rule.threshold.calibrate(value)
            self._aggregates[text] = self._aggregates[text] * score if rule.product else score
        threshold = self.rules[0].threshold
        if len(self.rules) > 1 and threshold is self.rules[-1].threshold:  # of all texts
            threshold.weigh([self._aggregates[text] for text in going])
        for text, value in going.items():
            rule, seen = self.rules[text], self.seen[text]
            below = self._aggregates[text] < rule.threshold.value
            if not (below and rule.refuse):
                seen.append(value)
            if below:
                self.lengths[text] = len(seen)
