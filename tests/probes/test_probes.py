"""Probes: features from one pass, the optimum, calibration, files, and what is refused."""

from __future__ import annotations

import copy
import itertools
import json
from pathlib import Path

import pytest
import torch
from reading import draws_named
from sklearn.linear_model import LogisticRegression

from decode.drafters.probe import (
    AcceptanceProbe,
    advised,
    confidence_features,
    load_probe,
    same_weights,
    save_probes,
    weight_sample,
)
from decode.errors import UserError
from decode.loop import Method, decode, steps
from decode.method_options import MethodOptions
from decode.methods import MethodInputs, build
from decode.models.choose_runner import open_runner
from decode.models.writing import write_texts
from decode.sampling import LogitsWarper, TorchRng
from decode.stopping import DraftedToken
from probes.features import Features, collect, exit_layers
from probes.fit import (
    EXTRA_PENALTY,
    calibrate,
    evaluate,
    evaluate_exits,
    logits,
    train_probes,
)
from probes.labels import Mode
from probes.settings import ProbeSettings

DEPTH = 4
PROMPTS = [[3, 1, 4], [1, 5, 9, 2, 6], [5, 3], [5, 8, 9, 7]]
SAMPLED = LogitsWarper(0.9, top_p=0.8)
GREEDY_MODE = Mode("greedy", LogitsWarper(), "match")


def synthetic(n: int, *, seed: int, exits: int = 3, width: int = 12, soft: bool = False) -> Features:
    """Positions whose acceptance is a logistic function of badly scaled, correlated states."""
    generator = torch.Generator().manual_seed(seed)
    mixing = torch.randn(exits, width, width, generator=torch.Generator().manual_seed(9)) * torch.logspace(-2, 1, width)
    x = torch.randn(exits, n, width, generator=generator) @ mixing
    truth = torch.linalg.solve(mixing, torch.ones(exits, width, 1))
    z = (x @ truth).squeeze(-1) + 1
    extra = torch.stack([-z.abs() - 0.1, z.abs(), z], -1)
    y = (torch.rand(z.shape, generator=generator) < z.sigmoid()).float()
    text = torch.arange(n) // 10
    return Features(list(range(1, exits + 1)), torch.cat([x, extra], -1), z.sigmoid() if soft else y, y, text)


def model_of(tiny, **options):
    return tiny("llama", num_hidden_layers=DEPTH, **options)


# -- texts and features ------------------------------------------------------------------------------------------------


def texts_of(model, prompts, warp: LogitsWarper, length: int):
    written = write_texts(model, prompts, warp, budgets=length, stop_ids=(), draws=draws_named(0))
    return [([*ids, *text], len(ids)) for ids, text in zip(prompts, written)]


def test_training_texts_are_sampled_and_judged_in_blocks_of_whole_texts(tiny, monkeypatch) -> None:
    model = model_of(tiny)
    texts = texts_of(model, PROMPTS, LogitsWarper(), 9)
    whole = collect(model, texts, GREEDY_MODE, exits=[1, 3], batch_size=3)
    monkeypatch.setattr("probes.features.BLOCK", 7 * model.config.vocab_size)
    blocks = collect(model, texts, GREEDY_MODE, exits=[1, 3], batch_size=3)
    assert blocks.text.tolist() == whole.text.tolist() == [i for i in range(4) for _ in range(9)]
    torch.testing.assert_close(blocks.inputs, whole.inputs)
    assert torch.equal(blocks.outcome, whole.outcome)


@pytest.mark.parametrize("family", ["llama", "gpt_neox", "phi", "gpt2", "gemma2", "codegen", "opt"])
def test_one_pass_sees_what_each_exit_would_draft(tiny, family: str) -> None:
    model = tiny(family)
    exits = exit_layers(model)
    texts = [([3, 1, 4, 1, 5, 9, 2], 3), ([2, 7, 1, 8], 2)]
    found = collect(model, texts, GREEDY_MODE, exits=exits, batch_size=2)
    assert found.exits == [1]
    assert found.text.tolist() == [0] * 4 + [1] * 2
    with torch.no_grad():
        whole = model(torch.tensor([texts[0][0]])).logits[0, 2:-1].argmax(-1)
    drafted = model.get_output_embeddings()(found.inputs[0, :4, :-3]).argmax(-1)
    if not getattr(model.config, "final_logit_softcapping", None):
        assert found.labels[0, :4].tolist() == (whole == drafted).float().tolist()


def test_features_are_those_that_decoding_shows_to_the_stop_rule(tiny) -> None:
    model = model_of(tiny)
    runner = open_runner(model)
    text = texts_of(model, PROMPTS[:1], LogitsWarper(), 6)
    found = collect(model, text, GREEDY_MODE, exits=[2])
    seen = []

    def watch(step) -> float:
        seen.append(torch.cat([step.hidden[None], confidence_features(step.logits[None], step.token.view(1))], -1)[0])
        return 1.0

    system = build(
        "layerskip", MethodInputs(runner, LogitsWarper(), options=MethodOptions(exit_layer=2, draft_length=1))
    )
    system.stop.confidence = watch
    for _ in steps(runner, system, LogitsWarper(), PROMPTS[0], max_new_tokens=6):
        pass
    torch.testing.assert_close(seen[0], found.inputs[0, 0], atol=1e-3, rtol=1e-3)


def test_sampled_labels_are_the_acceptance_probability_and_the_top_p_set(tiny) -> None:
    model = model_of(tiny)
    texts = texts_of(model, PROMPTS, SAMPLED, 20)
    accept, inside = (Mode("sampled", SAMPLED, label) for label in ("accept", "top-p"))
    found = collect(model, texts, accept, exits=[1, 3], positions=15)
    soft = found.labels
    top_p = collect(model, texts, inside, exits=[1], positions=15).labels
    assert len(found) == 4 * 15
    assert ((soft >= 0) & (soft <= 1)).all()
    assert (soft > 0).sum() < soft.numel()
    assert set(top_p.unique().tolist()) == {0.0, 1.0}
    assert set(found.outcome.unique().tolist()) == {0.0, 1.0}
    assert (found.outcome <= (soft > 0)).all()
    assert abs(found.outcome.mean() - soft.mean()) < 0.15


def test_a_draft_model_is_the_only_exit_of_its_features(tiny) -> None:
    target, draft = model_of(tiny), tiny("llama", seed=5, hidden_size=16)
    texts = texts_of(target, PROMPTS, LogitsWarper(), 10)
    found = collect(target, texts, GREEDY_MODE, draft=draft)
    assert (found.exits, found.inputs.shape[-1]) == ([2], 16 + 3)
    itself = collect(target, texts, GREEDY_MODE, draft=target)
    assert itself.outcome.min() == 1


# -- training ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("l2", [1e-3, 1e-1])
def test_the_optimiser_finds_scikit_learns_optimum_for_all_layers_at_once(l2: float) -> None:
    train, held = synthetic(3000, seed=1), synthetic(500, seed=2)
    probes = train_probes(train, held, "match", ProbeSettings(l2=[l2]), early_stopping=False)
    assert [(p.layer, p.kind) for p in probes][:3] == [(1, "probe"), (1, "confidence-probe"), (2, "probe")]
    for probe in probes:
        i = probe.layer - 1
        x = train.inputs[i] if len(probe.extra) else train.inputs[i, :, :-3]
        x, penalty = x.double(), torch.full((x.shape[-1],), l2, dtype=torch.double)
        if len(probe.extra):
            penalty[-3:] = EXTRA_PENALTY
        mean, scale = x.mean(0), x.std(0)
        factor = (l2 / penalty).sqrt()
        z, y = ((x - mean) / scale * factor).numpy(), train.labels[i].numpy()
        expected = LogisticRegression(C=1 / (l2 * len(y)), tol=1e-9, max_iter=5000).fit(z, y)
        ours = probe.temperature * probe.logit(train.inputs[i, :, :-3], train.inputs[i, :, -3:])
        torch.testing.assert_close(ours.double(), torch.from_numpy(expected.decision_function(z)), atol=0.02, rtol=0.02)


def test_soft_labels_are_estimated_as_probabilities() -> None:
    train, held, test = (synthetic(2000, seed=s, soft=True) for s in (1, 2, 3))
    for probe in train_probes(train, held, "accept", ProbeSettings(l2=[1e-5])):
        error = logits(probe, test).sigmoid() - test.labels[probe.layer - 1]
        assert error.abs().mean() < 0.03


def test_labels_of_a_single_class_are_refused() -> None:
    train = synthetic(100, seed=1)
    train.labels[1] = 1.0
    with pytest.raises(UserError, match="exit layer 2 is accepted"):
        train_probes(train, train, "match")
    train.labels[0] = 0.0
    with pytest.raises(UserError, match="exit layer 1 is rejected"):
        train_probes(train, train, "match")


# -- metrics -----------------------------------------------------------------------------------------------------------


def test_metrics_are_what_their_formulas_say() -> None:
    p, y = torch.tensor([0.9, 0.8, 0.3, 0.1]), torch.tensor([1.0, 0.0, 1.0, 0.0])
    found = evaluate(p, y, bins=2)
    assert found["auroc"] == 0.75
    assert found["base_rate"] == 0.5
    assert found["brier"] == pytest.approx((0.01 + 0.64 + 0.49 + 0.01) / 4)
    assert found["bins"] == [pytest.approx([0.2, 0.5, 2]), pytest.approx([0.85, 0.5, 2])]
    assert found["ece"] == pytest.approx((0.3 + 0.35) / 2)
    assert evaluate(p, torch.ones(4))["auroc"] is None


def test_calibration_mends_overconfidence_and_keeps_the_ranking() -> None:
    train, held, test = (synthetic(2000, seed=s) for s in (1, 2, 3))
    probe = train_probes(train, held, "match")[0]
    probe.weight, probe.bias, probe.temperature = 4 * probe.weight, 4 * probe.bias, 1.0
    before = evaluate(logits(probe, test).sigmoid(), test.outcome[0])
    calibrate(probe, held)
    after = evaluate(logits(probe, test).sigmoid(), test.outcome[0])
    assert probe.temperature == pytest.approx(4, rel=0.3)
    assert after["ece"] < before["ece"] / 2
    assert after["brier"] < before["brier"]
    assert after["auroc"] == pytest.approx(before["auroc"], abs=1e-4)


def test_every_exit_gets_a_row_with_all_scores_on_the_same_tokens() -> None:
    train, held, test = (synthetic(1000, seed=s) for s in (1, 2, 3))
    rows = evaluate_exits(train_probes(train, held, "match"), held, test)
    assert [row["layer"] for row in rows] == [1, 2, 3]
    expected = {"auroc", "brier", "ece", "base_rate", "auroc_token_probability", "brier_confidence_probe"}
    assert all(expected <= row.keys() for row in rows)
    assert all(sum(b[2] for b in row["bins"][name]) == 1000 for row in rows for name in row["bins"])


# -- files and decoding ------------------------------------------------------------------------------------------------


def probe_for(model, layer: int, kind: str = "probe", label: str = "match") -> AcceptanceProbe:
    width = model.config.hidden_size
    extra = torch.tensor([0.5, -0.1, 0.2]) if kind != "probe" else torch.empty(0)
    return AcceptanceProbe(layer, kind, label, torch.linspace(-0.1, 0.1, width), extra, 0.3, 1.5, {"auroc": 0.9})


@pytest.fixture
def folder(tiny, tmp_path: Path) -> Path:
    model = model_of(tiny)
    probes = [
        probe_for(model, e, k, n) for e in (1, 3) for k in ("probe", "confidence-probe") for n in ("match", "accept")
    ]
    best = {"greedy": {"adaspeed-probe": {"exit_layer": 3, "draft_length": 4, "threshold": 0.2}}}
    save_probes(tmp_path / "probes", model, probes, best)
    return tmp_path / "probes"


def test_probes_come_back_from_their_folder_as_they_were(tiny, folder: Path) -> None:
    model = model_of(tiny)
    for kind in ("probe", "confidence-probe"):
        found, expected = load_probe(folder, model, 3, kind, ["accept"]), probe_for(model, 3, kind, "accept")
        states, features = torch.randn(5, model.config.hidden_size), torch.randn(5, 3)
        torch.testing.assert_close(found.logit(states, features), expected.logit(states, features))
        assert found.metrics == {"auroc": 0.9}
    assert not list(folder.glob(".tmp*"))
    assert advised(folder, "adaspeed-probe", greedy=True)["exit_layer"] == 3


@pytest.mark.parametrize("kind", ["probe", "confidence-probe"])
def test_one_step_gets_the_probability_that_a_batch_gets(tiny, kind: str) -> None:
    probe = probe_for(model_of(tiny), 1, kind)
    for seed in range(4):
        generator = torch.Generator().manual_seed(seed)
        hidden, scores = torch.randn(32, generator=generator), 9 * torch.randn(20, generator=generator)
        scores[:3] = -torch.inf
        x = torch.tensor(5 + seed)
        features = confidence_features(scores[None], x.view(1))
        expected = probe.logit(hidden[None], features).sigmoid().item()
        assert probe(DraftedToken(scores.softmax(-1), x, scores, hidden)) == pytest.approx(expected, rel=1e-4)


def test_probes_of_another_model_layer_or_nothing_are_refused(tiny, folder: Path, tmp_path: Path) -> None:
    model, other = model_of(tiny), model_of(tiny, seed=2)
    with pytest.raises(UserError, match="another model"):
        load_probe(folder, other, 1, "probe", ["match"])
    with pytest.raises(UserError, match=r"layers \[1, 3\], not for layer 2"):
        load_probe(folder, model, 2, "probe", ["match"])
    with pytest.raises(UserError, match="no probes"):
        load_probe(tmp_path, model, 1, "probe", ["match"])
    (folder / "probes.safetensors").write_bytes(b"x")
    with pytest.raises(UserError, match="damaged"):
        load_probe(folder, model, 1, "probe", ["match"])
    with pytest.raises(UserError, match="give --probes"):
        build("adaspeed-probe", MethodInputs(open_runner(model), LogitsWarper()))


@pytest.mark.parametrize("dtypes", list(itertools.permutations((torch.float32, torch.float16, torch.bfloat16), 2)))
def test_probes_know_their_model_in_every_precision_and_no_other(tiny, dtypes) -> None:
    """Rounding twice, to float16 and then to bfloat16, may end elsewhere than rounding once."""
    model = model_of(tiny)
    one, other = (weight_sample(copy.deepcopy(model).to(dtype)) for dtype in dtypes)
    assert same_weights(one, other)
    assert same_weights(one, json.loads(json.dumps(other)))
    assert not same_weights(one, weight_sample(model_of(tiny, seed=2)))
    assert not same_weights(one, "a fingerprint of an earlier version")
    trained = copy.deepcopy(model)
    with torch.no_grad():
        trained.get_input_embeddings().weight.mul_(1.02)
    assert not same_weights(one, weight_sample(trained))


@pytest.mark.parametrize("method", ["adaspeed-probe", "confidence-probe", "adaspeed"])
def test_probe_methods_decode_greedily_as_generate_does_and_take_advice(tiny, folder: Path, method: str) -> None:
    model = model_of(tiny)
    runner = open_runner(model)
    expected = model.generate(torch.tensor([PROMPTS[1]]), max_new_tokens=20, do_sample=False)[0].tolist()
    given = MethodOptions(probes=str(folder), exit_layer=None if method == "adaspeed-probe" else 1)
    system: Method = build(method, MethodInputs(runner, LogitsWarper(), options=given))
    assert decode(runner, system, LogitsWarper(), PROMPTS[1], max_new_tokens=20).ids == expected
    if method == "adaspeed-probe":
        assert (system.drafter.subset.shared, system.stop.window, system.stop.threshold.start) == (3, 4, 0.2)


def test_a_draft_models_probe_stops_its_drafts(tiny, tmp_path: Path) -> None:
    target, draft = model_of(tiny), tiny("llama", seed=5)
    probe = probe_for(draft, 2)
    probe.bias = -8.0  # sure of rejection: one token a round
    save_probes(tmp_path, draft, [probe])
    parts = MethodInputs(
        open_runner(target), LogitsWarper(), open_runner(draft), options=MethodOptions(probes=str(tmp_path))
    )
    out = decode(
        parts.target, build("draft-probe", parts), LogitsWarper(), PROMPTS[0], max_new_tokens=8, rng=TorchRng(0)
    )
    assert set(out.trace.drafted) <= {0, 1}
    assert 1 in out.trace.drafted


def test_exits_outside_the_model_are_refused(tiny) -> None:
    with pytest.raises(UserError, match="exits are 1 to 3"):
        exit_layers(model_of(tiny), [4])
    assert exit_layers(model_of(tiny), [3, 1]) == [1, 3]
    with pytest.raises(UserError, match="no early exit"):
        exit_layers(tiny("llama", num_hidden_layers=1))
