"""Threads: chosen for a measurement, and as the caller had them afterwards."""

import pytest
import torch
from pairs import make_pair, make_suite, make_tokenizer

from decode.measure import machine, session
from decode.measure.benchmark import Benchmark
from decode.measure.session import BenchOptions, Session


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
        opened = Session(target, {"d": draft}, make_tokenizer(), BenchOptions(4, 1, threads=asked, costs=False))
        bench = Benchmark(opened)
        bench.run([make_suite(1)], [])
        counts.append((opened.threads, opened.facts()["threads"], torch.get_num_threads()))
    assert counts == [(1, 1, 2), (2, 2, 2), (1, 1, 2)]


def test_the_faster_count_is_chosen_by_measurement_and_torchs_own_stays(tiny, two_threads) -> None:
    count, reason = machine.choose_threads(tiny("llama"))
    assert count in (1, 2)
    assert reason.startswith(f"threads: {count} (a one-token target forward takes ")
    assert machine.choose_threads(tiny("llama"), 7) == (7, "threads: 7")
    assert torch.get_num_threads() == 2


def test_layouts_are_measured_with_the_threads_that_are_used(tiny, two_threads, monkeypatch) -> None:
    target, draft = make_pair(tiny)
    seen = []
    for name in ("open_runner", "open_draft_runner"):
        opened = getattr(session, name)
        monkeypatch.setattr(
            session, name, lambda *a, opened=opened, **k: seen.append(torch.get_num_threads()) or opened(*a, **k)
        )
    Session(target, {"d": draft}, make_tokenizer(), BenchOptions(4, 1, threads=1))
    assert seen == [1, 1]
    with pytest.raises(ZeroDivisionError), machine.using_threads(1):
        1 / 0  # noqa: B018
    assert torch.get_num_threads() == 2
