"""Self-speculation is lossless, shares the target's cache, and reads no layer twice; acceptance probes stop its drafts."""

import copy
import itertools
import json
from pathlib import Path

import pytest
import torch
from enumeration import Experiment
from greedy import generate
from reading import rounds_of

from decode.core.sampling import LogitsWarper
from decode.core.stop import DraftedTokens, Fixed, StopRule, max_probability, token_probability
from decode.drafters.model import EarlyExitDrafter
from decode.drafters.probe import (
    KINDS,
    AcceptanceProbe,
    advised,
    confidence_features,
    load_probe,
    same_weights,
    save_probes,
    weight_sample,
)
from decode.errors import UserError
from decode.loop import Method, decode
from decode.methods import MethodInputs, build
from decode.models.check import open_runner
from decode.models.fast.forward import FastForward, FastRunner, fast_runner, self_speculating
from decode.models.fast.layout import FAMILIES
from decode.options import MethodOptions

WALKED = ["llama", "llama-mha", "qwen2-sliding", "qwen3", "gemma3", "phi", "gpt_neox-sequential"]
DEPTH = 4
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]
STOPS = {
    "length": lambda: StopRule(3),
    "token": lambda: StopRule(5, token_probability, threshold=Fixed(0.5)),
    "product": lambda: StopRule(5, token_probability, product=True, threshold=Fixed(0.3)),
    "refuse": lambda: StopRule(5, max_probability, threshold=Fixed(0.45), refuse=True),
}


def open_deep(tiny, family: str, **options) -> FastRunner:
    """Without `open_runner`'s comparison: transformers' norms compute in float32 even for float64 weights."""
    return fast_runner(tiny(family, num_hidden_layers=DEPTH, **options))


def system_of(runner: FastRunner, exit_layer: int, stop: StopRule, warp: LogitsWarper) -> Method:
    return Method("self", EarlyExitDrafter(runner, warp, exit_layer), stop)


@pytest.mark.parametrize("family", WALKED)
def test_greedy_text_is_that_of_generate_for_every_exit(tiny, family: str) -> None:
    runner, warp = open_deep(tiny, family), LogitsWarper()
    wanted = generate(tiny(family, num_hidden_layers=DEPTH), PROMPT, 24)
    for exit_layer in range(1, DEPTH):
        for stop in STOPS.values() if family == "llama" else [STOPS["product"]]:
            out = decode(runner, system_of(runner, exit_layer, stop(), warp), warp, PROMPT, max_new_tokens=24)
            assert out.ids == wanted, (family, exit_layer)


@pytest.mark.parametrize(("exit_layer", "stop"), [*((1, stop) for stop in STOPS), (3, "product")])
@torch.inference_mode()
def test_the_output_has_the_targets_distribution_for_every_exit_and_stop_rule(tiny, exit_layer: int, stop: str) -> None:
    warp = LogitsWarper(temperature=1.3)
    runner = open_deep(tiny, "llama", vocab_size=3, dtype=torch.float64)
    experiment = Experiment(runner, warp, [0, 2, 1], tokens=3)
    assert experiment.bias(system_of(runner, exit_layer, STOPS[stop](), warp)) < 1e-12
    assert max(experiment.drafted) > 0


def test_verification_runs_the_early_layers_for_one_token_only(tiny, monkeypatch) -> None:
    runner = open_deep(tiny, "llama")
    seen = []
    run = FastForward.run

    def spy(self, x, first, last, *rest):
        seen.append((len(x), first, last))
        return run(self, x, first, last, *rest)

    monkeypatch.setattr(FastForward, "run", spy)
    next(iter(rounds_of(runner, system_of(runner, 2, StopRule(3), LogitsWarper()), LogitsWarper(), PROMPT)))
    assert seen == [(7, 0, 4), (1, 0, 2), (1, 0, 2), (1, 0, 2), (1, 0, 2), (4, 2, 4)]


@pytest.mark.parametrize("layer", [0, DEPTH])
def test_an_exit_outside_the_model_is_refused_with_the_layers_there_are(tiny, layer: int) -> None:
    runner = open_deep(tiny, "llama")
    with pytest.raises(UserError, match=rf"exit_layer is {layer}; .* 1 to {DEPTH - 1}"):
        EarlyExitDrafter(runner, LogitsWarper(), layer)


def test_families_whose_layers_cannot_be_walked_are_named(tiny) -> None:
    with pytest.raises(UserError, match=rf"\(gpt2\) cannot draft with its own layers.*{FAMILIES[0]}"):
        build("layerskip", MethodInputs(open_runner(tiny("gpt2")), LogitsWarper()))
    assert self_speculating(open_runner(tiny("llama", num_hidden_layers=DEPTH))).depth == DEPTH


def probe_for(model, layer: int, kind: str = "probe", label: str = "match") -> AcceptanceProbe:
    width = model.config.hidden_size
    extra = torch.tensor([0.5, -0.1, 0.2]) if kind != "probe" else torch.empty(0)
    return AcceptanceProbe(layer, kind, label, torch.linspace(-0.1, 0.1, width), extra, 0.3, 1.5, {"auroc": 0.9})


@pytest.fixture
def folder(tiny, tmp_path: Path) -> Path:
    """Probes whose file advises a function, which is never called."""
    model = tiny("llama", num_hidden_layers=DEPTH)
    probes = [probe_for(model, e, k, label) for e in (1, 3) for k in KINDS for label in ("match", "accept")]
    best = {"greedy": {"adaspeed-probe": {"exit_layer": 3, "draft_length": 4, "threshold": 0.2, "rule": "os.abort"}}}
    save_probes(tmp_path / "probes", model, probes, best)
    return tmp_path / "probes"


def test_probes_come_back_from_their_folder_as_they_were(tiny, folder: Path) -> None:
    model = tiny("llama", num_hidden_layers=DEPTH)
    for kind in KINDS:
        loaded, expected = load_probe(folder, model, 3, kind, ["accept"]), probe_for(model, 3, kind, "accept")
        states, inputs = torch.randn(5, model.config.hidden_size), torch.randn(5, 3)
        torch.testing.assert_close(loaded.logit(states, inputs), expected.logit(states, inputs))
        assert loaded.metrics == {"auroc": 0.9}
    assert not list(folder.glob(".tmp*"))
    assert advised(folder, "adaspeed-probe", greedy=True)["exit_layer"] == 3


@pytest.mark.parametrize("kind", KINDS)
def test_one_step_gets_the_probability_that_a_batch_gets(tiny, kind: str) -> None:
    probe = probe_for(tiny("llama", num_hidden_layers=DEPTH), 1, kind)
    for seed in range(4):
        generator = torch.Generator().manual_seed(seed)
        hidden, scores = torch.randn(32, generator=generator), 9 * torch.randn(20, generator=generator)
        scores[:3] = -torch.inf
        scores, hidden, x = scores[None], hidden[None], torch.tensor([5 + seed])
        expected = probe.logit(hidden, confidence_features(scores, x)).sigmoid().item()
        assert probe(DraftedTokens(scores.softmax(-1), scores, hidden, x)).item() == pytest.approx(expected, rel=1e-4)


def test_probes_of_another_model_layer_or_nothing_are_refused(tiny, folder: Path, tmp_path: Path) -> None:
    model, other = tiny("llama", num_hidden_layers=DEPTH), tiny("llama", num_hidden_layers=DEPTH, seed=2)
    with pytest.raises(UserError, match="another model"):
        load_probe(folder, other, 1, "probe", ["match"])
    with pytest.raises(UserError, match=r"layers \[1, 3\], not for layer 2"):
        load_probe(folder, model, 2, "probe", ["match"])
    with pytest.raises(UserError, match="no probes"):
        load_probe(tmp_path, model, 1, "probe", ["match"])
    (folder / "probes.safetensors").write_bytes(b"x")
    with pytest.raises(UserError, match="damaged"):
        load_probe(folder, model, 1, "probe", ["match"])
    with pytest.raises(UserError, match="--probes DIR"):
        build("adaspeed-probe", MethodInputs(open_runner(model), LogitsWarper()))


def test_probes_know_their_model_in_every_precision_and_no_other(tiny) -> None:
    """Rounding twice, to float16 and then to bfloat16, may end elsewhere than rounding once."""
    model, trained = tiny("llama", num_hidden_layers=DEPTH), copy.deepcopy(tiny("llama", num_hidden_layers=DEPTH))
    with torch.no_grad():
        trained.get_input_embeddings().weight.mul_(1.02)
    dtypes = torch.float32, torch.float16, torch.bfloat16
    for first, second in itertools.permutations([weight_sample(copy.deepcopy(model).to(dtype)) for dtype in dtypes], 2):
        assert same_weights(first, json.loads(json.dumps(second)))
        for other in (
            weight_sample(tiny("llama", num_hidden_layers=DEPTH, seed=2)),
            weight_sample(trained),
            "of an earlier version",
        ):
            assert not same_weights(first, other)


@pytest.mark.parametrize("method", ["adaspeed-probe", "confidence-probe", "adaspeed"])
def test_probe_methods_decode_greedily_as_generate_does_and_take_advice(tiny, folder: Path, method: str) -> None:
    model = tiny("llama", num_hidden_layers=DEPTH)
    runner = open_runner(model)
    expected = generate(model, PROMPT, 20)
    given = MethodOptions(probes=str(folder), exit_layer=None if method == "adaspeed-probe" else 1)
    system = build(method, MethodInputs(runner, LogitsWarper(), options=given))
    if method == "adaspeed-probe":
        assert (system.drafter.exit_layer, system.stop.window, system.stop.threshold.value) == (3, 4, 0.2)
    assert decode(runner, system, LogitsWarper(), PROMPT, max_new_tokens=20).ids == expected
