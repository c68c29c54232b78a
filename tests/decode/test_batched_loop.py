"""Texts decoded together: the joint distribution is the product of each text's own, and neighbours do not matter."""

import copy
from collections.abc import Callable

import pytest
import torch
from enumeration import Experiment, ScriptedRunner, joint_bias, random_table
from families import CONTEXT, VOCAB, resembling
from greedy import GREEDY, generate, together
from plain_logits import after
from scripted import RandomTree, corpus_drafters
from transformers import PreTrainedModel

from decode.core import verify
from decode.core.lengths import DraftLengths, RoundCosts
from decode.core.sampling import LogitsWarper, TorchRng
from decode.core.stop import Fixed, StopRule, max_probability, token_probability
from decode.core.verify import AcceptanceRule, BlockVerification, Ears, Exact, JensenShannon
from decode.drafters.base import Drafter, NoDrafter
from decode.drafters.hybrid import HybridDrafter
from decode.drafters.model import EarlyExitDrafter, ModelDrafter
from decode.loop import Method, Text, decode, decode_texts, run
from decode.methods import STOPS, MethodInputs
from decode.models import api
from decode.models.api import Model
from decode.models.check import open_runner
from decode.models.fast.forward import FastRunner, fast_runner
from decode.models.huggingface import HuggingFaceRunner
from decode.options import MethodOptions

TOLERANCE = 1e-12
SAMPLE = LogitsWarper(temperature=0.7)
PAIR = [[0, 2, 1, 0, 2], [1, 0]]
"""Two prompts of different lengths for tables of three tokens."""


def tables(vocab: int = 3) -> tuple[ScriptedRunner, ScriptedRunner]:
    return ScriptedRunner(random_table(1, vocab), vocab), ScriptedRunner(random_table(3, vocab), vocab)


@pytest.mark.parametrize("name", [name for name in STOPS if name not in ("length", "unsure", "copy", "suffix")])
def test_two_texts_are_lossless_together_with_every_adaptive_stop_rule(name: str) -> None:
    target, draft = tables(2)
    stop = STOPS[name](MethodInputs(target, SAMPLE, draft))
    system = Method(name, ModelDrafter(draft, SAMPLE, 2), stop)
    before = stop.threshold.value
    assert joint_bias(target, system, SAMPLE, [[0, 1, 1], [1]], 3) < TOLERANCE
    assert stop.threshold.value == before  # what a text learns stays with it


@pytest.mark.parametrize(("stop", "refuse"), [("length", False), ("cost-optimal", False), ("cost-optimal", True)])
def test_two_texts_whose_draft_lengths_are_chosen_together_are_lossless(stop: str, refuse: bool) -> None:
    class Watched(DraftLengths):
        def limit(self, batch: int) -> int:
            limits.add(limit := super().limit(batch))
            return limit

        def reset(self) -> None:
            super().reset()
            rule.threshold = STOPS[stop](inputs).threshold  # which the texts share too

    limits: set[int] = set()
    target, draft = tables(2)
    costs = RoundCosts({1: {0: 1.0, 1: 1.58, 3: 2.7}, 2: {0: 1.0, 1: 1.63, 3: 2.85}})
    inputs = MethodInputs(target, SAMPLE, draft, options=MethodOptions(draft_length=3))
    rule = STOPS[stop](inputs)
    if refuse:
        rule.confidence, rule.refuse = max_probability, True
    system = Method("", ModelDrafter(draft, SAMPLE, 2), rule, lengths=Watched(costs, 3))
    assert joint_bias(target, system, SAMPLE, [[0, 1, 1], [1]], 3) < TOLERANCE
    assert len(limits) > 1  # what was accepted of either text decides for both
    assert 0 in limits


@pytest.mark.parametrize("name", ["prompt-lookup", "suffix", "rest", "adaptix", "lookahead", "random-tree"])
def test_two_texts_are_lossless_together_with_every_drafter(name: str, tmp_path) -> None:
    target, _ = tables()
    drafter = corpus_drafters(tmp_path, 3, [PAIR[0] * 3])[name]()
    assert joint_bias(target, Method(name, drafter, StopRule()), SAMPLE, PAIR, 3) < TOLERANCE


def test_copied_drafted_and_waiting_texts_that_end_at_different_times_are_lossless_together() -> None:
    """The copied tokens were not drawn from the q that the draft model leaves beside them."""
    target, draft = tables(2)
    drafter = ModelDrafter(draft, SAMPLE, 2)
    hybrid = Method("hybrid", HybridDrafter(drafter, match=2, length=2), StopRule(2))
    assert joint_bias(target, hybrid, SAMPLE, [[0, 1, 0, 1], [1]], 3) < TOLERANCE
    system, prompts = Method("model", drafter, StopRule(2)), [[0, 1, 1], [1], [0, 0]]
    for stop_ids in ((), (1,)):
        assert joint_bias(target, system, SAMPLE, prompts, 2, batch_size=2, stop_ids=stop_ids) < TOLERANCE


def unequal() -> tuple[ScriptedRunner, Method]:
    """A pair whose texts draft one to three tokens each, of different numbers in one round."""
    target, draft = tables(2)
    stop = StopRule(3, token_probability, threshold=Fixed(0.45))
    return target, Method("", ModelDrafter(draft, SAMPLE, 2), stop)


@pytest.mark.parametrize("rule", [Exact(), BlockVerification(), Ears(0.0), JensenShannon(threshold=0.0)])
def test_texts_with_drafts_of_unequal_lengths_are_lossless_together(rule: AcceptanceRule) -> None:
    target, system = unequal()
    system.rule = rule
    assert joint_bias(target, system, SAMPLE, [[0, 1, 1], [1]], 3) < TOLERANCE


def of_the_neighbour(values: torch.Tensor) -> torch.Tensor:
    return values.roll(1, 0)


FAULTS = {
    "a residual at the neighbour's position": ("at", lambda at: lambda rows, m: at(rows, of_the_neighbour(m))),
    "the neighbour's ratios": ("ratio", lambda ratio: lambda p, q, x: of_the_neighbour(ratio(p, q, x))),
    "the neighbour's results": ("fetch", lambda get: lambda *all: get(*(x.roll(1, 0) if x.dim() else x for x in all))),
}


@pytest.mark.parametrize("name", FAULTS)
def test_faults_of_a_batch_are_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (target, system), (part, changed) = unequal(), FAULTS[name]
    monkeypatch.setattr(verify, part, changed(getattr(verify, part)))
    assert joint_bias(target, system, SAMPLE, [[0, 1, 1], [1]], 2) > 1e-3


WARP = LogitsWarper(temperature=1.3, top_k=2)  # two tokens a position: many rounds at little cost
LONG = [3, 1, 4, 1, 5, 1, 4]


CASES = [
    ("llama", fast_runner),
    ("mistral", fast_runner),
    ("mistral", HuggingFaceRunner),
    ("gpt_neox", fast_runner),
    ("gpt2", HuggingFaceRunner),
    ("gemma3", fast_runner),
]


@pytest.mark.parametrize(("family", "runner"), CASES, ids=lambda value: getattr(value, "__name__", value))
def test_chains_and_trees_are_lossless_through_real_caches(family: str, runner: type[Model], double) -> None:
    """Tiny random models in float64, with the real caches, positions and masks."""
    model = double(family, vocab_size=8)
    chains, trees = (Experiment(runner(model), WARP, LONG, tokens, forward=after(model)) for tokens in (3, 5))
    drafter = ModelDrafter(runner(resembling(model, 0.2)), WARP, 8)
    assert chains.bias(Method("model", drafter, StopRule(5))) < TOLERANCE
    assert {r.accepted for trace in chains.traces for r in trace} == {0, 1, 2}
    accepted = set()
    for seed in range(2):
        assert trees.bias(Method("tree", RandomTree(8, nodes=60, seed=seed), StopRule())) < TOLERANCE
        accepted |= {r.accepted for trace in trees.traces for r in trace}
    assert accepted >= {0, 1}  # the cache was gathered along paths


@pytest.mark.parametrize(("family", "runner"), [CASES[0], CASES[3], CASES[4]])
def test_two_texts_are_lossless_through_real_caches(family: str, runner: type[Model], double, tmp_path) -> None:
    model = double(family, vocab_size=8)
    target, draft = runner(model), runner(resembling(model, 0.2))
    drafters = [ModelDrafter(draft, WARP, 8), corpus_drafters(tmp_path, 8, [LONG * 3])["lookahead"]()]
    if isinstance(target, FastRunner):
        drafters.append(EarlyExitDrafter(target, WARP, 1))
    with torch.inference_mode():
        for drafter in drafters:
            assert joint_bias(target, Method("", drafter, StopRule(3)), WARP, [LONG, [2, 7]], 2) < TOLERANCE


PROMPTS = [[3, 7, 1, 9], [1, 2, 3, 1, 2, 3, 1, 2], [5], [9, 9, 4] * 6, [40, 2], [8] * (CONTEXT - 6), [11, 30, 7]]


@pytest.fixture(scope="module")
def methods(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, PreTrainedModel, Model], Drafter]:
    known = corpus_drafters(tmp_path_factory.mktemp("corpus"), VOCAB, PROMPTS)

    def get(name: str, model: PreTrainedModel, runner: Model, warp: LogitsWarper = GREEDY) -> Drafter:
        if name == "model":
            return ModelDrafter(open_runner(resembling(model, 0.15), fast=isinstance(runner, FastRunner)), warp, VOCAB)
        if name == "early-exit":
            assert isinstance(runner, FastRunner)
            return EarlyExitDrafter(runner, warp, 1)
        return known[name]()

    return get


NAMES = ["none", "model", "early-exit", "prompt-lookup", "suffix", "rest", "adaptix", "lookahead", "random-tree"]


@pytest.mark.parametrize("name", NAMES)
def test_every_text_is_what_generate_writes(name: str, methods, tiny) -> None:
    model = tiny("llama")
    runner = open_runner(model)
    end = generate(model, PROMPTS[0], 20)[12]
    wanted = [generate(model, p, min(20, CONTEXT + 1 - len(p)), eos_token_id=end) for p in PROMPTS]
    assert len({len(text) - len(prompt) for text, prompt in zip(wanted, PROMPTS)}) > 2  # they end at different times
    system = Method(name, methods(name, model, runner), StopRule(4))
    for batch_size in (1, 3, 16):
        texts = together(runner, system, PROMPTS, batch_size=batch_size, max_new_tokens=20, stop_ids={end})
        assert [text.ids for text in texts] == wanted
        assert runner.network.cache.tensor.shape[1] == 1  # the memory is given back
    if name not in ("none", "random-tree"):
        assert sum(sum(r.accepted for r in text.rounds) for text in texts) > 0


def test_texts_whose_drafting_is_switched_off_and_on_are_what_generate_writes(methods, tiny) -> None:
    model = tiny("llama")
    runner = open_runner(model)
    wanted = [generate(model, p, min(20, CONTEXT + 1 - len(p))) for p in PROMPTS]
    for name in ("model", "early-exit"):
        # dear drafts: after the first rounds only a probe now and then, whose draft has to read what it missed
        lengths = DraftLengths(RoundCosts({1: {0: 1.0, 1: 1.9, 4: 4.6}}), 4)
        system = Method(name, methods(name, model, runner), StopRule(4), lengths=lengths)
        for _ in range(4):
            texts = together(runner, system, PROMPTS, batch_size=3, max_new_tokens=20)
            assert [text.ids for text in texts] == wanted
        drafted = [k for text in texts for k in [r.drafted for r in text.rounds]]
        assert 0 < sum(k > 0 for k in drafted) < len(drafted) / 2


@pytest.mark.parametrize("name", ["model", "early-exit", "adaptix", "lookahead"])
def test_a_sampled_text_does_not_depend_on_its_neighbours(name: str, methods, tiny) -> None:
    model, warp = tiny("llama"), LogitsWarper(1.0)
    runner = open_runner(model)
    drafter = methods(name, model, runner, warp)
    stop = STOPS["entropy"](MethodInputs(runner, warp, None))
    system = Method(name, drafter, stop)

    def texts(numbers: list[int], batch_size: int | None) -> list[list[int]]:
        rngs = [TorchRng(i) for i in numbers]
        prompts = [PROMPTS[i] for i in numbers]
        options = {"batch_size": batch_size, "max_new_tokens": 16, "stop_ids": {7}}
        return [text.new_ids for text in decode_texts(runner, system, warp, prompts, rngs=rngs, **options)]

    alone = [texts([i], None)[0] for i in range(len(PROMPTS))]
    assert texts(list(range(len(PROMPTS))), 3) == alone
    assert texts([4, 0, 6], None) == [alone[4], alone[0], alone[6]]
    first = decode(runner, copy.copy(system), warp, PROMPTS[0], rng=TorchRng(0), max_new_tokens=16, stop_ids={7})
    assert first.new_ids == alone[0]  # a text alone is a batch of one
    together = TorchRng.together
    with pytest.MonkeyPatch.context() as patch:  # a neighbour's random numbers
        patch.setattr(TorchRng, "together", staticmethod(lambda rngs, *given: together([*rngs[1:], rngs[0]], *given)))
        assert texts(list(range(len(PROMPTS))), 3) != alone


def test_prompts_that_cannot_be_decoded_do_not_keep_the_others_from_it(tiny) -> None:
    model = tiny("llama")
    runner = open_runner(model)
    prompts = [[3, 7, 1, 9], [], [1] * (CONTEXT + 1), [5], [VOCAB]]
    system = Method("none", NoDrafter(), StopRule())
    texts = together(runner, system, prompts, batch_size=2, max_new_tokens=8)
    assert [bool(text.error) for text in texts] == [False, True, True, False, True]
    assert [text.ids for text in (texts[0], texts[3])] == [generate(model, prompts[i], 8) for i in (0, 3)]
    assert "the prompt is empty" in str(texts[1].error)
    assert "shorten it" in str(texts[2].error)
    assert [text.new_ids for text in texts if text.error] == [[], [], []]


@pytest.mark.parametrize("fast", [True, False])
def test_no_more_texts_are_decoded_at_once_than_memory_holds(
    fast: bool, methods, tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny("llama")
    runner = open_runner(model, fast=fast)
    system = Method("model", methods("model", model, runner), StopRule(3))
    prompts, reserved = [[3, 7, 1, 9], [5], [], [40, 2, 7]], []
    both = 2 * (2 * 2 * 2 * 8 * 4)  # target and draft: layers, keys and values, their heads, width, float32
    monkeypatch.setattr(api, "free_memory", lambda _: api.GROWTH * both * 2.2 * 12)
    kind, reserve = type(runner), type(runner).reserve
    monkeypatch.setattr(kind, "reserve", lambda self, *given: reserved.append(given[0]) or reserve(self, *given))
    with pytest.warns(UserWarning, match="memory holds 2 texts of 12 tokens; writing 2 instead of 3 at once"):
        texts = together(runner, system, prompts, max_new_tokens=8)
    assert max(reserved) == 2
    assert [text.ids for text in texts] == [generate(model, p, 8) if p else [] for p in prompts]


def test_finished_texts_hold_no_caches_and_strings_end_texts_of_a_batch(methods, tiny) -> None:
    model = tiny("llama")
    runner = open_runner(model, fast=False)
    system = Method("model", methods("model", model, runner), StopRule(4))
    wanted = [generate(model, p, min(12, CONTEXT + 1 - len(p))) for p in PROMPTS]

    class Third:
        def ends(self, ids: list[int]) -> bool:
            return any(ids == text[: len(prompt) + 3] for text, prompt in zip(wanted, PROMPTS))

    texts = together(runner, system, PROMPTS, batch_size=2, max_new_tokens=12, stop_strings=Third())
    assert [text.ids for text in texts] == [text[: len(prompt) + 3] for text, prompt in zip(wanted, PROMPTS)]
    assert {text.finish for text in texts} == {"stop"}
    assert all(text.cache is None and text.state is None for text in texts)


def test_a_text_ends_while_the_draft_has_read_nothing_of_another(tiny) -> None:
    model = tiny("llama")
    target, draft = open_runner(model), open_runner(resembling(model, 0.15))
    rounds = []
    for new in (3, 20):  # as two threads do; drafting never pays, so that the draft reads no prompt
        lengths = DraftLengths(RoundCosts({1: {0: 1.0, 1: 9.0}}), 4)
        system = Method("", ModelDrafter(draft, GREEDY, VOCAB), StopRule(4), lengths=lengths)
        text = Text(target, system, GREEDY, PROMPTS[0], max_new_tokens=new)
        rounds.append((text, run(target, system, [text])))
        next(rounds[-1][1])
    for text, others in rounds:
        for _ in others:
            pass
        assert text.ids == generate(model, PROMPTS[0], len(text.ids) - len(PROMPTS[0]))
