"""vLLM and llama.cpp as they are, where `make engines` has set them up: run by `make test-engines`."""

from __future__ import annotations

import os
import shlex
from pathlib import Path

import pytest
import torch
from engine_pairs import (
    check_of_a_running_vllm,
    gguf,
    needs_llama,
    needs_vllm,
    program,
    save_exports,
    serve_check,
)
from safetensors.torch import load_file, save_file

from decode.engines.server import VLLM_PYTHON, Engine, Server, free_port, opened, running
from decode.errors import UserError

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def llama(tmp_path_factory) -> Path:
    return save_exports(tmp_path_factory.mktemp("llama"), "llama")


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory) -> Path:
    return save_exports(tmp_path_factory.mktemp("qwen3"), "qwen3")


@pytest.fixture
def pair(request) -> Path:
    return request.getfixturevalue(request.param)


def agrees(row: dict) -> bool:
    """Served as predicted at every position, and the same texts."""
    places = row["positions"]
    near = all(abs(at["served"] - at["predicted"]) < 0.02 for at in places)
    partly = 0 < places[-1]["served"] < 1
    return near and partly and row["fits"] and row["identical_share"] == 1


@needs_llama
@pytest.mark.parametrize("draft", ["draft", "head"])
@pytest.mark.parametrize("pair", ["llama", "qwen3"], indirect=True)
def test_llama_server_accepts_what_is_predicted_and_writes_the_same_texts(pair: Path, draft: str) -> None:
    found = serve_check(pair, "llama.cpp", draft)
    assert agrees(found["rows"][0])
    assert found["causes"] == []


@needs_vllm
@pytest.mark.parametrize("draft", ["draft", "head"])
def test_vllm_accepts_what_is_predicted_and_writes_the_same_texts(llama: Path, draft: str) -> None:
    found = serve_check(llama, "vllm", draft)
    assert agrees(found["rows"][0])
    assert found["causes"] == []


@needs_vllm
@pytest.mark.parametrize("draft", ["draft", "head"])
def test_a_running_vllm_accepts_what_is_predicted_and_writes_transformers_texts(qwen3: Path, draft: str) -> None:
    found = check_of_a_running_vllm(qwen3, draft)
    assert agrees(found["rows"][0])
    assert found["causes"] == []


@needs_vllm
def test_the_cards_vllm_line_runs_as_it_stands_and_its_metrics_are_read(llama: Path) -> None:
    card = (llama / "draft" / "README.md").read_text()
    port = free_port()
    line = card.split("vLLM:\n\n```sh\n")[1].split("```")[0].replace("\\\n", " ") + f" --port {port}"
    environment = {"PATH": f"{program(VLLM_PYTHON).parent}:{os.environ['PATH']}", "VLLM_CPU_KVCACHE_SPACE": "1"}
    server = Server(f"http://127.0.0.1:{port}", "vllm", 900)
    with running(shlex.split(line), server.ready, name="vllm", seconds=1800, environment=environment):
        text = server.write([40, 9, 17], temperature=0.0, seed=0, max_new_tokens=16)
    assert text.drafts.rounds > 0
    assert len(text.drafts.accepted) == 3


@needs_llama
def test_llama_server_shows_why_it_does_not_load(tmp_path: Path) -> None:
    (tmp_path / "wrong.gguf").write_bytes(b"GGUF" + bytes(64))
    engine = Engine("llama.cpp", str(tmp_path / "wrong.gguf"))
    with pytest.raises(UserError, match="ended with status"), opened(engine, None):
        pass


@needs_llama
def test_llama_server_stops_at_the_targets_stop_ids(llama: Path) -> None:
    engine = Engine("llama.cpp", str(gguf(llama, "target")), str(gguf(llama, "draft")), threads=1, seconds=600)
    with opened(engine, 3) as server:
        full = server.write([40, 9, 17], temperature=0.0, seed=0, max_new_tokens=16)
        stop = full.ids[len(full.ids) // 2]
        text = server.write([40, 9, 17], temperature=0.0, seed=0, max_new_tokens=16, stop_ids=[stop])
    assert text.ids == full.ids[: full.ids.index(stop) + 1]
    assert 0 < text.drafts.rounds < full.drafts.rounds


# -- planted faults ----------------------------------------------------------------------------------------------------


def permuted(folder: Path) -> None:
    """Rows of the embedding in another order than measured."""
    state, name = load_file(folder / "model.safetensors"), "model.embed_tokens.weight"
    order = torch.randperm(280, generator=torch.Generator().manual_seed(0))
    changed = state | {name: state[name][order].contiguous()}
    save_file(changed, folder / "model.safetensors", metadata={"format": "pt"})


@needs_llama
def test_a_planted_fault_is_named(tmp_path: Path) -> None:
    folder = save_exports(tmp_path, "llama", steps=80)
    before = serve_check(folder, "llama.cpp", "draft")["rows"][0]["served_length"]
    for file in folder.glob("*.gguf"):
        file.unlink()
    permuted(folder / "draft")
    found = serve_check(folder, "llama.cpp", "draft")
    assert "other weights than measured" in [cause["name"] for cause in found["causes"]]
    assert found["rows"][0]["served_length"] < before - 0.1
    assert found["rows"][0]["identical_share"] == 1  # whatever is drafted
