"""Intervals hold what they promise; threads of a measurement, what other programs took of it, which speeds are results."""

import math

import numpy as np
import pytest
import torch
from pairs import make_pair, make_suite, make_tokenizer
from scipy import stats
from simulated_prompts import INTERVALS, NULLS, covered, rejected

from decode.measure import machine
from decode.measure.acceptance import OfflineAlpha, paired
from decode.measure.benchmark import Benchmark
from decode.measure.machine import timed
from decode.measure.session import BenchOptions, Session
from decode.measure.statistics import LEAST, median_interval, p_value, plain, ratio_interval
from decode.models.check import open_runner


@pytest.mark.parametrize("n", [LEAST, 8])
def test_intervals_hold_the_true_value_as_often_as_they_promise(n: int) -> None:
    """Of texts of uneven lengths, of 800 draws each."""
    assert min(covered(judge, n, 800) for judge in INTERVALS.values()) >= 0.92


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


@pytest.fixture
def two_threads():
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(1)


def test_every_session_of_a_process_chooses_among_the_callers_threads(tiny, two_threads, monkeypatch) -> None:
    target, draft = make_pair(tiny)
    counts, choose = [], machine.choose_threads
    monkeypatch.setattr(machine, "choose_threads", lambda model, asked: choose(model, asked or 1))
    for asked in (None, 2, None):
        opened = Session(target, {"d": draft}, make_tokenizer(), BenchOptions(4, 1, threads=asked))
        bench = Benchmark(opened)
        bench.run([make_suite(1)], [])
        counts.append((opened.threads, opened.facts()["threads"], torch.get_num_threads()))
    assert counts == [(1, 1, 2), (2, 2, 2), (1, 1, 2)]


def test_the_faster_count_is_chosen_by_measurement_and_torchs_own_stays(tiny, two_threads) -> None:
    count, reason = machine.choose_threads(open_runner(tiny("llama")))
    assert count in (1, 2)
    assert reason.startswith(f"threads: {count} (a one-token target forward takes ")
    assert machine.choose_threads(open_runner(tiny("llama")), 7) == (7, "threads: 7")
    with pytest.raises(ZeroDivisionError), machine.using_threads(1):
        1 / 0  # noqa: B018
    assert torch.get_num_threads() == 2


def test_the_share_is_the_time_in_which_the_most_delayed_thread_waited_for_no_processor(tmp_path, monkeypatch) -> None:
    """Ten seconds of the clock, in which two threads waited for one second each; on a GPU nothing is said."""
    stats = [tmp_path / number / "schedstat" for number in "12"]
    monkeypatch.setattr(machine, "THREADS", tmp_path)
    for device, told, noted in (("cpu", True, {"cpu_share": 0.9}), ("cpu", False, {}), ("cuda", True, {})):
        for stat in stats if told else ():
            stat.parent.mkdir(exist_ok=True)
            stat.write_text("7000000000 1000000000 5\n")
        monkeypatch.setattr(machine.time, "perf_counter", iter((5.0, 15.0)).__next__)
        with timed(torch.device(device)) as found:
            for stat in stats:
                stat.write_text("9000000000 2000000000 6\n") if told else stat.unlink(missing_ok=True)
        monkeypatch.undo()
        monkeypatch.setattr(machine, "THREADS", tmp_path)
        assert found == pytest.approx(noted)
    assert machine.busy({"cpu_share": 0.94}) > machine.busy({"cpu_share": 0.96}) == machine.busy({})
    assert machine.busy({"cpu_share": 0.0})


RESULT = {"speedup": 2.0, "accepted_length": 3.0, "least_cost": 1.2, "prompts": 6, "cpu_share": 0.96}


@pytest.mark.parametrize(("change", "why"), [
    ({}, ""), ({"cpu_share": 0.94}, "the machine was busy (threads waited over 5% of the time); measure"),
    ({"least_cost": 0.26}, "less time than one (v(n) is below 1)"), ({"prompts": 5}, "fewer than 6 prompts were timed"),
    ({"speedup": 3.1}, "above the accepted length, which"), ({"speedup": 3.1, "baseline": True}, ""),
    ({"speedup": 3.1, "cpu_share": 0.5, "prompts": 2}, "5% of the time) and the speedup is above"), ({"speedup": None, "prompts": 1}, ""),
    ({"least_cost": 0.97}, ""), ({"speedup": 3.0 + 1e-9}, ""), ({"prompts": 5}, "timed; time more (--limit"),
])  # fmt: skip
def test_a_speedup_that_cannot_be_or_was_not_measured_well_is_no_result(change: dict, why: str) -> None:
    told = machine.doubt(RESULT | change)
    assert why in told
    assert bool(told) == bool(why)


def test_predicted_and_served_speedups_are_judged_by_their_own_lengths_and_texts() -> None:
    row = {"predicted_speedup": 2.0, "served_length": 3.0, "texts": 6}
    assert machine.doubt(row) == ""
    assert "above the accepted length" in machine.doubt(row | {"predicted_speedup": 3.1})
    assert "fewer than 6 prompts" in machine.doubt(row | {"texts": 5})
