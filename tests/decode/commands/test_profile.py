"""``profile``: costs, acceptance, predictions and the verdict of a pair."""

from __future__ import annotations

import json

import pytest
from pairs import make_pair, make_suite, make_tokenizer, save_pair

from decode.bench.offline_acceptance import offline_alpha
from decode.bench.pair_profile import profile_pair
from decode.bench.prediction import predicted_speedup
from decode.bench.session import BenchOptions, Session
from decode.commands.profile import run
from decode.commands.settings import ProfileSettings
from decode.errors import UserError
from decode.sampling import LogitsWarper


@pytest.fixture(scope="module")
def models(tiny):
    return make_pair(tiny)


def bench_of(models):
    target, draft = models
    return Session(target, {"small": draft, "self": target}, make_tokenizer(), BenchOptions(24, 1))


def test_alpha_is_measured_on_the_targets_own_texts(models):
    bench = bench_of(models)
    items = bench.items(make_suite())
    warp = LogitsWarper(temperature=1.0)
    found = profile_pair(bench, "small", items, warp, longest=4)
    texts = [(i.ids + bench.answer(i.ids, warp, seed), len(i.ids)) for seed, i in enumerate(items)]
    assert found.alpha.mean == pytest.approx(offline_alpha(*models, texts, warp).mean)
    assert 0 < found.alpha.mean < 1


def test_a_model_drafting_for_itself_is_always_accepted(models):
    bench = bench_of(models)
    found = profile_pair(bench, "self", bench.items(make_suite()), LogitsWarper(), longest=3)
    assert found.alpha.mean == 1
    for row in found.lengths:
        assert row["predicted_speedup"] == pytest.approx((row["draft_length"] + 1) / row["round_cost"])


def test_predictions_follow_from_the_measured_costs(models):
    bench = bench_of(models)
    found = profile_pair(bench, "small", bench.items(make_suite()), LogitsWarper(), longest=15)
    cost = found.cost
    assert [row["draft_length"] for row in found.lengths] == list(range(1, 16))
    for row in found.lengths:
        k = row["draft_length"]
        assert row["round_cost"] == pytest.approx(k * cost.cost_ratio + cost.v(k + 1))
        assert row["predicted_speedup"] == pytest.approx(
            predicted_speedup(found.alpha.mean, k, cost.cost_ratio, cost.v)
        )
        assert row["with_bookkeeping"] <= row["replayed_speedup"] + 1e-9
    fastest = max(found.lengths, key=lambda row: row["with_bookkeeping"])
    assert found.best == (fastest["draft_length"] if fastest["with_bookkeeping"] > 1 else 0)
    assert ("should gain" in found.verdict) == bool(found.best)


def test_json_names_what_was_measured(tiny, tmp_path, capsys):
    folder = save_pair(tmp_path, tiny)
    settings = ProfileSettings(
        target=str(folder / "target"),
        draft=str(folder / "draft"),
        suite=["open"],
        limit=2,
        max_new_tokens=16,
        longest=3,
        json=True,
    )
    run(settings)
    found = json.loads(capsys.readouterr().out)
    assert [n for n, _ in found["verify_cost"]][:16] == list(range(1, 17))
    assert {"cost_ratio", "overhead", "offline_alpha", "offline_alpha_se", "best_draft_length", "verdict"} <= set(found)
    assert len(found["draft_lengths"]) == 3
    assert found["machine"]["cores"] >= 1
    settings.json = False
    run(settings)
    shown = capsys.readouterr().out
    assert found["verdict"].split(":")[0].split(" of ")[0] in shown
    assert "break-even α" in shown


def test_a_missing_draft_is_refused():
    with pytest.raises(UserError, match="--draft is missing"):
        run(ProfileSettings(target="somewhere"))
