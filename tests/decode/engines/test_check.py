"""Predicted drafts: which drafts an engine accepts in a text, and the rounds that follow from them."""

from __future__ import annotations

import math

import pytest
import torch
from heads import learned_head
from pairs import make_pair
from simulated_engine import SimulatedEngine

from decode.core.loop import decode
from decode.core.sampling import LogitsWarper
from decode.engines.check import (
    Drafts,
    ServedText,
    acceptance,
    acceptance_rates,
    difference_error,
    mean_length,
    predicted_drafts,
)
from decode.methods import MethodInputs, build
from decode.models.check import open_draft_runner, open_runner
from decode.options import MethodOptions

PROMPTS = [[5, 9, 17], [40, 41, 42, 43], [7], [100, 3, 55, 8, 9]]


def test_rounds_of_known_acceptances() -> None:
    # token 0 comes from the prompt; rounds start at 1 (three accepted), 5 (none), 6 (the text ends at 7)
    accept = [[False, True, True, True, True, False, True, True, True, True]]
    assert predicted_drafts(accept, 8, 3) == Drafts(3, [2, 2, 2])
    # the budget leaves the last round one token
    assert predicted_drafts(accept, 8, 3, budget=8) == Drafts(3, [2, 1, 1])
    # deeper tokens have acceptances of their own: one round of three
    assert predicted_drafts([[True] * 9, [True] * 9, [False] * 9], 2, 3) == Drafts(1, [1, 1, 0])


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_prediction_is_what_an_engine_counts(tiny, temperature: float) -> None:
    """Exactly so for greedy texts; within three standard errors for sampled ones, whose draws differ."""
    target, draft = make_pair(tiny)
    items = [(prompt, seed) for prompt in PROMPTS for seed in range(6 if temperature else 1)]
    options = {"temperature": temperature, "max_new_tokens": 24, "stop_ids": [0]}
    plain = SimulatedEngine(target, None, 1)
    texts = [(prompt, plain.write(prompt, seed=seed, **options).ids) for prompt, seed in items]
    accepted, agreement = acceptance(target, draft, texts, 4)
    expected = [predicted_drafts(accept, len(ids), 4) for accept, (_, ids) in zip(accepted, texts)]
    engine = SimulatedEngine(target, draft, 4)
    out = [engine.write(prompt, seed=seed + 100, **options) for prompt, seed in items]
    served = [text.drafts for text in out]
    (ours, ours_se), (theirs, theirs_se) = mean_length(served), mean_length(expected)
    if temperature == 0:
        assert agreement == 1
        assert [text.ids for text in out] == [ids for _, ids in texts]
        assert [drafts.accepted for drafts in served] == [drafts.accepted for drafts in expected]
        assert (ours - theirs, difference_error(served, expected)) == (0, 0)
    else:
        assert 0 < ours_se < 0.5
        assert abs(ours - theirs) < 3 * math.hypot(ours_se, theirs_se)


def test_a_greedy_draft_is_accepted_where_the_text_has_its_argmax(tiny) -> None:
    """Over texts that the target samples that is p(argmax q), the probability with which a one-hot q is accepted."""
    target, draft = make_pair(tiny)
    with torch.inference_mode():
        best = int(draft(torch.tensor([[5, 9, 17]])).logits[0, -1].argmax())
    accepted, _ = acceptance(target, draft, [([5, 9, 17], [token]) for token in range(280)], 1)
    assert [i for i, text in enumerate(accepted) if text[0][0]] == [best]


def test_a_heads_prediction_is_what_our_own_loop_accepts(tiny) -> None:
    target, _ = make_pair(tiny)
    prompts = [[5, 9, 17, 4, 6], [40, 41, 42, 43, 44], [100, 3, 55, 8, 9]]
    head = learned_head(target, prompts[:2], captured_layers=(0, 1, 2))
    runner, warp = open_runner(target), LogitsWarper(0.0)
    inputs = MethodInputs(runner, warp, open_draft_runner(head, target), options=MethodOptions(draft_length=3))
    system = build("eagle", inputs)
    counted, texts = Drafts(accepted=[0, 0, 0]), []
    for prompt in prompts:  # our loop drafts at once; an engine has the first token from the prompt
        first = decode(runner, system, warp, prompt, max_new_tokens=1).new_ids
        out = decode(runner, system, warp, [*prompt, *first], max_new_tokens=40)
        texts.append((prompt, [*first, *out.new_ids]))
        for accepted, drafted in zip([r.accepted for r in out.rounds], [r.drafted for r in out.rounds]):
            counted.rounds += drafted > 0
            counted.accepted = [n + (accepted > i) for i, n in enumerate(counted.accepted)]
    accepted, _ = acceptance(target, head, texts, 3)
    expected = [predicted_drafts(accept, len(ids), 3, budget=41) for accept, (_, ids) in zip(accepted, texts)]
    assert sum(drafts.rounds for drafts in expected) == counted.rounds
    assert [sum(d.accepted[i] for d in expected) for i in range(3)] == counted.accepted
    assert 0 < counted.accepted[2] < counted.accepted[0] < counted.rounds


def test_rates_and_lengths_are_over_all_rounds() -> None:
    texts = [Drafts(10, [8, 4]), Drafts(10, [6, 6])]
    assert acceptance_rates(texts, 4) == [0.7, pytest.approx(5 / 7), 0, None]
    assert mean_length(texts) == (pytest.approx(1 + 0.7 + 0.5), 0)
    assert Drafts(5, [4, 3]) - Drafts(2, [2]) == Drafts(3, [2, 3])
    assert ServedText([1] * 11, 9.0, 2.0).tokens_per_second == 5
    assert ServedText([1] * 18, 9.0).tokens_per_second == 2
