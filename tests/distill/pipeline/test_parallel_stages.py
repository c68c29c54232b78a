"""Drafts beside each other, each in a process of a pool."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
from tiny_run import begun, bench, run_tiny, tiny_settings

from decode.errors import UserError
from distill.config.drafts import DraftSettings
from distill.config.run import TrackerSettings
from distill.parallel import may_run_beside, run_beside
from distill.tracking import make_logger

STAGES = ["target", "initial", "distillspec", "adaspec", "kl-tv"]


def test_stages_beside_each_other_are_the_same_and_tracked_and_found_again(tmp_path: Path) -> None:
    alone, beside = (tiny_settings(tmp_path / name, stages_at_once=2) for name in ("alone", "beside"))
    for settings in (alone, beside):
        settings.drafts.append(DraftSettings(name="kl-tv", divergence="kl_tv"))
    run = run_tiny(begun(alone))[1]
    context, text = bench(beside)
    assert may_run_beside(context)
    context.logger = make_logger(TrackerSettings(kind="csv"), context.run.folder, "tiny", {})
    run_beside(context)
    assert "up to date" not in text.getvalue()  # what the pool has made is not listed again
    for stage in STAGES:
        made, wanted = (each.record(stage).history for each in (context.run, run))  # type: ignore[union-attr]
        assert [row["step"] for row in made] == [row["step"] for row in wanted], stage
        assert [row["loss"] for row in made] == pytest.approx([row["loss"] for row in wanted], rel=1e-3), stage
        (file,) = (context.run.folder / "csv" / stage).glob("version_*/metrics.csv")
        assert [row["loss"] for row in csv.DictReader(file.open()) if row.get("loss")]
    context, text = bench(beside)
    run_beside(context)
    assert text.getvalue().count("up to date") >= len(STAGES)


def test_the_error_of_another_process_is_that_of_the_run(tmp_path: Path) -> None:
    settings = tiny_settings(tmp_path, stages_at_once=2)
    settings.drafts = [DraftSettings(name="one"), DraftSettings(name="two")]
    settings.teacher.signal, settings.teacher.signal_limit_gb = "hidden", 1e-9  # too small for a process to train
    context, _ = bench(begun(settings))
    with pytest.raises(UserError, match=r"signal_limit_gb"):
        run_beside(context)
