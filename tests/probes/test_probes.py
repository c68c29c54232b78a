"""Probes: features from a forward, labels, the optimum, calibration, resuming, and the choice of settings."""

import copy
import csv
import json
import re
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import CSVLogger
from reading import draws_named, rounds_of
from sklearn.linear_model import LogisticRegression
from tiny_run import Killed

from decode.core.sampling import LogitsWarper
from decode.drafters.probe import confidence_features, load_probe, save_probes
from decode.errors import UserError
from decode.measure.benchmark import Record
from decode.methods import MethodInputs, build
from decode.models.check import open_runner
from decode.options import MethodOptions
from decode.writing import write_texts
from distill.config import TrainerSettings
from probes import exit_search, features, fit
from probes.exit_search import METHODS, WINDOW, best_settings, fastest_options
from probes.features import Features, collect, exit_layers
from probes.fit import calibrate, judged, logits, train_probes
from probes.labels import Mode, label_drafts, modes_of
from probes.module import EXTRA_PENALTY
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


def trained(train: Features, held: Features, work: Path, label: str = "match", l2=PENALTIES, logger=None):
    return train_probes(train, held, label, l2, TrainerSettings(accelerator="cpu"), work, logger)


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


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2", "opt"])
def test_a_forward_sees_what_each_exit_would_draft(tiny, family: str) -> None:
    model, texts = tiny(family), [([3, 1, 4, 1, 5, 9, 2], 3), ([2, 7, 1, 8], 2)]
    seen = collect(model, texts, GREEDY_MODE, exit_layers(model.config.num_hidden_layers))
    assert (seen.exits, seen.text.tolist()) == ([1], [0] * 4 + [1] * 2)
    with torch.no_grad():
        plain = model(torch.tensor([texts[0][0]])).logits[0, 2:-1].argmax(-1)
    drafted = model.get_output_embeddings()(seen.inputs[0, :4, :-3]).argmax(-1)  # soft-capping keeps the order
    assert seen.labels[0, :4].tolist() == (plain == drafted).float().tolist()


def test_features_are_those_that_decoding_shows_to_the_stop_rule(tiny) -> None:
    model, seen = model_of(tiny), []
    runner = open_runner(model)
    expected = collect(model, texts_of(model, PROMPTS[:1], LogitsWarper(), 6), GREEDY_MODE, [2])

    def watch(step) -> torch.Tensor:
        seen.append(torch.cat([step.hidden, confidence_features(step.logits, step.tokens)], -1)[0])
        return torch.ones(1)

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


def test_the_optimiser_finds_scikit_learns_optimum_for_all_layers_at_once(tmp_path) -> None:
    l2, train, held = 1e-2, synthetic(1000, seed=1), synthetic(200, seed=2)
    for probe in trained(train, held, tmp_path, "match", [l2]):
        i = probe.layer - 1
        x = train.inputs[i] if len(probe.extra) else train.inputs[i, :, :-3]
        x, penalty = x.double(), torch.full((x.shape[-1],), l2, dtype=torch.double)
        if len(probe.extra):
            penalty[-3:] = EXTRA_PENALTY
        z, y = ((x - x.mean(0)) / x.std(0) * (l2 / penalty).sqrt()).numpy(), train.labels[i].numpy()
        expected = LogisticRegression(C=1 / (l2 * len(y)), tol=1e-9, max_iter=5000).fit(z, y)
        ours = probe.temperature * probe.logit(train.inputs[i, :, :-3], train.inputs[i, :, -3:])
        torch.testing.assert_close(ours.double(), torch.from_numpy(expected.decision_function(z)), atol=0.02, rtol=0.02)


def test_soft_labels_are_estimated_as_probabilities_and_labels_of_a_single_class_are_refused(tmp_path) -> None:
    train, held, test = (synthetic(2000, seed=s, soft=True) for s in (1, 2, 3))
    for probe in trained(train, held, tmp_path, "accept", [1e-5]):
        error = logits(probe, test).sigmoid() - test.labels[probe.layer - 1]
        assert error.abs().mean() < 0.03
    train.labels[1] = 1.0
    with pytest.raises(UserError, match="exit layer 2 is accepted"):
        trained(train, train, tmp_path)


def test_metrics_are_what_their_formulas_say_and_calibration_mends_them(tmp_path) -> None:
    p, y = torch.tensor([0.9, 0.8, 0.3, 0.1]), torch.tensor([1.0, 0.0, 1.0, 0.0])
    metrics = judged(p, y)
    assert metrics["auroc"] == 0.75
    assert metrics["brier"] == pytest.approx((0.01 + 0.64 + 0.49 + 0.01) / 4)
    assert metrics["ece"] == pytest.approx((0.1 + 0.8 + 0.7 + 0.1) / 4)
    assert judged(p, torch.ones(4))["auroc"] is None
    train, held = (synthetic(2000, seed=s) for s in (1, 2))
    probe = trained(train, held, tmp_path)[0]
    probe.weight, probe.bias, probe.temperature = 4 * probe.weight, 4 * probe.bias, 1.0  # overconfident
    calibrate(probe, held)
    assert probe.temperature == pytest.approx(4, rel=0.3)


def test_every_method_takes_the_setting_that_was_fastest_in_real_rounds(monkeypatch) -> None:
    asked = []

    class Rounds:
        """Exit 2 with short drafts and low thresholds is the fastest; the rows are those of the settings asked for."""

        def __init__(self, *_) -> None:
            self.records = {}

        def run(self, suites, settings):
            asked.append((getattr(suites[0], "prompts", suites[0]), settings))
            rows = []
            for entry in settings:
                o = entry.options
                speed = 3 - abs(o.exit_layer - 2) - o.draft_length / 90 - (o.threshold or 0)
                rows.append({"name": entry.name, "method": entry.method, "speedup": speed, "accepted_per_drafted": 0.7})
                self.records["suite", 0.0, 1, entry.name] = Record()
            return rows

    for name, made in {"Benchmark": Rounds, "Session": lambda *_: None, "test_suite": lambda *_: "test"}.items():
        monkeypatch.setattr(exit_search, name, made)
    settings = SimpleNamespace(data=SimpleNamespace(source=""), seed=0, threads=None)
    run = SimpleNamespace(corpus=None, tokenizer=None, folder=Path(), settings=settings)
    mode = Mode("greedy", LogitsWarper(), "match", {"validation": [([1, 2], 1)] * 20})
    rows, tried = best_settings(run, None, mode, [1, 2, 3, 5, 9], ProbeSettings(confirm=2))  # type: ignore[arg-type]
    assert [len(settings) for _, settings in asked] == [5, 60, 10, 5]
    assert [len(prompts) for prompts, _ in asked[:3]] == [3, 3, 12]
    assert asked[3][0] == "test"
    assert {s.options.exit_layer for s in asked[1][1]} == {1, 2, 3}  # by drafts of one length
    assert {s.options.threshold for s in asked[2][1] if s.method == "adaspeed"} == {0.3, 0.6}
    assert [(s.method, s.options.exit_layer, s.options.draft_length) for s in asked[3][1]] == [
        (method, 2, 2 if method == "layerskip" else WINDOW) for method in METHODS
    ]
    # a rule with a threshold is steered to the acceptance that it had
    assert {s.options.target_acceptance for s in asked[3][1]} == {None, 0.7}
    assert {row["method"]: row["tried"] for row in rows} == dict.fromkeys(METHODS, 12) | {"layerskip": 14}
    assert len(tried) == 5 * 12 + 2
    best = fastest_options([row | {"temperature": 0.0, "draft_length": 2} for row in rows])["greedy"]
    assert best["layerskip"] == {"draft_length": 2, "exit_layer": 2}


def test_the_answer_says_first_what_the_probe_can_do_and_then_what_is_fastest() -> None:
    names, numbers = {"title": "adaspeed", "method": "adaspeed"}, {"exit_layer": 2, "speedup": 1.4, "prompts": 36}
    best = {"temperature": 0.0} | names | numbers
    judged = {"mode": "greedy", "auroc": 0.9, "auroc_token_probability": 0.95}
    scores = [judged | {"layer": 1}, judged | {"layer": 2, "auroc": None}, judged | {"layer": 3, "mode": "sampled"}]
    added = {"self_speculation": [best], "probes": scores}
    first = "greedy: the probe ranks tokens better than their probability does (AUROC) at 0 of 1 exits."
    fastest, of = "adaspeed with exit layer 2 is fastest", "1.40 times decoding without a draft, 36 prompts."
    assert answer(added, "greedy") == f"{first} {fastest}: {of}"
    near = added | {"self_speculation": [best | {"speedup_vs_layerskip_ci95": [0.96, 1.15]}]}
    assert answer(near, "greedy") == f"{first} {fastest}, not significantly different from layerskip: {of}"
    busy = added | {"self_speculation": [best | {"cpu_share": 0.9}]}
    assert answer(busy, "greedy") == f"{first} No speedup is reliable."


class Kill(Callback):
    """Ends a training after some epochs."""

    def __init__(self, epochs: int) -> None:
        self.epochs = epochs

    def on_train_epoch_start(self, trainer, pl_module) -> None:
        if trainer.current_epoch == self.epochs:
            raise Killed


def test_a_killed_fit_goes_on_and_its_curves_reach_loggers_and_callbacks(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(fit, "EPOCHS", 5)
    train, held = synthetic(200, seed=1), synthetic(100, seed=2)
    whole = trained(train, held, tmp_path)
    for end in (3, 5):  # in the middle, and after the last checkpoint
        with monkeypatch.context() as patch, pytest.raises(Killed) if end < 5 else nullcontext():
            patch.setattr(TrainerSettings, "callback_instances", lambda _, end=end: [Kill(end)])
            trained(train, held, tmp_path / str(end))
        continued = CSVLogger(tmp_path, name=f"continued-{end}")
        probes = trained(train, held, tmp_path / str(end), logger=continued)
        for one, other in zip(whole, probes, strict=True):
            assert torch.equal(one.weight, other.weight)
            assert (one.bias, one.temperature) == (other.bias, other.temperature)
        continued.finalize("success")
        rows = list(csv.DictReader((Path(continued.log_dir) / "metrics.csv").open()))
        assert {int(row["epoch"]) for row in rows if row.get("train_loss")} == set(range(end, 5))
        assert rows[-1]["validation_loss"]  # of the validation after the end


def test_the_documented_function_reads_a_probe_with_plain_transformers(tiny, tmp_path) -> None:
    model = model_of(tiny)
    texts = texts_of(model, PROMPTS, LogitsWarper(), 9)
    seen = collect(model, texts, GREEDY_MODE, [1, 3])
    save_probes(tmp_path, model, trained(seen, seen, tmp_path / "work", "match", [1.0]))
    page = (Path(__file__).parents[2] / "docs" / "probes.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    names: dict = {}
    exec(code, names)
    ids, start = texts[1]
    read = names["acceptance"](model, tmp_path, 3, torch.tensor([ids]))
    expected = load_probe(tmp_path, model, 3, "probe", ["match"]).logit(seen.inputs[1, seen.text == 1, :-3]).sigmoid()
    torch.testing.assert_close(read[0, start - 1 : -1], expected, rtol=1e-4, atol=1e-5)
    note = json.loads((tmp_path / "probes.json").read_text())
    assert "final norm" in note["input"]
