"""A tiny target with a draft and an EAGLE-3 head as exported, which the real engines load, and serve-check on them."""

from __future__ import annotations

import contextlib
import copy
import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from families import build_tiny
from heads import learned_head
from pairs import make_tokenizer

from decode.__main__ import main
from decode.engines.gguf import convert
from decode.engines.server import CHECKOUT, LLAMA_SERVER, VLLM_PYTHON, Engine, opened
from decode.models.heads.files import save_head
from distill.config import ExportSettings
from distill.export.draft import export_draft
from distill.export.head import export_head

PROMPTS = ("Tom has 3 apples", "How many apples does he have?", "buys 4 more apples", "Das Ma")
LIMITS = ("--threads", "1", "--timeout", "1800")
"""Generous ones: a busy machine takes minutes to load vLLM."""


def program(made: Path) -> Path | None:
    """What `make engines` made, here or in the checkout."""
    return next((folder / made for folder in (Path.cwd(), CHECKOUT) if (folder / made).is_file()), None)


needs_vllm = pytest.mark.skipif(program(VLLM_PYTHON) is None, reason="vLLM is not set up (make engines)")
needs_llama = pytest.mark.skipif(program(LLAMA_SERVER) is None, reason="llama.cpp is not set up (make engines)")


def save_exports(folder: Path, family: str, steps: int = 24) -> Path:
    """``target``, ``draft`` (the target with noise) and ``head`` (trained so many steps), in shapes that vLLM's CPU
    kernels take."""
    shape = {"vocab_size": 280, "max_position_embeddings": 256, "eos_token_id": 0, "hidden_size": 64,
             "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32, "num_hidden_layers": 4}  # fmt: skip
    tokenizer = make_tokenizer(chat=True)
    target = copy.deepcopy(build_tiny(family, **shape))
    draft, generator = copy.deepcopy(target), torch.Generator().manual_seed(5)
    with torch.no_grad():
        for weight in draft.parameters():
            weight.add_(0.01 * weight.std() * torch.randn(weight.shape, generator=generator))
    for name, model in (("target", target), ("trained", draft)):
        model.generation_config.eos_token_id = 0
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    settings = ExportSettings()
    export_draft(folder / "trained", folder / "target", folder / "draft", settings)
    prompts = [tokenizer(text)["input_ids"] for text in PROMPTS]
    head = learned_head(target, prompts, captured_layers=(1, 2, 3), steps=steps)
    (folder / "trained-head").mkdir()
    save_head(head, folder / "trained-head")
    export_head(folder / "trained-head", folder / "target", folder / "head", settings, length=3)
    (folder / "prompts.txt").write_text("\n".join(PROMPTS) + "\n")
    return folder


def gguf(folder: Path, name: str, kind: str = "f32") -> Path:
    """The GGUF file of one of the exports, made once."""
    file = folder / f"{name}-{kind}.gguf"
    target = folder / "target" if "head" in name else None
    return file if file.is_file() else convert(folder / name, file, kind, target=target)


def serve_check(folder: Path, engine: str, draft: str, *more: str) -> dict[str, Any]:
    """What ``python -m decode serve-check`` prints of three drafted tokens on `PROMPTS`."""
    command = ["serve-check", "--engine", engine, "--target", str(folder / "target"), "--draft", str(folder / draft)]
    command += ["--suite", f"prompts={folder / 'prompts.txt'}", "--draft-lengths", "3", "--temperatures", "0"]
    command += ["--max-new-tokens", "24", "--device", "cpu", "--chat", "false", "--json", *LIMITS, *more]
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        assert main(command) == 0
    return dict(json.loads(printed.getvalue()))


def check_of_a_running_vllm(folder: Path, draft: str) -> dict[str, Any]:
    """The same of a vLLM that runs already, which starts once instead of twice: its texts beside transformers' own."""
    method = "eagle3" if draft == "head" else "draft_model"
    engine = Engine("vllm", str(folder / "target"), str(folder / draft), method, 128, threads=1, seconds=1800)
    with opened(engine, 3) as server:
        return serve_check(folder, "vllm", draft, "--url", server.url)
