"""Intervals hold what they promise, and say nothing of fewer than six prompts."""

import math

import numpy as np
import pytest
from scipy import stats
from simulated_prompts import BOOTSTRAP, INTERVALS, NULLS, covered, rejected

from decode.measure.acceptance import OfflineAlpha, paired
from decode.measure.statistics import LEAST, median_interval, p_value, plain, ratio_interval


@pytest.mark.parametrize("n", [LEAST, 8])
def test_intervals_hold_the_true_value_as_often_as_they_promise(n: int) -> None:
    """Of texts of uneven lengths, of 800 draws each; the percentile bootstrap does not."""
    assert min(covered(judge, n, 800) for judge in INTERVALS.values()) >= 0.92
    if n == 8:
        assert max(covered(judge, n, 300) for judge in BOOTSTRAP.values()) < 0.9


@pytest.mark.parametrize("name", NULLS)
def test_p_is_below_5_percent_in_5_of_100_cases_at_most_where_nothing_differs(name: str) -> None:
    share = rejected(NULLS[name], 8, 1000)
    assert share < 0.065
    if "seeds" not in name:
        assert share > 0.035


@pytest.mark.parametrize("n", [0, 1, LEAST - 1])
def test_fewer_than_six_prompts_have_no_interval(n: int) -> None:
    values = [1.0 + i for i in range(n)]
    middle, ends = median_interval([*values, math.nan])
    assert ends is None
    assert math.isnan(middle) if not n else middle == np.median(values)
    if n:
        assert ratio_interval(range(n), [[2.0, 1.0]] * n) == (2.0, None)
        assert ratio_interval([0] * 20, [[2.0, 1.0]] * 20) == (2.0, None)  # a prompt given twice is one observation
        assert ratio_interval(range(20), [[900.0, 300.0]] + [[2.0, 1.0]] * 19)[1] is None  # one has nearly all weight


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
