"""Means over positions with their standard errors, texts being the unit of sampling."""

import math
from collections.abc import Sequence


def clustered_ratio(
    sums: Sequence[float], counts: Sequence[float], clusters: Sequence[int] | None = None
) -> tuple[float, float]:
    """Σsums / Σcounts over independent clusters (texts, or all texts of a prompt), and its linearised standard error.

    The positions of one text are not independent of each other, so that a text counts as one observation; the texts of
    one prompt neither, so that a repeat of a deterministic one adds nothing.

    Args:
        sums: of each part, the sum of what is averaged over its positions.
        counts: of each part, its positions.
        clusters: the cluster that each part belongs to; each is its own if not given.

    Returns:
        The mean and its standard error; NaN where nothing was counted, or for the error of fewer than two clusters.
    """
    totals: dict[int, list[float]] = {}
    for cluster, s, c in zip(range(len(sums)) if clusters is None else clusters, sums, counts):
        total = totals.setdefault(cluster, [0.0, 0])
        total[0], total[1] = total[0] + s, total[1] + c
    kept = [(s, c) for s, c in totals.values() if c]
    n, whole = len(kept), sum(c for _, c in kept)
    if not whole:
        return math.nan, math.nan
    mean = sum(s for s, _ in kept) / whole
    if n < 2:
        return mean, math.nan
    spread = sum((s - mean * c) ** 2 for s, c in kept)
    return mean, math.sqrt(n / (n - 1) * spread) / whole
