"""Texts read together by teacher forcing get the logits that each has alone."""

from __future__ import annotations

import copy
from itertools import chain
from typing import Any

import pytest
import torch
from families import VOCAB, build_architecture, resembling
from heads import make_block_head, make_head
from plain_logits import draft_logits, head_logits, response_logits
from reading import draws_named
from torch.nn import functional

from decode import writing
from decode.core.sampling import LogitsWarper
from decode.measure.acceptance import offline_alphas
from decode.models import texts
from decode.models.texts import teacher_forced
from decode.writing import write_texts

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
            wanted = draft_logits(target, model, *text)
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
    written = write_texts(target, [[3, 7], [5]], LogitsWarper(), **options)
    forward = target.forward

    def swallowing(input_ids=None, attention_mask=None, position_ids=None, past_key_values=None, **kwargs):
        assert "logits_to_keep" not in kwargs
        return forward(input_ids, attention_mask, position_ids, past_key_values, **kwargs)

    monkeypatch.setattr(target, "forward", swallowing)
    for seen, rows in zip(teacher_forced(target, {}, TEXTS), wanted):
        torch.testing.assert_close(seen.p, rows, rtol=1e-4, atol=1e-4)
    monkeypatch.setattr(writing, "fast_if_equal", lambda *_: None)
    assert write_texts(target, [[3, 7], [5]], LogitsWarper(), **options) == written
