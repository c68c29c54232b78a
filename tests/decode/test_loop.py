"""The loop: α(model, itself) = 1, cuts, errors at the border, annotations; metrics are functions of its rounds."""

import math
import random
import tracemalloc

import pytest
import torch
from enumeration import ScriptedRunner
from families import VOCAB
from greedy import generate
from scripted import Oracle, RandomTree

from decode.core.draft import Draft
from decode.core.lengths import DraftLengths, RoundCosts
from decode.core.round import Round, acceptance_by_position, metrics
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


def make_round(tokens: list[int], parents: list[int], path: list[int], **measured) -> Round:  # type: ignore[no-untyped-def]
    draft = Draft(tokens, parents)
    return Round(draft, path, 9, [*(tokens[i] for i in path), 9], seconds=(0.25, 0.5), **measured)


CHAIN = [-1, 0, 1, 2]


def example() -> list[Round]:
    """Three rounds: 4 drafted 2 kept, 3 drafted 3 kept, nothing drafted; a tree of depth 2 with one node kept."""
    return [
        make_round([1, 2, 3, 4], CHAIN, [0, 1], overlap=[0.9, 0.6, 0.3], spent=[0.0, 0.1, 0.2]),
        make_round([1, 2, 3], CHAIN[:3], [0, 1, 2], overlap=[1.0, 0.8, 0.6], spent=[0.0] * 3),
        make_round([], [], []),
        make_round([1, 2, 3, 4], [-1, -1, 0, 0], [0], overlap=[0.5, 0.1], distance=[0.4, 0.2]),
    ]


def test_metrics_follow_their_definitions() -> None:
    measured = metrics([example()])
    assert math.isnan(measured.pop("alpha_se"))  # one text has no error
    assert measured == pytest.approx(
        {
            "rounds": 4,
            "tokens": 10,
            "alpha": sum([0.9, 0.6, 0.3, 1.0, 0.8, 0.6, 0.5, 0.1]) / 8,
            "accepted_per_tested": 6 / (3 + 3 + 0 + 2),
            "accepted_per_drafted": 6 / 11,
            "accepted_length": (6 + 4) / 4,
            "drafted_per_round": 11 / 4,
            "tv_spent": 0.3 / 6,
            "js_distance": 0.3,
            "draft_seconds": 1.0,
            "verify_seconds": 2.0,
        },
        abs=1e-7,
    )


def test_acceptance_by_position_counts_the_drafts_that_nothing_cut() -> None:
    rows = acceptance_by_position([example()])
    assert [row["rounds"] for row in rows] == [3] * 4  # depths 4, 3, 2 with 2, 3, 1 kept; one round drafted nothing
    assert [row["tested"] for row in rows] == [3, 3, 2, 0]
    assert [row["conditional"] for row in rows[:3]] == [1.0, pytest.approx(2 / 3), 0.5]
    assert math.isnan(rows[3]["conditional"])
    assert [row["marginal"] for row in rows] == pytest.approx([1.0, 2 / 3, 1 / 3, 0.0])
    assert 1 + sum(row["marginal"] for row in rows) == pytest.approx(1 + (2 + 3 + 1) / 3)  # tokens a drafted round
    cut = [*example(), make_round([1, 2], CHAIN[:2], [], cut=True)]
    assert acceptance_by_position([cut])[0]["conditional"] == 1.0


def test_accepted_tokens_behind_the_end_of_a_text_are_no_part_of_the_accepted_length(tiny) -> None:
    model, warp = tiny("llama"), LogitsWarper()
    system = Method("", ModelDrafter(open_runner(tiny("llama")), warp, 64), StopRule(4))
    out = decode(open_runner(model), system, warp, [5, 9, 2, 7], max_new_tokens=13)
    assert [(r.drafted, r.cut) for r in out.rounds] == [(4, False), (4, False), (2, True)]
    rows = acceptance_by_position([out.rounds])
    assert [(row["rounds"], row["marginal"]) for row in rows] == [(2, 1.0)] * 4
    assert (out.finish, metrics([out.rounds])["accepted_length"]) == ("length", 13 / 3)


@pytest.mark.parametrize("how", ["model", "perfect"])  # of which the first looks for stop ids while it drafts
@pytest.mark.parametrize("end", ["id", "string"])
def test_nothing_behind_the_end_of_a_text_counts(how: str, end: str, tiny) -> None:
    model, warp, prompt = tiny("llama"), LogitsWarper(), [5, 9, 2, 7]
    runner = open_runner(model)
    text = generate(model, prompt, 13)
    last = next(i for i in range(len(prompt) + 6, len(text)) if text[i] not in text[:i])

    class Ending:
        def ends(self, ids: list[int]) -> bool:
            return ids == text[: last + 1]

    drafter = ModelDrafter(open_runner(model), warp, VOCAB) if how == "model" else Oracle(text, "perfect", VOCAB)
    ends = {"stop_ids": {text[last]}} if end == "id" else {"stop_strings": Ending()}
    out = decode(runner, Method("", drafter, StopRule(5)), warp, prompt, max_new_tokens=40, **ends)
    assert out.ids == text[: last + 1]
    assert out.finish == ("eos" if end == "id" else "stop")
    r = out.rounds[-1]
    assert (r.drafted, r.tested, len(r.overlap or ())) == (r.accepted,) * 3
    assert sum(r.accepted for r in out.rounds) < len(out.new_ids)
    measured = metrics([out.rounds])
    assert (measured["alpha"], measured["accepted_per_tested"], measured["accepted_per_drafted"]) == (1.0, 1.0, 1.0)
    assert (r.cut, measured["accepted_length"]) == (True, len(out.new_ids) / len(out.rounds))


def test_a_tree_keeps_what_the_text_can_hold() -> None:
    """Nodes below a token that ends the text, and those deeper than its end, are no part of a round."""
    draft, place = Draft([1, 9, 2, 3, 4, 5], [-1, -1, 0, 1, 2, 4], [0.5] * 6).cut({9}, 2)
    assert (draft.ids, list(draft.parents), place) == ([1, 9, 2], [-1, -1, 0], {-1: -1, 0: 0, 1: 1, 2: 2})


def test_a_trace_is_small() -> None:
    """A round of a tree of 60 nodes keeps no more than its numbers."""
    generator = random.Random(0)
    parents = [generator.randrange(-1, i) for i in range(60)]
    tracemalloc.start()
    rounds = []
    for seed in range(200):
        draft = Draft([1000 * seed + i for i in range(60)], parents)
        draft.children(), draft.depths(), draft.depth
        rounds.append(Round(draft, [0, 1], 5, [1, 2, 5]))
    size, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert size / len(rounds) < 1500


def test_errors_are_those_of_texts_and_a_repeated_text_adds_nothing() -> None:
    def text(*overlaps: float) -> list[Round]:
        return [make_round([1], [-1], [0] if value > 0.5 else [], overlap=[value]) for value in overlaps]

    texts = [text(1.0, 1.0, 1.0), text(0.0, 0.0, 0.0), text(1.0, 0.0)]
    wanted = math.sqrt(3 / 2 * 4.5) / 8  # sums 3, 0, 1 over 3, 3, 2 positions: mean 1/2, deviations 1.5, −1.5, 0
    assert metrics(texts)["alpha_se"] == pytest.approx(wanted)
    assert metrics([*texts, *texts], [0, 1, 2, 0, 1, 2])["alpha_se"] == pytest.approx(wanted)


def test_alpha_of_a_deterministic_draft_is_the_targets_mass_on_it() -> None:
    class Pair(RandomTree):
        def draft(self, request):  # type: ignore[no-untyped-def]
            return Draft([0, 2], [-1, -1]) if request.max_depth else Draft(())

    target = ScriptedRunner(lambda _: torch.tensor([0.5, 0.2, 0.3, 0.0], dtype=torch.float64).log(), 4)
    warp = LogitsWarper(temperature=1.0)
    out = decode(target, Method("", Pair(4), StopRule()), warp, [0], max_new_tokens=30, rng=TorchRng(1))
    measured = metrics([out.rounds])
    assert measured["alpha"] == pytest.approx(0.8)
    assert 0.5 < measured["accepted_per_tested"] <= 1
