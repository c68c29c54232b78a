"""What a round of several texts costs: forwards of draft and target by batch size, measured before decoding."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


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
