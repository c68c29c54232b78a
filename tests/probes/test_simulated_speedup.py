"""The choice of exit and threshold: simulated rounds, costs, and what is predicted from them."""

from __future__ import annotations

import pytest
import torch

from decode.bench.costs import CostModel
from decode.bench.exit_costs import Costs, measure, of_weights
from decode.loop import Target, decode
from decode.method_options import MethodOptions
from decode.methods import MethodInputs, build
from decode.models.families import decoder_layers
from decode.models.fast_runner import fast_runner
from decode.sampling import LogitsWarper
from probes.exit_search import HINDSIGHT, METHODS, Choice, best_of, entry_of, predict, simulate, split_texts
from probes.features import collect
from probes.report import TITLES

DEPTH = 4


def test_a_simulated_round_accepts_up_to_the_first_rejection_and_adds_the_targets_token() -> None:
    outcome = [1, 1, 0, 1, 1, 1, 1, 0]
    assert simulate(outcome, None, 2) == ([2, 2, 1], [2, 2, 1])
    assert simulate(outcome, None, 4) == ([4, 4], [2, 4])
    assert simulate([1], None, 4) == ([0], [0])
    assert simulate([1, 1], None, 4, ended=True) == ([2], [1])


def test_a_simulated_round_stops_with_the_token_whose_confidence_falls_below() -> None:
    outcome, confidence = [1] * 6, [0.9, 0.9, 0.4, 0.9, 0.9, 0.9]
    assert simulate(outcome, confidence, 9, 0.5) == ([3, 1], [3, 1])
    assert simulate(outcome, confidence, 9, 0.85, product=True) == ([2, 2], [2, 2])
    assert simulate(outcome, confidence, 1, 0.5) == ([1, 1, 1], [1, 1, 1])


def test_simulated_rounds_are_those_of_greedy_decoding(tiny) -> None:
    """At a fixed length a greedy text decides every round, so the simulation is exact."""
    model = tiny("llama", num_hidden_layers=DEPTH)
    runner = fast_runner(model)
    prompt = [3, 1, 4]
    parts = MethodInputs(runner, LogitsWarper(), options=MethodOptions(exit_layer=3, draft_length=3))
    out = decode(Target(runner), build("layerskip", parts), LogitsWarper(), prompt, max_new_tokens=30)
    found = collect(model, [(out.ids, 3)], LogitsWarper(), exits=[3])
    drafted, accepted = simulate(found.outcome[0].tolist(), None, 3)
    assert drafted == out.trace.drafted
    assert accepted[:-1] == out.trace.accepted[:-1]


def test_the_best_setting_is_the_cheapest_way_to_the_same_tokens() -> None:
    free, dear = (dict.fromkeys(range(1, 26), 1.0), {n: 1.0 * n for n in range(1, 26)})
    outcomes = [[1.0] * 9 + [0.0] + [1.0] * 10]
    sure = {"token": [[0.9] * 9 + [0.1] + [0.9] * 10]}
    for verify, expected in ((free, 9), (dear, 1)):
        costs = Costs({2: CostModel(0.1, verify)})
        (found,) = predict(outcomes, sure, 2, [costs], window=12, thresholds=[0.05, 0.5])
        lengths = [c for c in found if c.method == "layerskip"]
        best = best_of(found, "layerskip", 1)[0]
        assert len(lengths) == 12
        assert best.speedup == max(c.speedup for c in lengths)
        assert (best.window >= expected) if verify is free else (best.window == 1)
    dearer = Costs({2: CostModel(0.2, free)})
    stopped = best_of(predict(outcomes, sure, 2, [dearer], window=12, thresholds=[0.5])[0], "draft-verify", 1)
    assert stopped[0].accepted > 0.85
    known = best_of(predict(outcomes, {}, 2, [dearer], window=12, thresholds=[])[0], HINDSIGHT, 1)
    assert known[0].speedup >= stopped[0].speedup
    assert known[0].speedup >= best_of(found, "layerskip", 1)[0].speedup
    assert set(METHODS) - {c.method for c in found} == {"adaspeed-probe", "confidence-probe"}


def test_a_choice_becomes_options_of_the_method_table() -> None:
    options = Choice("adaspeed", 2, 12, 0.3, 1.5, 0.8, 4.0).options()
    assert MethodOptions(**options).target_acceptance == 0.8
    assert entry_of(Choice("layerskip", 2, 5, None, 1.5, 0.8, 4.0), 0.0, "layerskip").label == "layerskip E2 k5"


def test_costs_are_in_steps_of_plain_decoding_and_deeper_exits_draft_dearer(tiny) -> None:
    runner = fast_runner(tiny("llama", num_hidden_layers=8, hidden_size=128))
    costs = measure(runner, [1, 7], {}, LogitsWarper(), [[3, 1, 4]], seconds=2.0)
    shallow, deep = costs.exits[1], costs.exits[7]
    assert 0 < shallow.cost_ratio < deep.cost_ratio < 1.5
    assert shallow.verify_cost[1] < 1.5
    assert set(costs.confidence) == {"token"}
    assert runner.length == 0


def test_values_are_split_by_text() -> None:
    assert split_texts(torch.arange(5.0), torch.tensor([0, 0, 2, 2, 2])) == [[0, 1], [2, 3, 4]]


@pytest.mark.parametrize("method", METHODS)
def test_every_method_of_the_choice_has_a_title(method: str) -> None:
    assert method in TITLES


def test_costs_of_weights_are_shares_of_layers_and_head(tiny) -> None:
    model = tiny("llama")
    layer = sum(p.numel() for p in decoder_layers(model)[0].parameters())
    head, count = model.get_output_embeddings().weight.numel(), len(decoder_layers(model))
    costs = of_weights(model, [1])
    assert costs.exits[1].cost_ratio == pytest.approx((layer + head) / (count * layer + head))
    assert [costs.exits[1].v(n) for n in (1, 4, 25)] == [1.0, 1.0, 1.0]
