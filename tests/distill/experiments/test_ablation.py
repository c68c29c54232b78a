"""Variations of AdaSPEC: what each setting changes of the objective, names, fingerprints; and their comparison."""

from __future__ import annotations

import io
import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console
from tiny_run import begun, run_tiny, tiny_settings

from decode.bench.offline_acceptance import OfflineAlpha, paired, prompt_numbers
from decode.bench.prediction import replay
from decode.errors import UserError
from distill.config.drafts import AdaSpecSettings, ComparisonSettings, DistillSettings
from distill.experiments.ablation import AblateSettings, Measured, ablate, verdict
from distill.files import RunDir
from distill.losses.divergences import Divergence
from distill.losses.objective import objective_of
from distill.losses.selection import Selection
from distill.pipeline import run_of
from distill.stages import stage_fingerprints

STEPS = 10


def objective(**settings: Any) -> Any:
    return objective_of(ComparisonSettings(name="variant", **settings), DistillSettings(), STEPS)


def test_a_selection_of_all_tokens_asks_for_no_reference() -> None:
    assert objective(k=1.0).selection is None
    assert objective(k=1.0, normalisation="response").selection is not None
    assert objective(k=0.9).selection is not None


def test_plain_adaspec_is_the_objective_it_was() -> None:
    plain = objective_of(AdaSpecSettings(), DistillSettings(divergence="jsd"), STEPS)
    assert plain.divergence == Divergence("jsd")
    assert plain.selection == Selection(0.4)
    assert {plain.divergence_at(step).name for step in range(STEPS)} == {"jsd"}


def test_the_loss_switches_after_the_share_of_forward_kl_and_the_ranking_does_not() -> None:
    switched = objective(divergence="tv", kl_first=0.3)
    names = [switched.divergence_at(step).name for step in range(STEPS)]
    assert names == ["forward_kl"] * 3 + ["tv"] * 7
    assert switched.divergence.name == "tv"
    without = objective(method="distillspec", k=1.0, divergence="tv", kl_first=0.3)
    assert without.selection is None
    assert without.divergence_at(2).name == "forward_kl"


@pytest.mark.parametrize(
    ("draft", "words"),
    [
        (AdaSpecSettings(kl_first=0.3, divergence="tv"), "with divergence, kl_first set this is not AdaSPEC"),
        (AdaSpecSettings(name="a", kl_first=1.0), "draft.kl_first is 1.0"),
        (AdaSpecSettings(name="a", divergence="kl"), "draft.divergence is 'kl', expected forward_kl"),  # type: ignore[arg-type]
        (AdaSpecSettings(name="a", on_policy=1.5), "draft.on_policy is 1.5"),
        (AdaSpecSettings(seed=-1), "draft.seed is -1"),
        (AdaSpecSettings(name="reference"), "draft.name is 'reference', which is taken"),
        (ComparisonSettings(name="signals"), "the name of a file under work/"),
        (ComparisonSettings(name="adaspec"), "names a standard draft"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(tmp_path: Path, draft: Any, words: str) -> None:
    settings = tiny_settings(tmp_path, comparisons=[])
    if isinstance(draft, ComparisonSettings):
        settings.comparisons = [draft]
    else:
        settings.draft = draft
    with pytest.raises(UserError, match=words):
        settings.validate()


def test_a_variation_in_place_of_adaspec_bears_its_own_name_in_reports(tmp_path: Path) -> None:
    settings = tiny_settings(tmp_path, draft=AdaSpecSettings(name="tv-after-kl", divergence="tv", kl_first=0.3))
    settings.comparisons.append(ComparisonSettings(name="adaspec"))
    settings.validate()
    assert list(run_of(settings).drafts) == ["undistilled", "distillspec", "tv-after-kl", "equal-tokens", "adaspec"]


def test_settings_left_alone_keep_the_fingerprint_and_others_change_it(tmp_path: Path) -> None:
    settings = tiny_settings(tmp_path)
    before, parts = stage_fingerprints(settings)["draft"]
    assert set(parts["adaspec"]) == {"k", "scope", "normalisation", "iso", "epochs", "lr"}
    for change in ({"seed": 1}, {"on_policy": 0.5}, {"weigh_by": "accepted"}):
        other = replace(settings, draft=replace(settings.draft, **change))
        assert stage_fingerprints(other)["draft"][0] != before
        assert stage_fingerprints(other)["reference"] == stage_fingerprints(settings)["reference"]


def test_a_draft_may_write_its_own_texts_where_the_reference_does_not(tmp_path: Path) -> None:
    own = ComparisonSettings(name="own", method="distillspec", k=1.0, iso="epochs", on_policy=1.0)
    seeded = ComparisonSettings(name="seeded", method="distillspec", k=1.0, iso="epochs", seed=7)
    settings = tiny_settings(tmp_path, comparisons=[own, seeded])
    settings.reference.responses.max_new_tokens = 4
    _, run, _ = run_tiny(begun(settings))
    accounts = {stage: run.record(stage).account for stage in ("reference", "own", "seeded")}  # type: ignore[union-attr]
    assert (
        accounts["own"]["teacher_tokens"] <= 4 * accounts["own"]["examples"] < accounts["reference"]["teacher_tokens"]
    )
    assert accounts["seeded"]["examples"] == accounts["reference"]["examples"]
    weights = {stage: (run.path(stage) / "model.safetensors").read_bytes() for stage in ("reference", "own", "seeded")}
    assert len(set(weights.values())) == 3


def test_the_ablation_compares_seed_by_seed_and_goes_on_where_it_was(tmp_path: Path) -> None:
    _, donor, _ = run_tiny(begun(tiny_settings(tmp_path, comparisons=[])))
    tiny = tiny_settings(tmp_path, name="ablation", comparisons=[ComparisonSettings(name="late-tv", divergence="tv")])
    tiny.evaluation.prompts, tiny.evaluation.max_new_tokens = 4, 6
    settings = AblateSettings(**vars(tiny))
    settings.ablation.seeds = [3, 4]
    text = io.StringIO()
    folder = ablate(settings, Console(file=text, width=200))
    assert "already made: target, initial, reference" in text.getvalue()
    content = json.loads((folder / "ablation.json").read_text())
    assert [row["name"] for row in content["variants"]] == ["distillspec", "adaspec", "late-tv"]
    assert [row["seeds"] for row in content["variants"]] == [2, 2, 2]
    assert set(content["variants"][2]["by_seed"]) == {"3", "4"}
    assert (folder / "ablation.md").read_text().count("\n| ") == 4
    weights = [(RunDir(folder).path(f"distillspec-seed{seed}") / "model.safetensors").read_bytes() for seed in (3, 4)]
    assert weights[0] != weights[1]
    again = io.StringIO()
    ablate(AblateSettings(**vars(tiny), ablation=settings.ablation), Console(file=again, width=200))
    assert again.getvalue().count("up to date") == 3 + 6
    assert json.loads((folder / "ablation.json").read_text())["variants"] == content["variants"]
    assert donor.record("draft") is not None


def measured(gains: dict[str, list[float]]) -> Measured:
    """Variants whose α is 0.5 plus these gains, by seed, on four texts."""
    found = Measured(list(gains))
    noise = np.array([0.001, -0.001, 0.002, -0.002])
    for name, by_seed in gains.items():
        for seed, gain in enumerate(by_seed):
            alpha = OfflineAlpha([[0.5 + gain + (gain != 0) * wiggle] * 3 for wiggle in noise])
            used = {"optimiser_steps": 1, "teacher_tokens": 2, "selected_tokens": 1, "seconds": 3.0}
            found.add(name, asdict(AdaSpecSettings()), seed, {"sampled": [alpha], "greedy": [alpha]}, used)
    return found


def test_the_gain_is_the_mean_over_seeds_with_errors_over_seeds_and_over_texts() -> None:
    found = measured({"distillspec": [0.0, 0.0, 0.0], "adaspec": [0.01, 0.02, 0.03]}).gain("adaspec", "distillspec")
    assert found["gain"] == pytest.approx(0.02)
    assert found["se_seeds"] == pytest.approx(0.01 / 3**0.5)
    assert found["se_texts"] == pytest.approx(np.std([0.001, -0.001, 0.002, -0.002], ddof=1) / 2)
    assert found["se"] == pytest.approx(np.hypot(found["se_seeds"], found["se_texts"]))


def test_the_verdict_names_a_winner_only_beyond_twice_the_error() -> None:
    base = {"distillspec": [0.0, 0.0], "adaspec": [0.01, 0.012]}
    told = "AdaSPEC − DistillSpec: +0.0110 ± 0.0014 over 2 seeds."
    assert verdict(measured({"distillspec": [0.0]}).rows()) == ""
    assert verdict(measured(base).rows()) == told
    assert verdict(measured(base | {"x": [0.02, 0.022]}).rows()).startswith(f"{told} x beats AdaSPEC: +0.0100 ± ")
    assert verdict(measured(base | {"x": [0.02, 0.002]}).rows()).startswith(f"{told} No variant beats AdaSPEC")
    assert verdict(measured(base | {"x": [0.001, 0.002]}).rows()).endswith("seeds.")


def test_the_block_efficiency_of_a_head_follows_each_drafted_token_s_own_acceptance() -> None:
    found = measured({"eagle": [0.0]})
    first, second = ([[a] * 3 for a in alphas] for alphas in ((0.9, 0.8), (0.2, 0.1)))
    used = {"optimiser_steps": 1, "teacher_tokens": 2, "selected_tokens": 1, "seconds": 3.0}
    by_depth = [OfflineAlpha(first), OfflineAlpha(second)]
    found.add("eagle", {}, 0, {"sampled": by_depth, "greedy": by_depth[:1]}, used)
    rounds = sum(replay(text, 7, [deep])[0] for text, deep in zip(first, second))
    assert found.rows()[0]["block_efficiency"] == pytest.approx(6 / rounds)
    assert rounds > sum(replay(text, 7)[0] for text in first)


def test_the_block_efficiency_s_gain_is_that_of_replayed_rounds() -> None:
    found = measured({"distillspec": [0.0, 0.0], "adaspec": [0.1, 0.1], "x": [0.2, 0.2]})
    rounds = {name: sum(replay(text, 7)[0] for text in found.alphas[name]["sampled"][0].texts) for name in found.names}
    by_name = {row["name"]: row for row in found.rows()}
    wanted = {name: 12 / count for name, count in rounds.items()}
    assert {name: row["block_efficiency"] for name, row in by_name.items()} == pytest.approx(wanted)
    gain = by_name["x"]["block_efficiency_over"]["gain"]
    assert gain == pytest.approx(wanted["x"] - wanted["adaspec"], rel=0.02)
    assert by_name["x"]["block_efficiency_over"]["se"] > 0


def test_texts_of_one_prompt_are_one_observation() -> None:
    """A deterministic answer to a prompt that is there twice adds nothing to the errors."""
    once = [OfflineAlpha([[a] * 3 for a in alphas]) for alphas in ((0.2, 0.5, 0.9), (0.3, 0.5, 0.8))]
    twice = [OfflineAlpha(alpha.texts * 2, [0, 1, 2, 0, 1, 2]) for alpha in once]
    assert [a.mean for a in twice] == pytest.approx([a.mean for a in once])
    assert [a.se for a in twice] == pytest.approx([a.se for a in once])
    assert paired(*twice)["se"] == pytest.approx(paired(*once)["se"])
    assert prompt_numbers([([1, 2, 3], 2), ([1, 3, 3], 2), ([1, 2, 4], 2)]) == [0, 1, 0]
