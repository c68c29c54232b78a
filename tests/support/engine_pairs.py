"""A tiny target with a draft and heads as exported, which the real engines load, and serve-check on them."""

from __future__ import annotations

import contextlib
import copy
import io
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from families import build_tiny, resembling
from heads import learned, learned_block, learned_head
from pairs import make_tokenizer

from decode.__main__ import main
from decode.engines.base import installed
from decode.engines.llama_cpp import convert
from decode.engines.server import ENGINES, Engine, Server, opened
from decode.models.heads.files import save_head
from distill.config import ExportSettings
from distill.export.draft import export_draft
from distill.export.head import export_head
from distill.kinds.parallel import ParallelDraft

PROMPTS = ("Tom has 3 apples", "How many apples does he have?", "buys 4 more apples", "Das Ma")
BUDGET, LENGTH = 24, 28  # new tokens of each text, and tokens of each of `even_prompts`
LIMITS = ("--threads", "1", "--timeout", "1800")
"""Generous ones: a busy machine takes minutes to load vLLM."""


needs_vllm, needs_llama = (
    pytest.mark.skipif(not installed(kind.installed).is_file(), reason=f"{name} is not set up (make engines)")
    for name, kind in ENGINES.items()
)


def save_exports(folder: Path, family: str, steps: int = 24) -> Path:
    """``target``, ``draft`` (the target with noise), ``pard`` (it with masks), ``head`` (EAGLE-3), ``normed`` (3.1),
    ``dflash`` and ``dspark``, trained so many steps, in shapes that vLLM's CPU kernels take; some texts end."""
    shape = {"vocab_size": 280, "max_position_embeddings": 256, "eos_token_id": 0, "hidden_size": 64,
             "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32, "num_hidden_layers": 4}  # fmt: skip
    tokenizer = make_tokenizer(chat=True)
    prompts = [tokenizer(text)["input_ids"] for text in PROMPTS]
    target = copy.deepcopy(build_tiny(family, **shape))
    end_texts(target, prompts)
    draft = resembling(target, 0.01, seed=5)
    pard = copy.deepcopy(draft)
    pard.config.pard_token = 7
    learned(ParallelDraft(pard, 5), target, prompts, 2 * steps, 1e-3)
    for name, model in (("target", target), ("trained", draft), ("trained-pard", pard)):
        model.generation_config.eos_token_id = 0
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    settings = ExportSettings()
    export_draft(folder / "trained", folder / "target", folder / "draft", settings)
    export_draft(folder / "trained-pard", folder / "target", folder / "pard", settings)
    heads: dict[str, Any] = {
        name: learned_head(target, prompts, captured_layers=(1, 2, 3), steps=steps, norms=name == "normed")
        for name in ("head", "normed")
    }
    heads |= {kind: learned_block(target, prompts, kind, steps) for kind in ("dflash", "dspark")}
    for name, head in heads.items():
        (folder / f"trained-{name}").mkdir()
        save_head(head, folder / f"trained-{name}")
        export_head(folder / f"trained-{name}", folder / "target", folder / name, settings, length=3)
    (folder / "prompts.txt").write_text("\n".join(PROMPTS) + "\n")
    (folder / "even.txt").write_text("\n".join([*PROMPTS, *even_prompts(tokenizer, 8)]) + "\n")
    return folder


def even_prompts(tokenizer: Any, count: int) -> list[str]:
    """Texts of as many tokens each, so that every one needs the room of the longest."""
    chance, made = random.Random(0), list[str]()
    while len(made) < count:
        text = "".join(chance.sample(PROMPTS[1], len(PROMPTS[1]))).strip()
        made += [text] if len(tokenizer(text)["input_ids"]) == LENGTH else []
    return made


@torch.no_grad()
def end_texts(target: Any, prompts: list[list[int]]) -> None:
    """Exchange the ids of the end and of what the target writes twelfth after the first prompt; sampled texts resemble
    greedy ones."""
    ids = torch.tensor([prompts[0]])
    token = int(target.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False)[0, -1])
    for table in {target.get_input_embeddings().weight, target.get_output_embeddings().weight}:
        table[[0, token]] = table[[token, 0]]
    target.get_output_embeddings().weight.mul_(3)


def gguf(folder: Path, name: str, kind: str = "f32") -> Path:
    """The GGUF file of one of the exports, made once."""
    file = folder / f"{name}-{kind}.gguf"
    target = folder / "target" if name not in ("target", "draft") else None
    return file if file.is_file() else convert(folder / name, file, kind, target=target)


def serve_check(
    folder: Path,
    engine: str,
    draft: str,
    *more: str,
    prompts: str = "prompts.txt",
    temperatures: str = "0,1",
    status: int = 0,
) -> dict[str, Any]:
    """What ``draftsmith decode serve-check`` prints of five drafted tokens on `PROMPTS`; it ends with this status."""
    command = ["serve-check", "--engine", engine, "--target", str(folder / "target"), "--draft", str(folder / draft)]
    command += ["--suite", f"prompts={folder / prompts}", "--draft-lengths", "5", "--temperatures", temperatures]
    command += ["--max-new-tokens", str(BUDGET), "--device", "cpu", "--chat", "false", "--json", *LIMITS, *more]
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        assert main(command) == status
    return dict(json.loads(printed.getvalue()))


@contextlib.contextmanager
def running_vllm(folder: Path, draft: str, context: int, *arguments: str) -> Iterator[Server]:
    """A vLLM that drafts five tokens: `serve_check` by its address starts it once instead of twice."""
    methods = {"draft": "draft_model", "pard": "draft_model", "head": "eagle3", "normed": "eagle3"}
    method = methods.get(draft, draft)
    engine = Engine("vllm", str(folder / "target"), str(folder / draft), method, context, arguments=arguments)
    engine.threads, engine.seconds = 1, 1800
    with opened(engine, 5) as server:
        yield server
