"""The forecast by batch size: from costs and acceptances to speedups, vLLM's schedule, and the draft's files."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from pairs import make_pair, make_suite, make_tokenizer, save_pair

from decode.bench.costs import CostModel
from decode.bench.offline_acceptance import OfflineAlpha
from decode.bench.pair_profile import profile_pair
from decode.bench.prediction import forecast, replayed_speedup
from decode.bench.session import BenchOptions, Session
from decode.commands.profile import run
from decode.commands.settings import ProfileSettings
from decode.sampling import LogitsWarper

ALPHA = OfflineAlpha([[0.8] * 60, [1.0, 0.2] * 30])


def cost_at(batch: int, growth: float) -> CostModel:
    """A pair whose target reads another token of every text for `growth` of a forward."""
    verify = {n: 1 + growth * (n - 1) for n in (1, 2, 4, 8)}
    return CostModel(0.1, verify, 0.05, target_seconds=0.01 * batch**0.5, batch=batch, step_overhead=0.1)


@pytest.fixture(scope="module")
def found():
    return forecast([cost_at(8, 2.0), cost_at(1, 0.05), cost_at(2, 0.2), cost_at(4, 0.4)], [ALPHA], 6)


def test_speedups_follow_from_costs_and_acceptances(found):
    assert found.sizes == [1, 2, 4, 8]
    for cost in found.costs:
        for k, speedup in found.speedups(cost.batch).items():
            plain = replayed_speedup(ALPHA.texts, k, 0.1, cost.v, 0.05 + 0.1)
            assert speedup == pytest.approx(1.1 * plain)
    row = found.rows()[1]
    assert row["goodput_without_draft"] == pytest.approx(2 / (1.1 * 0.01 * 2**0.5))
    assert row["best_goodput"] == pytest.approx(row["goodput_without_draft"] * row["best_speedup"])


def test_the_batch_size_from_which_drafting_loses_lies_between_the_measured_ones(found):
    assert found.best(4) > 0
    assert found.best(8) == 0
    losing = found.losing_from
    assert 4 < losing <= 8
    assert found.best(losing - 1) > 0
    assert f"loses from batch {losing} on" in found.verdict()


def test_the_schedule_is_one_that_vllm_takes(found):
    for longest in (None, 2):
        schedule = found.schedule(longest)
        assert schedule[0][0] == 1
        assert schedule[-1][1] == 8
        assert all(first <= last and 0 <= k <= (longest or 6) for first, last, k in schedule)
        assert all(entry[0] == before[1] + 1 and entry[2] != before[2] for before, entry in pairwise(schedule))
        assert [k for _, _, k in schedule] == sorted((k for _, _, k in schedule), reverse=True)
        assert schedule[-1][2] == 0
    assert found.to_dict(2)["num_speculative_tokens_per_batch_size"] == found.schedule(2)


def test_a_pair_that_gains_everywhere_and_one_that_gains_nowhere():
    assert forecast([cost_at(1, 0.0), cost_at(2, 0.0)], [ALPHA], 4).losing_from is None
    hopeless = forecast([cost_at(2, 3.0)], [ALPHA], 4)
    assert hopeless.schedule() == [[1, 2, 0]]
    assert hopeless.losing_from == 1
    assert "loses at every batch size" in hopeless.verdict()


def test_costs_of_several_texts_are_measured(tiny):
    target, draft = make_pair(tiny)
    session = Session(target, {"small": draft}, make_tokenizer(), BenchOptions(8, 1, threads=1, pack="off"))
    made = profile_pair(session, "small", session.items(make_suite()), LogitsWarper(), longest=3, batch_sizes=[3, 1, 3])
    assert made.batches.sizes == [1, 3]
    one, three = made.batches.costs
    assert one is made.cost
    assert set(three.verify_cost) == {1, 2, 3, 4}
    assert three.cost_ratio > 0
    assert three.step_overhead > 0
    assert session.runner.forward.rows == 1  # the memory is given back
    assert {"batches", "num_speculative_tokens_per_batch_size", "round_costs"} <= made.to_dict().keys()


def test_the_drafts_files_get_the_lengths_and_no_section_twice(tiny, tmp_path, capsys):
    folder = save_pair(tmp_path, tiny)
    profile, card = folder / "draft" / "speculation_profile.json", folder / "draft" / "README.md"
    profile.write_text(json.dumps({"num_speculative_tokens": 2, "served": []}))
    card.write_text("# A draft\n\nUse it.\n")
    options = {"limit": 2, "max_new_tokens": 6, "longest": 3, "batch_sizes": [1, 2], "threads": 1, "pack": "off"}
    for _ in range(2):
        run(ProfileSettings(str(folder / "target"), draft=str(folder / "draft"), **options))
    content = json.loads(profile.read_text())
    assert content["served"] == []
    assert all(k <= 2 for _, _, k in content["num_speculative_tokens_per_batch_size"])
    assert [row["batch_size"] for row in content["batches"]] == [1, 2]
    text = card.read_text()
    assert text.startswith("# A draft\n\nUse it.\n")
    assert text.count("## Several texts at once") == 1
    assert '"num_speculative_tokens_per_batch_size": [[1, ' in text
    told = capsys.readouterr()
    assert 'vLLM: "num_speculative_tokens_per_batch_size": [[1, ' in told.out.replace("\n", " ")
    assert f"into {profile}" in told.err
