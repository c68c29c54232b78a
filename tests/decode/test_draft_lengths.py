"""Draft lengths of a round: the best constant one where drafting pays, none where it loses."""

from __future__ import annotations

import json
import random
from types import SimpleNamespace

import pytest

from decode.core.lengths import LOOK, DraftLengths, RoundCosts, between


def decode(lengths: DraftLengths, rates: list[float], tokens: int, batch: int = 1, seed: int = 0) -> float:
    """Tokens per unit of time over rounds whose position i is accepted with probability ``rates[i]``."""
    chance, written, spent, costs = random.Random(seed), 0, 0.0, lengths.costs
    while written < tokens:
        limit, results = lengths.limit(batch), []
        for _ in range(batch):
            accepted = next((i for i in range(limit) if chance.random() >= rates[i]), limit)
            results.append((SimpleNamespace(drafted=limit, accepted=accepted), limit))
            written += accepted + 1
        spent += costs.round(batch, limit)
        if limit:
            lengths.observe(results)  # type: ignore[arg-type]
    return written / spent


def constant(costs: RoundCosts, rates: list[float], length: int, batch: int = 1) -> float:
    """The same of a constant draft length, in expectation."""
    kept, tokens = 1.0, 1.0
    for rate in rates[:length]:
        kept *= rate
        tokens += kept
    return batch * tokens / costs.round(batch, length)


@pytest.mark.parametrize("rate", [0.6, 0.8, 0.95])
@pytest.mark.parametrize("c", [0.02, 0.1])
@pytest.mark.parametrize("batch", [1, 8])
def test_where_drafting_pays_it_is_at_most_three_percent_slower_than_the_best_constant_length(
    rate: float, c: float, batch: int
) -> None:
    costs, rates = RoundCosts.of_ratios(c, 0.05), [rate] * 20
    best = max(constant(costs, rates, k, batch) for k in range(1, 21))
    assert decode(DraftLengths(costs, 20), rates, 40_000, batch) > 0.97 * best


@pytest.mark.parametrize(("rate", "c", "growth"), [(0.3, 0.5, 0.1), (0.0, 0.1, 0.0), (0.8, 0.9, 0.0), (0.45, 0.4, 0.1)])
@pytest.mark.parametrize("batch", [1, 8])
def test_where_drafting_loses_it_is_at_most_three_percent_slower_than_none(
    rate: float, c: float, growth: float, batch: int
) -> None:
    lengths = DraftLengths(RoundCosts.of_ratios(c, growth), 20)
    assert decode(lengths, [rate] * 20, 4_000, batch) > 0.97 * batch
    assert lengths.chosen == 0


def test_drafting_comes_back_when_it_pays_again() -> None:
    lengths = DraftLengths(RoundCosts.of_ratios(0.1, 0.05), 8)
    decode(lengths, [0.02] * 8, 2_000)
    assert lengths.chosen == 0
    decode(lengths, [0.95] * 8, 20_000)
    assert lengths.chosen >= 5


def test_now_and_then_a_longer_draft_shows_whether_it_pays() -> None:
    lengths = DraftLengths(RoundCosts.of_ratios(0.2), 12)
    limits = []
    for _ in range(2 * LOOK):
        limits.append(lengths.limit(1))
        lengths.observe([(SimpleNamespace(drafted=limits[-1], accepted=min(limits[-1], 2)), limits[-1])])  # type: ignore[list-item]
    assert lengths.chosen == 2
    assert [limit for limit in limits[LOOK // 2 :] if limit > 2] == [4, 4]


def test_the_batch_decides_whether_drafting_pays() -> None:
    # a target forward over 16 texts costs by its tokens, over one text nothing more for five of them
    costs = RoundCosts({1: {0: 1.0, 1: 1.12, 4: 1.5}, 16: {0: 1.6, 1: 3.0, 4: 7.2}})
    lengths = DraftLengths(costs, 4)
    decode(lengths, [0.7] * 4, 500, batch=1)
    assert lengths.limit(1) > 0
    assert lengths.step_costs == pytest.approx([0, 0.38 / 3])
    assert lengths.block_cost == 0
    lengths.limit(16)
    assert lengths.chosen == 0
    assert lengths.step_costs[16] / 16 == pytest.approx(4.2 / 3 / 1.6)
    lengths.reset()
    assert lengths.limit(1) > 0


def test_drafts_that_end_themselves_are_not_charged_for_what_they_could_have_been() -> None:
    lengths = DraftLengths(RoundCosts.of_ratios(0.3), 8)
    for _ in range(40):  # two tokens are drafted where eight were allowed, and both are accepted
        lengths.observe([(SimpleNamespace(drafted=2, accepted=2), 8)])  # type: ignore[list-item]
    lengths.limit(1)
    assert lengths.chosen >= 2
    for _ in range(400):  # the text's end cuts them: nothing is learned of the positions behind
        lengths.observe([(SimpleNamespace(drafted=2, accepted=2), 2)])  # type: ignore[list-item]
    assert lengths._drafted[2] == [0, 40]


def test_a_rule_that_weighs_its_tokens_goes_on_after_an_early_rejection_and_is_limited_where_it_loses() -> None:
    lengths = DraftLengths(RoundCosts.of_ratios(0.9), 20, weighed=True)
    rejected = [(SimpleNamespace(drafted=3, accepted=0), 20)]
    for _ in range(16):
        assert lengths.limit(1) == 20
        lengths.observe(rejected)  # type: ignore[arg-type]
    for _ in range(16):
        lengths.limit(1)
    assert lengths.chosen == 0


def test_a_block_heads_forward_is_a_price_of_drafting_at_all() -> None:
    """Its tokens cost the growth of the target's forward alone, however many of them are drafted."""
    assert RoundCosts.of_ratios(0.3, 0.05).prices(1) == pytest.approx((0.35, 0))
    costs = RoundCosts.of_ratios(0.3, 0.05, block=True)
    assert costs.prices(1) == pytest.approx((0.05, 0.3))
    assert [costs.round(1, k) for k in (0, 1, 7)] == pytest.approx([1, 1.35, 1.65])


def test_costs_are_linear_between_what_was_measured() -> None:
    costs = RoundCosts({1: {0: 1.0, 1: 1.1, 3: 1.5}, 4: {0: 2.5, 1: 3.1, 3: 5.5}})
    assert costs.round(2, 0) == pytest.approx(1.5)
    assert costs.round(8, 0) == pytest.approx(4.5)
    assert costs.round(0.5, 1) == 1.1
    assert costs.round(1, 2) == pytest.approx(1.3)
    assert costs.round(1, 5) == pytest.approx(1.9)
    assert costs.round(2.5, 2) == pytest.approx((1.3 + 4.3) / 2)
    assert RoundCosts.from_dict(json.loads(json.dumps(costs.to_dict()))) == costs
    assert between({2: 3.0}, 7) == 3.0
    assert between({1: 1.0, 2: 0.1}, 9) == 0.0
