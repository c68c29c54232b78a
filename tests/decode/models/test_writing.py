"""Texts of many prompts that are written, or read by teacher forcing, at once are those that each has alone."""

import copy
import random
from collections.abc import Callable
from itertools import chain
from typing import Any

import pytest
import torch
from families import FAMILIES, VOCAB, build_architecture, build_tiny, resembling
from greedy import generate
from heads import make_block_head, make_head
from plain_logits import head_logits, response_logits
from reading import draws_named
from torch.nn import functional
from transformers import MptConfig, PreTrainedModel

from decode import writing
from decode.core.sampling import LogitsWarper, TorchRng
from decode.errors import UserError
from decode.loop import decode
from decode.measure.acceptance import offline_alphas
from decode.methods import MethodInputs, build
from decode.models import api, huggingface, texts
from decode.models.check import open_runner
from decode.models.fast import forward
from decode.models.texts import teacher_forced
from decode.writing import draws_of_loop, write_texts

Tiny = Callable[..., PreTrainedModel]

PROMPTS = [[5, 9, 3], [7], [2, 11, 13, 17, 19, 23, 4, 8], [30, 31]]
GREEDY, SAMPLED = LogitsWarper(0.0), LogitsWarper(1.0)


def written(model: PreTrainedModel, warp: LogitsWarper, **options) -> list[list[int]]:
    options = {"budgets": 12, "stop_ids": (), "draws": draws_named(0)} | options
    return write_texts(model, PROMPTS, warp, **options)


@pytest.mark.parametrize(
    ("family", "tuned"), [*((family, True) for family in FAMILIES), ("llama", False), ("gemma3", False)]
)
def test_a_batch_is_answered_as_generate_answers_each(
    tiny: Tiny, family: str, tuned: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not tuned:  # as on a GPU
        monkeypatch.setattr(forward, "tunable", lambda model: False)
    prompts = [*PROMPTS, [5, 9, 40, 3] * 9]  # which a window cuts
    found = write_texts(tiny(family), prompts, GREEDY, budgets=12, stop_ids=(), draws=draws_named(0))
    for prompt, got in zip(prompts, found, strict=True):
        assert prompt + got == generate(tiny(family), prompt, 12)


@pytest.mark.parametrize("name", ["Mamba-2", "BART decoder", "DeepSeek-V4", "DeepSeek-V3.2"])
def test_a_model_that_padding_or_another_cache_would_change_writes_its_texts(name: str) -> None:
    model = build_architecture(name)
    for prompt, got in zip(PROMPTS, written(model, GREEDY), strict=True):
        assert prompt + got == generate(model, prompt, 12)


def test_a_text_ends_with_the_context_of_its_model() -> None:
    """That of MPT has another name."""
    assert huggingface.context_of(MptConfig(max_seq_len=48)) == 48
    model = build_tiny("llama")
    found = written(model, GREEDY, budgets=10**6)
    assert {len(prompt + text) for prompt, text in zip(PROMPTS, found)} == {model.config.max_position_embeddings + 1}


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
def test_a_text_does_not_depend_on_its_neighbours(
    tiny: Tiny, warp: LogitsWarper, monkeypatch: pytest.MonkeyPatch
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
    for batch_size in (1, 3, 16):
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


TEXTS = [([3, 7, 1, 9, 12, 40, 2, 5], 4), ([5, 6], 2), ([5, 6, 7], 1), ([9, 9, 4] * 6, 11), ([8] * 30, 3)]
"""The second has no response."""


@pytest.mark.parametrize(("family", "tokens"), [("llama", 40), ("llama", 4096), ("mistral", 40), ("gpt2", 40)])
def test_every_text_gets_its_own_logits(family: str, tokens: int, tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(texts, "TOKENS", tokens)
    target = tiny(family)
    short = copy.deepcopy(target)
    short.resize_token_embeddings(30)
    models = {"short": short, "draft": resembling(target, 0.2)}
    heads = {"one": make_head(target, 1), "three": make_head(target, 3)}
    seen = {forced.number: forced for forced in teacher_forced(target, models | heads, TEXTS, depth=3)}
    assert sorted(seen) == [0, 2, 3, 4]
    assert all(forced.last for forced in seen.values())
    for number, forced in seen.items():
        text = TEXTS[number]
        torch.testing.assert_close(forced.p, response_logits(target, *text), rtol=1e-4, atol=1e-4)
        for name, model in models.items():
            (q,) = forced.q[name]
            wanted = response_logits(model, *text)
            wanted = functional.pad(wanted, (0, 48 - wanted.shape[1]), value=-torch.inf)
            torch.testing.assert_close(q, wanted, rtol=1e-4, atol=1e-4)
        for name, head in heads.items():
            assert len(forced.q[name]) == 3
            for depth, q in enumerate(forced.q[name], 1):
                wanted = head_logits(head, target, *text, depth)
                torch.testing.assert_close(q, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["Llama", "Gemma 2", "Cohere", "Falcon-H1"])
def test_logits_of_a_long_text_are_made_piece_by_piece(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also those that a factor or a soft cap follows, known or not; no more than `LOGITS` are held at once."""
    target = build_architecture(name)
    drafts: dict[str, Any] = {"draft": resembling(target, 0.2)}
    if name == "Llama":
        drafts |= {"one": make_head(target, 1), "three": make_head(target, 3), "block": make_block_head(target)}

    def alphas() -> Any:
        return offline_alphas(target, drafts, TEXTS, LogitsWarper(0.8, repetition_penalty=1.1), depth=3)

    whole = alphas()
    monkeypatch.setattr(texts, "LOGITS", 4 * VOCAB)
    pieces = list(teacher_forced(target, drafts, TEXTS))
    assert max(len(piece.p) for piece in pieces) == 4
    assert [(piece.number, piece.at.start) for piece in pieces][-3:] == [(4, 19), (4, 23), (4, 27)]
    for draft, by_depth in alphas().items():
        for found, wanted in zip(by_depth, whole[draft], strict=True):
            for field in ("texts", "kept"):
                flat = [torch.tensor(list(chain(*getattr(each, field)))) for each in (found, wanted)]
                torch.testing.assert_close(*flat, rtol=0, atol=1e-5)


def test_a_model_that_ignores_logits_to_keep_gets_the_same_rows(tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some models take `logits_to_keep` as one of their ``**kwargs``, and give all rows."""
    target = copy.deepcopy(tiny("llama"))
    options = {"budgets": 4, "stop_ids": (), "draws": draws_named(0)}
    wanted = [forced.p for forced in teacher_forced(target, {}, TEXTS)]
    kept = write_texts(target, [[3, 7], [5]], GREEDY, **options)
    forward = target.forward

    def swallowing(input_ids=None, attention_mask=None, position_ids=None, past_key_values=None, **kwargs):
        assert "logits_to_keep" not in kwargs
        return forward(input_ids, attention_mask, position_ids, past_key_values, **kwargs)

    monkeypatch.setattr(target, "forward", swallowing)
    for seen, rows in zip(teacher_forced(target, {}, TEXTS), wanted):
        torch.testing.assert_close(seen.p, rows, rtol=1e-4, atol=1e-4)
    monkeypatch.setattr(writing, "fast_if_equal", lambda *_: None)
    assert write_texts(target, [[3, 7], [5]], GREEDY, **options) == kept
