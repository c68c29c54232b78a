"""Settings of drafts, and their comparison over seeds."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console
from tiny_run import begun, run_tiny, tiny_settings

from decode.bench.offline_acceptance import OfflineAlpha, paired, prompt_numbers
from decode.errors import UserError
from distill.config.drafts import DraftSettings
from distill.experiments.ablation import AblateSettings, ablate, table
from distill.stages import RunDir


@pytest.mark.parametrize(
    ("draft", "words"),
    [
        (DraftSettings(name="a", kl_first=1.0), r"drafts\[1\].kl_first is 1.0"),
        (DraftSettings(name="a", divergence="kl"), r"drafts\[1\].divergence is 'kl', expected forward_kl"),  # type: ignore[arg-type]
        (DraftSettings(name="a", seed=-1), r"drafts\[1\].seed is -1"),
        (DraftSettings(name="a", reference="b"), r"reference is 'b', expected the name of an earlier draft"),
        (DraftSettings(name="a", training={"epoch": 2}), "training.epoch is no key of the section training"),
        (DraftSettings(name="a", training={"lr": -1.0}), r"drafts.a.training.lr is -1.0"),
        (DraftSettings(name="a", training={"steps": 3, "epochs": 1.0}), "both are set; give exactly one"),
        (DraftSettings(name="a", accepted_only=True), "accepted_only needs an EAGLE head"),
        (DraftSettings(name="signals"), "a file or folder of every run"),
        (DraftSettings(name="export"), "a file or folder of every run"),
        (DraftSettings(name="distillspec"), "used twice"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(tmp_path: Path, draft: DraftSettings, words: str) -> None:
    settings = tiny_settings(tmp_path)
    settings.drafts[1] = draft
    with pytest.raises(UserError, match=words):
        settings.validate()


def test_a_draft_may_have_its_own_training_texts_and_order(tmp_path: Path) -> None:
    drafts = [DraftSettings(name="distillspec"), DraftSettings(name="own", on_policy=1.0)]
    drafts += [DraftSettings(name="seeded", seed=7), DraftSettings(name="short", training={"epochs": 1.0})]
    settings = tiny_settings(tmp_path, drafts=drafts)
    settings.teacher.responses.max_new_tokens = 4
    _, run, _ = run_tiny(begun(settings))
    accounts = {draft.name: run.draft_record(draft.name).account for draft in drafts}
    tokens = accounts["own"]["teacher_tokens"]
    assert tokens <= 4 * accounts["own"]["examples"] < accounts["distillspec"]["teacher_tokens"]
    assert accounts["seeded"]["examples"] == accounts["distillspec"]["examples"]
    assert accounts["short"]["optimiser_steps"] == 5  # of 20 examples in batches of 4
    assert len({(run.path(draft.name) / "model.safetensors").read_bytes() for draft in drafts}) == 4


def test_the_ablation_compares_seed_by_seed_and_goes_on_where_it_was(tmp_path: Path) -> None:
    run_tiny(begun(tiny_settings(tmp_path)))
    tiny = tiny_settings(tmp_path, name="ablation")
    tiny.drafts.append(DraftSettings(name="late-tv", divergence="tv"))
    tiny.evaluation.prompts, tiny.evaluation.max_new_tokens = 4, 6
    settings = AblateSettings(**vars(tiny))
    settings.ablation.seeds = [3, 4]
    text = io.StringIO()
    folder = ablate(settings, Console(file=text, width=200))
    assert text.getvalue().count("made from the same inputs") == 3
    content = json.loads((folder / "ablation.json").read_text())
    assert [row["name"] for row in content["drafts"]] == ["distillspec", "adaspec", "late-tv"]
    assert [row["seeds"] for row in content["drafts"]] == [2, 2, 2]
    assert set(content["drafts"][2]["gain_by_seed"]) == {"3", "4"}
    assert (folder / "ablation.md").read_text().count("\n| ") == 4
    weights = [(RunDir(folder).path(f"distillspec-seed{seed}") / "model.safetensors").read_bytes() for seed in (3, 4)]
    assert weights[0] != weights[1]
    again = io.StringIO()
    ablate(AblateSettings(**vars(tiny), ablation=settings.ablation), Console(file=again, width=200))
    assert again.getvalue().count("up to date") == 3 + 6
    assert json.loads((folder / "ablation.json").read_text())["drafts"] == content["drafts"]


def rows_of(gains: dict[str, list[float]]) -> dict[str, Any]:
    """Rows by name of drafts whose α is 0.5 plus these gains, by seed, on four texts."""
    noise, alphas, used = np.array([0.001, -0.001, 0.002, -0.002]), {}, {}
    for name, by_seed in gains.items():
        alphas[name] = {}
        for seed, gain in enumerate(by_seed):
            alpha = OfflineAlpha([[0.5 + gain + (gain != 0) * wiggle] * 3 for wiggle in noise])
            alphas[name][seed] = {"sampled": [alpha], "greedy": [alpha]}
        used[name] = [{"optimiser_steps": 1, "teacher_tokens": 2, "seconds": 3.0}] * len(by_seed)
    return {row["name"]: row for row in table(alphas, used)}


def test_the_gain_is_the_mean_over_seeds_with_errors_over_seeds_and_over_texts() -> None:
    rows = rows_of({"distillspec": [0.0] * 3, "adaspec": [0.01, 0.02, 0.03]})
    found = rows["adaspec"]
    assert found["gain"] == pytest.approx(0.02)
    assert found["gain_se_seeds"] == pytest.approx(0.01 / 3**0.5)
    assert found["gain_se_texts"] == pytest.approx(np.std([0.001, -0.001, 0.002, -0.002], ddof=1) / 2)
    assert found["gain_se"] == pytest.approx(np.hypot(found["gain_se_seeds"], found["gain_se_texts"]))
    assert "gain" not in rows["distillspec"]
    lengths = [row["offline_accepted_length"] for row in rows.values()]
    assert found["length_gain"] == pytest.approx(lengths[1] - lengths[0])


def test_texts_of_one_prompt_are_one_observation() -> None:
    """A deterministic answer to a prompt that is there twice adds nothing to the errors."""
    once = [OfflineAlpha([[a] * 3 for a in alphas]) for alphas in ((0.2, 0.5, 0.9), (0.3, 0.5, 0.8))]
    twice = [OfflineAlpha(alpha.texts * 2, [0, 1, 2, 0, 1, 2]) for alpha in once]
    assert [a.mean for a in twice] == pytest.approx([a.mean for a in once])
    assert [a.se for a in twice] == pytest.approx([a.se for a in once])
    assert paired(*twice)["se"] == pytest.approx(paired(*once)["se"])
    assert prompt_numbers([([1, 2, 3], 2), ([1, 3, 3], 2), ([1, 2, 4], 2)]) == [0, 1, 0]
