"""Drafts compared over seeds."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console
from tiny_run import begun, tiny_settings

from decode.bench.offline_acceptance import OfflineAlpha, paired, prompt_numbers
from distill.ablation import AblateSettings, ablate, table
from distill.config import DraftSettings


def test_the_ablation_compares_seed_by_seed_and_goes_on_where_it_was(tmp_path: Path) -> None:
    tiny = begun(tiny_settings(tmp_path))
    tiny.drafts.append(DraftSettings(name="late-tv", divergence="tv"))
    tiny.evaluation.prompts, tiny.evaluation.max_new_tokens = 4, 6  # type: ignore[union-attr]
    settings = AblateSettings(**vars(tiny))
    settings.ablation.seeds = [3, 4]
    text = io.StringIO()
    folder = ablate(settings, Console(file=text, width=200))
    assert text.getvalue().count("up to date") == 2
    content = json.loads((folder / "ablation.json").read_text())
    assert [row["name"] for row in content["drafts"]] == ["distillspec", "adaspec", "late-tv"]
    assert [row["seeds"] for row in content["drafts"]] == [2, 2, 2]
    assert set(content["drafts"][2]["gain_by_seed"]) == {"3", "4"}
    assert (folder / "ablation.md").read_text().count("\n| ") == 4
    weights = [(folder / f"distillspec-seed{seed}" / "model.safetensors").read_bytes() for seed in (3, 4)]
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
