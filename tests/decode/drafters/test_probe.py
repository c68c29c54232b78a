"""Acceptance probes as decoding reads them: their files, the confidence of a token, and the methods that stop by it."""

from __future__ import annotations

import copy
import itertools
import json
from pathlib import Path

import pytest
import torch
from greedy import generate

from decode.core.sampling import LogitsWarper
from decode.core.stop import DraftedTokens
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
from decode.loop import decode
from decode.methods import MethodInputs, build
from decode.models.check import open_runner
from decode.options import MethodOptions

PROMPT = [1, 5, 9, 2, 6]


def model_of(tiny, **options):
    return tiny("llama", num_hidden_layers=4, **options)


def probe_for(model, layer: int, kind: str = "probe", label: str = "match") -> AcceptanceProbe:
    width = model.config.hidden_size
    extra = torch.tensor([0.5, -0.1, 0.2]) if kind != "probe" else torch.empty(0)
    return AcceptanceProbe(layer, kind, label, torch.linspace(-0.1, 0.1, width), extra, 0.3, 1.5, {"auroc": 0.9})


@pytest.fixture
def folder(tiny, tmp_path: Path) -> Path:
    """Probes whose file advises a function, which is never called."""
    model = model_of(tiny)
    probes = [probe_for(model, e, k, label) for e in (1, 3) for k in KINDS for label in ("match", "accept")]
    best = {"greedy": {"adaspeed-probe": {"exit_layer": 3, "draft_length": 4, "threshold": 0.2, "rule": "os.abort"}}}
    save_probes(tmp_path / "probes", model, probes, best)
    return tmp_path / "probes"


def test_probes_come_back_from_their_folder_as_they_were(tiny, folder: Path) -> None:
    model = model_of(tiny)
    for kind in KINDS:
        loaded, expected = load_probe(folder, model, 3, kind, ["accept"]), probe_for(model, 3, kind, "accept")
        states, inputs = torch.randn(5, model.config.hidden_size), torch.randn(5, 3)
        torch.testing.assert_close(loaded.logit(states, inputs), expected.logit(states, inputs))
        assert loaded.metrics == {"auroc": 0.9}
    assert not list(folder.glob(".tmp*"))
    assert advised(folder, "adaspeed-probe", greedy=True)["exit_layer"] == 3


@pytest.mark.parametrize("kind", KINDS)
def test_one_step_gets_the_probability_that_a_batch_gets(tiny, kind: str) -> None:
    probe = probe_for(model_of(tiny), 1, kind)
    for seed in range(4):
        generator = torch.Generator().manual_seed(seed)
        hidden, scores = torch.randn(32, generator=generator), 9 * torch.randn(20, generator=generator)
        scores[:3] = -torch.inf
        scores, hidden, x = scores[None], hidden[None], torch.tensor([5 + seed])
        expected = probe.logit(hidden, confidence_features(scores, x)).sigmoid().item()
        assert probe(DraftedTokens(scores.softmax(-1), scores, hidden, x)).item() == pytest.approx(expected, rel=1e-4)


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
    with pytest.raises(UserError, match="--probes DIR"):
        build("adaspeed-probe", MethodInputs(open_runner(model), LogitsWarper()))


def test_probes_know_their_model_in_every_precision_and_no_other(tiny) -> None:
    """Rounding twice, to float16 and then to bfloat16, may end elsewhere than rounding once."""
    model, trained = model_of(tiny), copy.deepcopy(model_of(tiny))
    with torch.no_grad():
        trained.get_input_embeddings().weight.mul_(1.02)
    dtypes = torch.float32, torch.float16, torch.bfloat16
    for first, second in itertools.permutations([weight_sample(copy.deepcopy(model).to(dtype)) for dtype in dtypes], 2):
        assert same_weights(first, json.loads(json.dumps(second)))
        for other in (weight_sample(model_of(tiny, seed=2)), weight_sample(trained), "of an earlier version"):
            assert not same_weights(first, other)


@pytest.mark.parametrize("method", ["adaspeed-probe", "confidence-probe", "adaspeed"])
def test_probe_methods_decode_greedily_as_generate_does_and_take_advice(tiny, folder: Path, method: str) -> None:
    model = model_of(tiny)
    runner = open_runner(model)
    expected = generate(model, PROMPT, 20)
    given = MethodOptions(probes=str(folder), exit_layer=None if method == "adaspeed-probe" else 1)
    system = build(method, MethodInputs(runner, LogitsWarper(), options=given))
    if method == "adaspeed-probe":
        assert (system.drafter.exit_layer, system.stop.window, system.stop.threshold.value) == (3, 4, 0.2)
    assert decode(runner, system, LogitsWarper(), PROMPT, max_new_tokens=20).ids == expected
