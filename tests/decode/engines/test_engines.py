"""The real engines, where `make engines` has set them up: run by `make test-engines`."""

from __future__ import annotations

import copy
import os
import shlex
from pathlib import Path

import pytest
import torch
from families import build_tiny
from heads import learned_head
from pairs import make_tokenizer

from decode.core.errors import UserError
from decode.engines.check import CheckOptions, serve_check
from decode.engines.engine import CHECKOUT, LLAMA_SERVER, VLLM_PYTHON, EngineSettings, opened
from decode.engines.process import running
from decode.engines.server import Server
from decode.measure.bench_session import Item
from decode.models.eagle.files import save_head
from decode.models.pair import load
from decode.prompts.suites import Prompt
from distill.config.export import ExportSettings
from distill.export.draft import export_draft
from distill.export.eagle import export_head

pytestmark = pytest.mark.engine


def installed(made: Path) -> bool:
    return any((folder / made).is_file() for folder in (Path.cwd(), CHECKOUT))


needs_vllm = pytest.mark.skipif(not installed(VLLM_PYTHON), reason="vLLM is not set up (make engines)")
needs_llama = pytest.mark.skipif(not installed(LLAMA_SERVER), reason="llama.cpp is not set up (make engines)")


@pytest.fixture(scope="module", params=["llama", "qwen3"])
def pair(request, tmp_path_factory) -> Path:
    """A tiny target of a family and an exported draft that resembles it, in shapes that vLLM's CPU kernels take."""
    folder = tmp_path_factory.mktemp(request.param)
    shape = {"vocab_size": 280, "max_position_embeddings": 256, "eos_token_id": 0, "hidden_size": 64,
             "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32, "num_hidden_layers": 4}  # fmt: skip
    target = copy.deepcopy(build_tiny(request.param, **shape))
    draft, generator = copy.deepcopy(target), torch.Generator().manual_seed(5)
    with torch.no_grad():
        for weight in draft.parameters():
            weight.add_(0.1 * weight.std() * torch.randn(weight.shape, generator=generator))
    for name, model in (("target", target), ("trained", draft)):
        model.generation_config.eos_token_id = 0
        model.save_pretrained(folder / name)
        make_tokenizer(chat=True).save_pretrained(folder / name)
    export_draft(folder / "trained", folder / "target", folder / "draft", {}, ExportSettings(draft_length=3))
    head = learned_head(target, [item.ids for item in items()], captured_layers=(1, 2, 3))
    (folder / "trained-head").mkdir()
    save_head(head, folder / "trained-head")
    export_head(folder / "trained-head", folder / "target", folder / "head", {}, ExportSettings(draft_length=3))
    return folder


def items(count: int = 4) -> list[Item]:
    return [Item(Prompt(str(i), "Tom has", None), [40 + i, 9, 17, 60]) for i in range(count)]


def served(folder: Path, draft: str, method: str, temperatures: list[float]):
    found = load(folder / "target", folder / draft)
    files = EngineSettings(str(folder / "target"), str(folder / draft), method, threads=1, seconds=1800)
    return serve_check("vllm", files, found.target, found.draft, items(), [0], CheckOptions([3], temperatures, 24))


@needs_vllm
@pytest.mark.parametrize(("draft", "method"), [("draft", "draft_model"), ("head", "eagle3")])
def test_vllm_accepts_what_is_predicted_and_writes_the_same_texts(pair: Path, draft: str, method: str) -> None:
    found = served(pair, draft, method, [0.0])
    (row,) = found.rows
    assert row["identical_share"] == 1
    assert row["served_length"] == pytest.approx(row["predicted_length"], abs=0.05)
    assert [cause.name for cause in found.causes if cause.name != "another template or start token"] == []


@needs_vllm
@pytest.mark.skipif(torch.cuda.is_available(), reason="a fault of vLLM's CPU build")
def test_a_build_that_samples_wrongly_with_a_draft_is_named(pair: Path) -> None:
    found = served(pair, "draft", "draft_model", [1.0])
    assert "the engine's sampling with a draft is not the target's" in [cause.name for cause in found.causes]


@needs_vllm
def test_the_cards_vllm_line_runs_as_it_stands(pair: Path) -> None:
    card = (pair / "draft" / "README.md").read_text()
    line = card.split("vLLM:\n\n```sh\n")[1].split("```")[0].replace("\\\n", " ")
    program = next(folder / VLLM_PYTHON for folder in (Path.cwd(), CHECKOUT) if (folder / VLLM_PYTHON).is_file())
    server = Server("http://127.0.0.1:8000", "vllm", 300)
    environment = {"PATH": f"{program.parent}:{os.environ['PATH']}", "VLLM_CPU_KVCACHE_SPACE": "1"}
    with running(shlex.split(line), server.ready, name="vllm", seconds=900, environment=environment):
        text = server.write([40, 9, 17], temperature=0.0, seed=0, max_new_tokens=16)
    assert text.drafts.rounds > 0


@needs_vllm
def test_a_model_that_vllm_does_not_load_shows_why(pair: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama", "architectures": ["NoSuchModel"]}')
    settings = EngineSettings(str(tmp_path), str(pair / "draft"), seconds=900)
    with pytest.raises(UserError, match="ended with status"), opened("vllm", settings, None):
        pass


@needs_llama
def test_llama_server_shows_why_it_does_not_load(tmp_path: Path) -> None:
    (tmp_path / "wrong.gguf").write_bytes(b"GGUF" + bytes(64))
    settings = EngineSettings(str(tmp_path / "wrong.gguf"), "", seconds=120)
    with pytest.raises(UserError, match="ended with status"), opened("llama.cpp", settings, None):
        pass
