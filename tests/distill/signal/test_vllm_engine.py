"""A real vLLM, where `make engines` has set it up, which gives a run its target's states: run by `make test-engines`."""

from __future__ import annotations

import io
import random
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import torch
from engine_pairs import needs_vllm, save_exports
from rich.console import Console
from safetensors.torch import load_file
from tiny_run import bench, run_tiny, tiny_settings

from decode.engines import server
from decode.errors import UserError
from distill.config import Settings
from distill.config.models import StudentSettings, TargetSettings
from distill.config.teacher import EngineSettings, ResponseSettings
from distill.engine import servers
from distill.engine.vllm import CONNECTOR, server_options
from distill.kept import TEXT_IDS, Kept
from distill.pipeline import check_command
from distill.run import Run
from distill.stages import run_stages

pytestmark = [pytest.mark.engine, needs_vllm]


@pytest.fixture(scope="module")
def target(tmp_path_factory) -> Path:
    return save_exports(tmp_path_factory.mktemp("qwen3"), "qwen3") / "target"


def standing(folder: Path, target: Path, name: str) -> Settings:
    settings = tiny_settings(folder, name=name)
    settings.target = TargetSettings(kind="as_is", model=str(target))
    settings.student = StudentSettings(kind="eagle3", unroll=2)
    del settings.drafts["adaspec"]
    settings.teacher.responses = ResponseSettings(source="target", max_new_tokens=12, temperature=0.0)
    settings.teacher.engine = EngineSettings(in_flight=4)
    settings.threads = 1
    return settings


@contextmanager
def served(target: Path, layers: list[int], folder: Path) -> Iterator[str]:
    """The address of a vLLM that gives the states of these layers away."""
    port, program = server.free_port(), server.check_engine("vllm")
    engine = server.Engine("vllm", str(target), context=256, program=program, threads=1, seconds=1800.0)
    command, environment = server.ENGINES[engine.name].command(engine, None, port)
    command += ["--generation-config", "vllm", "--max-num-batched-tokens", "64", *server_options(layers, str(folder))]
    environment |= {"PYTHONPATH": str(CONNECTOR)}
    asked = server.Server(f"http://127.0.0.1:{port}", "vllm")
    with server.running(command, asked.ready, name="vLLM", seconds=1800.0, environment=environment):
        yield f"{asked.url}/v1"


def answers(url: str, target: Path, at_once: int) -> list[list[int]]:
    """The token ids of eight texts with seeds, whose prompts are longer than what the engine reads at once."""

    def ask(seed: int) -> list[int]:
        prompt = random.Random(seed).choices(range(1, 280), k=200)
        body = {"model": str(target), "prompt": prompt, "seed": seed, "max_tokens": 12, "return_token_ids": True}
        answer = httpx.post(f"{url}/completions", json=body, timeout=600.0).raise_for_status().json()
        return list(answer["choices"][0]["token_ids"])

    with ThreadPoolExecutor(at_once) as pool:
        return list(pool.map(ask, range(8)))


def test_every_layer_is_that_of_transformers_and_seeds_decide_texts_although_prompts_are_read_in_parts(
    target, tmp_path, monkeypatch
) -> None:
    settings, printed = standing(tmp_path, target, "checked"), io.StringIO()
    settings.teacher.signal = "vllm"
    monkeypatch.setattr(Run, "captured_layers", [0, 1, 2, 3])
    with served(target, Run(settings).engine_layers, tmp_path / "states") as url:
        settings.teacher.engine.urls = [url]
        check_command(settings, Console(file=printed, width=200))
        assert answers(url, target, at_once=8) == answers(url, target, at_once=1)
    assert "the engine gives the target's states" in printed.getvalue()
    assert "difference by layer: 0: 0.0e+00, 1: " in printed.getvalue()


def test_a_run_ends_as_from_disk_although_its_engine_was_killed(target, tmp_path, monkeypatch) -> None:
    here = standing(tmp_path, target, "here")
    _, disk, _ = run_tiny(here)
    settings = standing(tmp_path, target, "there")
    settings.teacher.signal = "vllm"
    run, _ = bench(settings)
    layers, ask, asked = run.engine_layers, servers.ask, count()

    def killing(*given: Any, **options: Any) -> httpx.Response:
        if next(asked) == 22:  # when some answers have followed the first ones
            (worker,) = (p for p in psutil.Process().children(recursive=True) if "EngineCor" in p.name())
            worker.send_signal(signal.SIGKILL)
        return ask(*given, **options)

    with served(target, layers, tmp_path / "states") as url, monkeypatch.context() as patch:
        settings.teacher.engine.urls = [url]
        patch.setattr(servers, "ask", killing)
        patch.setattr("distill.data.writing.FIRST", 4)
        run, _ = bench(settings)
        with pytest.raises(UserError, match="What is finished is kept"):
            run_stages(run)
    (folder,) = (run.work / "responses").glob("train-*")
    kept = len(Kept(TEXT_IDS, folder))
    with served(target, layers, tmp_path / "states") as url:
        settings.teacher.engine.urls = [url]
        _, run, printed = run_tiny(settings)
    assert f"train: 20 ({20 - kept} new)" in printed
    assert run.corpus.fingerprint == disk.corpus.fingerprint
    ours, theirs = (load_file(each.path("distillspec") / "model.safetensors") for each in (run, disk))
    assert all(torch.allclose(ours[name], theirs[name], atol=1e-4) for name in theirs)
    assert not list((tmp_path / "states").iterdir())
