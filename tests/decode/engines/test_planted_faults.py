"""Faults of an export, planted and served by a real engine: serve-check names each.

llama.cpp, which loads at once, unless only vLLM reads what is wrong.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from engine_pairs import check_of_a_running_vllm, needs_llama, needs_vllm, save_exports, serve_check
from safetensors.torch import load_file, save_file

from decode.__main__ import main

pytestmark = pytest.mark.engine
EMBEDDING = "model.embed_tokens.weight"


@pytest.fixture(scope="module")
def exports(tmp_path_factory) -> Path:
    """A draft and a head of which nothing is wrong, with what they were measured to accept."""
    folder = save_exports(tmp_path_factory.mktemp("faults"), "llama", steps=80)
    for draft in ("draft", "head"):
        (row,) = serve_check(folder, "llama.cpp", draft)["rows"]
        (folder / f"{draft}-length").write_text(str(row["served_length"]))
    return folder


def edit(path: Path, **fields: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def change(folder: Path, function: Callable[[dict], dict]) -> None:
    state = load_file(folder / "model.safetensors")
    save_file(function(state), folder / "model.safetensors", metadata={"format": "pt"})


def permuted(folder: Path) -> None:
    order = torch.randperm(280, generator=torch.Generator().manual_seed(0))
    change(folder, lambda state: state | {EMBEDDING: state[EMBEDDING][order].contiguous()})


def short(folder: Path) -> None:
    edit(folder / "config.json", max_position_embeddings=64)


def layers_in_the_engines_key(folder: Path) -> None:
    edit(folder / "config.json", eagle_aux_hidden_state_layer_ids=[0, 1, 2])


def other_tokenizer(folder: Path) -> None:
    core = json.loads((folder / "tokenizer.json").read_text())
    vocabulary = core["model"]["vocab"]
    a, b = list(vocabulary)[40:42]
    vocabulary[a], vocabulary[b] = vocabulary[b], vocabulary[a]
    (folder / "tokenizer.json").write_text(json.dumps(core))


def planted(exports: Path, folder: Path, draft: str, fault: Callable[[Path], None]) -> Path:
    """The exports with one fault."""
    shutil.copytree(exports, folder, dirs_exist_ok=True)
    for file in folder.glob("*.gguf"):
        file.unlink()
    fault(folder / draft)
    return folder


FAULTS = [
    pytest.param("llama.cpp", "draft", permuted, "other weights than measured", True, marks=needs_llama),
    pytest.param("llama.cpp", "draft", short, "cut context", False, marks=needs_llama),
    pytest.param("vllm", "head", layers_in_the_engines_key, "captured layers off by one", True, marks=needs_vllm),
]


@pytest.mark.parametrize(("engine", "draft", "fault", "name", "hurts"), FAULTS)
def test_a_fault_is_named(exports: Path, tmp_path: Path, engine, draft, fault, name, hurts) -> None:
    folder = planted(exports, tmp_path, draft, fault)
    found = check_of_a_running_vllm(folder, draft) if engine == "vllm" else serve_check(folder, engine, draft)
    (row,) = found["rows"]
    assert name in [cause["name"] for cause in found["causes"]]
    assert (row["served_length"] < float((exports / f"{draft}-length").read_text()) - 0.1) == hurts
    assert row["identical_share"] == 1  # whatever is drafted


@needs_llama
def test_another_tokenizer_is_named_before_an_engine_starts(exports: Path, tmp_path: Path, capsys) -> None:
    folder = planted(exports, tmp_path, "draft", other_tokenizer)
    command = ["serve-check", "--engine", "llama.cpp", "--target", str(folder / "target")]
    assert main([*command, "--draft", str(folder / "draft"), "--device", "cpu"]) == 2
    assert "tokenizer is not the target's" in capsys.readouterr().err
