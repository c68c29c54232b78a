"""``profile``: costs, acceptance, predictions and the verdict of a pair."""

from __future__ import annotations

import json

import pytest
from pairs import make_pair, make_suite, make_tokenizer, save_pair

from decode.bench.costs import CostModel
from decode.bench.offline_acceptance import offline_alpha
from decode.bench.prediction import predicted_speedup
from decode.commands.profile import profile_pair, run
from decode.commands.settings import ProfileSettings
from decode.models.pair import Pair
from decode.sampling import LogitsWarper


@pytest.fixture(scope="module")
def pair(tiny):
    target, draft = make_pair(tiny)
    return Pair(target, make_tokenizer(), draft)


def profile_of(pair, **options):
    return profile_pair(ProfileSettings(max_new_tokens=24, **options), pair, [make_suite()])


def test_alpha_is_measured_on_the_targets_own_texts(pair):
    found = profile_of(pair, longest=4, temperature=1.0)
    warp, items = LogitsWarper(temperature=1.0), found.session.items(make_suite())
    answers = found.session.written([i.ids for i in items], warp)
    texts = [(i.ids + answer, len(i.ids)) for i, answer in zip(items, answers)]
    assert found.alpha.mean == pytest.approx(offline_alpha(pair.target, pair.draft, texts, warp).mean)
    assert 0 < found.alpha.mean < 1


def test_predictions_follow_from_the_measured_costs(pair):
    found = profile_of(pair, longest=15)
    cost = found.cost
    assert [row["draft_length"] for row in found.lengths] == list(range(1, 16))
    for row in found.lengths:
        k = row["draft_length"]
        assert row["round_cost"] == pytest.approx(k * cost.cost_ratio + cost.v(k + 1))
        assert row["predicted_speedup"] == pytest.approx(
            predicted_speedup(found.alpha.mean, k, CostModel(cost.cost_ratio, cost.verify_cost))
        )
    fastest = max(found.lengths, key=lambda row: row["with_bookkeeping"])
    assert found.best == (fastest["draft_length"] if fastest["with_bookkeeping"] > 1 else 0)
    assert found.verdict.startswith("speedup") == bool(found.best)


def test_costs_of_several_sequences_are_measured(pair):
    made = profile_of(pair, longest=3, batch_sizes=[3, 1, 3])
    one, three = made.batches["batches"]
    assert (one["cost_ratio"], one["batch_size"], three["batch_size"]) == (made.cost.cost_ratio, 1, 3)
    assert {1, 2, 3, 4} <= {n for n, _ in three["verify_cost"]}
    assert three["cost_ratio"] > 0
    assert {"batches", "num_speculative_tokens_per_batch_size", "round_costs"} <= made.to_dict().keys()


def test_the_command_prints_what_it_measured_and_writes_the_draft_lengths_by_batch_size(tiny, tmp_path, capsys):
    folder = save_pair(tmp_path, tiny)
    profile = folder / "draft" / "speculation_profile.json"
    profile.write_text(json.dumps({"num_speculative_tokens": 2, "served": []}))
    options = {"limit": 2, "max_new_tokens": 6, "longest": 3, "batch_sizes": [1, 2], "threads": 1, "pack": "off"}
    settings = ProfileSettings(str(folder / "target"), draft=str(folder / "draft"), json=True, **options)
    run(settings)
    printed = capsys.readouterr()
    found = json.loads(printed.out)
    assert {"cost_ratio", "overhead", "offline_alpha", "offline_alpha_se", "best_draft_length", "verdict"} <= set(found)
    assert [row["draft_length"] for row in found["draft_lengths"]] == [1, 2, 3]
    assert f"into {profile}" in printed.err
    content = json.loads(profile.read_text())
    assert content["served"] == []
    assert all(k <= 2 for _, _, k in content["num_speculative_tokens_per_batch_size"])
    assert [row["batch_size"] for row in content["batches"]] == [1, 2]
    settings.json = False
    run(settings)
    shown = capsys.readouterr().out
    assert "break-even α" in shown
    assert 'vLLM: "num_speculative_tokens_per_batch_size": [[1, ' in shown.replace("\n", " ")
