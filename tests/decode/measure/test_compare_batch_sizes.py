"""Benchmarks of texts together: the same texts at every batch size, and speeds paired by prompt and repeat."""

from __future__ import annotations

import json

import numpy as np
import pytest
from pairs import make_pair, make_suite, make_tokenizer

from decode.bench.baselines import cut_at
from decode.bench.batch_report import batch_table, by_method, conclusions, write_batch_report
from decode.bench.batch_sizes import MEASURED, BatchBenchmark, Written, _interval, cells, predicted
from decode.bench.entries import plan
from decode.bench.session import BenchOptions, Session
from decode.commands.bench import bench
from decode.errors import UserError
from decode.models.pair import Pair
from decode.progress import Work, as_current
from decode.stopping import RoundCosts
from decode.trace import Trace

SIZES = [1, 3]


@pytest.fixture(scope="module")
def measured(tiny):
    target, draft = make_pair(tiny)
    session = Session(target, {"small": draft}, make_tokenizer(), BenchOptions(10, 2, threads=1, pack="off"))
    bench = BatchBenchmark(session)
    methods = ["vanilla", "cost-optimal", "generate-assistant"]
    entries = plan(methods, session.draft_models, draft_lengths=[1, 3])
    with as_current(Work()) as work:
        bench.run([make_suite()], entries, SIZES, prompts=2)
    return session, bench.rows, work


def test_every_method_writes_the_same_greedy_texts_at_every_batch_size(measured):
    _, rows, work = measured
    names = ["autoregressive", "generate", "vanilla k=1", "vanilla k=3", "cost-optimal"]
    assert [(row["batch_size"], row["name"]) for row in rows] == [(size, name) for size in SIZES for name in names]
    assert all(row["identical_share"] == 1 for row in rows)
    assert work.done == work.total == len(rows) * 3


def test_a_batch_gets_twice_the_prompts_that_it_holds_and_stays_filled(measured):
    _, rows, _ = measured
    for row in rows:
        assert set(MEASURED) <= row.keys()
        assert row["texts"] == 2 * (2 if row["batch_size"] == 1 else 6)
        assert row["mean_batch"] <= row["batch_size"] + 1e-6
        assert row["mean_batch"] > 0.5 * row["batch_size"]
        assert row["tokens_per_second_ci95"][0] <= row["tokens_per_second"] <= row["tokens_per_second_ci95"][1]
        assert row["seconds_per_token"] > 0
    assert [row["speedup"] for row in rows if row["method"] == "autoregressive"] == [1, 1]


def test_the_report_keeps_what_others_wrote_and_draws_a_line_for_each_draft_length(measured, tmp_path):
    session, rows, _ = measured
    (tmp_path / "report.json").write_text('{"methods": [1]}')
    path, page = write_batch_report(rows, session, {"limit": 2}, tmp_path)
    content = json.loads(path.read_text())
    assert content["methods"] == [1]
    assert content["batches"]["rows"] == rows
    assert list(by_method(rows)) == ["vanilla k=1", "vanilla k=3", "cost-optimal"]
    html = page.read_text()
    assert html.count("<svg") == 2
    assert "Speedup by batch size" in html
    assert len(batch_table(rows)) == len(SIZES)
    assert "at batch 3" in conclusions(rows)[0]


def test_the_batch_from_which_drafting_loses_is_named():
    row = {"suite": "s", "temperature": 0.0, "lossless": True, "peer": False, "method": "vanilla", "name": "vanilla"}
    row |= {"seconds_per_token": 1.0, "seconds_per_token_ci95": [1.0, 1.0]}
    speedups = {1: 2.0, 2: 0.9, 4: 1.1, 8: 0.9, 16: 0.8}
    rows = [row | {"batch_size": size, "speedup": speedup} for size, speedup in speedups.items()]
    assert conclusions(rows)[0].endswith("drafting loses from batch 8 on")


def test_rates_are_over_all_texts_and_intervals_cover_prompts_and_repeats():
    steady = [Written([[1] * 4, [1] * 2], [1.0, 1.0], 2.0) for _ in range(3)]
    table = cells(steady, [0, 1])
    assert table[:, 0].tolist() == [[4, 1], [2, 1]]
    assert _interval("rate", table, 0) == {"rate": 3, "rate_ci95": [2, 4]}  # one prompt or the other
    assert _interval("rate", np.concatenate([table, 2 * table], 2), 0) == {"rate": 1, "rate_ci95": [1, 1]}
    slow = [Written([[1] * 4] * 2, [s, s], 2 * s) for s in (1.0, 2.0)]
    found = _interval("rate", cells(slow, [0, 1]), 0)  # both prompts alike: only the repeats differ
    assert found == {"rate": pytest.approx(8 / 3), "rate_ci95": [2, 4]}
    assert cells(slow, [0, 0]).shape == (1, 2, 2)  # a prompt given twice is one observation


def test_a_prediction_counts_each_round_by_the_drafts_of_all_its_texts_and_the_reading_of_the_prompts():
    costs = RoundCosts({1: 1.0, 2: 1.5}, {1: 0.1, 2: 0.2}, {1: {1: 1.0, 3: 1.2}, 2: {1: 1.5, 3: 2.0}})
    # two texts draft two tokens each; two draft two tokens and none, which a draft reads alone; one drafts none
    drafted = Trace(together=[(2, 2), (2, 2), (2, 0), (2, 0), (0,)], tokens=8, prefill_seconds=0.5)
    plain = Trace(together=[(0, 0)] * 4 + [(0,)] * 2, tokens=6, prefill_seconds=0.4)
    seconds = 0.5 + (2 * 0.2 + 2.0) + (2 * 0.1 + 1.75) + 1.0
    without = 0.4 + 4 * 1.5 / 2 + 2 * 1.0
    assert predicted(drafted, plain, costs) == pytest.approx(without / 6 * 8 / seconds)


def test_a_generated_row_ends_behind_its_first_end_token():
    assert cut_at([5, 0, 7, 0], {0}) == [5, 0]
    assert cut_at([5, 7], {0}) == [5, 7]


def test_the_api_measures_batches_and_refuses_what_cannot_be_measured(tiny):
    target, draft = make_pair(tiny)
    options = {"batch_sizes": [2], "draft_lengths": [2], "limit": 2, "max_new_tokens": 4, "repeats": 1, "threads": 1}
    pair = Pair(target, make_tokenizer(), draft)
    names = [row["name"] for row in bench(pair, **options)]
    assert names == ["autoregressive", "generate", "vanilla", "cost-optimal"]
    with pytest.raises(UserError, match="batch_sizes"):
        bench(pair, **options | {"batch_sizes": [0]})
