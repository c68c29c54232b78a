"""Supposed drafts: their shape, their rates, and what is refused before an engine starts."""

from __future__ import annotations

import json

import pytest
from pairs import save_pair
from transformers import AutoModelForCausalLM

from decode.commands.what_if import profile_rates
from decode.engines.acceptance import Drafts, ServedText, round_cost
from decode.engines.what_if import marginal_rates, parse_shape, write_random_draft
from decode.errors import UserError


def test_shapes() -> None:
    assert parse_shape("192x2") == (192, 2, 3)
    assert parse_shape("576x4x9") == (576, 4, 9)
    for wrong in ("192", "192x0", "axb", "100x2x3"):
        with pytest.raises(UserError, match="draft_shape is"):
            parse_shape(wrong)


def test_a_random_draft_has_the_targets_vocabulary_and_context(tiny, tmp_path) -> None:
    save_pair(tmp_path, tiny)
    parameters = write_random_draft(tmp_path / "random", str(tmp_path / "target"), "32x1x2", 0)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "random")
    assert (model.config.vocab_size, model.config.max_position_embeddings) == (280, 256)
    assert sum(weight.numel() for weight in model.parameters()) == parameters


def test_rates_are_unconditional_and_never_rise(tmp_path) -> None:
    assert marginal_rates(0.5, 3) == [0.5, 0.25, 0.125]
    (tmp_path / "speculation_profile.json").write_text(json.dumps({"synthetic_acceptance_rates": [0.9, 0.8]}))
    assert profile_rates(tmp_path, 2) == [0.9, 0.8]
    with pytest.raises(UserError, match="holds 2 synthetic_acceptance_rates, 5 are wanted"):
        profile_rates(tmp_path, 5)


def test_the_cost_of_a_round_is_told_in_plain_steps() -> None:
    plain, drafted = ServedText([1] * 11, 9.0, 2.0), ServedText([1] * 11, 9.0, 6.0, Drafts(10, 50, [0, 0]))
    assert round_cost(drafted, plain) == pytest.approx(3.0)
