"""What an engine did: texts, times and counted drafts, and the rates that follow from them."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from decode.core.trace_metrics import clustered_ratio


@dataclass
class Drafts:
    """Drafts that were verified, as engines count them; expected numbers where they are predicted."""

    rounds: float = 0  # target forwards that checked a draft
    drafted: float = 0  # tokens drafted in all
    # for each draft position, how many rounds accepted at least so many tokens
    accepted: list[float] = field(default_factory=list)

    def __sub__(self, earlier: Drafts) -> Drafts:
        before = earlier.accepted + [0] * (len(self.accepted) - len(earlier.accepted))
        return Drafts(
            self.rounds - earlier.rounds,
            self.drafted - earlier.drafted,
            [now - then for now, then in zip(self.accepted, before)],
        )


@dataclass
class ServedText:
    """One text as an engine wrote it."""

    ids: list[int]  # the new tokens, the ending token among them where there is one
    seconds: float  # wall time of the request
    # time after the first token, by the engine's own clock; None where it does not tell
    decode_seconds: float | None = None
    drafts: Drafts = field(default_factory=Drafts)  # what was drafted for this text


def rates(texts: Sequence[Drafts], length: int) -> list[dict[str, Any]]:
    """Marginal and conditional acceptance at each draft position; texts are the unit of the errors.

    Marginal: Σ rounds that accepted i tokens or more / Σ rounds. Conditional: the same over those that accepted i − 1.
    """
    rows = []
    rounds = [text.rounds for text in texts]
    before: list[float] = rounds
    for i in range(length):
        accepted = [text.accepted[i] if i < len(text.accepted) else 0 for text in texts]
        marginal, marginal_se = clustered_ratio(accepted, rounds)
        conditional, conditional_se = clustered_ratio(accepted, before)
        rows.append(
            {
                "position": i + 1,
                "rounds": sum(rounds),
                "marginal": marginal,
                "marginal_se": marginal_se,
                "conditional": conditional,
                "conditional_se": conditional_se,
            }
        )
        before = accepted
    return rows


def mean_length(texts: Sequence[Drafts]) -> tuple[float, float]:
    """Mean accepted length 1 + Σ accepted / Σ rounds, the target's own token included, with its standard error."""
    mean, se = clustered_ratio([sum(text.accepted) for text in texts], [text.rounds for text in texts])
    return 1 + mean, se


def difference(served: Sequence[Drafts], predicted: Sequence[Drafts], *, paired: bool) -> tuple[float, float]:
    """Served minus predicted mean accepted length, and its standard error.

    Args:
        served: by text.
        predicted: by text.
        paired: both are over the same texts, so that the error is that of the differences.
    """
    (a, a_se), (b, b_se) = mean_length(served), mean_length(predicted)
    if not paired:
        return a - b, math.hypot(a_se, b_se)
    rounds = sum(text.rounds for text in served) or math.nan
    gaps = [
        (sum(s.accepted) - (a - 1) * s.rounds) / rounds - (sum(p.accepted) - (b - 1) * p.rounds) / max(1e-9, total)
        for total in [sum(text.rounds for text in predicted)]
        for s, p in zip(served, predicted)
    ]
    n = len(gaps)
    return a - b, math.sqrt(n / (n - 1) * sum(gap * gap for gap in gaps)) if n > 1 else math.nan


def tokens_per_second(texts: Sequence[ServedText]) -> float:
    """Σ tokens / Σ seconds, prompts included."""
    seconds = sum(text.seconds for text in texts)
    return sum(len(text.ids) for text in texts) / seconds if seconds else math.nan


def speedup(texts: Sequence[ServedText], plain: Sequence[ServedText]) -> list[float]:
    """For each prompt, tokens/s with a draft over tokens/s without; after the first token where both clocks tell."""
    ratios = []
    for ours, theirs in zip(texts, plain):
        a, b = (_pace(text, ours.decode_seconds and theirs.decode_seconds) for text in (ours, theirs))
        if a and b:
            ratios.append(a / b)
    return ratios


def round_cost(text: ServedText, plain: ServedText) -> float:
    """Time of a round with a draft, in that of a token without one; the first token is of neither."""
    a, b = (one.decode_seconds or one.seconds for one in (text, plain))
    return float(a / max(1, text.drafts.rounds) / (b / max(1, len(plain.ids) - 1)))


def _pace(text: ServedText, decoding: Any) -> float:
    if decoding and len(text.ids) > 1:
        return (len(text.ids) - 1) / float(text.decode_seconds or math.nan)
    return len(text.ids) / text.seconds if text.seconds else 0.0


def median(values: Sequence[float]) -> float:
    """The median; NaN of nothing."""
    return statistics.median(values) if values else math.nan
