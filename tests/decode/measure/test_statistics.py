"""Intervals hold what they promise, and say nothing of fewer than six prompts."""

import math

import numpy as np
import pytest
from scipy import stats

from decode.measure.acceptance import OfflineAlpha, paired
from decode.measure.statistics import LEAST, median_interval, p_value, plain, ratio_interval


@pytest.mark.parametrize("n", [LEAST, 7, 9, 20])
def test_intervals_hold_the_true_value_in_95_of_100_cases(n: int) -> None:
    """Of speeds that are skewed as those of real prompts; below, 0.02 is three standard errors of the count."""
    generator, runs, hits = np.random.default_rng(n), 1000, [0, 0]
    for _ in range(runs):
        _, ends = median_interval(generator.lognormal(0.5, 0.3, n).tolist())
        hits[0] += ends[0] <= math.exp(0.5) <= ends[1]
        tokens = generator.lognormal(4, 0.3, n)
        seconds = tokens * generator.lognormal(0, 0.2, n)
        _, ends = ratio_interval(range(n), np.stack([seconds, tokens], 1))
        hits[1] += ends[0] <= math.exp(0.02) <= ends[1]
    assert min(hits) / runs > 0.93


@pytest.mark.parametrize("n", [0, 1, LEAST - 1])
def test_fewer_than_six_prompts_have_no_interval(n: int) -> None:
    values = [1.0 + i for i in range(n)]
    middle, ends = median_interval([*values, math.nan])
    assert ends is None
    assert math.isnan(middle) if not n else middle == np.median(values)
    if n:
        assert ratio_interval(range(n), [[2.0, 1.0]] * n) == (2.0, None)
        assert ratio_interval([0] * 20, [[2.0, 1.0]] * 20) == (2.0, None)  # a prompt given twice is one observation


def test_the_median_of_six_lies_between_all_of_them_and_ratios_of_ratios_are_paired() -> None:
    assert median_interval([3, 1, 2, 6, 5, 4]) == (3.5, [1, 6])
    rows = [[a, 1.0, 2 * a, 1.0] for a in (1.0, 2.0, 3.0, 4.0, 5.0, 6.0)]
    middle, ends = ratio_interval(range(6), rows)
    assert (middle, *ends) == pytest.approx((0.5, 0.5, 0.5))  # every prompt says half


def test_p_values_are_students_with_prompts_as_observations() -> None:
    a = OfflineAlpha([[0.5], [0.6], [0.4], [0.7]], prompts=[0, 1, 2, 3])
    b = OfflineAlpha([[0.6], [0.9], [0.5], [0.7]], prompts=[0, 1, 2, 3])
    expected = stats.ttest_rel([0.6, 0.9, 0.5, 0.7], [0.5, 0.6, 0.4, 0.7])
    assert paired(a, b)["p_value"] == pytest.approx(expected.pvalue)
    assert paired(a, b)["p_value"] > math.erfc(expected.statistic / math.sqrt(2))
    assert (p_value(0.0, 0.0, 9), p_value(0.1, 0.0, 9), p_value(0.1, math.nan, 1)) == (1, 0, 1)


def test_values_for_json_are_finite() -> None:
    assert plain({1: np.array([1.0, math.inf]), "a": (math.nan, 2)}) == {"1": [1.0, None], "a": [None, 2]}
