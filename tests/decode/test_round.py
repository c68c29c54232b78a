"""Metrics are functions of the rounds, by their definitions."""

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
from decode.core.round import Round, acceptance_by_position, metrics
from decode.core.sampling import LogitsWarper, TorchRng
from decode.core.stop import StopRule
from decode.drafters.model import ModelDrafter
from decode.loop import Method, decode
from decode.models.check import open_runner


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
