"""Means over positions with their standard errors, texts being the unit of sampling."""

from __future__ import annotations

import math
from collections.abc import Sequence


def clustered_ratio(sums: Sequence[float], counts: Sequence[float]) -> tuple[float, float]:
    """Σsums / Σcounts over independent texts, and its linearised standard error.

    The positions of one text are not independent of each other, so that a text counts as one observation. A text that
    is there twice, in one cluster, changes neither number.

    Args:
        sums: of each text, the sum of what is averaged over its positions.
        counts: of each text, its positions.

    Returns:
        The mean and its standard error; NaN where nothing was counted, or for the error of fewer than two texts.
    """
    kept = [(s, c) for s, c in zip(sums, counts) if c]
    n, total = len(kept), sum(c for _, c in kept)
    if not total:
        return math.nan, math.nan
    mean = sum(s for s, _ in kept) / total
    if n < 2:
        return mean, math.nan
    spread = sum((s - mean * c) ** 2 for s, c in kept)
    return mean, math.sqrt(n / (n - 1) * spread) / total
