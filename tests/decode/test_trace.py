"""Metrics are functions of the trace, by their definitions."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from decode.draft import Draft
from decode.drafters.draft_model import ModelDrafter
from decode.loop import Method, decode
from decode.models.choose_runner import open_runner
from decode.sampling import LogitsWarper, TorchRng
from decode.stopping import StopRule
from decode.trace import Step, Trace


def make_round(tokens: list[int], parents: list[int], path: list[int], token: int = 9) -> Step:
    return Step(Draft.tree(tokens, parents), path, token, torch.empty(0), torch.empty(0), seconds=(0.25, 0.5))


CHAIN = [-1, 0, 1, 2]


@pytest.mark.parametrize(
    ("parents", "path", "tested"),
    [
        (CHAIN, [], 1),
        (CHAIN, [0, 1], 3),
        (CHAIN, [0, 1, 2, 3], 4),
        ([], [], 0),
        ([-1, -1, 0, 0], [], 1),
        ([-1, -1, 0, 0], [0], 2),  # its children were tested and refused
        ([-1, -1, 0, 0], [1], 1),  # it has none
        ([-1, -1, 0, 0], [0, 3], 2),
    ],
)
def test_tested_positions_are_the_accepted_ones_and_the_first_refused(
    parents: list[int], path: list[int], tested: int
) -> None:
    result = make_round([1, 2, 3, 4][: len(parents)], parents, path)
    assert (result.drafted, result.accepted, result.tested) == (len(parents), len(path), tested)
    assert result.emitted == [[1, 2, 3, 4][i] for i in path] + [9]


def test_authors_and_rejected_tokens_of_a_tree_round() -> None:
    result = make_round([5, 6, 7, 8], [-1, -1, 0, 0], [0])
    result.new = result.emitted
    assert result.written_by == ["draft", "correction"]
    assert result.rejected_at_end == [7, 8]
    result = make_round([5, 6, 7, 8], [-1, -1, 0, 0], [0, 3])
    result.new = result.emitted
    assert result.written_by == ["draft", "draft", "target"]
    assert result.rejected_at_end == []


def example() -> Trace:
    """Three rounds: 4 drafted 2 kept, 3 drafted 3 kept, nothing drafted; a tree of depth 2 with one node kept."""
    trace = Trace()
    trace.close(
        make_round([1, 2, 3, 4], CHAIN, [0, 1]), torch.tensor([0.9, 0.6, 0.3]), torch.tensor([0.0, 0.1, 0.2]), None
    )
    trace.close(
        make_round([1, 2, 3], CHAIN[:3], [0, 1, 2]), torch.tensor([1.0, 0.8, 0.6]), torch.tensor([0.0] * 3), None
    )
    trace.close(make_round([], [], []), None, None, None)
    trace.close(make_round([1, 2, 3, 4], [-1, -1, 0, 0], [0]), torch.tensor([0.5, 0.1]), None, torch.tensor([0.4, 0.2]))
    trace.tokens = 10
    trace.total_seconds = 4.0
    trace.prefill_seconds = 0.5
    return trace


def test_metrics_follow_their_definitions() -> None:
    overlaps = [0.9, 0.6, 0.3, 1.0, 0.8, 0.6, 0.5, 0.1]
    mean = sum(overlaps) / 8
    assert math.isnan(example().metrics()["alpha_se"])  # one text has no error
    assert {k: v for k, v in example().metrics().items() if k != "alpha_se"} == pytest.approx(
        {
            "rounds": 4,
            "tokens": 10,
            "alpha": mean,
            "accepted_per_tested": 6 / (3 + 3 + 0 + 2),
            "accepted_per_drafted": 6 / 11,
            "block_efficiency": (6 + 4) / 4,
            "drafted_per_round": 11 / 4,
            "tv_spent": 0.3 / 6,
            "js_distance": 0.3,
            "tokens_per_second": 2.5,
            "prefill_seconds": 0.5,
            "draft_seconds": 1.0,
            "verify_seconds": 2.0,
            "total_seconds": 4.0,
        },
        abs=1e-7,
    )


def test_acceptance_by_position_counts_the_drafts_that_nothing_cut() -> None:
    rows = example().acceptance_by_position()
    assert [row["rounds"] for row in rows] == [3] * 4  # depths 4, 3, 2 with 2, 3, 1 kept; one round drafted nothing
    assert [row["tested"] for row in rows] == [3, 3, 2, 0]
    assert [row["conditional"] for row in rows[:3]] == [1.0, pytest.approx(2 / 3), 0.5]
    assert math.isnan(rows[3]["conditional"])
    assert [row["marginal"] for row in rows] == pytest.approx([1.0, 2 / 3, 1 / 3, 0.0])
    assert 1 + sum(row["marginal"] for row in rows) == pytest.approx(1 + (2 + 3 + 1) / 3)  # tokens a drafted round

    cut = example()
    cut.close(make_round([1, 2], CHAIN[:2], []), torch.tensor([0.1]), None, None, cut=True)
    assert cut.acceptance_by_position()[0]["conditional"] == 1.0


def test_budget_and_stop_ids_mark_the_drafts_that_they_cut(tiny) -> None:
    model, warp = tiny("llama"), LogitsWarper()
    system = Method("", ModelDrafter(open_runner(tiny("llama")), warp, 64), StopRule(4))
    out = decode(open_runner(model), system, warp, [5, 9, 2, 7], max_new_tokens=13)
    assert (out.trace.drafted, out.trace.cut) == ([4, 4, 2], [False, False, True])
    rows = out.trace.acceptance_by_position()
    assert [(row["rounds"], row["marginal"]) for row in rows] == [(2, 1.0)] * 4
    end = out.new_ids[6]
    ended = decode(open_runner(model), system, warp, [5, 9, 2, 7], max_new_tokens=13, stop_ids={end})
    assert ended.trace.cut[-1]
    assert not ended.trace.cut[0] or end in out.new_ids[:4]


def test_errors_are_those_of_texts_and_a_repeated_text_adds_nothing() -> None:
    def text(*overlaps: float) -> Trace:
        trace = Trace()
        for value in overlaps:
            trace.close(make_round([1], [-1], [0] if value > 0.5 else []), torch.tensor([value]), None, None)
        return trace

    texts = [text(1.0, 1.0, 1.0), text(0.0, 0.0, 0.0), text(1.0, 0.0)]
    once, twice = Trace(), Trace()
    for i, one in enumerate(texts):
        once.extend(one, i)
        for _ in range(2):
            twice.extend(one, i)
    # sums 3, 0, 1 over 3, 3, 2 positions: mean 1/2, deviations 1.5, −1.5, 0
    assert once.metrics()["alpha_se"] == pytest.approx(math.sqrt(3 / 2 * 4.5) / 8)
    assert twice.metrics()["alpha_se"] == pytest.approx(once.metrics()["alpha_se"])
    assert once.acceptance_by_position()[0]["conditional_se"] == pytest.approx(math.sqrt(3 / 2 * 4.5) / 8)
    alone = Trace()
    for one in texts:
        alone.extend(one)
    assert alone.text == [0, 0, 0, 1, 1, 1, 2, 2]


def test_alpha_of_a_deterministic_draft_is_the_targets_mass_on_it() -> None:
    def logits(context: tuple[int, ...]) -> Tensor:
        return torch.tensor([0.5, 0.2, 0.3, 0.0], dtype=torch.float64).log()

    from enumeration import ScriptedRunner
    from scripted import RandomTree

    class Pair(RandomTree):
        def draft(self, request):  # type: ignore[no-untyped-def]
            return Draft.tree([0, 2], [-1, -1]) if request.max_depth else Draft.empty()

    out = decode(
        ScriptedRunner(logits, 4),
        Method("", Pair(4), StopRule()),
        LogitsWarper(temperature=1.0),
        [0],
        max_new_tokens=30,
        rng=TorchRng(1),
    )
    metrics = out.trace.metrics()
    assert metrics["alpha"] == pytest.approx(0.8)
    assert 0.5 < metrics["accepted_per_tested"] <= 1
