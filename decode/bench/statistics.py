"""Bootstrap intervals over independent observations (prompts), and values for JSON."""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

RESAMPLES = 2000


def bootstrap(
    values: np.ndarray, statistic: Callable[[np.ndarray], np.ndarray], *, seed: int = 0
) -> tuple[float, float, float]:
    """A statistic with its 95 % percentile bootstrap interval over resampled rows.

    Args:
        values: ``[n, ...]``, one row for each independent observation (a prompt).
        statistic: ``[samples, n, ...]`` to ``[samples]``.
        seed: of the resampling.

    Returns:
        The statistic of the values themselves, and the ends of its interval; NaN without values.
    """
    if not len(values):
        return math.nan, math.nan, math.nan
    picks = np.random.default_rng(seed).integers(len(values), size=(RESAMPLES, len(values)))
    drawn = statistic(values[picks])
    low, high = np.quantile(drawn[np.isfinite(drawn)], [0.025, 0.975])
    return float(statistic(values[None])[0]), float(low), float(high)


def median_interval(values: Sequence[float], *, seed: int = 0) -> tuple[float, float, float]:
    """Median of the finite values and the ends of its interval, which always contains it; NaN without values."""
    known = np.array([v for v in values if math.isfinite(v)])
    middle, low, high = bootstrap(known, lambda drawn: np.median(drawn, axis=1), seed=seed)
    return middle, min(middle, low), max(middle, high)


def ratio_interval(clusters: Iterable[int], sums: Iterable[Sequence[float]], seed: int) -> tuple[float, float, float]:
    """Σ a / Σ b and its interval; values of one cluster (all texts of a prompt) are one observation.

    Args:
        clusters: the cluster of each observation.
        sums: a and b of each, or a, b, c and d for the ratio of Σ a / Σ b to Σ c / Σ d.
        seed: of the resampling.
    """
    table: dict[int, np.ndarray] = {}
    for cluster, parts in zip(clusters, sums):
        table[cluster] = table.get(cluster, np.zeros(len(parts))) + np.array(parts)

    def ratio(drawn: np.ndarray) -> np.ndarray:
        totals = drawn.sum(1)
        first = totals[:, 0] / totals[:, 1]
        return np.asarray(first if totals.shape[1] == 2 else first / (totals[:, 2] / totals[:, 3]))

    return bootstrap(np.array(list(table.values())), ratio, seed=seed)


def plain(value: Any) -> Any:
    """The same value for JSON: numbers that are not finite become null, arrays and tensors lists."""
    if hasattr(value, "tolist"):
        return plain(value.tolist())
    if isinstance(value, dict):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(v) for v in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
