"""Which draft to train: costs and needed acceptance of candidates, short trials in rungs, the winner's configuration."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
import yaml
from rich.console import Console
from tiny_run import tiny_settings

from decode.bench.costs import CostModel
from decode.bench.prediction import predicted_speedup
from decode.errors import UserError
from distill.experiments.design import DesignRunSettings, design, needed_alpha, student_of


def test_the_needed_acceptance_is_where_the_best_length_reaches_the_gain() -> None:
    cost = CostModel(0.1, {n: 1 + 0.05 * n for n in range(1, 6)} | {1: 1.0})
    alpha = needed_alpha(1.5, cost, 4)
    assert alpha is not None
    best = [max(predicted_speedup(a, k, cost) for k in range(1, 5)) for a in (alpha - 1e-3, alpha)]
    assert best[0] < 1.5 <= best[1]
    assert needed_alpha(9.0, cost, 4) is None


def test_a_design_tries_the_better_half_longer_and_names_a_configuration(tmp_path: Path) -> None:
    settings = DesignRunSettings(**vars(tiny_settings(tmp_path)))
    settings.target.architecture.layers = 4
    settings.evaluation.prompts, settings.evaluation.max_new_tokens = 4, 6
    settings.design.shapes, settings.design.steps = ["1x12", "eagle", "cut:1"], 4
    settings.evaluation.draft_lengths = [3]
    text = io.StringIO()
    folder = design(settings, Console(file=text, width=200))
    rows = {row["name"]: row for row in json.loads((folder / "design.json").read_text())["drafts"]}
    assert set(rows) == {"1x12", "eagle", "cut:1"}
    tried = [row for row in rows.values() if row["needed_1"] is not None]
    assert sorted(row["optimiser_steps"] for row in tried) == [4] * (len(tried) // 2) + [8] * ((len(tried) + 1) // 2)
    assert all(0 < row["offline_alpha"] < 1 for row in tried)
    assert all(row["cost_ratio"] > 0 and row["parameters"] > 0 for row in rows.values())
    again = io.StringIO()
    assert design(settings, Console(file=again, width=200)) == folder
    assert "tokens read" not in again.getvalue()  # nothing is trained twice
    if (winner := folder / "winner.yaml").exists():
        best = max(tried, key=lambda row: (row["optimiser_steps"], row["predicted_speedup"]))
        assert (
            yaml.safe_load(winner.read_text())["student"]["kind"]
            == {"e": "eagle", "c": "cut", "1": "scratch"}[best["name"][0]]
        )


def test_shapes_that_name_no_draft_are_refused(tmp_path: Path, tiny) -> None:  # type: ignore[no-untyped-def]
    settings = DesignRunSettings(**vars(tiny_settings(tmp_path)))
    for shape in ("2x", "cut:one", "medusa", "0x8"):
        with pytest.raises(UserError, match=r"design\.shapes"):
            student_of(shape, settings, tiny("llama"))
