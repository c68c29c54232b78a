"""Predicted drafts: which drafts an engine accepts in a text, and the rounds that follow from them."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from heads import learned_block, learned_head
from pairs import make_pair
from simulated_engine import SimulatedEngine

from decode.core.sampling import LogitsWarper
from decode.engines.check import (
    Drafts,
    ServedText,
    acceptance,
    acceptance_rates,
    mean_length,
    predicted_drafts,
    within,
)
from decode.loop import decode
from decode.measure.acceptance import offline_alphas, replayed
from decode.methods import MethodInputs, build
from decode.models.check import open_draft_runner, open_runner
from decode.models.heads.eagle import DraftHead
from decode.options import MethodOptions

PROMPTS = [[5, 9, 17], [40, 41, 42, 43], [7], [100, 3, 55, 8, 9]]


def test_counts_stop_at_an_end_token_where_llama_cpp_stops() -> None:
    accept = [[True] * 12]
    # rounds start at 1 and 5, and token 6, the second of its round, ends the text
    assert predicted_drafts(accept, 7, 3) == Drafts(2, [2, 2, 2])
    assert predicted_drafts(accept, 7, 3, ended=True) == Drafts(2, [2, 1, 1])
    assert predicted_drafts(accept, 8, 3, ended=True) == Drafts(2, [2, 2, 2])  # the last one drafted counts
    # what is drafted behind the end may be accepted or not
    least, most = (predicted_drafts(accept, 7, 3, beyond=beyond) for beyond in (False, True))
    assert (least, most) == (Drafts(2, [2, 2, 1]), Drafts(2, [2, 2, 2]))
    assert within(Drafts(2, [2, 2, 1]), least, most)
    assert not within(Drafts(2, [2, 1, 1]), least, most)
    assert not within(Drafts(1, [2, 2, 1]), least, most)


@pytest.mark.parametrize("llama", [False, True])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_prediction_is_what_an_engine_counts_in_every_text(tiny, temperature: float, llama: bool) -> None:
    """At T = 1 that of the text itself; the mean over other texts within three standard errors."""
    target, draft = make_pair(tiny)
    plain, engine = SimulatedEngine(target, None, 1, llama), SimulatedEngine(target, draft, 4, llama)
    options = {"temperature": temperature, "max_new_tokens": 24}
    if temperature:
        items = [(prompt, seed, [0]) for prompt in PROMPTS for seed in range(6)]
    else:  # texts that end with every token of some, of which drafts hold some
        texts = [(prompt, plain.write(prompt, seed=0, **options).ids) for prompt in PROMPTS[:2]]
        items = [(prompt, 0, [end]) for prompt, ids in texts for end in dict.fromkeys(ids[1:16])]
    out = [engine.write(prompt, seed=seed + 100, stop_ids=ends, **options) for prompt, seed, ends in items]

    def predicted(texts, counts: bool = True, **more: bool) -> list[Drafts]:
        accepted, agreement = acceptance(target, draft, [(item[0], text.ids) for item, text in zip(items, texts)], 4)
        assert temperature or agreement == 1
        limit = 24 if llama else float("inf")
        return [
            predicted_drafts(accept, len(text.ids), 4, budget=limit, ended=text.ended and counts, **more)
            for accept, text in zip(accepted, texts)
        ]

    bounds = ({"beyond": beyond} if temperature and not llama else {} for beyond in (False, True))
    served = [text.drafts for text in out]
    assert all(map(within, served, *(predicted(out, **more) for more in bounds)))
    texts = [plain.write(prompt, seed=seed, stop_ids=ends, **options) for prompt, seed, ends in items]
    expected = predicted(texts)
    (ours, ours_se), (theirs, theirs_se) = mean_length(served), mean_length(expected)
    if temperature == 0:
        assert [text.ids for text in out] == [text.ids for text in texts]
        assert [drafts.accepted for drafts in served] == [drafts.accepted for drafts in expected]
        assert ours == theirs
        assert llama == (predicted(texts, counts=False) != expected)
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


@pytest.mark.parametrize("kind", ["eagle3", "dflash", "dspark"])
def test_a_heads_prediction_is_what_our_own_loop_accepts(tiny, kind: str) -> None:
    """A block head drafts three tokens here and could draft five or six."""
    target = copy.deepcopy(tiny("llama", num_hidden_layers=4))
    prompts = [[5, 9, 17, 4, 6], [40, 41, 42, 43, 44], [40, 3, 35, 8, 9]]
    head: DraftHead
    if kind == "eagle3":
        head = learned_head(target, prompts[:2], captured_layers=(0, 1, 2))
    else:
        head = learned_block(target, prompts[:2], kind, 60)
    runner, warp = open_runner(target), LogitsWarper(0.0)
    inputs = MethodInputs(runner, warp, open_draft_runner(head, target), options=MethodOptions(draft_length=3))
    system = build("eagle" if kind == "eagle3" else "block", inputs)
    counted, texts, rounds = Drafts(accepted=[0, 0, 0]), [], 0
    for prompt in prompts:  # our loop drafts at once; an engine has the first token from the prompt
        first = decode(runner, system, warp, prompt, max_new_tokens=1).new_ids
        out = decode(runner, system, warp, [*prompt, *first], max_new_tokens=40)
        texts.append((prompt, [*first, *out.new_ids]))
        rounds += len(out.rounds)
        for accepted, drafted in zip([r.accepted for r in out.rounds], [r.drafted for r in out.rounds]):
            counted.rounds += drafted > 0
            counted.accepted = [n + (accepted > i) for i, n in enumerate(counted.accepted)]
    accepted, _ = acceptance(target, head, texts, 3)
    expected = [predicted_drafts(accept, len(ids), 3, budget=41) for accept, (_, ids) in zip(accepted, texts)]
    assert sum(drafts.rounds for drafts in expected) == counted.rounds
    assert [sum(d.accepted[i] for d in expected) for i in range(3)] == counted.accepted
    assert 0 < counted.accepted[2] < counted.accepted[0] < counted.rounds
    # the best length is chosen by the same acceptance
    forced = [([*prompt, *ids], len(prompt) + 1) for prompt, ids in texts]
    (alphas,) = offline_alphas(target, {"": head}, forced, warp, depth=3).values()
    assert sum(replayed(alphas, 3)[1].values()) == rounds


def test_rates_and_lengths_are_over_all_rounds() -> None:
    texts = [Drafts(10, [8, 4]), Drafts(10, [6, 6])]
    assert acceptance_rates(texts, 4) == [0.7, pytest.approx(5 / 7), 0, None]
    assert mean_length(texts) == (pytest.approx(1 + 0.7 + 0.5), 0)
    assert Drafts(5, [4, 3]) - Drafts(2, [2]) == Drafts(3, [2, 3])
    assert ServedText([1] * 11, 9.0, 2.0).tokens_per_second == 5
    assert ServedText([1] * 18, 9.0).tokens_per_second == 2
