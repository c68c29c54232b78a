"""Speedups predicted from acceptances position by position, and from curves of training extrapolated to their end.

The law of the curves: 1 − α(n) = a · n^(−b), n the training steps. A shape's exponent b is the mean of its own slope
between its longest trainings and of those of all shapes, weighted by their certainty: single curves of two or three
points are noisy, and shapes of one family learn alike. The curve goes through the shape's longest training.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from decode.bench.offline_acceptance import OfflineAlpha
from decode.bench.prediction import replay
from distill.experiments.design.shape_costs import Price

UNKNOWN = (0.3, 0.3)
"""Exponent and its standard deviation where nothing is known: halving rejections takes ten times the steps."""
LEAST_SPREAD = 0.05  # smallest standard deviation of the exponent among shapes
BEND = 0.05  # standard deviation of the exponent along one curve (a head on SmolLM2: 0.05 at first, 0.14 later)
LENGTHS = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 15, 19, 23, 31)  # draft lengths compared


def replayed(alphas: Sequence[OfflineAlpha], length: int, price: Price, rejected: float = 1.0) -> float:
    """Speedup at a draft length over texts with known acceptances.

    Args:
        alphas: acceptance at each position as first, second, … drafted token; deeper ones are as the last.
        length: of drafts.
        price: of the draft.
        rejected: factor of all probabilities of rejection.
    """
    tokens, spent = 0, 0.0
    costs = [price.v(k + 1) + price.c * k for k in range(length + 1)]
    for text in zip(*(alpha.texts for alpha in alphas), strict=True):
        first, *deeper = ([min(1.0, max(0.0, 1 - rejected * (1 - a))) for a in row] for row in text)
        tokens += len(first)
        spent += sum(count * costs[k] for k, count in replay(first, length, deeper)[1].items())
    return tokens / spent if spent else math.nan


def best_of(alphas: Sequence[OfflineAlpha], price: Price, longest: int, rejected: float = 1.0) -> tuple[float, int]:
    """The largest speedup, and its draft length."""
    return max((replayed(alphas, k, price, rejected), k) for k in LENGTHS if k <= longest)


@dataclass(frozen=True)
class Slope:
    """An exponent of the law, and its standard deviation."""

    b: float
    sd: float


@dataclass(frozen=True)
class Forecast:
    """What a longer training would reach."""

    alpha: float  # acceptance as first drafted token
    low: float  # lower end of its 95 % interval
    high: float  # upper end
    speedup: float  # with the best draft length
    speedup_low: float  # its lower end
    speedup_high: float  # its upper end
    length: int  # best draft length


def own_slope(points: Mapping[int, OfflineAlpha]) -> Slope | None:
    """The exponent between the two longest trainings of a shape; its error from α's errors over texts."""
    steps = sorted(points)[-2:]
    if len(steps) < 2:
        return None
    lost = [max(1e-6, 1 - points[n].mean) for n in steps]
    errors = [points[n].se / x for n, x in zip(steps, lost)]
    between = math.log(steps[1] / steps[0])
    return Slope(math.log(lost[0] / lost[1]) / between, max(1e-3, math.hypot(*errors) / between))


def common_slope(curves: Sequence[Mapping[int, OfflineAlpha]]) -> Slope:
    """Mean and spread of the exponents of shapes that were trained at two lengths or more."""
    found = [slope.b for points in curves if (slope := own_slope(points)) is not None]
    if len(found) < 3:
        return Slope(*UNKNOWN)
    return Slope(statistics.fmean(found), max(LEAST_SPREAD, statistics.stdev(found)))


def slope_of(points: Mapping[int, OfflineAlpha], common: Slope) -> Slope:
    """A shape's exponent: its own and the common one, weighted by their certainty.

    The law is not the curve: its exponent further on differs from that of the trainings that are known (`BEND`).
    """
    own = own_slope(points)
    if own is None:
        return Slope(common.b, math.hypot(common.sd, BEND))
    weights = 1 / own.sd**2, 1 / common.sd**2
    b = (own.b * weights[0] + common.b * weights[1]) / sum(weights)
    return Slope(b, math.hypot(sum(weights) ** -0.5, BEND))


def forecast(
    alphas: Sequence[OfflineAlpha], steps: int, full: int, slope: Slope, price: Price, longest: int
) -> Forecast:
    """Extrapolate a training to its full length.

    Args:
        alphas: measured, by depth.
        steps: trained.
        full: steps of the full training.
        slope: of the curve.
        price: of the draft.
        longest: longest draft.
    """
    grown = math.log(full / steps)
    lost = max(1e-6, 1 - alphas[0].mean)
    error = math.hypot(alphas[0].se / lost, grown * slope.sd)
    factor = math.exp(-max(0.0, slope.b) * grown)
    factors = [factor, factor * math.exp(1.96 * error), factor * math.exp(-1.96 * error)]
    speedup, length = best_of(alphas, price, longest, factor)
    middle, low, high = (1 - min(1.0, lost * f) for f in factors)
    slow, fast = (replayed(alphas, length, price, f) for f in factors[1:])
    return Forecast(middle, low, high, speedup, slow, fast, length)
