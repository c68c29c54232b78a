"""vLLM and llama.cpp as they are, where `make engines` has set them up: run by `make test-engines`."""

from __future__ import annotations

import os
import shlex
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import vllm_cpu
from engine_pairs import (
    BUDGET,
    LENGTH,
    gguf,
    needs_llama,
    needs_vllm,
    running_vllm,
    save_exports,
    serve_check,
)
from heads import filed_head
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer
from vllm_cpu import plugin

from decode.__main__ import main
from decode.engines.base import installed, room_for
from decode.engines.server import ENGINES, Engine, Server, free_port, opened, running
from decode.errors import UserError
from decode.models.heads.block import convolved
from decode.models.heads.block_runner import Block, BlockRunner
from decode.models.heads.files import save_head
from distill.export.draft import DRAFTED

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


def differences(found: dict[str, Any]) -> list[dict[str, Any]]:
    """Causes, rows with a text that has other counts than predicted, and the greedy row if its texts are others."""
    greedy = found["rows"][0]
    same = greedy["identical_share"] == 1
    wrong = [] if same and all(at["served"] == at["predicted"] for at in greedy["positions"]) else [greedy]
    for row in found["rows"]:
        counted = (row["equal_texts"], row["unequal"]) == (row["texts"], None)
        wrong += [] if counted and 0 < row["positions"][0]["served"] < 1 else [row]
    return found["causes"] + wrong


DRAFTS = ("draft", "head", "dflash", "dspark")
"""Folders of `save_exports`."""


@needs_llama
@pytest.mark.parametrize("draft", DRAFTS)
@pytest.mark.parametrize("pair", ["llama", "qwen3"], indirect=True)
def test_llama_server_accepts_in_each_text_what_is_predicted(pair: Path, draft: str) -> None:
    assert differences(serve_check(pair, "llama.cpp", draft)) == []


@needs_vllm
@pytest.mark.parametrize("draft", ["draft", "pard", "head"])
def test_vllm_accepts_in_each_text_what_is_predicted(llama: Path, draft: str) -> None:
    assert differences(serve_check(llama, "vllm", draft, temperatures="0")) == []


@needs_vllm
@pytest.mark.parametrize("draft", [*DRAFTS, "pard", "normed"])  # llama.cpp has no norms of EAGLE-3.1
def test_vllm_without_the_faults_of_its_cpu_build_accepts_in_each_text_what_is_predicted(
    qwen3: Path, draft: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a context in which every text is just drafted to its end."""
    for name, value in plugin(tmp_path).items():
        monkeypatch.setenv(name, value)
    with running_vllm(qwen3, draft, LENGTH + BUDGET + room_for(5)) as server:
        assert differences(serve_check(qwen3, "vllm", draft, "--url", server.url, prompts="even.txt")) == []


@needs_vllm
@pytest.mark.skipif(torch.cuda.is_available(), reason="faults of vLLM's CPU build")
def test_the_faults_of_vllms_cpu_build_fail_the_check(qwen3: Path, capsys: pytest.CaptureFixture) -> None:
    found = {}

    def check_and_kill() -> None:
        with running_vllm(qwen3, "dflash", 256, "--max-num-batched-tokens", "64") as server:
            found.update(serve_check(qwen3, "vllm", "dflash", "--url", server.url, status=1))
            server.write(list(range(1, 200)), temperature=1.0, seed=0, max_new_tokens=2)  # its prompt is read in parts

    with pytest.raises(UserError, match=r"The first error:\n.*CPU Generator does not use offset"):
        check_and_kill()
    assert [row["equal_texts"] < row["texts"] for row in found["rows"]] == [True, True]
    assert [cause["name"] for cause in found["causes"]] == ["unexplained difference"]
    began = time.monotonic()
    pair = ["--target", str(qwen3 / "target"), "--draft", str(qwen3 / "dspark")]
    assert main(["serve-check", "--engine", "vllm", *pair]) == 2
    assert "does not run DSpark: its CPU build has Model Runner V1 only" in capsys.readouterr().err
    assert time.monotonic() - began < 60  # before anything is started


@needs_vllm
def test_the_cards_vllm_line_runs_as_it_stands_and_its_metrics_are_read(llama: Path) -> None:
    card = (llama / "draft" / "README.md").read_text()
    port = free_port()
    line = card.split("vLLM:\n\n```sh\n")[1].split("```")[0].replace("\\\n", " ") + f" --port {port}"
    environment = {
        "PATH": f"{installed(ENGINES['vllm'].installed).parent}:{os.environ['PATH']}",
        "VLLM_CPU_KVCACHE_SPACE": "1",
    }
    server = Server(f"http://127.0.0.1:{port}", "vllm", 900)
    with running(shlex.split(line), server.ready, name="vllm", seconds=1800, environment=environment):
        text = server.write([40, 9, 17], temperature=0.0, seed=0, max_new_tokens=16)
    assert text.drafts.rounds > 0
    assert len(text.drafts.accepted) == DRAFTED


@needs_llama
def test_llama_server_shows_why_it_does_not_load(tmp_path: Path) -> None:
    (tmp_path / "wrong.gguf").write_bytes(b"GGUF" + bytes(64))
    engine = Engine("llama.cpp", str(tmp_path / "wrong.gguf"))
    with pytest.raises(UserError, match="ended with status"), opened(engine, None):
        pass


@needs_llama
def test_llama_server_stops_at_the_targets_stop_ids(llama: Path) -> None:
    engine = Engine("llama.cpp", str(gguf(llama, "target")), str(gguf(llama, "draft")), threads=1, seconds=600)
    tokenizer = AutoTokenizer.from_pretrained(llama / "target")
    with opened(engine, 3) as server:
        full = server.write([40, 9, 17], temperature=0.0, seed=0, max_new_tokens=16)
        texts = {i: tokenizer.decode([i]) for i in full.ids}
        # it stops at strings, which a piece of a character is not
        whole = [n for n, i in enumerate(full.ids) if "\ufffd" not in texts[i] and full.ids.index(i) == n]
        stop = full.ids[next(n for n in whole if 2 <= n < 13)]
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


# -- kinds that no CPU build runs --------------------------------------------------------------------------------------


@needs_vllm
def test_vllms_own_classes_score_the_candidates_of_each_slot_as_we_do(tiny: Any, tmp_path: Path) -> None:
    """Of an exported head, whose tensors all have a place in them; the walks over the scores are the same."""
    target = tiny("llama", num_hidden_layers=6)
    head = filed_head(target, "dflash2", candidates=4)
    save_head(head, tmp_path)
    table, (blocks, n, width) = target.get_input_embeddings().weight.detach(), (3, head.drafts, head.config.hidden_size)
    states = torch.randn(blocks, n + 1, width, generator=torch.Generator().manual_seed(0))
    anchors, drafting = torch.tensor([3, 9, 5]), head.drafting(states)
    unary = drafting @ table.T
    best, kept = unary.topk(4)
    given = {"hidden_states": drafting, "anchor_token_ids": anchors, "rows": states}
    given |= {"candidate_ids": kept, "unary_logits": best}
    with torch.no_grad():
        _, wanted = BlockRunner(head, target).scores(Block(unary, drafting, anchors=anchors))
    save_file({key: value.contiguous() for key, value in given.items()}, tmp_path / "given")
    script = Path(vllm_cpu.__file__).with_name("vllm_classes.py")
    command = [ENGINES["vllm"].installed, str(script), str(tmp_path), str(tmp_path / "given"), str(tmp_path / "made")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    found = load_file(tmp_path / "made")
    torch.testing.assert_close(found.pop("scores"), wanted, rtol=1e-4, atol=1e-4)
    for name, convolved_rows in found.items():
        conv = head.get_submodule(name)
        ours = convolved(conv, states, torch.arange(n + 1), lambda y: y).detach()
        torch.testing.assert_close(convolved_rows, ours, rtol=1e-4, atol=1e-4)
    assert len(found) == 4
