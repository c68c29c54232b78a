"""The choice of exit and threshold: simulated rounds, costs, and what is predicted from them."""

from __future__ import annotations

from decode.bench.costs import CostModel, exit_costs
from decode.loop import decode
from decode.method_options import MethodOptions
from decode.methods import MethodInputs, build
from decode.models.fast_runner import fast_runner
from decode.sampling import LogitsWarper
from probes.exit_search import METHODS, best_of, predict, simulate
from probes.features import collect
from probes.labels import Mode

DEPTH = 4


def test_a_simulated_round_accepts_up_to_the_first_rejection_and_adds_the_targets_token() -> None:
    outcome = [1, 1, 0, 1, 1, 1, 1, 0]
    assert simulate(outcome, None, 2) == ([2, 2, 2], [2, 2, 1])
    assert simulate(outcome, None, 4) == ([4, 4], [2, 4])
    assert simulate([1, 1], None, 4) == ([2], [1])


def test_a_simulated_round_stops_with_the_token_whose_confidence_falls_below() -> None:
    outcome, confidence = [1] * 6, [0.9, 0.9, 0.4, 0.9, 0.9, 0.9]
    assert simulate(outcome, confidence, 9, 0.5) == ([3, 2], [3, 1])
    assert simulate(outcome, confidence, 9, 0.85, product=True) == ([2, 2], [2, 2])
    assert simulate(outcome, confidence, 1, 0.5) == ([1, 1, 1], [1, 1, 1])


def test_simulated_rounds_are_those_of_greedy_decoding(tiny) -> None:
    """At a fixed length a greedy text decides every round, so the simulation is exact."""
    model = tiny("llama", num_hidden_layers=DEPTH)
    runner = fast_runner(model)
    prompt = [3, 1, 4]
    parts = MethodInputs(runner, LogitsWarper(), options=MethodOptions(exit_layer=3, draft_length=3))
    out = decode(runner, build("layerskip", parts), LogitsWarper(), prompt, max_new_tokens=30)
    found = collect(model, [(out.ids, 3)], Mode("greedy", LogitsWarper(), "match"), exits=[3])
    drafted, accepted = simulate(found.outcome[0].tolist(), None, 3)
    rounds = len(drafted) - 1  # the budget cuts the last drafts of decoding
    assert drafted[: rounds - 1] == out.trace.drafted[: rounds - 1]
    assert accepted[:-1] == out.trace.accepted[:-1]


def test_the_best_setting_is_the_cheapest_way_to_the_same_tokens() -> None:
    free, dear = (dict.fromkeys(range(1, 26), 1.0), {n: 1.0 * n for n in range(1, 26)})
    outcomes = [[1.0] * 9 + [0.0] + [1.0] * 10]
    sure = {"token": [[0.9] * 9 + [0.1] + [0.9] * 10]}
    for verify, expected in ((free, 9), (dear, 1)):
        cost = CostModel(0.1, verify)
        found = predict(outcomes, sure, 2, cost, {}, 12)
        lengths = [c for c in found if c.method == "layerskip"]
        best = best_of(found, "layerskip")[0]
        assert len(lengths) == 12
        assert best.speedup == max(c.speedup for c in lengths)
        assert (best.window >= expected) if verify is free else (best.window == 1)
    stopped = predict(outcomes, sure, 2, CostModel(0.2, free), {}, 12)
    assert best_of(stopped, "draft-verify")[0].accepted > 0.85
    assert set(METHODS) - {c.method for c in found} == {"adaspeed-probe", "confidence-probe"}


def test_costs_are_in_steps_of_plain_decoding_and_deeper_exits_draft_dearer(tiny) -> None:
    runner = fast_runner(tiny("llama", num_hidden_layers=8, hidden_size=128))
    costs, reading = exit_costs(runner, [1, 7], {}, LogitsWarper(), [[3, 1, 4]])
    shallow, deep = costs[1], costs[7]
    assert 0 < shallow.cost_ratio < deep.cost_ratio
    assert set(reading) == {"token"}
