"""Speedups of every exit, stop rule and threshold, predicted from measured costs and measured acceptances.

The rounds of every held-out text are simulated: drafted tokens are accepted or not as they were found to be, and
drafting ends where the stop rule would end it. Confidences behind a first rejection are those of the text
instead of the rejected continuation, which no draw could tell without decoding.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from decode.measure.costs.exit_costs import Costs
from decode.measure.predicted_speedup import speedup_of_rounds

STOPPED = {
    "draft-verify": "token",
    "adaspeed": "token",
    "adaspeed-probe": "probe",
    "confidence-probe": "confidence-probe",
}
"""Methods that stop by a confidence, and which."""
PRODUCT = {"adaspeed", "adaspeed-probe", "confidence-probe"}
"""Those that multiply it over the draft: AdaSPEED and its variants."""
METHODS = ("layerskip", *STOPPED)  # methods among which the best setting is looked for
HINDSIGHT = "hindsight"
"""No method: the stop rule that knows of each token, once drafted, whether it is accepted. It bounds all of them."""


@dataclass
class Choice:
    """A setting with its predicted speedup over plain decoding."""

    method: str  # a name of `decode.methods.METHODS`
    exit_layer: int  # layers that the draft runs
    window: int  # most tokens a round
    threshold: float | None  # of the stop rule; None for a fixed length
    speedup: float  # predicted
    accepted: float  # predicted share of drafted tokens that are accepted
    tokens: float  # predicted tokens per round

    def options(self) -> dict[str, Any]:
        """As `decode.methods.MethodOptions`: the controller starts at the threshold and is steered to its rate."""
        given: dict[str, Any] = {"exit_layer": self.exit_layer, "draft_length": self.window}
        if self.threshold is not None:
            given |= {"threshold": self.threshold, "target_acceptance": min(0.99, max(0.01, self.accepted))}
        return given


def simulate(
    outcome: Sequence[float],
    confidence: Sequence[float] | None,
    window: int,
    threshold: float = 0.0,
    *,
    product: bool = False,
    ended: bool = False,
) -> tuple[list[int], list[int]]:
    """Rounds of decoding one text: tokens drafted and accepted in each.

    Args:
        outcome: for each position whether its drafted token is accepted.
        confidence: of each drafted token; None drafts to the window.
        window: most tokens a round.
        threshold: drafting ends with the token whose confidence (or their product) falls below.
        product: multiply over the draft.
        ended: the last position is the text's end, which may be drafted; else the budget ends there, which may not.
    """
    drafted, accepted, s, n = [], [], 0, len(outcome)
    while s < n:
        longest = min(window, n - s - (not ended))
        k, aggregate = 0, 1.0
        while k < longest:
            if confidence is not None:
                aggregate = aggregate * confidence[s + k] if product else confidence[s + k]
            k += 1
            if aggregate < threshold:
                break
        m = 0
        while m < min(k, n - s - 1) and outcome[s + m] > 0:
            m += 1
        drafted.append(k)
        accepted.append(m)
        s += m + 1
    return drafted, accepted


def predict(
    outcomes: Sequence[Sequence[float]],
    confidences: Mapping[str, Sequence[Sequence[float]]],
    exit_layer: int,
    costs: Sequence[Costs],
    *,
    window: int,
    thresholds: Sequence[float],
) -> list[list[Choice]]:
    """All settings of one exit layer, priced by each of several costs.

    Args:
        outcomes: acceptance at every position, by text.
        confidences: the same for ``token`` and the kinds of probes.
        exit_layer: which exit they are of.
        costs: of this machine, and of others.
        window: longest draft.
        thresholds: confidence thresholds.
    """
    settings: list[tuple[str, str, int, float | None]] = []
    for k in range(1, window + 1):
        settings += [("layerskip", "length", k, None), (HINDSIGHT, "length", k, 0.5)]
    for method, rule in STOPPED.items():
        settings += [(method, rule, window, t) for t in thresholds if rule in confidences]
    found: list[list[Choice]] = [[] for _ in costs]
    for method, rule, k, threshold in settings:
        values = outcomes if method == HINDSIGHT else confidences.get(rule)
        drafted: list[int] = []
        accepted: list[int] = []
        for i, outcome in enumerate(outcomes):
            sure, product = None if values is None else values[i], method in PRODUCT
            d, a = simulate(outcome, sure, k, threshold or 0.0, product=product, ended=True)
            drafted += d
            accepted += a
        shares = sum(accepted) / max(1, sum(drafted)), 1 + sum(accepted) / max(1, len(drafted))
        for choices, one in zip(found, costs):
            cost = one.exits[exit_layer]
            c = cost.cost_ratio + cost.draft_overhead + one.confidence.get(rule, 0.0)
            speed = speedup_of_rounds(drafted, accepted, c, cost.v, cost.overhead)
            choices.append(Choice(method, exit_layer, k, threshold, speed, *shares))
    return found


def best_of(choices: Sequence[Choice], method: str, count: int) -> list[Choice]:
    """The best predicted settings of a method, from different exits or thresholds."""
    return sorted((c for c in choices if c.method == method), key=lambda c: -c.speedup)[:count]


def split_texts(values: Tensor, text: Tensor) -> list[list[float]]:
    """A value for each position ``[n]`` as one list a text."""
    counts = torch.bincount(text)
    return [part.tolist() for part in values.split(counts[counts > 0].tolist())]
