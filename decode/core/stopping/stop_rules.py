"""When drafting stops: confidence × aggregate × threshold, under a window.

A stop rule that reads the sampled token keeps that token in the draft; dropping it would bias the output. A rule that
reads only the distribution may refuse to draft at all (`refuse=True`).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field

from torch import Tensor

from decode.core.acceptance_rules import entropy
from decode.core.errors import UserError
from decode.core.stopping.thresholds import Fixed, Threshold
from decode.core.trace_metrics import Round


@dataclass
class Step:
    """One drafted token as a stop rule sees it."""

    probs: Tensor  # the warped probabilities ``[vocab]`` that the token is drawn from
    token: Tensor | None  # the token (0-d long), or None before it is drawn
    logits: Tensor  # the unwarped logits ``[vocab]``
    hidden: Tensor  # the hidden state ``[width]`` that produced them
    greedy: bool = False  # decoding is greedy, so that `probs` is one-hot and says nothing of confidence


Confidence = Callable[[Step], float]


def token_probability(step: Step) -> float:
    """q(x) of the drafted token, unwarped (Draft & Verify, AdaSPEED)."""
    assert step.token is not None
    return step.logits.float().softmax(-1)[step.token].item()


def warped_token_probability(step: Step) -> float:
    """q(x) after warping; greedy decoding has nothing to warp and uses the unwarped one (Hugging Face)."""
    assert step.token is not None
    return token_probability(step) if step.greedy else step.probs[step.token].item()


def max_probability(step: Step) -> float:
    """max q, unwarped; reads the distribution only."""
    return step.logits.float().softmax(-1).amax().item()


def negative_entropy(step: Step) -> float:
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

    def _below(self, step: Step) -> bool:
        assert self.confidence is not None
        value = self.confidence(step)
        if math.isnan(value):
            raise UserError("the draft's logits are NaN; check its weights, or load it in bfloat16 or float32")
        self.seen.append(value)
        score = self.threshold.calibrate(value)
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
        if self.schedule != "constant" and round.drafted:
            full = round.accepted == round.drafted
            self._window = self._window + 2 if full else max(1, self._window - 1)

    def reset(self) -> None:
        """Forget everything learned."""
        self.threshold.reset()
        self._window = self.window
        self.begin()
