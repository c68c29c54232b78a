"""The forecast by batch size: from costs and acceptances to speedups, vLLM's schedule, and the draft's files."""

from __future__ import annotations

from itertools import pairwise

import pytest

from decode.bench.costs import CostModel
from decode.bench.offline_acceptance import OfflineAlpha
from decode.bench.prediction import BatchForecast, best_length, replayed, speedup

ALPHA = OfflineAlpha([[0.8] * 60, [1.0, 0.2] * 30])


def cost_at(batch: int, growth: float) -> CostModel:
    """A pair whose target reads another token of every text for `growth` of a forward."""
    verify = {n: 1 + growth * (n - 1) for n in (1, 2, 4, 8)}
    return CostModel(0.1, verify, 0.05, target_seconds=0.01 * batch**0.5, batch=batch, step_overhead=0.1)


@pytest.fixture(scope="module")
def found():
    return BatchForecast([cost_at(1, 0.05), cost_at(2, 0.2), cost_at(4, 0.4), cost_at(8, 2.0)], [ALPHA], 6)


def test_speedups_follow_from_costs_and_acceptances(found):
    for cost in found.costs:
        for k, predicted in found.speedups(cost.batch).items():
            assert predicted == pytest.approx(speedup(*replayed([ALPHA], k), cost))
    row = found.rows()[1]
    assert row["goodput_without_draft"] == pytest.approx(2 / (1.1 * 0.01 * 2**0.5))
    assert row["best_goodput"] == pytest.approx(row["goodput_without_draft"] * row["best_speedup"])


def test_the_batch_size_from_which_drafting_loses_lies_between_the_measured_ones(found):
    assert best_length(found.speedups(4)) > 0
    assert best_length(found.speedups(8)) == 0
    losing = found.losing_from
    assert 4 < losing <= 8
    assert best_length(found.speedups(losing - 1)) > 0


def test_the_schedule_is_one_that_vllm_takes(found):
    for longest in (None, 2):
        schedule = found.schedule(longest)
        assert schedule[0][0] == 1
        assert schedule[-1][1] == 8
        assert all(first <= last and 0 <= k <= (longest or 6) for first, last, k in schedule)
        assert all(entry[0] == before[1] + 1 and entry[2] != before[2] for before, entry in pairwise(schedule))
        assert [k for _, _, k in schedule] == sorted((k for _, _, k in schedule), reverse=True)
        assert schedule[-1][2] == 0
    assert found.to_dict(2)["num_speculative_tokens_per_batch_size"] == found.schedule(2)


def test_a_pair_that_gains_everywhere_and_one_that_gains_nowhere():
    assert BatchForecast([cost_at(1, 0.0), cost_at(2, 0.0)], [ALPHA], 4).losing_from is None
    hopeless = BatchForecast([cost_at(2, 3.0)], [ALPHA], 4)
    assert hopeless.schedule() == [[1, 2, 0]]
    assert hopeless.losing_from == 1
