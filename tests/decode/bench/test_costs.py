"""Costs and the formulas on them."""

from __future__ import annotations

import itertools
import json

import pytest
from pairs import make_pair, make_tokenizer
from reading import Reader

from decode.bench.costs import WAYS, CostMeter, CostModel, time_forwards
from decode.bench.offline_acceptance import OfflineAlpha, offline_alpha
from decode.bench.prediction import (
    best_length,
    break_even,
    predicted_speedup,
    replay,
    replayed_speedup,
    speedup,
    speedups_by_length,
    verdict,
)
from decode.loop import decode
from decode.method_options import MethodOptions
from decode.methods import MethodInputs, build
from decode.models.choose_runner import open_runner
from decode.models.fast_runner import FastRunner
from decode.models.head_runner import HeadRunner
from decode.sampling import LogitsWarper


def cost_of(c: float, o: float = 0.0, flat: float = 1.0, **more: float) -> CostModel:
    """v(1) = 1 and v(n) = `flat` above."""
    return CostModel(c, {1: 1.0} | dict.fromkeys(range(2, 17), flat), o, **more)


def test_predicted_speedup_by_hand():
    # α = 0.8, k = 5: 3.68928 tokens for 5 · 0.1 + 1.5 = 2 target forwards
    assert predicted_speedup(0.8, 5, cost_of(0.1, flat=1.5)) == pytest.approx(1.84464)
    assert predicted_speedup(0.8, 5, cost_of(0.1, 0.5, 1.5)) == pytest.approx(3.68928 / 2.5)
    assert predicted_speedup(0.3, 0, cost_of(0.1)) == 1  # no draft, no gain
    assert predicted_speedup(1.0, 5, cost_of(0.0)) == 6


def test_speedup_of_measured_rounds_by_hand():
    # rounds with k = 2, m = 2 and k = 3, m = 0: 4 tokens for 5 · 0.1 + 1.2 + 1.4
    cost = CostModel(0.1, {1: 1.0, 3: 1.2, 4: 1.4})
    assert speedup(4, {2: 1, 3: 1}, cost) == pytest.approx(4 / 3.1)
    cost = CostModel(0.1, {1: 1.0, 2: 1.2, 3: 1.5}, overhead=0.25, draft_overhead=0.05, step_overhead=0.1)
    assert cost.of_round(2) == pytest.approx(2 * 0.15 + 1.5 + 0.25 + 0.1)
    assert speedup(3, {2: 1}, cost) == pytest.approx(3 * 1.1 / 2.15)


def test_replay_of_certain_acceptances_by_hand():
    # "110111" with drafts of 2: accept 2 and emit the third; accept 2 and emit the sixth
    assert replay([1, 1, 0, 1, 1, 1], 2) == (2, {2: 2})
    # "010" with drafts of 2: reject at once; then one token of room, accepted, and the end
    rounds, lengths = replay([0, 1, 0], 2)
    assert rounds == 2
    assert lengths == {2: 1, 1: 1}


def test_replay_is_the_expectation_over_all_outcomes():
    accept, length = [0.3, 0.9, 0.5, 0.7, 0.2, 0.6], 2
    expected = 0.0
    for fate in itertools.product([0, 1], repeat=len(accept)):
        weight = 1.0
        for kept, a in zip(fate, accept):
            weight *= a if kept else 1 - a
        expected += weight * replay(fate, length)[0]
    assert replay(accept, length)[0] == pytest.approx(expected)


@pytest.mark.parametrize("length", [1, 3, 6])
def test_replay_of_greedy_acceptances_counts_the_rounds_that_decoding_takes(tiny, length):
    target, draft = make_pair(tiny)
    runner, warp = open_runner(target), LogitsWarper()
    prompt = make_tokenizer()("Tom has 3 apples").input_ids
    parts = MethodInputs(runner, warp, open_runner(draft), options=MethodOptions(draft_length=length))
    out = decode(runner, build("vanilla", parts), warp, prompt, max_new_tokens=40)
    accept = offline_alpha(target, draft, [(out.ids, len(prompt))], warp).texts[0]
    assert 0 < sum(accept) < len(accept)
    rounds, lengths = replay(accept, length)
    assert rounds == out.trace.rounds
    drafted = sorted(k for k, n in lengths.items() for _ in range(round(n)))
    assert drafted == sorted(out.trace.drafted)


def test_replayed_speedup_with_equal_acceptances_tends_to_the_formula():
    wanted = predicted_speedup(0.7, 4, cost_of(0.1))
    assert replayed_speedup([[0.7] * 4000], 4, 0.1, lambda n: 1.0) == pytest.approx(wanted, rel=2e-3)


def test_break_even_is_where_the_prediction_is_one():
    alpha = break_even(4, cost_of(0.2, flat=1.3))
    assert alpha is not None
    assert predicted_speedup(alpha, 4, cost_of(0.2, flat=1.3)) == pytest.approx(1, abs=1e-5)
    # a single draft token pays from α = c + v(2) − 1 on
    assert break_even(1, cost_of(0.3, flat=1.2)) == pytest.approx(0.5, abs=1e-5)
    assert break_even(3, cost_of(1.0, flat=1.5)) is None


@pytest.mark.parametrize(("alpha", "c", "told"), [
    (0.8, 0.05, "speedup 2.67 at draft length 6"), (0.01, 0.05, "no speedup: the least"), (0.9, 1.2, "no speedup at any α"),
])  # fmt: skip
def test_the_verdict_names_the_best_length_or_what_is_missing(alpha, c, told):
    cost = CostModel(c, {1: 1.0, 2: 1.0 if c < 1 else 1.4, 16: 1.5 if c < 1 else 3.0})
    gains = {k: predicted_speedup(alpha, k, cost) for k in range(1, 16)}
    assert verdict(alpha, cost, gains).startswith(told)
    assert (best_length(gains) > 0) == (alpha == 0.8)


def test_verify_cost_is_interpolated_and_extended():
    cost = CostModel(0.1, {1: 1.0, 2: 1.2, 4: 1.6, 8: 2.0})
    assert cost.v(2) == 1.2
    assert cost.v(3) == pytest.approx(1.4)
    assert cost.v(6) == pytest.approx(1.8)
    assert cost.v(16) > cost.v(9) > cost.v(8)
    assert json.loads(json.dumps(cost.to_dict()))["verify_cost"][0] == [1, 1.0]


def test_costs_are_measured_at_every_width_and_leave_no_trace_in_the_caches(tiny):
    target, draft = (open_runner(model) for model in make_pair(tiny))
    cost = CostMeter(target, draft, context=20).run(3)
    assert sorted(cost.verify_cost) == list(range(1, 17))
    assert cost.verify_cost[1] == 1
    assert cost.cost_ratio == pytest.approx(cost.draft_seconds / cost.target_seconds)
    assert cost.context == 20
    assert target.network.cache.rows == draft.network.cache.rows == []
    assert CostMeter(target).run(1).cost_ratio == 0


def test_costs_stay_within_a_short_context(tiny):
    runner = open_runner(tiny("gpt2", n_positions=12))
    cost = CostMeter(runner, context=128).run(1)
    assert max(cost.verify_cost) < 12
    assert cost.context + max(cost.verify_cost) <= 12


def test_a_head_whose_later_tokens_are_rejected_is_predicted_slower() -> None:
    first, never = OfflineAlpha([[1.0] * 40]), OfflineAlpha([[0.0] * 40])
    cost = CostModel(0.0, {1: 1.0, 2: 1.0, 5: 1.0})
    assert speedups_by_length([first], cost, 4)[4] == pytest.approx(5.0)
    assert speedups_by_length([first, never], cost, 4)[4] == pytest.approx(2.0)


def test_every_way_of_reading_is_timed_and_the_runner_is_left_as_it_was(tiny):
    ways = {name for kind in (FastRunner, HeadRunner) for name in dir(kind) if name.startswith("forward")}
    assert ways == set(WAYS)
    runner = open_runner(make_pair(tiny)[0])
    before = runner.forward
    with time_forwards(runner, runner) as watch:
        Reader(runner).read([1, 2, 3])
    assert watch.seconds > 0
    assert runner.forward == before
