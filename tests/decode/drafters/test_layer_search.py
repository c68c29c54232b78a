"""The search for the layer subset finds what pays, from acceptance alone."""

from __future__ import annotations

import pytest
import torch

from decode.bench.prediction import replayed_speedup
from decode.drafters.early_exit import response_rows, search
from decode.models.fast_forward import LayerSubset
from decode.models.fast_runner import FastRunner, fast_runner
from decode.sampling import LogitsWarper
from decode.verify import overlap

DEPTH = 4
GREEDY = LogitsWarper()


@pytest.fixture
def runner(tiny) -> FastRunner:
    """A model whose layers 1 and 2 do nothing: their output projections are zero."""
    from families import build_tiny

    model = build_tiny("llama", num_hidden_layers=DEPTH)
    with torch.no_grad():
        for i in (1, 2):
            model.model.layers[i].self_attn.o_proj.weight.zero_()
            model.model.layers[i].mlp.down_proj.weight.zero_()
    return fast_runner(model)


TEXTS = [([3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5], 3), ([2, 7, 1, 8, 2, 8, 1, 8], 2)]


def test_the_whole_model_accepts_itself_and_idle_layers_cost_nothing(runner: FastRunner) -> None:
    rows = response_rows(runner, TEXTS, GREEDY)

    def accepted(skip: list[int]) -> list[list[float]]:
        drafts = response_rows(runner, TEXTS, GREEDY, LayerSubset.skipping(DEPTH, skip, skip))
        return [overlap(p, q).tolist() for p, q in zip(rows, drafts)]

    assert [len(r) for r in rows] == [8, 6]
    for skip in ([], [1], [1, 2]):
        assert accepted(skip) == [[1.0] * 8, [1.0] * 6]
    assert sum(map(sum, accepted([0]))) < 14


def test_the_search_skips_the_idle_sublayers_and_predicts_a_gain(runner: FastRunner) -> None:
    found = search(runner, TEXTS, GREEDY, speedup=replayed_speedup, verify_cost=lambda n: 1 + 0.02 * (n - 1))
    assert {("attention", 1), ("mlp", 1), ("attention", 2), ("mlp", 2)} <= found.skip
    assert found.speedup > 1


def test_no_gain_is_predicted_where_drafting_cannot_pay(runner: FastRunner) -> None:
    found = search(
        runner, TEXTS[1:], GREEDY, speedup=replayed_speedup, verify_cost=lambda n: 3.0 * n, fixed=0.9, longest=3
    )
    assert found.speedup < 1
