"""Texts of prompts as decoding makes them, whose true ratios are known, to judge intervals and p-values.

``python tests/support/simulated_prompts.py [DRAWS]`` prints how often an interval holds the true value, and how often p
is below 0.05 where nothing differs.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from functools import cache

import numpy as np

from decode.measure.acceptance import OfflineAlpha, paired
from decode.measure.report import markdown_table
from decode.measure.statistics import median_interval, p_value, ratio_interval

BUDGET, DRAFTED = 128, 5
Judge = tuple[Callable[[np.ndarray], float], Callable[[np.ndarray], list[float]]]
"""The true value of many texts, and the interval of some, both from `texts`."""


def texts(chance: np.random.Generator, n: int) -> np.ndarray:
    """Tokens, rounds, and seconds with and without a draft of a text of each prompt: ``[n, 4]``.

    Lengths are skewed and cut by the budget, acceptance varies from prompt to prompt and is higher in longer texts, and
    reading a prompt takes its time.
    """
    tokens = np.clip(np.round(chance.lognormal(math.log(60), 0.9, n)), 2, BUDGET)
    alpha = np.clip(chance.beta(6, 2, n) + 0.05 * np.log(tokens / 60), 0.05, 0.98)
    length = (1 - alpha ** (DRAFTED + 1)) / (1 - alpha)
    rounds = np.maximum(1, np.round(tokens / length * chance.lognormal(0, 0.1, n)))
    prefill = 0.02 * chance.lognormal(0, 1, n)
    seconds = [prefill + 0.01 * each * chance.lognormal(0, 0.05, n) for each in (1.6 * rounds, tokens)]
    return np.stack([tokens, rounds, *seconds], 1)


def ratio(*columns: int) -> Judge:
    """Σa / Σb, or (Σa / Σb) / (Σc / Σd), of columns."""
    signs = np.array([1, -1, -1, 1][: len(columns)])
    return (
        lambda drawn: float(np.prod(drawn[:, columns].sum(0) ** signs)),
        lambda drawn: ratio_interval(range(len(drawn)), drawn[:, columns])[1] or [],
    )


def paired_speeds(drawn: np.ndarray) -> np.ndarray:
    return drawn[:, 3] / drawn[:, 2]


INTERVALS: dict[str, Judge] = {
    "accepted length": ratio(0, 1),
    "speedup of throughputs": ratio(0, 2, 0, 3),
    "speedup, median": (
        lambda drawn: float(np.median(paired_speeds(drawn))),
        lambda drawn: median_interval(paired_speeds(drawn).tolist())[1] or [],
    ),
}


@cache
def many() -> np.ndarray:
    """So many texts that their ratios are the true ones."""
    return texts(np.random.default_rng(1), 300_000)


def covered(judge: Judge, n: int, draws: int) -> float:
    """The share of draws of n prompts whose interval holds the true value."""
    truth, interval = judge
    wanted, chance = truth(many()), np.random.default_rng(n)
    ends = [interval(texts(chance, n)) for _ in range(draws)]
    return sum(low <= wanted <= high for low, high in ends) / draws


# -- p-values where nothing differs ------------------------------------------------------------------------------------


def of_texts(chance: np.random.Generator, n: int) -> float:
    """p of two drafts over the same texts, whose differences vary from text to text and from token to token."""
    counts = texts(chance, n)[:, 0].astype(int)
    shift = 0.01 * chance.standard_t(5, n)
    a = [[0.8] * count for count in counts]
    b = [(0.8 + each + chance.normal(0, 0.1, count)).tolist() for each, count in zip(shift, counts)]
    return paired(OfflineAlpha(a), OfflineAlpha(b))["p_value"]


def of_seeds(seeds: int, between: float) -> Callable[[np.random.Generator, int], float]:
    """p over seeds and texts, as `p_value` combines the two, of trainings that differ by `between`."""

    def p(chance: np.random.Generator, n: int) -> float:
        counts = texts(chance, n)[:, 0]
        change = chance.normal(0, between, (seeds, 1)) + chance.normal(0, 0.02, n) + chance.normal(0, 0.02, (seeds, n))
        by_seed, by_text = change @ counts / counts.sum(), change.mean(0)
        mean, of_seed = by_seed.mean(), by_seed.std(ddof=1) / seeds**0.5
        residuals = (by_text - mean) * counts
        of_text = math.sqrt(n / (n - 1) * (residuals**2).sum()) / counts.sum()
        return max(p_value(mean, of_seed, seeds), p_value(mean, math.hypot(of_seed, of_text), n))

    return p


NULLS = {"two drafts, over texts": of_texts} | {
    f"{seeds} seeds, {spread} between trainings": of_seeds(seeds, spread)
    for seeds in (2, 3)
    for spread in (0.002, 0.02)
}


def rejected(p: Callable[[np.random.Generator, int], float], n: int, draws: int) -> float:
    """The share of draws of n texts with p below 0.05."""
    chance = np.random.default_rng(n)
    return sum(p(chance, n) < 0.05 for _ in range(draws)) / draws


if __name__ == "__main__":
    draws, prompts = int(sys.argv[1]) if sys.argv[1:] else 1000, (8, 24, 80)
    kinds = {"the interval holds the true value": (INTERVALS, covered), "p < 0.05": (NULLS, rejected)}
    for title, (judges, share) in kinds.items():
        rows = [[name, *(f"{share(judge, n, draws):.1%}" for n in prompts)] for name, judge in judges.items()]
        print(markdown_table([title, *(f"{n} prompts" for n in prompts)], rows), end="\n\n")
