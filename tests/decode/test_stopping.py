"""Stop rules: what they read, and their controllers against sequences computed by hand from the papers; draft lengths."""

import json
import math
import random
from types import SimpleNamespace

import pytest
import torch
from enumeration import ScriptedRunner, random_table
from sklearn.metrics import roc_curve

from decode.core.draft import Draft
from decode.core.lengths import LOOK, DraftLengths, RoundCosts, between
from decode.core.round import Round
from decode.core.sampling import LogitsWarper
from decode.core.stop import (
    CostOptimal,
    DraftedTokens,
    Fixed,
    MeanOfRejected,
    Roc,
    StopRule,
    TargetAcceptance,
    Watch,
    max_probability,
    negative_entropy,
    token_probability,
    warped_token_probability,
)
from decode.errors import UserError
from decode.methods import STOPS, MethodInputs
from decode.options import MethodOptions


def chain_round(drafted: int, accepted: int, confidence: list[float] | None = None) -> Round:
    draft = Draft([0] * drafted, None, confidence or [])
    return Round(draft, list(range(accepted)), 0, [0] * (accepted + 1))


def step(*logits: float, token: int = 0, warp: LogitsWarper | None = None) -> DraftedTokens:
    row = torch.tensor(logits)
    warp = warp or LogitsWarper(temperature=1.0)
    return DraftedTokens(warp(row[None]), row[None], torch.empty(1, 0), torch.tensor([token]), warp.greedy)


def log(*probabilities: float) -> list[float]:
    return [math.log(p) for p in probabilities]


def test_confidences_read_what_their_papers_say() -> None:
    sampled = step(*log(0.5, 0.25, 0.25), token=1)
    assert token_probability(sampled).item() == pytest.approx(0.25)
    assert warped_token_probability(sampled).item() == pytest.approx(0.25)
    assert max_probability(sampled).item() == pytest.approx(0.5)
    assert negative_entropy(sampled).item() == pytest.approx(-1.5)

    cut = step(*log(0.5, 0.25, 0.25), token=0, warp=LogitsWarper(temperature=0.5))
    assert token_probability(cut).item() == pytest.approx(0.5)  # Draft & Verify: before warping
    assert warped_token_probability(cut).item() == pytest.approx(2 / 3)  # Hugging Face: after it
    assert negative_entropy(cut).item() == pytest.approx(-(2 / 3 * math.log2(1.5) + 1 / 3 * math.log2(6)))

    greedy = step(*log(0.5, 0.25, 0.25), token=0, warp=LogitsWarper())
    assert warped_token_probability(greedy).item() == pytest.approx(0.5)
    assert negative_entropy(greedy).item() == pytest.approx(-1.5)


def drafted_by(stop: StopRule, *probabilities: float) -> int:
    """How many tokens of these probabilities are drafted."""
    watch = Watch([stop])
    for i, p in enumerate(probabilities):
        if i == stop.window:
            return i
        watch.look([0], step(*log(p, 1 - p)))
        if watch.lengths:
            return watch.lengths[0]
    return len(probabilities)


def test_the_token_that_stops_a_draft_stays_in_it() -> None:
    last = StopRule(10, token_probability, threshold=Fixed(0.5))
    assert drafted_by(last, 0.9, 0.6, 0.4, 0.9) == 3
    assert drafted_by(last, 0.1) == 1
    product = StopRule(10, token_probability, product=True, threshold=Fixed(0.5))
    assert drafted_by(product, 0.9, 0.8, 0.8, 0.8, 0.8) == 4  # .9, .72, .576, .4608
    assert drafted_by(StopRule(3, token_probability, threshold=Fixed(0.5)), *[0.9] * 9) == 3


def test_a_refused_token_is_not_part_of_the_draft() -> None:
    stop = StopRule(10, max_probability, threshold=Fixed(0.6), refuse=True)
    watch = Watch([stop, stop])
    for second in (0.7, 0.55, 0.9):
        watch.look([0], step(*log(0.8, 0.2)))
        watch.look([1], step(*log(second, 1 - second)))
    assert watch.lengths == {1: 1}
    assert watch.seen == [pytest.approx([0.8] * 3), pytest.approx([0.7])]


def test_draft_and_verify_moves_its_threshold_as_in_its_code() -> None:
    """β₁ .5, α .9, ε .01, β₂ .9, window 12: one round moves the threshold by .001 at most."""
    controller = TargetAcceptance()
    rate, threshold = 0.0, 0.6
    moves = []
    for drafted, accepted in [(5, 5), (4, 4), (6, 6), (12, 12), (12, 12), (3, 3), (4, 1), (0, 0), (2, 2)]:
        controller.observe(chain_round(drafted, accepted))
        if drafted:
            rate = 0.5 * rate + 0.5 * accepted / drafted
            goal = threshold + 0.01 if rate < 0.9 else threshold if drafted == 12 else threshold - 0.01
            moves.append(round(0.1 * (goal - threshold), 12))
            threshold = 0.9 * threshold + 0.1 * goal
        assert controller.rate == pytest.approx(rate, abs=1e-15)
        assert controller.value == pytest.approx(threshold, abs=1e-15)
    # the rate climbs .5, .75, .875, .9375: raised three times, held at the cap, lowered, raised after a rejection
    assert moves == [0.001, 0.001, 0.001, 0, 0, -0.001, 0.001, 0.001]
    controller = TargetAcceptance(0.8, keep_at=None)  # AdaSpeed's is lowered at the cap too
    controller.rate = 1.0
    controller.observe(chain_round(12, 12))
    assert controller.value == pytest.approx(0.799)


def test_adasd_stops_at_the_mean_entropy_of_first_rejected_tokens() -> None:
    controller = MeanOfRejected()
    assert controller.value == -math.inf  # drafts to the window until something was rejected
    controller.observe(chain_round(3, 3, [-0.5, -1.0, -1.5]))
    assert controller.value == -math.inf
    controller.observe(chain_round(3, 1, [-0.5, -1.0, -1.5]))
    assert controller.value == -1.0
    controller.observe(chain_round(2, 0, [-2.0, -0.1]))
    assert controller.value == pytest.approx(-1.5)
    watch = Watch([StopRule(20, negative_entropy, threshold=controller)])
    watch.look([0], step(0.0, 0.0))  # one bit
    assert not watch.lengths
    watch.look([0], step(0.0, 0.0, 0.0, 0.0))  # two bits
    assert watch.lengths == {0: 2}


@pytest.mark.parametrize("digits", [1, 17])  # with and without confidences that are equal
@pytest.mark.parametrize("shift", [0.2, -0.5])  # seldom rejected, seldom accepted
def test_hugging_faces_threshold_minimises_the_cost_on_its_roc_curve(digits: int, shift: float) -> None:
    generator = random.Random(3)
    controller = Roc()
    matches: list[int] = []
    probabilities: list[float] = []
    threshold = 0.4
    changed = 0
    for _ in range(60):
        drafted = generator.randrange(1, 6)
        seen = [round(generator.random(), digits) for _ in range(drafted)]
        accepted = 0
        while accepted < drafted and generator.random() < seen[accepted] + shift:
            accepted += 1
        controller.observe(chain_round(drafted, accepted, seen))
        # literally: accepted ones, then one zero if anything is left, the rest of the probabilities is dropped
        probabilities += seen
        matches += [1] * accepted
        if len(probabilities) > len(matches):
            matches.append(0)
        del probabilities[len(matches) :]
        if len(probabilities) > 5 and {0, 1} <= set(matches):
            fpr, tpr, thresholds = roc_curve(matches, probabilities)
            threshold = min(thresholds[(fpr + 3 * (1 - tpr)).argmin()], 1.0)
        changed += controller.value != 0.4
        assert controller.value == threshold
    assert changed > 20
    few = Roc()
    few.observe(chain_round(8, 8))  # a copied draft, of which no confidence was read
    few.observe(chain_round(2, 1, [0.9, 0.1]))
    assert few.value == 0.4  # too little seen
    for _ in range(2):
        few.observe(chain_round(2, 1, [0.9, 0.1]))
    assert few.value == 0.9


def test_hugging_faces_heuristic_schedule_grows_by_two_and_shrinks_by_one() -> None:
    stop = StopRule(4, heuristic=True)
    caps = []
    for drafted, accepted in [(4, 4), (6, 6), (8, 3), (7, 7), *[(5, 0)] * 12]:
        stop.observe(chain_round(drafted, accepted))
        caps.append(stop.window)
    assert caps == [6, 8, 7, 9, 8, 7, 6, 5, 4, 3, 2, 1, 1, 1, 1, 1]


def test_on_trees_hugging_faces_schedule_and_the_controllers_compare_with_the_depth() -> None:
    """A path as long as the tree is deep is a full acceptance, however many siblings the tree has."""
    tree = Draft([0, 1, 2, 0, 1], [-1, -1, 0, 1, 2])
    full = Round(tree, [0, 2, 4], 0, [0] * 4)
    stop, controller = StopRule(4, heuristic=True), TargetAcceptance(alpha=0.4)
    stop.observe(full)
    controller.observe(full)
    assert stop.window == 6
    assert controller.rate == 0.5
    stop.observe(Round(tree, [1], 0, [0, 0]))
    assert stop.window == 5


def test_the_cost_optimal_threshold_is_the_rate_times_the_price_of_a_token() -> None:
    ahead, behind = CostOptimal(0.3, drafted=False, decay=1.0), CostOptimal(0.3, decay=1.0)
    assert ahead.value == behind.value == pytest.approx(0.3)  # plain decoding: one token a forward
    cost = tokens = accepted_of = tested = 0.0
    for drafted, accepted in [(1, 1), (3, 1), (5, 5), (2, 0), (4, 2)]:
        for controller in (ahead, behind):
            controller.observe(chain_round(drafted, accepted, [0.5] * drafted))
        cost += 1 + 0.3 * drafted
        tokens, accepted_of, tested = tokens + accepted + 1, accepted_of + accepted, tested + min(accepted + 1, drafted)
        assert ahead.value == pytest.approx(tokens / cost * 0.3, abs=1e-12)
        # what is not drafted yet is accepted at the rate of all
        assert behind.value == pytest.approx(tokens / cost * 0.3 * (tested + 1) / (accepted_of + 1), abs=1e-12)

    controller = CostOptimal(drafted=False, decay=1.0)  # of a draft that has one forward, which the rate pays for
    controller.price([0.0, 0.1], 0.5)
    for drafted, accepted in [(3, 1), (2, 2)]:
        controller.observe(chain_round(drafted, accepted, [0.5] * drafted))
    assert controller.rate == pytest.approx((2 + 3) / (2 * (1 + 0.5) + 5 * 0.1))


def test_tokens_of_several_texts_share_the_cost_of_a_step() -> None:
    controller = CostOptimal(drafted=False)
    for costs, scores, admitted in (
        ([0, 1, 1.1, 1.2], [0.3, 0.9, 0.2], 3),  # 0.4 for each: the first text pays for the others
        ([0, 1, 1.1, 1.2], [0.3, 0.9, 0.05], 2),  # the third one adds less than it costs
        ([0, 1, 1.1, 1.2], [0.9], 0),  # the others' drafts have ended
        ([0, 0.6, 1.2, 1.8], [0.5, 0.7, 0.05], 1),
    ):
        controller.price(costs, 0.0)
        controller.weigh(scores)
        assert sum(score >= controller.value for score in scores) == admitted


def test_cost_optimal_takes_its_costs_from_measurements_or_from_the_weights_that_are_read() -> None:
    inputs = parts()
    inputs.draft.weight_bytes = 250  # of the 1000 of the target
    assert STOPS["cost-optimal"](inputs).threshold.value == 0.25
    inputs.costs = RoundCosts({1: {0: 2.0, 1: 2.8, 8: 8.4}})
    assert STOPS["cost-optimal"](inputs).threshold.value == 0.4


def test_cost_optimal_estimates_the_acceptance_of_tested_tokens_from_their_confidence() -> None:
    controller, chance = CostOptimal(), random.Random(0)
    assert [controller.calibrate(c) for c in (0.2, 0.63, 0.999)] == pytest.approx([0.2, 0.63, 0.999])
    assert 0 < controller.calibrate(0.0) < controller.calibrate(1.0) < 1
    for _ in range(4000):  # two confidences, which are accepted four times and once of five; drafts end at a rejection
        kinds = [chance.random() < 0.5 for _ in range(4)]
        hits = [chance.random() < (0.8 if sure else 0.2) for sure in kinds]
        controller.observe(chain_round(4, [*hits, False].index(False), [0.99 if sure else 0.6 for sure in kinds]))
    assert [controller.calibrate(c) for c in (0.6, 0.99)] == pytest.approx([0.2, 0.8], abs=0.05)


def parts(**options) -> MethodInputs:  # type: ignore[no-untyped-def]
    runners = [ScriptedRunner(random_table(seed, 6), 6) for seed in (1, 2)]
    return MethodInputs(runners[0], LogitsWarper(temperature=1.0), runners[1], options=MethodOptions(**options))


def test_stop_rules_start_from_their_papers_values() -> None:
    papers = {"draft-verify": (12, 0.6), "product": (12, 0.8), "entropy": (20, -math.inf), "copy": (10, 0.0)}
    of_hugging_face = dict.fromkeys(["hf-dynamic", "hf-constant", "hf-heuristic"], (20, 0.4))
    for name, start in (papers | of_hugging_face).items():
        stop = STOPS[name](parts())
        assert (stop.window, stop.threshold.value) == start, name
    assert STOPS["product"](parts(threshold=0.3, draft_length=7)).threshold.value == 0.3
    assert STOPS["product"](parts(threshold=0.3, draft_length=7)).window == 7
    assert STOPS["draft-verify"](parts(target_acceptance=0.8)).threshold.alpha == 0.8  # type: ignore[attr-defined]


def test_a_draft_whose_logits_are_no_numbers_is_named() -> None:
    with pytest.raises(UserError, match="the draft's logits are NaN"):
        Watch([StopRule(4, max_probability)]).look([0], step(math.nan, 0.0))


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


@pytest.mark.parametrize("rate", [0.6, 0.95])
@pytest.mark.parametrize(("c", "batch"), [(0.02, 8), (0.1, 1)])
def test_where_drafting_pays_the_best_constant_length_is_met_to_three_percent(
    rate: float, c: float, batch: int
) -> None:
    costs, rates = RoundCosts.of_ratios(c, 0.05), [rate] * 20
    best = max(constant(costs, rates, k, batch) for k in range(1, 21))
    assert decode(DraftLengths(costs, 20), rates, 40_000, batch) > 0.97 * best


@pytest.mark.parametrize(("rate", "c", "growth"), [(0.3, 0.5, 0.1), (0.0, 0.1, 0.0), (0.8, 0.9, 0.0), (0.45, 0.4, 0.1)])
@pytest.mark.parametrize("batch", [1, 8])
def test_where_drafting_loses_at_most_three_percent_are_lost(rate: float, c: float, growth: float, batch: int) -> None:
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
        limits.append(limit := lengths.limit(1))
        lengths.observe([(SimpleNamespace(drafted=limit, accepted=min(limit, 2)), limit)])  # type: ignore[list-item]
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
    assert costs.round(1, 5) == pytest.approx(1.9)
    assert costs.round(2.5, 2) == pytest.approx((1.3 + 4.3) / 2)
    assert RoundCosts.from_dict(json.loads(json.dumps(costs.to_dict()))) == costs
    assert between({2: 3.0}, 7) == 3.0
    assert between({1: 1.0, 2: 0.1}, 9) == 0.0
