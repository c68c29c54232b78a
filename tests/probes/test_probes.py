"""Probes: features from a forward, labels, the optimum, calibration, simulated rounds; and probes inside a block head."""

import copy
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from heads import make_block_head, plain_block, plain_scores
from reading import draws_named, rounds_of
from sklearn.linear_model import LogisticRegression

from decode.core.lengths import RoundCosts
from decode.core.sampling import LogitsWarper
from decode.drafters.probe import confidence_features
from decode.errors import UserError
from decode.measure.benchmark import Record
from decode.methods import MethodInputs, build
from decode.models.check import open_runner
from decode.models.heads.block_config import BLOCK_ARCHITECTURES
from decode.models.texts import write_texts
from decode.options import MethodOptions
from probes import exit_search, features
from probes.blocks import collect_blocks, judge
from probes.exit_search import METHODS, Choice, best_of, candidates, predict, run_best, simulate
from probes.features import Features, collect, exit_layers
from probes.fit import EXTRA_PENALTY, calibrate, judged, logits, train_probes
from probes.labels import Mode, label_drafts, modes_of
from probes.report import answer
from probes.settings import ProbeSettings

PROMPTS = [[3, 1, 4], [1, 5, 9, 2, 6], [5, 3], [5, 8, 9, 7]]
SAMPLED = LogitsWarper(0.9, top_p=0.8)
GREEDY_MODE = Mode("greedy", LogitsWarper(), "match")
PENALTIES = [1e-3, 1e-2, 1e-1, 1.0]


def synthetic(n: int, *, seed: int, exits: int = 3, width: int = 12, soft: bool = False) -> Features:
    """Positions whose acceptance is a logistic function of badly scaled, correlated states."""
    generator = torch.Generator().manual_seed(seed)
    mixing = torch.randn(exits, width, width, generator=torch.Generator().manual_seed(9)) * torch.logspace(-2, 1, width)
    x = torch.randn(exits, n, width, generator=generator) @ mixing
    truth = torch.linalg.solve(mixing, torch.ones(exits, width, 1))
    z = (x @ truth).squeeze(-1) + 1
    extra = torch.stack([-z.abs() - 0.1, z.abs(), z], -1)
    y = (torch.rand(z.shape, generator=generator) < z.sigmoid()).float()
    inputs, text = torch.cat([x, extra], -1), torch.arange(n) // 10
    return Features(list(range(1, exits + 1)), inputs, z.sigmoid() if soft else y, y, text)


def model_of(tiny, **options):
    return tiny("llama", num_hidden_layers=4, **options)


def texts_of(model, prompts, warp: LogitsWarper, length: int):
    written = write_texts(model, prompts, warp, budgets=length, stop_ids=(), draws=draws_named(0))
    return [([*ids, *text], len(ids)) for ids, text in zip(prompts, written)]


def test_positions_are_labelled_in_blocks_and_sampled_where_they_are_too_many(tiny, monkeypatch) -> None:
    model = model_of(tiny)
    texts = texts_of(model, PROMPTS, LogitsWarper(), 9)
    every = collect(model, texts, GREEDY_MODE, [1, 3])
    monkeypatch.setattr(features, "BLOCK", 7 * model.config.vocab_size)
    monkeypatch.setattr(features, "TOKENS", 30)
    blocks = collect(model, texts, GREEDY_MODE, [1, 3], sample=True)
    assert blocks.text.tolist() == every.text.tolist() == [i for i in range(4) for _ in range(9)]
    torch.testing.assert_close(blocks.inputs, every.inputs, atol=1e-3, rtol=1e-3)
    assert torch.equal(blocks.outcome, every.outcome)
    monkeypatch.setattr(features, "MOST", 5 * 4 * 2 * model.config.hidden_size)
    few = collect(model, texts, GREEDY_MODE, [1, 3], sample=True)
    assert few.text.tolist() == [i for i in range(4) for _ in range(5)]
    assert torch.cdist(few.inputs[0], every.inputs[0]).min(1).values.max() < 1e-2


@pytest.mark.parametrize("family", ["llama", "gpt_neox", "phi", "gpt2", "gemma2", "codegen", "opt"])
def test_a_forward_sees_what_each_exit_would_draft(tiny, family: str) -> None:
    model, texts = tiny(family), [([3, 1, 4, 1, 5, 9, 2], 3), ([2, 7, 1, 8], 2)]
    seen = collect(model, texts, GREEDY_MODE, exit_layers(model))
    assert (seen.exits, seen.text.tolist()) == ([1], [0] * 4 + [1] * 2)
    with torch.no_grad():
        plain = model(torch.tensor([texts[0][0]])).logits[0, 2:-1].argmax(-1)
    drafted = model.get_output_embeddings()(seen.inputs[0, :4, :-3]).argmax(-1)  # soft-capping keeps the order
    assert seen.labels[0, :4].tolist() == (plain == drafted).float().tolist()


def test_features_are_those_that_decoding_shows_to_the_stop_rule(tiny) -> None:
    model, seen = model_of(tiny), []
    runner = open_runner(model)
    expected = collect(model, texts_of(model, PROMPTS[:1], LogitsWarper(), 6), GREEDY_MODE, [2])

    def watch(step) -> float:
        seen.append(torch.cat([step.hidden[None], confidence_features(step.logits[None], step.token.view(1))], -1)[0])
        return 1.0

    options = MethodOptions(exit_layer=2, draft_length=1)
    system = build("layerskip", MethodInputs(runner, LogitsWarper(), options=options))
    system.stop.confidence = watch
    for _ in rounds_of(runner, system, LogitsWarper(), PROMPTS[0], max_new_tokens=6):
        pass
    torch.testing.assert_close(seen[0], expected.inputs[0, 0], atol=1e-3, rtol=1e-3)


def test_sampled_labels_are_the_acceptance_probability_and_the_top_p_set() -> None:
    generator = torch.Generator().manual_seed(0)
    p, q = (SAMPLED(3 * torch.randn(4000, 9, generator=generator)[:1].expand(4000, -1)) for _ in range(2))
    tokens, label, outcome = label_drafts(p, q, Mode("sampled", SAMPLED, "accept"), generator)
    assert torch.equal(label, (p[0, tokens] / q[0, tokens]).clamp(max=1))
    for values in (label, outcome):  # of tokens from q the mean is the overlap of both
        assert values.mean().item() == pytest.approx(torch.minimum(p[0], q[0]).sum().item(), abs=0.02)
    tokens, label, outcome = label_drafts(p, q, Mode("sampled", SAMPLED, "top-p"), generator)
    assert label.tolist() == outcome.tolist() == (p[0, tokens] > 0).float().tolist()


def test_the_targets_generation_settings_are_applied(tiny) -> None:
    model = copy.deepcopy(model_of(tiny))
    model.generation_config.update(top_k=2, repetition_penalty=5.0)
    greedy, sampled = modes_of(ProbeSettings(), model)
    assert (greedy.warp.top_k, sampled.warp.top_k, sampled.warp.top_p) == (2, 2, 0.9)
    ids = model.generate(torch.tensor([PROMPTS[0]]), max_new_tokens=12, do_sample=False)[0].tolist()
    with torch.no_grad():
        states = model(torch.tensor([ids]), output_hidden_states=True).hidden_states[3]
        scores = model.get_output_embeddings()(model.base_model.norm(states))[0]
    for at in range(2, len(ids) - 1):  # the exit is punished for repetitions as the target is
        seen = torch.tensor(ids[: at + 1]).unique()
        scores[at, seen] = torch.where(scores[at, seen] > 0, scores[at, seen] / 5, scores[at, seen] * 5)
    hits = (scores.argmax(-1)[2:-1] == torch.tensor(ids[3:])).float()
    assert torch.equal(collect(model, [(ids, 3)], greedy, [3]).labels[0], hits)


@pytest.mark.parametrize("l2", [1e-3, 1e-1])
def test_the_optimiser_finds_scikit_learns_optimum_for_all_layers_at_once(l2: float) -> None:
    train, held = synthetic(3000, seed=1), synthetic(500, seed=2)
    for probe in train_probes(train, held, "match", [l2]):
        i = probe.layer - 1
        x = train.inputs[i] if len(probe.extra) else train.inputs[i, :, :-3]
        x, penalty = x.double(), torch.full((x.shape[-1],), l2, dtype=torch.double)
        if len(probe.extra):
            penalty[-3:] = EXTRA_PENALTY
        z, y = ((x - x.mean(0)) / x.std(0) * (l2 / penalty).sqrt()).numpy(), train.labels[i].numpy()
        expected = LogisticRegression(C=1 / (l2 * len(y)), tol=1e-9, max_iter=5000).fit(z, y)
        ours = probe.temperature * probe.logit(train.inputs[i, :, :-3], train.inputs[i, :, -3:])
        torch.testing.assert_close(ours.double(), torch.from_numpy(expected.decision_function(z)), atol=0.02, rtol=0.02)


def test_soft_labels_are_estimated_as_probabilities_and_labels_of_a_single_class_are_refused() -> None:
    train, held, test = (synthetic(2000, seed=s, soft=True) for s in (1, 2, 3))
    for probe in train_probes(train, held, "accept", [1e-5]):
        error = logits(probe, test).sigmoid() - test.labels[probe.layer - 1]
        assert error.abs().mean() < 0.03
    train.labels[1] = 1.0
    with pytest.raises(UserError, match=r"exit layer \(or slot\) 2 is accepted"):
        train_probes(train, train, "match", PENALTIES)


def test_metrics_are_what_their_formulas_say_and_calibration_mends_them() -> None:
    p, y = torch.tensor([0.9, 0.8, 0.3, 0.1]), torch.tensor([1.0, 0.0, 1.0, 0.0])
    metrics = judged({"probe": p}, y)
    assert metrics["auroc"] == 0.75
    assert metrics["base_rate"] == 0.5
    assert metrics["brier"] == pytest.approx((0.01 + 0.64 + 0.49 + 0.01) / 4)
    assert metrics["ece"] == pytest.approx((0.1 + 0.8 + 0.7 + 0.1) / 4)
    assert judged({"probe": p}, torch.ones(4))["auroc"] is None
    train, held = (synthetic(2000, seed=s) for s in (1, 2))
    probe = train_probes(train, held, "match", PENALTIES)[0]
    probe.weight, probe.bias, probe.temperature = 4 * probe.weight, 4 * probe.bias, 1.0  # overconfident
    calibrate(probe, held)
    assert probe.temperature == pytest.approx(4, rel=0.3)


def test_exits_outside_the_model_are_refused(tiny) -> None:
    with pytest.raises(UserError, match="exits are 1 to 3"):
        exit_layers(model_of(tiny), [4])
    assert exit_layers(model_of(tiny), [3, 1]) == [1, 3]
    with pytest.raises(UserError, match="no early exit"):
        exit_layers(tiny("llama", num_hidden_layers=1))


def test_a_simulated_round_accepts_up_to_the_first_rejection_or_stops_where_the_confidence_falls() -> None:
    outcome, confidence = [1, 1, 0, 1, 1, 1, 1, 0], [0.9, 0.9, 0.4, 0.9, 0.9, 0.9]
    assert simulate(outcome, None, 2) == ([2, 2, 2], [2, 2, 1])
    assert simulate(outcome, None, 4) == ([4, 4], [2, 4])
    assert simulate([1, 1], None, 4) == ([2], [1])
    assert simulate([1] * 6, confidence, 9, 0.5) == ([3, 2], [3, 1])
    assert simulate([1] * 6, confidence, 9, 0.85, product=True) == ([2, 2], [2, 2])
    assert simulate([1] * 6, confidence, 1, 0.5) == ([1, 1, 1], [1, 1, 1])


def test_the_best_setting_is_the_cheapest_way_to_the_same_tokens() -> None:
    free, dear = (RoundCosts({1: {0: 1.0, 1: 1.1, 2: 1.2}}), RoundCosts({1: {0: 1.0, 1: 2.1, 2: 3.2}}))
    outcomes = [[1.0] * 9 + [0.0] + [1.0] * 10]
    sure = {"token": [[0.9] * 9 + [0.1] + [0.9] * 10]}
    for costs, expected in ((free, [8, 11]), (dear, [1])):
        choices = predict(outcomes, sure, 2, costs, {}, 12)
        assert best_of(choices, "layerskip")[0].window in expected
    stopped = predict(outcomes, sure, 2, RoundCosts({1: {0: 1.0, 1: 1.2, 2: 1.4}}), {}, 12)
    assert best_of(stopped, "draft-verify")[0].accepted > 0.85
    assert set(METHODS) - {c.method for c in choices} == {"adaspeed-probe", "confidence-probe"}


def test_every_method_takes_the_setting_that_was_fastest_in_real_rounds_and_layerskip_too(monkeypatch) -> None:
    places = [(layer, k) for layer in (1, 2, 3) for k in (2, 8)]
    choices = [
        Choice(m, e, k, None if m == "layerskip" else 0.5, 4 - e + k / 9, 0.9) for m in METHODS for e, k in places
    ]
    tried = [(c.exit_layer, c.window) for c in candidates(choices, "layerskip", 4)]
    assert tried == [(1, 8), (2, 8), (3, 8), (1, 2)]
    asked = []

    def bench(session, suite, entries):  # exit 2 with short drafts is the fastest, and was predicted the slowest
        asked.append([(entry.method, entry.options.exit_layer, entry.options.draft_length) for entry in entries])
        speeds = {e.name: 3.0 - abs(e.options.exit_layer - 2) - e.options.draft_length / 9 for e in entries}
        rows = [{"name": e.name, "method": e.method, "speedup": speeds[e.name], "tokens": 9} for e in entries]
        return rows, {name: Record() for name in (*speeds, "autoregressive")}

    monkeypatch.setattr(exit_search, "bench", bench)
    for name in ("open_session", "test_prompts"):
        monkeypatch.setattr(exit_search, name, lambda *_: None)
    monkeypatch.setattr(Record, "plain", lambda _: (0.1, 1.0))
    mode, run = Mode("greedy", LogitsWarper(), "match", {"validation": [([1, 2], 1)]}), SimpleNamespace(folder=Path())
    rows, others = run_best(run, None, mode, choices, ProbeSettings(confirm=6))  # type: ignore[arg-type]
    assert asked[1] == [(method, 2, 2) for method in METHODS]
    assert {row["tried"] for row in rows} == {6}
    assert len(others) == len(asked[0]) == 6 * len(METHODS)


def test_the_answer_names_the_best_exit_with_agreement_cost_and_tried_speed_of_each() -> None:
    names, numbers = {"title": "adaspeed", "method": "adaspeed"}, {"exit_layer": 2, "speedup": 1.4, "prompts": 36}
    best = {"temperature": 0.0} | names | numbers
    tried = [best | {"exit_layer": layer, "speedup": speed} for layer, speed in ((1, 1.1), (1, 1.0), (2, 1.5))]
    costs = {"greedy": {"exits": RoundCosts({e: {0: 1.0, 1: 1 + e / 4, 8: 1 + 2 * e} for e in (1, 2)}).to_dict()}}
    scores = [{"mode": "greedy", "layer": layer, "alpha": alpha} for layer, alpha in ((1, 0.8), (2, 0.95))]
    added = {"self_speculation": [best], "probes": scores, "probe_settings": {"tried": tried, "costs": costs}}
    said = answer(added, "greedy")
    assert "Exit layer 2 is best for it: α 0.950, 0.50 of a round without a draft for each further" in said
    assert said.endswith("speedup 1.50 when tried (exit layer 1: α 0.800, 0.25, 1.10).")
    without = answer(added | {"probes": [{"mode": "greedy", "layer": layer} for layer in (1, 2)]}, "greedy")
    assert "is best for it: 0.50 of a round" in without  # of the label top-p, which has no α
    assert without.endswith("speedup 1.50 when tried (exit layer 1: 0.25, 1.10).")
    assert "Exit layer" not in answer(added | {"self_speculation": [best | {"load": 9.0, "cores": 2}]}, "greedy")


# -- probes inside a block head ----------------------------------------------------------------------------------------


TEXTS = [([3, 7, 1, 9, 4, 4, 2, 8, 5], 3), ([1, 2, 3, 1, 2, 6], 2), ([5, 4], 1)]


@pytest.mark.parametrize("version", BLOCK_ARCHITECTURES)
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_a_slot_is_asked_whether_the_texts_token_would_have_been_drafted(
    tiny, temperature: float, version: str
) -> None:
    target = tiny("llama", vocab_size=12)
    head = make_block_head(target, version, block=3 + (version != "dspark"))
    head.temperatures, head.sampled_temperatures = [2.0, 1.0, 0.5], [3.0, 4.0, 5.0]
    warp = LogitsWarper(temperature)
    seen, odds = collect_blocks(target, head, TEXTS, Mode("", warp, "match"))
    assert seen.exits == [1, 2, 3]
    assert seen.text.tolist() == [0, 0, 0, 0, 1, 1]  # blocks that end within their text; the last text has none
    column = 0
    for ids, start in TEXTS[:2]:
        p = warp(target(torch.tensor([ids])).logits[0].detach())
        for at in range(start - 1, len(ids) - 3):
            _, hidden, *_ = plain_block(head, target, ids[: at + 1], 3)
            for slot in range(3):
                token = ids[at + slot + 1]
                torch.testing.assert_close(seen.inputs[slot, column, :-3], hidden[slot], rtol=1e-4, atol=1e-4)
                q = warp(plain_scores(head, target, ids[: at + 1], ids[at + 1 : at + slot + 1], 3))[slot]
                chance = float(q[token] / max(q[token], p[at + slot, token], 1e-30))
                assert seen.labels[slot, column] == pytest.approx(chance, abs=1e-4)
                if head.confidence_head is None:
                    continue
                row = head.markov_head.markov_w1(torch.tensor([ids[at + slot]]))
                scale = (head.sampled_temperatures if temperature else head.temperatures)[slot]
                expected = head.confidence_head(torch.cat([hidden[slot], row[0]])) / scale
                torch.testing.assert_close(odds[slot, column], expected.detach(), rtol=1e-4, atol=1e-4)
            column += 1
    assert set(seen.outcome.unique().tolist()) <= {0.0, 1.0}
    assert (seen.outcome <= (seen.labels > 0)).all()


def test_the_mean_over_texts_of_the_target_is_the_overlap_and_rejected_tokens_are_too_likely_ones(tiny) -> None:
    target, warp = tiny("llama", vocab_size=12), LogitsWarper(1.0)
    head = make_block_head(target, "dspark", block=2)
    texts = [([3, 7, token, 5], 2) for token in range(12)]
    seen, _ = collect_blocks(target, head, texts, Mode("", warp, "accept"))
    with torch.no_grad():
        p = warp(target(torch.tensor([[3, 7]])).logits[0, -1:])[0]
        q = warp(plain_scores(head, target, [3, 7], [], 2))[0]
    assert float(p @ seen.labels[0]) == pytest.approx(float(torch.minimum(p, q).sum()), abs=1e-4)
    for token, (hit, drafted) in enumerate(zip(seen.outcome[0], seen.token_probability[0])):
        likely = q[token : token + 1] if hit else q[q > p]
        assert (likely - drafted).abs().min() < 1e-4


def test_estimates_are_judged_where_the_block_was_right_before(tiny) -> None:
    head, generator = make_block_head(tiny("llama"), "dspark", block=3), torch.Generator().manual_seed(0)
    seen = {}
    for split, n in (("train", 3000), ("validation", 1500), ("test", 6000)):
        states = torch.randn(3, n, 4, generator=generator)
        true = 1.5 * states[..., 0] + 0.5
        hits = (torch.rand(true.shape, generator=generator) < true.sigmoid()).float()
        blind = torch.tensor([0.7]).log().expand(3, n, 1)  # a token probability that knows nothing
        inputs = torch.cat([states, blind, torch.randn(3, n, 2, generator=generator)], -1)
        seen[split] = Features([1, 2, 3], inputs, hits, hits, torch.arange(n)), 3 * true  # an overconfident head
    rows, products = judge(head, seen, "match", [1e-3, 1e-1])
    test = seen["test"][0].outcome
    assert [row["tokens"] for row in rows] == [6000, int(test[0].sum()), int(test[:2].prod(0).sum())]
    for row in rows:
        assert row["ece"] < 0.045 < row["ece_confidence_head"]
        assert row["auroc"] == pytest.approx(row["auroc_confidence_head"], abs=0.01)  # the same order
        assert row["auroc_token_probability"] == pytest.approx(0.5)
    by_name = {row["estimate"]: row for row in products}
    assert by_name["probe"]["ece"] < 0.045 < by_name["confidence head"]["ece"]
    assert by_name["confidence head"]["worst_slot_ece"] >= by_name["confidence head"]["ece"]
