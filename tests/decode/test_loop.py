"""The loop: α(model, itself) = 1, cuts, errors at the border, annotations."""

import math

import pytest
import torch
from enumeration import ScriptedRunner
from families import VOCAB
from greedy import generate
from scripted import Oracle, RandomTree

from decode.core.draft import Draft
from decode.core.lengths import DraftLengths, RoundCosts
from decode.core.round import metrics
from decode.core.sampling import LogitsWarper, TorchRng
from decode.core.stop import StopRule
from decode.drafters.base import NoDrafter
from decode.drafters.model import ModelDrafter
from decode.errors import UserError
from decode.loop import Method, Text, decode, run
from decode.models.check import open_runner

PROMPT = [3, 7, 1, 9, 3, 7]
SAMPLE = LogitsWarper(temperature=1.0)


def test_a_cut_text_leaves_the_cache_at_the_cut(tiny) -> None:
    model = tiny("llama")
    text = generate(model, PROMPT, 24)
    eos = text[len(PROMPT) + 3]
    assert eos not in text[: len(PROMPT) + 3]
    runner = open_runner(model)
    lengths = DraftLengths(RoundCosts.of_ratios(0.01), 9)
    method = Method("", Oracle(text, "perfect", VOCAB), StopRule(), lengths=lengths)
    decoded = Text(runner, method, LogitsWarper(), PROMPT, max_new_tokens=24, stop_ids={eos})
    for _, result in run(runner, method, [decoded]):
        assert len(result.path) >= len(result.new)
        assert decoded.cache.length == len(PROMPT) + len(result.new) - 1
    assert lengths._drafted[2:5] == [[1, 1], [1, 1], [0, 0]]  # a draft that a stop id ends has not refused to go on


WARPS = [
    LogitsWarper(),
    LogitsWarper(temperature=1.2, top_k=5, top_p=0.8, min_p=0.05),
    LogitsWarper(temperature=1.0, repetition_penalty=1.6),
]


@pytest.mark.parametrize("warp", WARPS, ids=str)
def test_a_model_that_drafts_for_itself_is_always_accepted(warp: LogitsWarper, tiny) -> None:
    target, draft = open_runner(tiny("llama")), open_runner(tiny("llama"))
    system = Method("", ModelDrafter(draft, warp, VOCAB), StopRule(4))
    out = decode(target, system, warp, PROMPT, max_new_tokens=40, rng=TorchRng(0))
    measured = metrics([out.rounds])
    assert measured["alpha"] == pytest.approx(1, abs=1e-5)
    assert measured["accepted_per_drafted"] == 1
    assert measured["accepted_length"] == 5


@pytest.mark.parametrize(
    ("prompt", "options", "message"),
    [
        ([0, 48], {}, "token id 48,.*0 to 47"),
        ([-1, 5], {}, "token id -1,"),
        ([1], {"max_new_tokens": 0}, "max_new_tokens is 0"),
    ],
)
def test_bad_prompts_are_refused(prompt: list[int], options: dict[str, int], message: str, tiny) -> None:
    runner = open_runner(tiny("llama"))
    with pytest.raises(UserError, match=message):
        decode(runner, Method("", NoDrafter(), StopRule()), LogitsWarper(), prompt, **options)


def runner_with(value: float, dtype: torch.dtype = torch.float64) -> ScriptedRunner:
    """A target whose logits are 0 but for token 1 after a text that ends in token 2."""

    def logits(context: tuple[int, ...]) -> torch.Tensor:
        row = torch.zeros(5, dtype=dtype)
        if context[-1] == 2:
            row[1] = value
        return row

    return ScriptedRunner(logits, 5)


@pytest.mark.parametrize("warp", [LogitsWarper(), SAMPLE], ids=["greedy", "sampled"])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_logits_that_are_nan_or_infinite_are_an_error(value: float, warp: LogitsWarper) -> None:
    with pytest.raises(UserError, match="after 2 tokens"):
        decode(runner_with(value), Method("", NoDrafter(), StopRule()), warp, [3, 2])


@pytest.mark.parametrize("warp", [LogitsWarper(), SAMPLE], ids=["greedy", "sampled"])
def test_tokens_that_the_target_rules_out_and_large_half_precision_logits_are_legal(warp: LogitsWarper) -> None:
    system = Method("", NoDrafter(), StopRule())
    out = decode(runner_with(-math.inf), system, warp, [3, 2], max_new_tokens=1, rng=TorchRng(0))
    assert out.ids[2] != 1
    runner = ScriptedRunner(lambda context: torch.full((5,), 60000.0, dtype=torch.float16), 5)
    assert len(decode(runner, Method("", RandomTree(5), StopRule()), warp, [3, 2], rng=TorchRng(0)).ids) == 130


def test_every_token_knows_its_author_and_what_was_rejected_in_its_place() -> None:
    text = [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]

    def successor(context: tuple[int, ...]) -> torch.Tensor:
        logits = torch.zeros(12, dtype=torch.float64)
        logits[context[-1] + 1] = 50.0
        return logits

    class Plan(NoDrafter):
        trees = True
        drafts = (Draft([1, 2, 9], [-1, 0, 1]), Draft(()), Draft([7, 5, 6, 7], [-1, -1, 1, 2]))

        def start(self, prompt):  # type: ignore[no-untyped-def]
            return list(self.drafts)

        def draft(self, request):  # type: ignore[no-untyped-def]
            return request.state.pop(0) if request.state else Draft(())

    target = ScriptedRunner(successor, 12)
    out = decode(target, Method("", Plan(), StopRule()), LogitsWarper(), [0], max_new_tokens=9)
    assert out.ids == text
    assert [r.written_by for r in out.rounds] == [
        ["draft", "draft", "correction"], ["target"], ["draft", "draft", "draft", "target"], ["target"],
    ]  # fmt: skip
    assert [r.rejected for r in out.rounds] == [[[], [], [9]], [[]], [[], [], [], []], [[]]]
    assert [(r.drafted, r.accepted, r.tested) for r in out.rounds] == [(3, 2, 3), (0, 0, 0), (4, 3, 3), (0, 0, 0)]
    cut = decode(target, Method("", Plan(), StopRule()), LogitsWarper(), [0], max_new_tokens=9, stop_ids={2})
    (only,) = cut.rounds
    assert (cut.new_ids, only.written_by, only.rejected) == ([1, 2], ["draft", "draft"], [[], []])
