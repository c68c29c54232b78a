"""``profile``: costs, acceptance, predictions and the verdict of a pair."""

from __future__ import annotations

import json

import pytest
from heads import make_block_head, make_head
from pairs import make_pair, make_suite, make_tokenizer, save_pair
from plain_logits import offline_alpha

from decode.commands.profile import profile_pair, run
from decode.commands.settings import ProfileSettings
from decode.core.lengths import RoundCosts
from decode.core.sampling import LogitsWarper
from decode.measure.costs import speedups_by_length
from decode.models.open import Pair


@pytest.fixture(scope="module")
def pair(tiny):
    target, draft = make_pair(tiny)
    return Pair(target, make_tokenizer(), draft)


def profile_of(pair, **options):
    return profile_pair(ProfileSettings(max_new_tokens=24, **options), pair, [make_suite()])


def test_alpha_is_measured_on_the_targets_own_texts(pair):
    result = profile_of(pair, longest=4, temperature=1.0)
    warp, items = LogitsWarper(temperature=1.0), result.session.items(make_suite())
    answers = result.session.written([i.ids for i in items], warp)
    texts = [(i.ids + answer, len(i.ids)) for i, answer in zip(items, answers)]
    assert result.alpha.mean == pytest.approx(offline_alpha(pair.target, pair.draft, texts, warp).mean)
    assert 0 < result.alpha.mean < 1


@pytest.mark.parametrize("kind", ["dflash", "eagle"])
def test_no_draft_is_predicted_that_is_longer_than_a_block(pair, kind):
    """A feature head drafts as many tokens as are asked for."""
    head = make_block_head(pair.target, kind) if kind == "dflash" else make_head(pair.target, 1)
    longest = 6
    rows = profile_of(Pair(pair.target, pair.tokenizer, head), longest=longest).lengths
    assert [row["draft_length"] for row in rows] == [*range(1, (head.drafts or longest) + 1)]
    assert kind == "eagle" or head.drafts < longest


def test_predictions_follow_from_the_one_table_of_costs(pair):
    result = profile_of(pair, longest=6, batch_sizes=[3, 1, 3])
    rounds = result.cost.rounds
    assert {1, 3} == set(rounds.seconds)
    assert [row["draft_length"] for row in result.lengths] == list(range(1, 7))
    assert [row["ms"] for row in result.lengths] == [1e3 * rounds.round(1, k) for k in range(1, 7)]
    best = max(result.lengths, key=lambda row: row["predicted_speedup"])
    assert result.best == (best["draft_length"] if best["predicted_speedup"] > 1 else 0)
    assert result.verdict.startswith("no speedup is predicted, since")  # of three prompts
    assert "fewer than 6 prompts were timed" in result.verdict
    alone, three = result.batches["batches"]
    assert alone["best_speedup"] == max(1.0, best["predicted_speedup"])
    assert (alone["batch_size"], three["batch_size"]) == (1, 3)
    assert RoundCosts.from_dict(json.loads(json.dumps(result.to_dict()))["round_costs"]) == rounds
    assert speedups_by_length([result.alpha], RoundCosts.of_ratios(0.0), 2)[1] > 1


def test_the_command_prints_what_it_measured_and_writes_the_draft_lengths_by_batch_size(tiny, tmp_path, capsys):
    folder = save_pair(tmp_path, tiny)
    profile = folder / "draft" / "speculation_profile.json"
    profile.write_text(json.dumps({"num_speculative_tokens": 2, "served": []}))
    options = {"limit": 2, "max_new_tokens": 6, "longest": 3, "batch_sizes": [1, 2], "threads": 1, "pack": "off"}
    settings = ProfileSettings(str(folder / "target"), draft=str(folder / "draft"), json=True, **options)
    run(settings)
    printed = capsys.readouterr()
    result = json.loads(printed.out)
    assert {"cost_ratio", "verify_cost", "offline_alpha", "drafted_tokens", "best_draft_length", "verdict"} <= set(
        result
    )
    assert f"into {profile}" in printed.err
    content = json.loads(profile.read_text())
    assert content["served"] == []
    assert all(k <= 2 for _, _, k in content["num_speculative_tokens_per_batch_size"])
    assert content["batch_size_conditions"]["cpu"] == result["machine"]["cpu"]
    settings.json = False
    run(settings)
    shown = capsys.readouterr().out
    assert "3 prompts; α" in shown
    assert "at draft length" not in shown
    assert 'vLLM: "num_speculative_tokens_per_batch_size": [[1, ' in shown.replace("\n", " ")
