"""The training benchmark: both sides begin alike."""

import sys
from pathlib import Path

import pytest
from rich.console import Console
from tiny_run import tiny_settings

from decode.errors import UserError

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from training_speed import measure


def test_both_sides_take_the_same_first_step(tmp_path: Path) -> None:
    settings = tiny_settings(tmp_path)
    settings.trainer.precision, settings.teacher.signal = "64-true", "online"
    console = Console(record=True, width=160)
    result = measure(settings, 10, 1, console)
    assert result["loss_difference"] < 1e-9
    assert result["k"] == 0.4
    assert result["sides"]["draftsmith"]["prepare_seconds"] > 0 == result["sides"]["Trainer"]["prepare_seconds"]
    assert f"ratio {result['speedup']:.2f}" in console.export_text()
    settings.student.kind = "eagle"
    with pytest.raises(UserError, match=r"student.kind is eagle"):
        measure(settings, 10, 1, console)
