"""When drafting stops: confidence × aggregate × threshold within a window; draft lengths that pay for a batch.

A stop rule that reads the drawn token keeps that token in the draft; dropping it would bias the output. A rule that
reads only the distribution may refuse to draw (`StopRule.refuse`).
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from torch import Tensor

from decode.errors import UserError
from decode.trace import Step
from decode.verify import entropy


class Threshold:
    """A value below which the confidence ends a draft. The methods here are those of a constant one."""

    value: float

    def calibrate(self, confidence: float) -> float:
        """The confidence as it is compared with `value`."""
        return confidence

    def price(self, token_cost: float, block_cost: float) -> None:
        """Set the costs of one more drafted token and of drafting at all, in rounds without a draft."""

    def observe(self, step: Step, confidence: list[float]) -> None:
        """Learn from a step, given the confidence of each drafted token."""


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

    start: float = 0.6
    alpha: float = 0.9
    step: float = 0.01
    beta1: float = 0.5
    beta2: float = 0.9
    keep_at: int | None = 12  # drafts of this length do not lower the threshold (Draft & Verify's code; not AdaSPEED)
    value: float = field(init=False)
    rate: float = 0.0

    def __post_init__(self) -> None:
        self.value = self.start

    def observe(self, step: Step, confidence: list[float]) -> None:
        """Move towards the target acceptance."""
        depth = step.depth
        if not depth:
            return
        self.rate = self.beta1 * self.rate + (1 - self.beta1) * step.accepted / depth
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

    def observe(self, step: Step, confidence: list[float]) -> None:
        """Record the confidence of the first rejected token."""
        if step.accepted < len(confidence):
            self.total += confidence[step.accepted]
            self.count += 1
            self.value = self.total / self.count


@dataclass
class Roc(Threshold):
    """Hugging Face's update: the threshold on the ROC curve that minimises fpr + 3·(1 − tpr) over the history."""

    start: float = 0.4
    limit: int = 4096  # tokens of the history
    value: float = field(init=False)
    matches: list[int] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.value = self.start

    def observe(self, step: Step, confidence: list[float]) -> None:
        """Add the accepted tokens and the first rejected one; refit once both kinds have been seen."""
        seen = confidence[: step.tested]
        accepted = min(step.accepted, len(seen))  # copied drafts have no confidence
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
        self.value = self.token_cost = self.cost
        self.block_cost = 0.0
        self.table = [[0.0, 0.0] for _ in range(self.bins)]

    def _bin(self, confidence: float) -> list[float]:
        return self.table[min(self.bins - 1, int(confidence * self.bins))]

    def calibrate(self, confidence: float) -> float:
        """Estimated acceptance probability at this confidence."""
        hits, seen = self._bin(confidence)
        return (hits + self.prior * confidence) / (seen + self.prior)

    def observe(self, step: Step, confidence: list[float]) -> None:
        """Update the calibration and the rate of tokens."""
        for i, value in enumerate(confidence[: step.tested]):
            count(self._bin(value), i < step.accepted, self.memory)
        self.time = self.decay * self.time + 1 + self.block_cost + step.drafted * self.token_cost
        self.tokens = self.decay * self.tokens + step.accepted + 1
        self.value = self.tokens / self.time * self.token_cost

    def price(self, token_cost: float, block_cost: float) -> None:
        """See `Threshold.price`."""
        self.token_cost, self.block_cost = token_cost, block_cost
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
    token: Tensor | None  # token id (0-d long), None before it is drawn
    logits: Tensor  # unwarped logits ``[vocab]``
    hidden: Tensor  # hidden state ``[width]`` that the logits are computed from
    greedy: bool = False  # `probs` is one-hot and carries no confidence
    accepted: float | None = None  # the draft's own estimate, made without `token`, that the target accepts it


Confidence = Callable[[DraftedToken], float]


def token_probability(drafted: DraftedToken) -> float:
    """q(x) of the drafted token, unwarped (Draft & Verify, AdaSPEED)."""
    assert drafted.token is not None
    return drafted.logits.float().softmax(-1)[drafted.token].item()


def warped_token_probability(drafted: DraftedToken) -> float:
    """q(x) after warping (Hugging Face); unwarped in greedy decoding."""
    assert drafted.token is not None
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

    def __post_init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """A new round starts."""
        self.seen: list[float] = []
        self._aggregate = 1.0

    def _below(self, drafted: DraftedToken) -> bool:
        assert self.confidence is not None
        value = self.confidence(drafted)
        if math.isnan(value):
            raise UserError("the draft's logits are NaN; check its weights, or load it in bfloat16 or float32")
        score = self.threshold.calibrate(value)
        self._aggregate = self._aggregate * score if self.product else score
        below = self._aggregate < self.threshold.value
        if not (below and self.refuse):
            self.seen.append(value)
        return below

    def before(self, drafted: DraftedToken) -> bool:
        """Whether to stop before drawing from ``drafted.probs``."""
        return self.confidence is not None and self.refuse and self._below(drafted)

    def after(self, drafted: DraftedToken) -> bool:
        """Whether to stop after ``drafted.token``, which stays in the draft."""
        return self.confidence is not None and not self.refuse and self._below(drafted)

    def observe(self, step: Step) -> None:
        """Adapt to a verified step."""
        self.threshold.observe(step, self.seen)
        if self.heuristic and step.drafted:
            self.window = self.window + 2 if step.accepted == step.depth else max(1, self.window - 1)


@dataclass(frozen=True)
class RoundCosts:
    """Times of the parts of a round by batch size, in seconds or any other unit, bookkeeping included.

    Between measured batch sizes and widths costs are linear; below the first point they are constant, beyond the last
    they grow as between the last two.
    """

    step: Mapping[int, float]  # a round without a draft, by batch size
    draft: Mapping[int, float]  # one draft forward of all sequences, by batch size
    verify: Mapping[int, Mapping[int, float]]  # the rest of a round, by batch size and tokens read of each sequence
    # of a block head: its forward, by batch size, however long the draft; `draft` is then bookkeeping of a token
    block: Mapping[int, float] = field(default_factory=lambda: {1: 0.0})

    @classmethod
    def of_ratios(cls, cost_ratio: float, verify_growth: float = 0.0, *, block: bool = False) -> RoundCosts:
        """Costs known as c and the growth of the target's forward by one more token, the same at any batch size."""
        token, whole = (0.0, cost_ratio) if block else (cost_ratio, 0.0)
        return cls({1: 1.0}, {1: token}, {1: {1: 1.0, 2: 1.0 + verify_growth}}, {1: whole})

    def plain(self, batch: float) -> float:
        """A round without a draft."""
        return between(self.step, batch)

    def drafting(self, sequences: float) -> float:
        """A draft forward of this many sequences."""
        return between(self.draft, sequences)

    def blocks(self, batch: float) -> float:
        """A block head's forward of this many sequences; 0 of other drafts."""
        return between(self.block, batch)

    def verifying(self, batch: float, tokens: float) -> float:
        """The rest of a round in which each sequence has this many tokens to be read, the pending one included."""
        return between({size: between(row, tokens) for size, row in self.verify.items()}, batch)

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> RoundCosts:
        """From `to_dict`, read from JSON, whose keys are strings."""
        return cls(**{key: _with_int_keys(content[key]) for key in ("step", "draft", "verify", "block")})


def _with_int_keys(values: Mapping[str, Any]) -> Any:
    return {int(k): _with_int_keys(v) if isinstance(v, Mapping) else float(v) for k, v in values.items()}


def between(values: Mapping[int, float], x: float) -> float:
    """A value between measured points, linear; the first below them, along the line of the last two beyond, >= 0."""
    points = sorted(values)
    if len(points) == 1 or x <= points[0]:
        return values[points[0]]
    i = min(bisect_right(points, x), len(points) - 1)
    low, high = points[i - 1 : i + 1]
    return max(0.0, values[low] + (values[high] - values[low]) * ((x - low) / (high - low)))


EVERY = 16  # rounds between two choices of the draft length
LOOK = 64  # every so many rounds with drafts the limit is larger than the chosen one
GAIN = 0.02  # gain over plain decoding from which drafting is chosen: costs are known no better
LOSS = 0.01  # share of the time spent on rounds that only test whether drafting pays again
FIRST_RATE = 0.7  # prior acceptance rate of the first position; that of each other position is the one before it
PRIOR, MEMORY = 4.0, 512  # observations that a prior counts as, and those after which counts are halved


class DraftLengths:
    """Chooses the longest draft of each round by expected tokens per second, for all sequences of a batch together.

    Args:
        costs: of rounds by batch size.
        window: longest draft.

    Attributes:
        chosen: the best limit at present; 0: drafting does not pay.
        token_cost: one more drafted token of every sequence, in rounds without a draft.
        block_cost: a block head's forward of every sequence, in rounds without a draft.
    """

    def __init__(self, costs: RoundCosts, window: int) -> None:
        self.costs, self.window = costs, window
        # by batch size: a round without a draft, draft forwards of 1, 2, … sequences, verification of 1, 2, … tokens
        self._known: dict[int, tuple[float, list[float], list[float]]] = {}
        self.block_cost = 0.0
        self.reset()

    def reset(self) -> None:
        """Forget everything learned."""
        # [hits, observations] of each position: drafts that reached it when they were allowed to, and accepted tokens
        self._drafted = [[0.0, 0.0] for _ in range(self.window)]
        self._accepted = [[0.0, 0.0] for _ in range(self.window)]
        self.chosen, self.token_cost, self._batch, self._rounds, self._with_draft = 0, 0.0, 0, 0, 0
        self._waited = self._price = 0.0
        self._learned = False

    def limit(self, batch: int) -> int:
        """The longest draft of the round that begins, for `batch` sequences."""
        if batch != self._batch or (self._learned and self._rounds >= min(EVERY, 1 + self._with_draft // 2)):
            self._choose(batch)
        self._rounds += 1
        if self.chosen:
            self._with_draft += 1
            wider = self.chosen + max(2, self.chosen // 2)
            return min(self.window, wider) if self._with_draft % LOOK == 0 else self.chosen
        self._waited += self._known[batch][0]
        if LOSS * self._waited < self._price:
            return 0
        self._waited, self._rounds = 0.0, EVERY  # this round tests whether drafting pays, and is learned from at once
        return self._best

    def observe(self, rounds: Iterable[tuple[Step, int]]) -> None:
        """Learn from a round of all sequences, each given with the longest draft that it was allowed."""
        self._learned = True
        for result, allowed in rounds:
            drafted, accepted = result.drafted, result.accepted
            for i in range(min(drafted + 1, allowed)):
                count(self._drafted[i], i < drafted, MEMORY)
            for i in range(min(accepted + 1, drafted)):
                count(self._accepted[i], i < accepted, MEMORY)

    def _choose(self, batch: int) -> None:
        """Set `chosen`, and the time that a round with the best draft loses against plain decoding if it is 0."""
        if batch not in self._known:
            drafting = [self.costs.drafting(sequences) for sequences in range(1, batch + 1)]
            verifying = [self.costs.verifying(batch, n) for n in range(1, self.window + 2)]
            self._known[batch] = self.costs.plain(batch), drafting, verifying
        plain, drafting, verifying = self._known[batch]
        self._batch, self._rounds, self._learned = batch, 0, False
        reach = min(8, self.window)
        block = self.costs.blocks(batch)
        self.block_cost = block / plain
        self.token_cost = (drafting[-1] + max(0.0, (verifying[reach] - verifying[0]) / reach)) / plain
        # shares of the drafts that are this long, and of those whose tokens so far are all accepted
        longer = np.array(_rates(self._drafted, 1.0))
        reached, kept = longer.cumprod(), (longer * _rates(self._accepted, FIRST_RATE)).cumprod()
        some = 1 - (1 - reached) ** batch  # drafting goes on while one sequence does
        each = np.interp(reached * batch / np.maximum(some, 1e-12), range(1, batch + 1), drafting)
        whole = block + (some * each).cumsum() + np.interp(reached.cumsum(), range(self.window + 1), verifying)
        tokens = 1 + kept.cumsum()
        best = int((tokens / whole).argmax())
        self._best, self._price = best + 1, float(whole[best] - tokens[best] * plain)
        self.chosen = self._best if tokens[best] / whole[best] * plain > 1 + GAIN else 0


def _rates(cells: Iterable[list[float]], rate: float) -> list[float]:
    """The rate at each position; what is expected before anything is seen is the rate of the position before."""
    return [rate := (hits + PRIOR * rate) / (seen + PRIOR) for hits, seen in cells]
