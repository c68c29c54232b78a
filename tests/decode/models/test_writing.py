"""Texts of many prompts at once are those that each prompt has alone."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from families import FAMILIES, VOCAB, build_architecture, build_tiny
from greedy import generate
from reading import draws_named
from transformers import MptConfig, PreTrainedModel

from decode import writing
from decode.core.sampling import LogitsWarper, TorchRng
from decode.errors import UserError
from decode.loop import decode
from decode.methods import MethodInputs, build
from decode.models import api, huggingface
from decode.models.check import open_runner
from decode.models.fast import forward
from decode.writing import draws_of_loop, write_texts

Tiny = Callable[..., PreTrainedModel]

PROMPTS = [[5, 9, 3], [7], [2, 11, 13, 17, 19, 23, 4, 8], [30, 31]]
GREEDY, SAMPLED = LogitsWarper(0.0), LogitsWarper(1.0)


def written(model: PreTrainedModel, warp: LogitsWarper, **options) -> list[list[int]]:
    options = {"budgets": 12, "stop_ids": (), "draws": draws_named(0)} | options
    return write_texts(model, PROMPTS, warp, **options)


@pytest.mark.parametrize("tuned", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_batch_of_prompts_is_answered_as_generate_answers_each_alone(
    tiny: Tiny, family: str, tuned: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not tuned:  # as on a GPU
        monkeypatch.setattr(forward, "tunable", lambda model: False)
    prompts = [*PROMPTS, [5, 9, 40, 3] * 9]  # which a window cuts
    texts = write_texts(tiny(family), prompts, GREEDY, budgets=12, stop_ids=(), draws=draws_named(0))
    for prompt, got in zip(prompts, texts, strict=True):
        assert prompt + got == generate(tiny(family), prompt, 12)


@pytest.mark.parametrize("name", ["Mamba-2", "BART decoder", "DeepSeek-V4", "DeepSeek-V3.2"])
def test_a_model_that_padding_or_another_cache_would_change_writes_its_texts(name: str) -> None:
    model = build_architecture(name)
    for prompt, got in zip(PROMPTS, written(model, GREEDY), strict=True):
        assert prompt + got == generate(model, prompt, 12)


def test_a_text_ends_with_the_context_of_its_model() -> None:
    """That of MPT has another name, and behind that of longrope all keys would have to be rotated anew."""
    assert huggingface.context_of(build_architecture("Phi-3, rope longrope").config) == 16
    assert huggingface.context_of(MptConfig(max_seq_len=48)) == 48
    model = build_tiny("llama")
    texts = write_texts(model, PROMPTS, GREEDY, budgets=10**6, stop_ids=(), draws=draws_named(0))
    assert {len(prompt + text) for prompt, text in zip(PROMPTS, texts)} == {model.config.max_position_embeddings + 1}


def test_ids_without_a_row_are_refused(tiny: Tiny) -> None:
    with pytest.raises(UserError, match="the prompt holds token id 999, but the target's ids are 0 to 47; was it"):
        write_texts(tiny("llama"), [[1], [999]], GREEDY, budgets=1, stop_ids=(), draws=draws_named(0))


@pytest.mark.parametrize("warp", [GREEDY, SAMPLED, LogitsWarper(0.7, top_p=0.9, repetition_penalty=1.3)], ids=str)
@pytest.mark.parametrize("batch_size", [None, 2])
def test_texts_are_those_of_the_loop_without_a_drafter(tiny: Tiny, warp: LogitsWarper, batch_size: int | None) -> None:
    model = tiny("llama")
    runner = open_runner(model)
    system = build("autoregressive", MethodInputs(runner, warp))
    alone = [
        decode(runner, system, warp, prompt, max_new_tokens=40, stop_ids={7}, rng=TorchRng(3 + i)).new_ids
        for i, prompt in enumerate(PROMPTS)
    ]
    finished = []
    options = {"budgets": 40, "stop_ids": {7}, "draws": draws_of_loop(3), "batch_size": batch_size}
    assert written(model, warp, **options, progress=finished.append) == alone
    assert sum(finished) == len(PROMPTS)


@pytest.mark.parametrize("warp", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("batch_size", [1, 2, 7, 16])
def test_a_text_depends_neither_on_its_neighbours_nor_on_when_it_is_begun(
    tiny: Tiny, warp: LogitsWarper, batch_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, dice = tiny("llama"), random.Random(0)
    monkeypatch.setattr(api, "PIECE", 20)  # longer prompts are read in pieces
    lengths = [3, 40, 8, 1, 25, 13, 13, 2, 60, 5, 9]
    prompts = [[dice.randrange(VOCAB) for _ in range(length)] for length in lengths]

    def write(numbers: list[int], size: int | None) -> list[list[int]]:
        return write_texts(
            model, [prompts[i] for i in numbers], warp, budgets=[min(20, 64 - lengths[i]) for i in numbers],
            stop_ids={7, 11}, draws=lambda i, count: draws_named(5)(numbers[i], count), batch_size=size,
        )  # fmt: skip

    alone = [write([i], None)[0] for i in range(len(prompts))]
    assert len({len(text) for text in alone}) > 2  # they end at different times
    assert write(list(range(len(prompts))), batch_size) == alone
    assert write([8, 2, 0], 2) == [alone[8], alone[2], alone[0]]


def test_packed_weights_write_the_same_texts(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny("llama")
    plain = [written(model, warp) for warp in (GREEDY, SAMPLED)]
    monkeypatch.setattr(writing, "PACKED", 0)
    model.train()
    assert [written(model, warp) for warp in (GREEDY, SAMPLED)] == plain
    assert model.training
    model.eval()


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_no_more_texts_are_written_at_once_than_memory_holds(tiny: Tiny, family: str, monkeypatch) -> None:
    model, rows = tiny(family), []
    wanted, call = written(model, SAMPLED), LogitsWarper.__call__
    monkeypatch.setattr(LogitsWarper, "__call__", lambda self, *of: rows.append(len(of[0])) or call(self, *of))
    size = huggingface.facts_of(model)["cache_bytes_per_token"]
    monkeypatch.setattr(api, "free_memory", lambda device: 2.5 * api.GROWTH * 20 * size)
    with pytest.warns(UserWarning, match="memory holds 2 texts of 20 tokens; writing 2 instead of 4"):
        assert written(model, SAMPLED) == wanted
    assert max(rows) == 2
    assert torch.is_inference_mode_enabled() is False
