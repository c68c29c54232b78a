"""Whole runs on a GPU: from the target to the report, after a kill, with probes, quantised, on the second of two GPUs."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
import torch
from families import build_tiny, resembling
from gpu_tests import CUDA, DEVICE, GPU, REAL, settings_in, there, with_ci
from rich.console import Console
from tiny_run import altered, check_killed_ends_alike, run_tiny
from transformers import AutoModelForCausalLM

from decode.core.sampling import LogitsWarper, TorchRng
from decode.files import read_json
from decode.loop import decode
from decode.methods import MethodInputs, build
from decode.models.check import open_draft_runner, open_runner
from decode.models.heads.files import load_head
from decode.models.open import load_model
from distill.config import Settings
from distill.config.models import BlockSettings, StudentSettings
from distill.pipeline import run_pipeline
from distill.run import Run

pytestmark = GPU


def finished(settings: Settings) -> Run:
    """A whole run, with its export and report."""
    run = run_pipeline(settings, Console(file=io.StringIO()))
    if settings.evaluation:
        report = read_json(run.folder / "report.json")
        assert report["decoding"]
        assert all(0 <= row["offline_alpha"] <= 1 for row in report["drafts"])
    assert (run.export / "model.safetensors").is_file()
    return run


RUNS: dict[str, dict[str, Any]] = {
    "states": {"teacher__signal": "hidden", "data__loader_workers": 2},
    "top-k in bf16-mixed": {"teacher__signal": "topk", "trainer__precision": "bf16-mixed"},
    "target in process, micro-batches": {"teacher__signal": "online", "trainer__accumulate": 2},
    "layerskip, texts of target and draft": {
        "target__layerskip__enabled": True, "teacher__responses__source": "target", "1__on_policy": 0.5,
        "teacher__responses__max_new_tokens": 8, "teacher__responses__batch_size": 4,
        "teacher__responses__refresh_every": 2,
    },
}  # fmt: skip


@pytest.mark.parametrize("name", RUNS)
def test_a_whole_run_of_language_models(tmp_path: Path, name: str) -> None:
    run = finished(altered(settings_in(tmp_path), **RUNS[name]))
    exported = AutoModelForCausalLM.from_pretrained(run.export).state_dict()
    chosen = load_model(run.drafts[run.chosen("best")], device="cpu", dtype="float32").state_dict()
    assert all(torch.equal(exported[key], weight) for key, weight in chosen.items())
    assert DEVICE.partition(":")[0] in str(read_json(run.folder / "report.json")["machine"]).lower() or not CUDA


HEADS = {"eagle": "hidden", "eagle3": "topk", "dflash": "online", "dspark": "hidden", "dflash2": "online"}


@pytest.mark.parametrize("kind", with_ci(HEADS, "dspark"))
def test_a_whole_run_of_heads(tmp_path: Path, kind: Any) -> None:
    """EAGLE-3 and DSpark are decoded with at the end."""
    settings = settings_in(tmp_path)
    settings.target.architecture.layers, settings.teacher.signal = 4, HEADS[kind]  # type: ignore[assignment]
    block = BlockSettings(size=3, markov_rank=None if kind == "dflash" else 4)
    some = None if kind == "eagle" else 64
    settings.student = StudentSettings(kind=kind, unroll=2, draft_vocab=some, block=block)
    settings.trainer.validation_examples = 2
    if kind not in ("eagle3", "dspark"):
        settings.evaluation, settings.drafts = False, dict(list(settings.drafts.items())[:1])
    run = finished(settings)
    head: Any = load_head(run.drafts[run.chosen("best")])
    assert all(weight.isfinite().all() for weight in head.state_dict().values())


def test_a_killed_run_goes_on_to_the_same_weights(tmp_path: Path) -> None:
    """Bit by bit on a CPU; the backward pass of a GPU's attention adds up in another order each time."""
    settings = settings_in(tmp_path / "whole")
    run_tiny(settings)
    gap = {"rtol": 1e-2, "atol": 1e-3} if REAL else {}
    check_killed_ends_alike(settings, tmp_path / "again", {"distillspec": 4}, **gap)


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


# -- two GPUs ---------------------------------------------------------------------------------------------------------

two = pytest.mark.skipif(torch.cuda.device_count() < 2 or not CUDA, reason="needs two CUDA devices")


@two
def test_nothing_is_put_on_the_first_gpu_for_a_run_on_the_second(tmp_path: Path) -> None:
    settings = settings_in(tmp_path)
    settings.trainer.devices = [1]
    _, run, _ = run_tiny(settings)
    assert run.device == torch.device("cuda", 1)
    assert run.record("adaspec").history  # type: ignore[union-attr]


@two
def test_texts_of_the_second_gpu_are_the_cpus() -> None:
    plain, warp, texts = build_tiny("llama"), LogitsWarper(1.0), []
    for device in ("cuda:1", "cpu"):
        own = there(plain, device)
        inputs = MethodInputs(open_runner(own), warp, open_draft_runner(there(resembling(plain, 0.15), device), own))
        out = decode(inputs.target, build("vanilla", inputs), warp, [3, 7, 1], max_new_tokens=16, rng=TorchRng(0))
        texts.append(out.ids)
    assert texts[0] == texts[1]
