"""Costs of real rounds, acceptance of known texts, and the speedups that are predicted from both."""

from itertools import pairwise

import pytest
import torch
from pairs import make_pair, make_tokenizer

from decode.core.lengths import RoundCosts
from decode.core.sampling import LogitsWarper
from decode.loop import decode
from decode.measure import acceptance
from decode.measure import costs as costs_module
from decode.measure.acceptance import OfflineAlpha, offline_accepted_length, offline_alphas
from decode.measure.costs import best_length, break_even, forecast, measure_costs, predicted_speedup, speedup
from decode.methods import MethodInputs, build
from decode.models.check import open_runner
from decode.options import MethodOptions


def costs_of(c: float, flat: float = 1.0) -> RoundCosts:
    """A draft forward costs c, and the target's forward over several tokens `flat`."""
    return RoundCosts({1: {0: 1.0} | {k: k * c + flat for k in range(1, 17)}})


def test_predicted_speedups_by_hand() -> None:
    # α = 0.8, k = 5: 3.68928 tokens for 5 · 0.1 + 1.5 = 2 target forwards
    assert predicted_speedup(0.8, 5, costs_of(0.1, 1.5)) == pytest.approx(1.84464)
    assert predicted_speedup(0.3, 0, costs_of(0.1)) == 1  # no draft, no gain
    assert predicted_speedup(1.0, 5, costs_of(0.0)) == 6
    # rounds with k = 2, m = 2 and k = 3, m = 0: 4 tokens for 1.4 + 1.7
    costs = RoundCosts({1: {0: 0.5, 2: 0.7, 3: 0.85}, 4: {0: 1.0, 2: 4.0, 3: 5.0}})
    assert speedup(4, {2: 1, 3: 1}, costs) == pytest.approx(4 / 3.1)
    assert speedup(4, {2: 1, 3: 1}, costs, 4) == pytest.approx(4 / 9)


def test_accepted_length_of_drafts_whose_later_tokens_depend_on_the_first_is_unbiased() -> None:
    """p(0) = p(1) = ½ and q(0) = 0.2: after 0 the draft is always right, after 1 never.

    Both tokens are accepted with probability 0.2; the product of the α, 0.7 and on average ½, would say 0.35.
    """
    texts = {0: ([0.7, 1.0, 0.0], [0.4, 1.0, 0.0]), 1: ([0.7, 0.0, 0.0], [1.0, 0.0, 0.0])}
    alphas = [OfflineAlpha([alpha], kept=[kept]) for alpha, kept in texts.values()]
    rounds = [sum(acceptance.replayed([alpha], 2)[1].values()) for alpha in alphas]
    # 0 was accepted with 0.2 / 0.5, else a second round writes the rest; 1 was accepted, and the token after it was not
    assert rounds == pytest.approx([0.4 * 1 + 0.6 * 2, 2])


def test_a_token_that_stands_was_accepted_with_the_probability_that_gives_alpha_on_average(tiny) -> None:
    target, draft = make_pair(tiny)
    warp, prompt = LogitsWarper(1.0), [1, 2, 3]
    texts = [([*prompt, token], len(prompt)) for token in range(target.config.vocab_size)]
    (found,) = offline_alphas(target, {"draft": draft}, texts, warp)["draft"]
    with torch.no_grad():
        p = target(input_ids=torch.tensor([prompt])).logits[0, -1].softmax(-1)
    assert found.kept is not None
    assert float(p @ torch.tensor([kept for (kept,) in found.kept])) == pytest.approx(found.mean, abs=1e-6)


def test_accepted_lengths_of_certain_acceptances_by_hand() -> None:
    # drafts of 2: accept 2 and emit the third; accept 2 and emit the sixth; two rounds of the other text
    assert offline_accepted_length([OfflineAlpha([[1, 1, 0, 1, 1, 1], [0, 0]])], 2) == 8 / 4
    first, never = OfflineAlpha([[1.0] * 40]), OfflineAlpha([[0.0] * 40])  # a head whose later tokens are rejected
    assert offline_accepted_length([first], 4) == pytest.approx(5.0)
    assert offline_accepted_length([first, never, never], 3) == pytest.approx(2.0)
    with pytest.raises(IndexError):  # no depth of a head stands for another one
        offline_accepted_length([first, never], 4)


@pytest.mark.parametrize("length", [1, 4])
def test_replay_of_greedy_acceptances_counts_the_rounds_that_decoding_takes(tiny, length) -> None:
    target, draft = make_pair(tiny)
    runner, warp = open_runner(target), LogitsWarper()
    prompt = make_tokenizer()("Tom has 3 apples").input_ids
    parts = MethodInputs(runner, warp, open_runner(draft), options=MethodOptions(draft_length=length))
    out = decode(runner, build("vanilla", parts), warp, prompt, max_new_tokens=40)
    (alpha,) = offline_alphas(target, {"draft": draft}, [(out.ids, len(prompt))], warp)["draft"]
    assert 0 < sum(alpha.texts[0]) < len(alpha.texts[0])
    lengths, tested = acceptance.replay([alpha.texts[0]], length)
    assert (sum(lengths.values()), tested) == (len(out.rounds), sum(r.tested for r in out.rounds))
    accepted = sum(r.accepted for r in out.rounds)
    rejected = sum(r.accepted < r.drafted for r in out.rounds)  # as AdaSPEC's authors count
    assert acceptance.offline_accepted_per_tested([alpha], length) == pytest.approx(accepted / (accepted + rejected))
    assert sorted(k for k, n in lengths.items() for _ in range(round(n))) == sorted(r.drafted for r in out.rounds)


def test_break_even_is_where_the_prediction_is_one() -> None:
    alpha = break_even(4, costs_of(0.2, 1.3))
    assert predicted_speedup(alpha or 0, 4, costs_of(0.2, 1.3)) == pytest.approx(1, abs=1e-5)
    # a single draft token pays from α = c + v(2) − 1 on
    assert break_even(1, costs_of(0.3, 1.2)) == pytest.approx(0.5, abs=1e-5)
    assert break_even(3, costs_of(1.0, 1.5)) is None


@pytest.mark.parametrize(("alpha", "c", "told"), [
    (0.8, 0.05, "speedup 3.09 at draft length 8 (α = 0.800, break-even"), (0.01, 0.05, "no speedup: the least"),
    (0.9, 1.2, "no speedup: not at any α"),
])  # fmt: skip
def test_the_verdict_names_the_best_length_or_what_is_missing(alpha, c, told) -> None:
    gains = {k: predicted_speedup(alpha, k, costs_of(c)) for k in range(1, 16)}
    assert costs_module.verdict(alpha, costs_of(c), gains).startswith(told)
    assert (best_length(gains) > 0) == (alpha == 0.8)


def test_rounds_of_the_loop_are_timed_at_every_length_and_leave_no_cache(tiny, monkeypatch) -> None:
    monkeypatch.setattr(costs_module, "TURNS", 3)
    target, draft = (open_runner(model) for model in make_pair(tiny))
    prompts = [[3, 1, 4, 1, 5], [9, 2, 6]]
    costs = measure_costs(target, draft, LogitsWarper(1.0), prompts, lengths=[1, 3], batch_sizes=[3])
    assert {size: sorted(row) for size, row in costs.rounds.seconds.items()} == {1: [0, 1, 3], 3: [0, 1, 3]}
    assert min(value for row in costs.rounds.seconds.values() for value in row.values()) > 0
    assert (sorted(costs.verify_cost), costs.verify_cost[1], costs.context) == ([1, 2, 4], 1, 4)
    assert costs.cost_ratio > 0
    assert target.network.cache.rows == draft.network.cache.rows == []
    alone = measure_costs(target, None, LogitsWarper(), prompts, lengths=[2, 5])
    assert alone.cost_ratio == 0
    assert sorted(alone.rounds.seconds[1]) == [0, 2, 5]
    assert costs.to_dict()["verify_cost"][0] == [1, 1.0]
    short = measure_costs(open_runner(tiny("gpt2", n_positions=12)), None, LogitsWarper(), [[*range(1, 11)]])
    assert sorted(short.rounds.seconds[1]) == [0, 1]  # within its context


ALPHA = OfflineAlpha([[0.8] * 60, [1.0, 0.2] * 30])


def batch_costs(*growths: float) -> RoundCosts:
    """A pair whose target reads another token of every text for a growth of its forward, at batch sizes 1, 2, 4, …."""
    plain = {2**i: 0.01 * 2 ** (i / 2) for i in range(len(growths))}
    return RoundCosts(
        {b: {k: s * (1 + k * (0.1 + growth)) for k in (0, 1, 8)} for (b, s), growth in zip(plain.items(), growths)}
    )


def test_the_forecast_by_batch_size_follows_from_costs_and_acceptances() -> None:
    costs = batch_costs(0.05, 0.2, 0.4, 2.0)
    found = forecast(costs, [ALPHA], 6)
    for row in found["batches"]:
        wanted = max(speedup(*acceptance.replayed([ALPHA], k), costs, row["batch_size"]) for k in range(1, 7))
        assert row["best_speedup"] == pytest.approx(max(1, wanted))
    first, last, length = found["num_speculative_tokens_per_batch_size"][-1]
    assert (4 < first <= 8, last, length) == (True, 8, 0)  # where drafting loses
    assert RoundCosts.from_dict(found["round_costs"]) == costs
    for longest in (6, 2):
        schedule = forecast(costs, [ALPHA], longest)["num_speculative_tokens_per_batch_size"]
        assert (schedule[0][0], schedule[-1][1]) == (1, 8)
        assert all(first <= last and 0 <= k <= longest for first, last, k in schedule)
        assert all(entry[0] == before[1] + 1 and entry[2] != before[2] for before, entry in pairwise(schedule))
        assert [k for _, _, k in schedule] == sorted((k for _, _, k in schedule), reverse=True)
    nowhere = forecast(batch_costs(3.0, 3.0), [ALPHA], 4)
    assert nowhere["num_speculative_tokens_per_batch_size"] == [[1, 2, 0]]
