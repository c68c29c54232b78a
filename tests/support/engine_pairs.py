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
import torch.nn.functional as F
from families import build_tiny
from heads import learned_head, make_block_head
from pairs import make_tokenizer
from some_rows import everything, from_lists

from decode.__main__ import main
from decode.engines.base import installed
from decode.engines.llama_cpp import convert
from decode.engines.server import ENGINES, Engine, Server, opened
from decode.models.heads.block import BlockHead
from decode.models.heads.files import save_head
from distill.config import ExportSettings
from distill.data.chat import IGNORE
from distill.export.draft import export_draft
from distill.export.head import export_head
from distill.kinds.parallel import ParallelDraft
from distill.losses.chunked import chunked_loss
from distill.losses.divergences import Divergence
from distill.signal.target import Signal

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
    draft, generator = copy.deepcopy(target), torch.Generator().manual_seed(5)
    with torch.no_grad():
        for weight in draft.parameters():
            weight.add_(0.01 * weight.std() * torch.randn(weight.shape, generator=generator))
    pard = learned_masks(target, copy.deepcopy(draft), prompts, steps)
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


def learned_masks(target: Any, draft: Any, prompts: list[list[int]], steps: int) -> Any:
    """A model that learns to draft five tokens in one forward from the target's greedy answers."""
    draft.config.pard_token, ids = 7, list[list[int]]()
    for prompt in prompts:
        read = torch.tensor([prompt])
        ids += target.generate(read, attention_mask=torch.ones_like(read), max_new_tokens=24, do_sample=False).tolist()
    examples = from_lists(ids, [[IGNORE] * len(prompt) + row[len(prompt) :] for prompt, row in zip(prompts, ids)])
    learner, optimiser = ParallelDraft(draft, 5), torch.optim.Adam(draft.parameters(), 1e-3)
    signal, batch = Signal(copy.deepcopy(target)), learner.indexed(everything(examples))
    for _ in range(2 * steps):
        optimiser.zero_grad()
        chunked_loss(learner.rows(batch, signal), Divergence())[0].backward()
        optimiser.step()
    return draft.eval()


def learned_block(target: Any, prompts: list[list[int]], kind: str, steps: int) -> BlockHead:
    """A block head of two layers, longer than what is drafted, trained on the target's greedy answers."""
    head = make_block_head(target, kind, block=6, mask_id=7, target_layers=[0, 1, 2]).requires_grad_(True)
    with torch.no_grad():  # keys of the second layer normed by the weights of the first are others
        head.layers[1].self_attn.k_norm.weight.mul_(3)
    table, output, examples = target.get_input_embeddings().weight, target.get_output_embeddings(), []
    with torch.no_grad():
        for prompt in prompts:
            ids = torch.tensor([prompt])
            tokens = target.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=24, do_sample=False)
            states = target(tokens, output_hidden_states=True).hidden_states
            anchors = torch.arange(len(prompt), tokens.shape[1] - head.drafts)[None]
            if anchors.numel():
                features = torch.cat([states[layer] for layer in head.captured_layers], -1)
                read = tokens[0].unfold(0, head.drafts + 1, 1)[anchors[0]]
                examples.append((features, anchors, read))
    optimiser = torch.optim.Adam(head.parameters(), 5e-3)
    for _ in range(steps):
        loss = torch.zeros(())
        for features, anchors, read in examples:
            blocks = head.tokens(read[None, :, 0], head.drafts)
            slots = head(F.embedding(blocks, table).detach(), features, anchors)
            logits = head.logits(slots, read[:, :-1], head.outputs(output), (1.0, None))
            loss = loss + F.cross_entropy(logits.flatten(0, 1).clamp_min(-40.0), read[:, 1:].flatten())
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    return head.eval().requires_grad_(False)


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
