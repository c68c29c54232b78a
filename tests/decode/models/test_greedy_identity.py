"""Greedy output is that of `generate(do_sample=False)`, whatever is drafted (see test_conformance too)."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest
from families import CONTEXT, VOCAB, resembling
from greedy import GREEDY, NEW, PROMPTS, assert_decodes, generate
from scripted import WAYS, Oracle

from decode.core.sampling import LogitsWarper
from decode.core.stop import StopRule
from decode.drafters.model import ModelDrafter
from decode.loop import Method, decode
from decode.models.api import Model
from decode.models.check import open_runner
from decode.models.fast.forward import FastRunner

PATHS = [("llama", True), ("mistral", False), ("gpt_neox", True), ("gpt2", False), ("gemma2", False)]
IDS = [f"{family}-{'fast' if fast else 'ordinary'}" for family, fast in PATHS]


@pytest.fixture(scope="module")
def texts(tiny) -> Callable[[str], list[list[int]]]:

    @cache
    def get(family: str) -> list[list[int]]:
        found = [generate(tiny(family), prompt) for prompt in PROMPTS]
        assert all(len(set(text[-NEW:])) >= 8 for text in found), "the texts are too monotonous to test anything"
        return found

    return get


@pytest.fixture(scope="module")
def runners(tiny) -> Callable[[str, bool], Model]:

    @cache
    def get(family: str, fast: bool) -> Model:
        runner = open_runner(tiny(family), fast=fast)
        assert isinstance(runner, FastRunner) == fast
        return runner

    return get


@pytest.mark.parametrize(("family", "penalty"), [("llama", 1.5), ("gpt_neox", 0.7), ("opt", 1.5)])
def test_repetition_penalties_act_as_in_generate(family: str, penalty: float, tiny) -> None:
    model, warp = tiny(family), LogitsWarper(repetition_penalty=penalty)
    runner, draft = open_runner(model), open_runner(resembling(model, 0.15))
    for prompt in PROMPTS:
        wanted = generate(model, prompt, repetition_penalty=penalty)
        assert wanted != generate(model, prompt)
        oracles = [Oracle(wanted, way, VOCAB) for way in ("tree", "perfect")]
        for drafter in (ModelDrafter(draft, warp, VOCAB), *oracles):
            text = decode(runner, Method("", drafter, StopRule()), warp, prompt, max_new_tokens=NEW)
            assert text.ids == wanted
            assert sum(r.accepted for r in text.rounds) > 3


@pytest.mark.parametrize("way", ["perfect", "tree", "alternating", "overlong", "empty"])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_the_text_ends_with_the_first_stop_token_wherever_it_stands_in_a_draft(
    family: str, way: str, runners, texts
) -> None:
    runner = runners(family, family == "llama")
    for prompt, text in zip(PROMPTS, texts(family)):
        for end in range(len(prompt), len(prompt) + 8):
            wanted, method = (
                text[: text.index(text[end], len(prompt)) + 1],
                Method("", Oracle(text, way, VOCAB), StopRule()),
            )
            assert_decodes(runner, method, wanted, prompt, stop_ids={text[end]})


@pytest.mark.parametrize("new", range(1, 9))
def test_every_budget_is_met_exactly(new: int, runners, texts) -> None:
    wanted = texts("llama")[0][: len(PROMPTS[0]) + new]
    for way in WAYS:
        method = Method(way, Oracle(wanted, way, VOCAB), StopRule())
        assert_decodes(runners("llama", True), method, wanted, PROMPTS[0], new)


@pytest.mark.parametrize(("family", "fast"), PATHS, ids=IDS)
def test_prompts_of_one_token_and_of_the_whole_context_are_served(family: str, fast: bool, runners, tiny) -> None:
    model, runner = tiny(family), runners(family, fast)
    draft = ModelDrafter(open_runner(resembling(model, 0.15), fast=fast), GREEDY, VOCAB)
    full = [(7 * i * i + 3) % VOCAB for i in range(CONTEXT)]
    # the last token written is never read, so it may stand past the end
    for prompt, new, budget in (([5], 10, 10), (full, 1, 20), (full[:-3], 4, 20)):
        wanted = generate(model, prompt, new)
        for drafter in (draft, Oracle(wanted, "tree", VOCAB), Oracle(wanted, "perfect", VOCAB)):
            assert_decodes(runner, Method("", drafter, StopRule()), wanted, prompt, budget)
