"""Threads of a measurement, the load of other programs meanwhile, and which speeds are results."""

import pytest
import torch
from pairs import make_pair, make_suite, make_tokenizer

from decode.measure import machine
from decode.measure.benchmark import Benchmark
from decode.measure.session import BenchOptions, Session
from decode.models.check import open_runner


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


@pytest.mark.parametrize(("own", "used", "waiting", "load"), [
    (10.0, 10.4, 9.0, 0.04), (9.0, 14.0, 9.0, 0.5), (1.3, 20.0, 31.0, 30.0), (10.0, 20.0, 1.5, 1.0), (5.0, 0.0, 0.0, 0.0),
])  # fmt: skip
def test_the_load_is_what_other_programs_take_and_where_nothing_is_free_wait_for(
    own: float, used: float, waiting: float, load: float, monkeypatch
) -> None:
    """In ten seconds on two cores; the average of the last minute counts where no time was free."""
    times = iter([(0.0, 0.0, 0.0), (10.0, own, used)])
    monkeypatch.setattr(machine, "_times", lambda: next(times))
    monkeypatch.setattr(machine.psutil, "getloadavg", lambda: (waiting, 0.0, 0.0))
    monkeypatch.setattr(machine.os, "cpu_count", lambda: 2)
    with machine.other_load() as seen:
        pass
    assert seen == pytest.approx({"load": load, "cores": 2})


RESULT = {"speedup": 2.0, "accepted_length": 3.0, "least_cost": 1.2, "prompts": 6, "load": 0.5, "cores": 2}


@pytest.mark.parametrize(("change", "why"), [
    ({}, ""), ({"load": 30.2}, "the machine was busy (load 30.2 on 2 cores): measure again on an idle machine"),
    ({"least_cost": 0.26}, "0.26 times as long as one: v(n) is below 1"), ({"prompts": 5}, "5 prompts were timed, expected 6"),
    ({"speedup": 3.1}, "above the accepted length of 3.00"), ({"speedup": 3.1, "baseline": True}, ""),
    ({"speedup": 3.1, "load": 1, "prompts": 2}, "busy (load 1 on 2 cores); it is above"), ({"speedup": None, "prompts": 1}, ""),
    ({"least_cost": 0.97}, ""), ({"speedup": 3.0 + 1e-9}, ""), ({"prompts": 5}, "6 or more: time more (--limit"),
])  # fmt: skip
def test_a_speedup_that_cannot_be_or_was_not_measured_well_is_no_result(change: dict, why: str) -> None:
    told = machine.doubt(RESULT | change)
    assert why in told
    assert bool(told) == bool(why)


def test_predicted_and_served_speedups_are_judged_by_their_own_lengths_and_texts() -> None:
    row = {"predicted_speedup": 2.0, "served_length": 3.0, "texts": 6}
    assert machine.doubt(row) == ""
    assert "above the accepted length of 3.00" in machine.doubt(row | {"predicted_speedup": 3.1})
    assert "5 prompts were timed" in machine.doubt(row | {"texts": 5})
