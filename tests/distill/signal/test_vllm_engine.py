"""A real vLLM, where `make engines` has set it up, which gives a run its target's states: run by `make test-engines`."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import psutil
import pytest
import torch
from engine_pairs import needs_vllm, save_exports
from safetensors.torch import load_file
from tiny_run import bench, run_tiny, tiny_settings

from decode.engines import server
from decode.errors import UserError
from distill.config import Settings
from distill.config.models import StudentSettings, TargetSettings
from distill.config.teacher import EngineSettings, ResponseSettings
from distill.engine.servers import Engine
from distill.engine.vllm import CONNECTOR, VLLM
from distill.kept import TEXT_IDS, Kept
from distill.pipeline import check_command
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
    command += ["--generation-config", "vllm", *VLLM().options(layers, str(folder))]
    environment |= {"PYTHONPATH": str(CONNECTOR)}

    def ready() -> bool:
        try:
            return httpx.get(f"http://127.0.0.1:{port}/health", timeout=2.0).status_code == 200
        except httpx.HTTPError:
            return False

    with server.running(command, ready, name="vLLM", seconds=1800.0, environment=environment):
        yield f"http://127.0.0.1:{port}/v1"


def test_every_layer_is_that_of_transformers(target, tmp_path) -> None:
    settings = standing(tmp_path, target, "checked")
    settings.teacher.signal = "vllm"
    run, printed = bench(settings)
    run.captured_layers = [0, 1, 2, 3]
    with served(target, run.engine_layers, tmp_path / "states") as url:
        settings.teacher.engine.urls = [url]
        check_command(run)
    assert "the engine gives the target's states" in printed.getvalue()
    assert "difference by layer: 0: 0.0e+00, 1: " in printed.getvalue()


def test_a_run_ends_as_from_disk_although_its_engine_was_killed(target, tmp_path, monkeypatch) -> None:
    here = standing(tmp_path, target, "here")
    _, disk, _ = run_tiny(here)
    settings = standing(tmp_path, target, "there")
    settings.teacher.signal = "vllm"
    run, _ = bench(settings)
    layers, complete = run.engine_layers, Engine.complete

    def killing(self: Engine, number: int, *given: object, **how: object) -> object:
        if number == 9:
            (worker,) = (p for p in psutil.Process().children(recursive=True) if "EngineCor" in p.name())
            worker.send_signal(signal.SIGKILL)
        return complete(self, number, *given, **how)

    with served(target, layers, tmp_path / "states") as url, monkeypatch.context() as patch:
        settings.teacher.engine.urls = [url]
        patch.setattr(Engine, "complete", killing)
        run, _ = bench(settings)
        with pytest.raises(UserError, match="What is finished is kept"):
            run_stages(run)
    (folder,) = (run.work / "responses").glob("train-*")
    kept = len(Kept(TEXT_IDS, folder))
    with served(target, layers, tmp_path / "states") as url:
        settings.teacher.engine.urls = [url]
        _, run, printed = run_tiny(settings)
    assert f"train: 20, {20 - kept} of them written now" in printed
    assert run.corpus.fingerprint == disk.corpus.fingerprint
    ours, theirs = (load_file(each.path("distillspec") / "model.safetensors") for each in (run, disk))
    assert all(torch.allclose(ours[name], theirs[name], atol=1e-4) for name in theirs)
    assert not list((tmp_path / "states").iterdir())
