"""The forward of fixed shapes: the model's own logits and texts, compiled or not, and refusals where it cannot work."""

from __future__ import annotations

import shutil
import sysconfig
from pathlib import Path

import pytest
import torch
from families import RUNNER_PATHS, VOCAB
from torch import Tensor
from transformers import PreTrainedModel

from decode.commands.checks import check_models
from decode.commands.settings import GenerateSettings
from decode.draft import Draft
from decode.errors import UserError
from decode.loop import Target, decode
from decode.method_options import MethodOptions
from decode.methods import MethodInputs, build
from decode.models import choose_runner as open_runner_module
from decode.models import compiled_forward as compiled
from decode.models.choose_runner import open_runner
from decode.models.compiled_forward import check_compile
from decode.models.fast_forward import LayerSubset
from decode.models.fast_runner import FastRunner, fast_runner
from decode.sampling import LogitsWarper, TorchRng

TEXT = [3, 7, 1, 9, 3, 7, 22, 4, 40, 0, 11]
PROMPT = TEXT[:6]
FAST = [family for family, fast in RUNNER_PATHS if fast]


@pytest.fixture
def eager(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """The same forward without a compiler; (width, capacity) of every call."""
    calls: list[tuple[int, int]] = []

    def plain(step, **options):  # type: ignore[no-untyped-def]
        def call(tokens: Tensor, start: Tensor) -> tuple[Tensor, Tensor]:
            calls.append((len(tokens), step.__self__.forward.capacity))
            return step(tokens, start)

        return call

    monkeypatch.setattr(torch, "compile", plain)
    return calls


@torch.inference_mode()
def logits_of(model: PreTrainedModel, ids: list[int]) -> Tensor:
    return model(input_ids=torch.tensor([ids]), use_cache=False).logits[0]


def close(seen: Tensor, wanted: Tensor) -> bool:
    return seen.shape == wanted.shape and torch.allclose(seen, wanted, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("family", FAST)
@torch.inference_mode()
def test_fixed_shapes_give_the_models_own_logits(family: str, tiny, eager) -> None:
    model, ids = tiny(family), torch.tensor(TEXT)
    runner = open_runner(model, compile="default")
    eager.clear()
    wanted = logits_of(model, TEXT)
    assert runner.read(ids[:3], head=0).shape == (0, VOCAB)
    assert close(runner.read(ids[3:4], head=1), wanted[3:4])
    assert close(runner.read(ids[4:9], head=2), wanted[7:9])
    assert close(runner.read(ids[9:]), wanted[9:])
    head = model.get_output_embeddings()
    assert close(torch.nn.functional.linear(runner.hidden, head.weight, head.bias), wanted[9:])
    assert eager == [(1, 256), (8, 256), (2, 256)]  # padded to a width, over the whole of one cache
    runner.truncate(6)
    assert close(runner.read(ids[6:8]), wanted[6:8])
    tree = Draft.tree([4, 5, 6], [-1, 0, -1])
    for node in range(-1, 3):
        runner.truncate(7)
        scored = runner.read(torch.cat([ids[7:8], tree.tokens]), tree)
        assert close(scored[node + 1], logits_of(model, tree.text_before(TEXT[:8], node))[-1])


@torch.inference_mode()
def test_a_cache_that_grows_keeps_the_text_and_doubles(tiny, eager, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "INITIAL_CAPACITY", 8)
    model = tiny("mistral", max_position_embeddings=512)
    runner = fast_runner(model, compile="default")
    ids = (torch.arange(300) * 7919) % VOCAB
    wanted = logits_of(model, ids.tolist())
    seen = [runner.read(ids[:100]), runner.read(ids[100:120]), runner.read(ids[120:250])]
    seen += [runner.read(ids[i : i + 5]) for i in range(250, 300, 5)]
    assert torch.allclose(torch.cat(seen), wanted, atol=1e-3)
    assert eager == [(32, 256)] + [(8, 512)] * 10  # 250 tokens and a width of 8 do not fit into 256


@pytest.mark.parametrize("temperature", [0.0, 1.3])
@pytest.mark.parametrize("method", ["vanilla", "adasd", "prompt-lookup", "layerskip"])
def test_texts_are_those_of_the_plain_path(method: str, temperature: float, tiny, eager) -> None:
    models = tiny("llama", num_hidden_layers=4), tiny("llama", seed=2)
    texts = []
    for mode in ("none", "default"):
        target, draft = (open_runner(model, compile=mode) for model in models)
        parts = MethodInputs(
            target, LogitsWarper(temperature), draft, options=MethodOptions(draft_length=4, exit_layer=2)
        )
        system = build(method, parts)
        out = decode(Target(target), system, parts.warp, PROMPT, max_new_tokens=24, rng=TorchRng(3))
        texts.append((out.ids, out.trace.accepted))
        assert target.length == len(out.ids) - 1
    assert texts[0] == texts[1]
    assert {1, 4} <= {width for width, _ in eager}


@torch.inference_mode()
def test_what_is_not_a_chain_takes_the_plain_forward_on_the_same_cache(tiny, eager) -> None:
    model, ids = tiny("llama", num_hidden_layers=4), torch.tensor(TEXT)
    runner = fast_runner(model, compile="default")
    wanted = logits_of(model, TEXT)
    runner.read(ids[:5])
    eager.clear()
    runner.read_subset(ids[5:6], LayerSubset(2))
    assert close(runner.read(ids[5:7]), wanted[5:7])
    runner.captured_layers = (1, 4)
    assert close(runner.read(ids[7:9]), wanted[7:9])
    assert runner.features.shape == (2, 2 * model.config.hidden_size)
    assert not eager
    runner.captured_layers = ()
    assert close(runner.read(ids[9:]), wanted[9:])
    assert eager == [(2, 256)]


def test_a_compiled_pair_writes_the_text_of_the_plain_one(tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    """The compiler itself, on one graph: models of the same shapes share it."""
    monkeypatch.setattr(compiled, "WIDTHS", (4,))
    if not any(map(shutil.which, ("g++", "c++", "clang++"))):
        pytest.skip("torch.compile on a CPU needs a C++ compiler, and there is none here")
    if not (Path(sysconfig.get_path("include")) / "Python.h").exists():
        pytest.skip("torch.compile on a CPU needs Python's headers, and they are not here")
    models = tiny("llama", num_hidden_layers=1), tiny("llama", num_hidden_layers=1, seed=2)
    texts = []
    for mode in ("none", "default"):
        target, draft = (open_runner(model, compile=mode) for model in models)
        parts = MethodInputs(target, LogitsWarper(), draft, options=MethodOptions(draft_length=3))
        out = decode(Target(target), build("vanilla", parts), parts.warp, PROMPT, max_new_tokens=20)
        texts.append(out.ids)
    assert isinstance(target, FastRunner)
    assert target.compile == "default"
    assert texts[0] == texts[1]
    assert texts[0] == models[0].generate(torch.tensor([PROMPT]), do_sample=False, max_new_tokens=20)[0].tolist()


def test_modes_that_cannot_work_here_are_refused_with_the_cure(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(match: str, mode: str = "default", device: str = "cpu", **settings: object) -> None:
        with pytest.raises(UserError, match=match):
            check_models(GenerateSettings(target="t", compile=mode, device=device, **settings))  # type: ignore[arg-type]

    refused("expected none or default or reduce-overhead", "cuda-graphs")
    refused("device cpu; take default", "reduce-overhead")
    refused("which has no float64", device="mps")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(compiled.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(shutil, "which", lambda name: "/usr/bin/" + name)
    refused("pip install triton", "reduce-overhead", "cuda:0")
    refused("give --device", device_map="auto")
    monkeypatch.setattr(sysconfig, "get_path", lambda name: "/nowhere")
    refused("python3-dev")
    monkeypatch.setattr(shutil, "which", lambda name: None)
    refused("apt install g")
    monkeypatch.setenv("CXX", "my-compiler")
    refused("my-compiler")
    check_compile("none", "mps")


def test_models_that_cannot_be_compiled_are_refused(tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match=r"GPT2LMHeadModel \(gpt2\) cannot be compiled here: only llama"):
        open_runner(tiny("gpt2"), compile="default")

    def broken(step, **options):  # type: ignore[no-untyped-def]
        def call(*args: object) -> None:
            raise torch._dynamo.exc.Unsupported("no such operator\nat line 7")

        return call

    monkeypatch.setattr(torch, "compile", broken)
    with pytest.raises(UserError, match=r"torch\.compile failed for Llama.* \(llama\): no such operator; leave"):
        open_runner(tiny("llama"), compile="default")
    monkeypatch.setattr(open_runner_module, "compare", lambda model, runner: open_runner_module.RunnerCheck(1e-3, 0.5))
    with pytest.raises(UserError, match=r"differs from itself by 0\.5"):
        open_runner(tiny("llama"), compile="default")
