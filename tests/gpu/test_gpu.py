"""Every path that touches a device, on a CUDA device or a pretended one: ``make test-gpu``. Else skipped.

``--device cpu`` runs the same tests on a CPU, to check the tests themselves (CUDA graphs excepted).
"""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
import torch
from devices import DEVICE
from families import build_tiny, resembling
from rich.console import Console
from tiny_run import killed, run_tiny, tiny_settings
from transformers import PreTrainedModel

from decode.core.loop import decode
from decode.core.round import metrics
from decode.core.sampling import LogitsWarper, TorchRng
from decode.methods import MethodInputs, build
from decode.models.check import open_draft_runner, open_runner
from decode.models.open import load_model
from decode.options import MethodOptions
from distill.config import Settings
from distill.config.models import BlockSettings, StudentSettings
from distill.pipeline import run_pipeline

CUDA = DEVICE.startswith("cuda")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(CUDA and not torch.cuda.is_available(), reason="needs a CUDA device"),
]
PROMPT = [3, 7, 1, 9, 3, 7]
NEW = 24


def on_device(family: str, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    return build_tiny(family).to(DEVICE, dtype)


@torch.inference_mode()
def generated(model: PreTrainedModel) -> list[int]:
    """What the model's own `generate` writes, greedily."""
    ids = torch.tensor([PROMPT], device=model.device)
    out = model.generate(ids, max_new_tokens=NEW, do_sample=False, attention_mask=torch.ones_like(ids))
    return out[0, len(PROMPT) :].tolist()


def decoded(
    model: PreTrainedModel,
    method: str = "vanilla",
    *,
    draft: Any = None,
    temperature: float = 0.0,
    fast: bool = True,
    seed: int = 0,
    **options: Any,
) -> Any:
    """The output of our loop on the device."""
    runner = open_runner(model, fast=fast)
    warp = LogitsWarper(temperature)
    drafter = None if draft is None else open_draft_runner(draft, model)
    system = build(method, MethodInputs(runner, warp, drafter, options=MethodOptions(**options)))
    return decode(
        runner, system, warp, PROMPT, max_new_tokens=NEW, rng=TorchRng(seed, runner.device)
    )  # fmt: skip


@pytest.mark.parametrize("fast", [True, False], ids=["fast-forward", "ordinary-call"])
@pytest.mark.parametrize("family", ["llama", "mistral", "qwen3", "phi", "gpt_neox"])
def test_greedy_texts_are_those_of_generate(family: str, fast: bool) -> None:
    model = on_device(family)
    draft = resembling(build_tiny(family), 0.15).to(DEVICE)
    assert decoded(model, "autoregressive", fast=fast).new_ids == generated(model)
    assert decoded(model, draft=draft, fast=fast, draft_length=4).new_ids == generated(model)


@pytest.mark.parametrize("method", ["layerskip", "adaspeed", "draft-verify"])
def test_drafting_with_the_targets_own_layers_leaves_the_text_unchanged(method: str) -> None:
    model = on_device("llama")
    assert decoded(model, method, exit_layer=1).new_ids == generated(model)


@pytest.mark.parametrize("method", ["prompt-lookup", "lookahead"])
def test_drafting_without_a_model_leaves_the_text_unchanged(method: str) -> None:
    model = on_device("llama")
    assert decoded(model, method).new_ids == generated(model)


@pytest.mark.parametrize("method", ["vanilla", "hf-dynamic", "hf-heuristic", "adasd-gen-only", "cost-optimal"])
def test_a_seed_gives_one_sampled_text(method: str) -> None:
    model, draft = on_device("llama"), resembling(build_tiny("llama"), 0.15).to(DEVICE)
    texts = [decoded(model, method, draft=draft, temperature=1.0, seed=s).new_ids for s in (3, 3, 4)]
    assert texts[0] == texts[1] != texts[2]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_model_accepts_all_that_it_drafts_itself(temperature: float) -> None:
    model = on_device("llama")
    out = decoded(model, draft=model, temperature=temperature)
    assert metrics([out.rounds])["alpha"] == pytest.approx(1.0, abs=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bits_decode_and_accept_nearly_all_of_their_own(dtype: torch.dtype) -> None:
    model = on_device("llama", dtype)
    out = decoded(model, draft=model, temperature=1.0)
    assert len(out.new_ids) == NEW
    assert metrics([out.rounds])["alpha"] > 0.9


def settings_in(folder: Path, **changes: Any) -> Settings:
    """A run of seconds on the device."""
    settings = tiny_settings(folder, **changes)
    settings.trainer.accelerator = "gpu" if CUDA else "cpu"
    settings.trainer.devices = 1
    evaluation = settings.evaluation
    evaluation.prompts = evaluation.accuracy_prompts = 4
    evaluation.decode_prompts, evaluation.max_new_tokens, evaluation.draft_lengths = 1, 6, [2]
    return settings


def report_of(settings: Settings) -> Path:
    run = run_pipeline(settings, Console(file=io.StringIO()))
    assert (run.export / "model.safetensors").is_file()
    return run.folder / "report.json"


@pytest.mark.parametrize("signal", ["hidden", "topk", "online"])
def test_a_whole_run_with_every_kind_of_signal(tmp_path: Path, signal: str) -> None:
    settings = settings_in(tmp_path)
    settings.teacher.signal = signal  # type: ignore[assignment]
    assert report_of(settings).is_file()


@pytest.mark.parametrize("change", [{}, {"student": StudentSettings(kind="eagle3", unroll=2, draft_vocab=64)}])
@pytest.mark.parametrize("signal", ["hidden", "online"])
def test_a_target_with_a_device_map_and_batches_made_ahead(tmp_path: Path, signal: Any, change: Any) -> None:
    settings = settings_in(tmp_path, **change)
    settings.target.architecture.layers = 4
    settings.teacher.signal, settings.target.device_map, settings.data.loader_workers = signal, "auto", 2
    assert report_of(settings).is_file()


@pytest.mark.parametrize("signal", ["hidden", "online"])
def test_a_quantised_target(tmp_path: Path, signal: Any) -> None:
    pytest.importorskip("bitsandbytes")
    settings = settings_in(tmp_path)
    settings.teacher.signal = signal
    settings.target.quantization = {"quant_method": "bitsandbytes", "load_in_8bit": True}
    assert report_of(settings).is_file()


def test_a_whole_run_in_bf16_mixed(tmp_path: Path) -> None:
    settings = settings_in(tmp_path)
    settings.trainer.precision = "bf16-mixed"
    assert report_of(settings).is_file()


def test_a_whole_run_with_layerskip_and_texts_of_the_target_and_the_draft(tmp_path: Path) -> None:
    settings = settings_in(tmp_path)
    settings.target.layerskip.enabled = True
    responses = settings.teacher.responses
    responses.source, responses.max_new_tokens, responses.batch_size, responses.refresh_every = "target", 8, 4, 4
    settings.drafts["adaspec"].on_policy = 0.5
    assert report_of(settings).is_file()


@pytest.mark.parametrize("kind", ["eagle", "eagle3", "dflash", "dspark"])
def test_a_whole_run_with_heads(tmp_path: Path, kind: str) -> None:
    settings = settings_in(tmp_path)
    settings.target.architecture.layers = 4
    block = BlockSettings(size=3, markov_rank=4 if kind == "dspark" else None)
    settings.student = StudentSettings(kind=kind, unroll=2, draft_vocab=64, block=block)  # type: ignore[arg-type]
    assert report_of(settings).is_file()


def test_a_killed_run_goes_on_to_the_same_weights(tmp_path: Path) -> None:
    whole, broken = settings_in(tmp_path / "whole"), settings_in(tmp_path / "broken")
    _, undisturbed, _ = run_tiny(whole)
    with killed("distillspec", 7):
        run_tiny(broken)
    runs = undisturbed, run_tiny(broken)[1]
    states = [load_model(run.path("adaspec"), device="cpu", dtype="float32").state_dict() for run in runs]
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


def test_probes_are_trained_and_used(tmp_path: Path) -> None:
    from probes.pipeline import run_probes
    from probes.settings import ProbeSettings, ProbesSettings

    settings = settings_in(tmp_path)
    settings.target.architecture.layers = 3
    settings.target.layerskip.enabled = True
    sizes = {"prompts": 12, "validation_prompts": 6, "test_prompts": 6, "max_new_tokens": 12, "bench_prompts": 2}
    small = ProbeSettings(**sizes, confirm=1)
    run_probes(ProbesSettings(**vars(settings), probes=small), Console(file=io.StringIO()))
    assert (tmp_path / "tiny" / "probes" / "probes.safetensors").is_file()
