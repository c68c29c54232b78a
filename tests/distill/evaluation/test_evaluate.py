"""Which drafts are timed, and at which lengths."""

from pathlib import Path

import pytest
from tiny_run import bench, run_tiny, tiny_settings

from decode.measure.cost import CostModel
from distill.config.settings import EvaluationSettings, Settings
from distill.core.run_dir import RunDir
from distill.evaluation.evaluate import Evaluation
from distill.pipeline.runner import measure


def test_every_draft_is_timed_at_its_own_best_length_and_the_final_one_at_those_asked_for_too() -> None:
    evaluation = Evaluation.__new__(Evaluation)  # without the models of a run
    evaluation.settings = EvaluationSettings(draft_lengths=[2, 9], temperatures=[0.0, 1.0])
    names = {"initial": "undistilled", "reference": "distillspec", "draft": "kl-tv"}
    evaluation.run, evaluation.full = RunDir(Path(), ["adaspec", "more-data"], names), Settings()
    evaluation.comparisons = {"adaspec": "adaspec", "more-data": "adaspec"}
    best = {"undistilled": 3, "distillspec": 5, "kl-tv": 6, "adaspec": 0, "more-data": 4}
    timed = {
        (c.draft, c.options.draft_length, c.temperature) for c in evaluation._entries({"best_draft_lengths": best})
    }
    wanted = {("undistilled", 3), ("distillspec", 5), ("adaspec", 1), ("kl-tv", 2), ("kl-tv", 6), ("kl-tv", 9)}
    assert timed == {(*pair, temperature) for pair in wanted for temperature in (0.0, 1.0)}


def test_every_predicted_speedup_of_a_run_follows_from_its_report(tmp_path: Path) -> None:
    """Tokens over Σ (c·k + v(k + 1)), with the costs of the row's own block."""
    settings = tiny_settings(tmp_path, comparisons=[])
    settings.evaluation = EvaluationSettings(
        prompts=3, accuracy_prompts=3, max_new_tokens=12, draft_lengths=[2], temperatures=[0.0, 1.0], repeats=1
    )
    run_tiny(settings)
    report = measure(bench(settings)[0])
    costs = {b["temperature"]: b["costs"] for b in report["analysis"]["costs"]}
    drafting = [row for row in report["decoding"] if row["method"] == "vanilla"]
    assert {row["temperature"] for row in drafting} == {0.0, 1.0}
    for row in drafting:
        cost = CostModel.from_dict(costs[row["temperature"]][row["draft"]])
        spent = sum(n * (cost.cost_ratio * int(k) + cost.v(int(k) + 1)) for k, n in row["draft_lengths"].items())
        assert row["predicted_speedup"] == pytest.approx(row["tokens"] / spent)
