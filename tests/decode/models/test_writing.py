"""Texts of many prompts at once are those that each prompt has alone."""

from __future__ import annotations

from collections.abc import Callable, Collection

import pytest
import torch
from architectures import build_architecture
from reading import draws_named
from transformers import PreTrainedModel

from decode.loop import decode
from decode.methods import MethodInputs, build
from decode.models import writing as batched_generation
from decode.models.choose_runner import open_runner
from decode.models.writing import draws_of_loop, write_texts
from decode.sampling import LogitsWarper, TorchRng

Tiny = Callable[..., PreTrainedModel]
PROMPTS = [[5, 9, 3], [7], [2, 11, 13, 17, 19, 23, 4, 8], [30, 31]]


def written(
    model: PreTrainedModel, warp: LogitsWarper, *, budget: int = 12, stops: Collection[int] = ()
) -> list[list[int]]:
    return write_texts(model, PROMPTS, warp, budgets=budget, stop_ids=stops, draws=draws_named(0))


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_neox", "codegen", "gpt2", "opt", "mistral", "phi"])
def test_a_batch_of_prompts_is_answered_as_generate_answers_each_alone(tiny: Tiny, family: str) -> None:
    model = tiny(family)
    for prompt, got in zip(PROMPTS, written(model, LogitsWarper(0.0))):
        ids = torch.tensor([prompt])
        wanted = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False)
        assert got == wanted[0, len(prompt) :].tolist()


@pytest.mark.parametrize("recurrent", [False, True])
def test_a_text_ends_at_its_stop_token_or_budget_and_the_others_go_on(tiny: Tiny, recurrent: bool) -> None:
    model = build_architecture("Qwen3-Next") if recurrent else tiny("llama")
    free = written(model, LogitsWarper(0.0))
    stop = free[0][4]
    cut = written(model, LogitsWarper(0.0), stops={stop})
    for whole, part in zip(free, cut):
        end = whole.index(stop) + 1 if stop in whole else len(whole)
        assert part == whole[:end]
    short = write_texts(model, PROMPTS, LogitsWarper(0.0), budgets=[3, 0, 12, 1], stop_ids=(), draws=draws_named(0))
    assert short == [free[0][:3], [], free[2], free[3][:1]]


def test_packed_weights_write_the_same_texts(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny("llama")
    plain = [written(model, warp) for warp in (LogitsWarper(0.0), LogitsWarper(1.0))]
    monkeypatch.setattr(batched_generation, "PACKED", 0)
    model.train()
    assert [written(model, warp) for warp in (LogitsWarper(0.0), LogitsWarper(1.0))] == plain
    assert model.training
    model.eval()


@pytest.mark.parametrize(
    "warp", [LogitsWarper(0.0), LogitsWarper(1.0), LogitsWarper(0.7, top_p=0.9, repetition_penalty=1.3)], ids=str
)
@pytest.mark.parametrize("batch_size", [None, 2])
def test_texts_are_those_of_the_loop_without_a_drafter(tiny: Tiny, warp: LogitsWarper, batch_size: int | None) -> None:
    model = tiny("llama")
    runner = open_runner(model)
    system = build("autoregressive", MethodInputs(runner, warp))
    alone = [
        decode(runner, system, warp, prompt, max_new_tokens=40, stop_ids={7}, rng=TorchRng(3 + i)).new_ids
        for i, prompt in enumerate(PROMPTS)
    ]
    finished: list[int] = []
    texts = write_texts(
        model,
        PROMPTS,
        warp,
        budgets=40,
        stop_ids={7},
        draws=draws_of_loop(3),
        batch_size=batch_size,
        progress=finished.append,
    )
    assert texts == alone
    assert sum(finished) == len(PROMPTS)
