"""vLLM and llama.cpp as they are, where `make engines` has set them up: run by `make test-engines`."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from engine_pairs import (
    check_of_a_running_vllm,
    gguf,
    needs_llama,
    needs_vllm,
    program,
    save_exports,
    serve_check,
)
from pairs import TEXT, make_tokenizer

from decode.engines.server import LLAMA_SERVER, VLLM_PYTHON, Engine, Server, free_port, opened, running
from decode.errors import UserError
from decode.models.loading import load_model

pytestmark = pytest.mark.engine
SAMPLING = "the engine's sampling with a draft is not the target's"


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
    near = all(abs(at["served_marginal"] - at["predicted_marginal"]) < 0.02 for at in places)
    partly = 0 < places[-1]["served_marginal"] < 1
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
    """Above T = 0 vLLM's CPU build samples wrongly with a draft: unless what it left unfilled happens to be right,
    which is told from the texts themselves."""
    found = serve_check(llama, "vllm", draft, temperatures="[0,1]" if draft == "draft" else "0")
    assert agrees(found["rows"][0])
    wrong = any(row.get("lossless") is False for row in found["rows"])
    assert [cause["name"] for cause in found["causes"]] == [SAMPLING] * wrong


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
        whole = server.write([40, 9, 17], temperature=0.0, seed=0, max_new_tokens=16, ignore_eos=True)
        stop = whole.ids[8]
        text = server.write([40, 9, 17], temperature=0.0, seed=0, max_new_tokens=16, stop_ids=[stop])
    assert text.ids == whole.ids[: whole.ids.index(stop) + 1]
    assert 0 < text.drafts.rounds < whole.drafts.rounds


def llama_tool(wanted: str, name: str, *options: object) -> list[float]:
    """Numbers in what one of llama.cpp's programs prints; run again where it ends before its logger has written all."""
    command = [program(LLAMA_SERVER).parent / name, *map(str, options), "-t", "1"]
    for _ in range(50):
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=900)
        printed = done.stdout.decode(errors="replace")
        assert done.returncode == 0, printed[-2000:]
        if found := re.search(wanted, printed, re.DOTALL):
            return [float(number) for number in found.groups()]
    raise AssertionError(printed[-2000:])


@needs_llama
@pytest.mark.parametrize("pair", ["llama", "qwen3"], indirect=True)
def test_a_gguf_file_has_our_perplexity(pair: Path, tmp_path: Path) -> None:
    (tmp_path / "text").write_text(TEXT * 8)
    ids = torch.tensor(make_tokenizer()(TEXT * 8)["input_ids"])
    chunks = ids[: len(ids) // 64 * 64].view(-1, 64)  # llama-perplexity scores the second half of each
    model = load_model(str(pair / "target"), device="cpu", dtype="float32")
    files = ("-m", gguf(pair, "target"), "-f", tmp_path / "text")
    exactly = ("-ctk", "f32", "-ctv", "f32", "-fa", "off")  # the caches are float16 otherwise
    running_mean = r".*\[(\d+)\](\d+\.\d{4}),"  # over the chunks so far; the final line may be lost
    count, theirs = llama_tool(running_mean, "llama-perplexity", *files, "-c", 64, "-b", 64, *exactly)
    chunks = chunks[: int(count)]
    with torch.no_grad():
        ours = F.cross_entropy(model(chunks).logits[:, 32:-1].flatten(0, 1), chunks[:, 33:].flatten()).exp()
    assert theirs == pytest.approx(float(ours), rel=1e-3)
