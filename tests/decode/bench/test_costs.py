"""Costs, and the speedups that are predicted from them and from acceptances."""

from __future__ import annotations

import itertools
import json
from itertools import pairwise

import pytest
import torch
from pairs import make_pair, make_tokenizer

from decode.bench.costs import CostModel, measure_costs, with_bookkeeping
from decode.bench.offline_acceptance import OfflineAlpha, offline_alpha, offline_alphas
from decode.bench.prediction import (
    best_length,
    break_even,
    forecast,
    offline_accepted_length,
    predicted_speedup,
    replay,
    replayed,
    replayed_speedup,
    speedup,
    speedups_by_length,
    verdict,
)
from decode.loop import decode
from decode.method_options import MethodOptions
from decode.methods import MethodInputs, build
from decode.models.choose_runner import open_runner
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


def test_accepted_length_of_drafts_whose_later_tokens_depend_on_the_first_is_unbiased():
    """p(0) = p(1) = ½ and q(0) = 0.2: after 0 the draft is always right, after 1 never.

    Both tokens are accepted with probability 0.2; the product of the α, 0.7 and on average ½, would say 0.35.
    """
    texts = {0: ([0.7, 1.0, 0.0], [0.4, 1.0, 0.0]), 1: ([0.7, 0.0, 0.0], [1.0, 0.0, 0.0])}
    alphas = [OfflineAlpha([alpha], kept=[kept]) for alpha, kept in texts.values()]
    rounds = [sum(replayed([alpha], 2)[1].values()) for alpha in alphas]
    # 0 was accepted with 0.2 / 0.5, else a second round writes the rest; 1 was accepted, and the token after it was not
    assert rounds == pytest.approx([0.4 * 1 + 0.6 * 2, 2])


def test_a_token_that_stands_was_accepted_with_the_probability_that_gives_alpha_on_average(tiny):
    target, draft = make_pair(tiny)
    warp, prompt = LogitsWarper(1.0), [1, 2, 3]
    texts = [([*prompt, token], len(prompt)) for token in range(target.config.vocab_size)]
    (found,) = offline_alphas(target, {"draft": draft}, texts, warp)["draft"]
    with torch.no_grad():
        p = target(input_ids=torch.tensor([prompt])).logits[0, -1].softmax(-1)
    assert found.kept is not None
    assert float(p @ torch.tensor([kept for (kept,) in found.kept])) == pytest.approx(found.mean, abs=1e-6)


def test_replay_of_certain_acceptances_by_hand():
    # "110111" with drafts of 2: accept 2 and emit the third; accept 2 and emit the sixth
    assert replay([1, 1, 0, 1, 1, 1], 2) == (2, {2: 2})
    assert offline_accepted_length([OfflineAlpha([[1, 1, 0, 1, 1, 1], [0, 0]])], 2) == 8 / 4
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
    (0.8, 0.05, "speedup 2.67 at draft length 6"), (0.01, 0.05, "no speedup: the least"), (0.9, 1.2, "no speedup: not at any α"),
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
    for batch in (1, 3):
        cost = measure_costs(target, draft, context=20, batch=batch)
        assert sorted(cost.verify_cost) == list(range(1, 17))
        assert cost.verify_cost[1] == 1
        assert cost.cost_ratio == pytest.approx(cost.draft_seconds / cost.target_seconds)
        assert (cost.context, cost.batch) == (20, batch)
        assert target.network.cache.rows == draft.network.cache.rows == []
        known = with_bookkeeping(cost, target, draft, LogitsWarper(), [[3, 1, 4], [1, 5]])
        assert known.verify_cost == cost.verify_cost
        assert min(known.overhead, known.draft_overhead, known.step_overhead) >= 0
        assert target.network.cache.rows == draft.network.cache.rows == []
    assert measure_costs(target).cost_ratio == 0


def test_costs_stay_within_a_short_context(tiny):
    runner = open_runner(tiny("gpt2", n_positions=12))
    cost = measure_costs(runner, context=128)
    assert max(cost.verify_cost) < 12
    assert cost.context + max(cost.verify_cost) <= 12


def test_a_head_whose_later_tokens_are_rejected_is_predicted_slower() -> None:
    first, never = OfflineAlpha([[1.0] * 40]), OfflineAlpha([[0.0] * 40])
    cost = CostModel(0.0, {1: 1.0, 2: 1.0, 5: 1.0})
    assert speedups_by_length([first], cost, 4)[4] == pytest.approx(5.0)
    assert speedups_by_length([first, never], cost, 4)[4] == pytest.approx(2.0)


ALPHA = OfflineAlpha([[0.8] * 60, [1.0, 0.2] * 30])


def cost_at(batch: int, growth: float) -> CostModel:
    """A pair whose target reads another token of every text for `growth` of a forward."""
    verify = {n: 1 + growth * (n - 1) for n in (1, 2, 4, 8)}
    return CostModel(0.1, verify, 0.05, target_seconds=0.01 * batch**0.5, batch=batch, step_overhead=0.1)


def test_the_forecast_by_batch_size_follows_from_costs_and_acceptances():
    costs = [cost_at(1, 0.05), cost_at(2, 0.2), cost_at(4, 0.4), cost_at(8, 2.0)]
    found = forecast(costs, [ALPHA], 6)
    for cost, row in zip(costs, found["batches"]):
        for at in row["draft_lengths"]:
            wanted = speedup(*replayed([ALPHA], at["draft_length"]), cost)
            assert at["predicted_speedup"] == pytest.approx(wanted)
    row = found["batches"][1]
    assert row["goodput_without_draft"] == pytest.approx(2 / (1.1 * 0.01 * 2**0.5))
    assert row["best_goodput"] == pytest.approx(row["goodput_without_draft"] * row["best_speedup"])
    first, last, length = found["num_speculative_tokens_per_batch_size"][-1]
    assert (4 < first <= 8, last, length) == (True, 8, 0)  # where drafting loses
    for longest in (None, 2):
        schedule = forecast(costs, [ALPHA], 6, longest)["num_speculative_tokens_per_batch_size"]
        assert (schedule[0][0], schedule[-1][1]) == (1, 8)
        assert all(first <= last and 0 <= k <= (longest or 6) for first, last, k in schedule)
        assert all(entry[0] == before[1] + 1 and entry[2] != before[2] for before, entry in pairwise(schedule))
        assert [k for _, _, k in schedule] == sorted((k for _, _, k in schedule), reverse=True)
        assert schedule[-1][2] == 0


def test_the_forecast_of_a_pair_that_gains_everywhere_and_of_one_that_gains_nowhere():
    everywhere = forecast([cost_at(1, 0.0), cost_at(2, 0.0)], [ALPHA], 4)
    assert everywhere["num_speculative_tokens_per_batch_size"][-1][2] > 0
    nowhere = forecast([cost_at(2, 3.0)], [ALPHA], 4)
    assert nowhere["num_speculative_tokens_per_batch_size"] == [[1, 2, 0]]


def test_rounds_of_a_target_that_reads_tokens_again_cost_more_and_are_drafted_shorter():
    flat = {n: 1 + 0.1 * (n - 1) for n in range(1, 32)}
    plain, again = CostModel(0.05, flat), CostModel(0.05, flat, read_again=0.5)
    assert again.of_round(4) == pytest.approx(plain.of_round(4) + 0.1 * 2)
    assert again.plain == plain.plain
    speeds = [[predicted_speedup(0.8, k, cost) for k in range(1, 16)] for cost in (plain, again)]
    assert speeds[1].index(max(speeds[1])) < speeds[0].index(max(speeds[0]))
