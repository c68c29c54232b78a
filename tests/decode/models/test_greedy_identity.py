"""Greedy output is that of `generate(do_sample=False)`, whatever is drafted (see test_conformance too)."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from families import CONTEXT, VOCAB, resembling
from greedy import GREEDY, NEW, PROMPTS, assert_decodes, generate
from scripted import WAYS, Oracle, corpus_drafters

from decode.drafters.base import Drafter
from decode.drafters.draft_model import ModelDrafter
from decode.drafters.hybrid import HybridDrafter
from decode.loop import Method, decode
from decode.methods import STOPS, MethodInputs
from decode.models.choose_runner import open_runner
from decode.models.fast_runner import FastRunner
from decode.models.runner import Runner
from decode.sampling import LogitsWarper
from decode.stopping import StopRule


@pytest.fixture(scope="module")
def texts(tiny) -> Callable[[str], list[list[int]]]:
    """What generate writes after each of `PROMPTS`."""
    cache: dict[str, list[list[int]]] = {}

    def get(family: str) -> list[list[int]]:
        if family not in cache:
            cache[family] = [generate(tiny(family), prompt) for prompt in PROMPTS]
            for prompt, text in zip(PROMPTS, cache[family]):
                assert len(set(text[len(prompt) :])) >= 8, "the text is too monotonous to test anything"
        return cache[family]

    return get


@pytest.fixture(scope="module")
def runners(tiny) -> Callable[[str, bool], Runner]:
    cache: dict[tuple[str, bool], Runner] = {}

    def get(family: str, fast: bool) -> Runner:
        if (family, fast) not in cache:
            cache[family, fast] = open_runner(tiny(family), fast=fast)
            assert isinstance(cache[family, fast], FastRunner) == fast
        return cache[family, fast]

    return get


PATHS = [("llama", True), ("mistral", False), ("gpt_neox", True), ("gpt2", False), ("gemma2", False)]
IDS = [f"{family}-{'fast' if fast else 'ordinary'}" for family, fast in PATHS]


@pytest.mark.parametrize(("family", "fast"), PATHS, ids=IDS)
def test_a_draft_model_does_not_change_the_text(family: str, fast: bool, runners, texts, tiny) -> None:
    runner = runners(family, fast)
    draft = open_runner(resembling(tiny(family), 0.15), fast=fast)
    itself = open_runner(tiny(family), fast=fast)
    for prompt, wanted in zip(PROMPTS, texts(family)):
        trace = assert_decodes(runner, Method("draft", ModelDrafter(draft, GREEDY, VOCAB), StopRule(4)), wanted, prompt)
        assert 0 < sum(trace.accepted) < sum(trace.drafted)
        trace = assert_decodes(
            runner, Method("itself", ModelDrafter(itself, GREEDY, VOCAB), StopRule(4)), wanted, prompt
        )
        assert trace.accepted == trace.drafted


@pytest.fixture(scope="module")
def drafters(tmp_path_factory: pytest.TempPathFactory, texts) -> dict[str, Callable[[], Drafter]]:
    known = [text for family in ("llama", "gpt2", "gemma2") for text in texts(family)]
    return corpus_drafters(tmp_path_factory.mktemp("corpus"), VOCAB, known)


@pytest.mark.parametrize("name", ["prompt-lookup", "suffix", "rest", "adaptix", "lookahead"])
def test_drafts_from_texts_do_not_change_the_text(name: str, drafters, runners, texts) -> None:
    accepted = 0
    for family, fast in PATHS:
        for prompt, wanted in zip(PROMPTS, texts(family)):
            accepted += sum(
                assert_decodes(
                    runners(family, fast), Method(name, drafters[name](), StopRule()), wanted, prompt
                ).accepted
            )
    assert accepted > 10


@pytest.mark.parametrize("match", [2, 4])
def test_a_hybrid_does_not_change_the_text(match: int, drafters, runners, texts, tiny) -> None:
    """The corpus holds half of what is to be written: copies and the model's drafts take turns."""
    store, copied, drawn = drafters["rest"]().store, 0, 0
    for family, fast in PATHS:
        runner, draft = runners(family, fast), open_runner(resembling(tiny(family), 0.15), fast=fast)
        for prompt, wanted in zip(PROMPTS, texts(family)):
            hybrid = HybridDrafter(ModelDrafter(draft, GREEDY, VOCAB), store, match=match, length=4)
            asked = _count(hybrid.head)
            for name in ("length", "unsure"):
                stop = STOPS[name](MethodInputs(runner, GREEDY, draft))
                trace = assert_decodes(runner, Method("hybrid", hybrid, stop), wanted, prompt)
                drawn += asked[0]
                copied += trace.rounds - asked[0]
                asked[0] = 0
    assert copied > 10
    assert drawn > 10


def _count(drafter: ModelDrafter) -> list[int]:
    """How often a drafter is asked from now on."""
    asked, propose = [0], drafter.propose

    def counting(requests):  # type: ignore[no-untyped-def]
        asked[0] += len(requests)
        return propose(requests)

    drafter.propose = counting  # type: ignore[method-assign]
    return asked


@pytest.mark.parametrize("name", STOPS)
def test_no_stop_rule_changes_the_text(name: str, runners, texts, tiny) -> None:
    runner, draft = runners("llama", True), open_runner(resembling(tiny("llama"), 0.15))
    stop = STOPS[name](MethodInputs(runner, GREEDY, draft))
    for prompt, wanted in zip(PROMPTS * 2, texts("llama") * 2):
        assert_decodes(runner, Method(name, ModelDrafter(draft, GREEDY, VOCAB), stop), wanted, prompt)


@pytest.mark.parametrize("processor", [{"repetition_penalty": 1.5}, {"repetition_penalty": 0.7}], ids=str)
@pytest.mark.parametrize("family", ["llama", "gpt_neox", "opt"])
def test_repetition_penalties_act_as_in_generate(family: str, processor: dict[str, float], tiny) -> None:
    model = tiny(family)
    warp = LogitsWarper(**processor)
    for prompt in PROMPTS:
        wanted = generate(model, prompt, **processor)
        assert wanted != generate(model, prompt)
        runner = open_runner(model)
        for drafter in (
            ModelDrafter(open_runner(resembling(model, 0.15)), warp, VOCAB),
            Oracle(wanted, "tree", VOCAB),
            Oracle(wanted, "perfect", VOCAB),
        ):
            out = decode(runner, Method("", drafter, StopRule()), warp, prompt, max_new_tokens=NEW)
            assert out.ids == wanted
            assert sum(out.trace.accepted) > 3


@pytest.mark.parametrize("way", ["perfect", "tree", "alternating", "overlong", "empty"])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_the_text_ends_with_the_first_stop_token_wherever_it_stands_in_a_draft(
    family: str, way: str, runners, texts
) -> None:
    runner = runners(family, family == "llama")
    for prompt, text in zip(PROMPTS, texts(family)):
        for end in range(len(prompt), len(prompt) + 8):
            eos = text[end]
            first = text.index(eos, len(prompt))
            wanted = text[: first + 1]
            assert_decodes(runner, Method(way, Oracle(text, way, VOCAB), StopRule()), wanted, prompt, stop_ids={eos})


@pytest.mark.parametrize("new", range(1, 9))
def test_every_budget_is_met_exactly(new: int, runners, texts) -> None:
    wanted = texts("llama")[0][: len(PROMPTS[0]) + new]
    for way in WAYS:
        assert_decodes(
            runners("llama", True), Method(way, Oracle(wanted, way, VOCAB), StopRule()), wanted, PROMPTS[0], new
        )


@pytest.mark.parametrize(("family", "fast"), PATHS, ids=IDS)
def test_prompts_of_one_token_and_of_the_whole_context_are_served(family: str, fast: bool, runners, tiny) -> None:
    model, runner = tiny(family), runners(family, fast)
    draft = ModelDrafter(open_runner(resembling(model, 0.15), fast=fast), GREEDY, VOCAB)
    one = generate(model, [5], 10)
    assert_decodes(runner, Method("", draft, StopRule()), one, [5], 10)
    assert_decodes(runner, Method("", Oracle(one, "tree", VOCAB), StopRule()), one, [5], 10)

    full = [(7 * i * i + 3) % VOCAB for i in range(CONTEXT)]
    for free in (0, 3):  # tokens that still fit; the last one written is never read, so it may stand past the end
        prompt = full[: CONTEXT - free]
        wanted = generate(model, prompt, free + 1)
        for drafter in (draft, Oracle(wanted, "tree", VOCAB), Oracle(wanted, "perfect", VOCAB)):
            assert_decodes(runner, Method("", drafter, StopRule()), wanted, prompt, 20)
