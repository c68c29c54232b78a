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


def ratio_interval(
    clusters: Iterable[int], a: Iterable[float], b: Iterable[float], seed: int
) -> tuple[float, float, float]:
    """Σ a / Σ b and its interval; values of one cluster (all texts of a prompt) are one observation."""
    sums: dict[int, np.ndarray] = {}
    for cluster, x, y in zip(clusters, a, b):
        sums[cluster] = sums.get(cluster, np.zeros(2)) + np.array([x, y])
    values = np.array([pair for pair in sums.values() if pair[1]]).reshape(-1, 2)
    return bootstrap(values, lambda drawn: drawn[..., 0].sum(1) / drawn[..., 1].sum(1), seed=seed)


def throughput_interval(table: np.ndarray, seed: int) -> tuple[float, float, float]:
    """Σ tokens / Σ seconds with its interval, or the ratio of two such rates.

    Prompts and repeats are both resampled: a disturbance of the machine in one repeat affects all its texts.

    Args:
        table: ``[prompts, repeats, 2 or 4]``, tokens and seconds of one method, or of two.
        seed: of the resampling.
    """
    picks = np.random.default_rng(seed).integers(table.shape[1], size=(RESAMPLES, table.shape[1]))

    def statistic(drawn: np.ndarray) -> np.ndarray:  # [samples, prompts, repeats, columns]
        per_repeat = drawn.sum(1)
        if len(drawn) > 1:
            per_repeat = np.take_along_axis(per_repeat, picks[:, :, None], 1)
        sums = per_repeat.sum(1)
        rates = sums[:, 0::2] / sums[:, 1::2]
        return np.asarray(rates[:, 0] / rates[:, 1] if rates.shape[1] > 1 else rates[:, 0])

    return bootstrap(table, statistic, seed=seed)


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
