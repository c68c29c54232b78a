"""``--estimate``: every part of a run appears, and the run itself is left as it was."""

from pathlib import Path

from rich.console import Console
from tiny_run import tiny_settings

from distill.estimate import estimate, show


def test_every_part_is_estimated_in_a_folder_that_is_removed(tmp_path: Path) -> None:
    settings = tiny_settings(tmp_path)
    settings.data.train_examples, settings.teacher.signal = 64, "hidden"
    evaluation = settings.evaluation
    evaluation.prompts, evaluation.accuracy_prompts, evaluation.decode_prompts = 4, 4, 2
    evaluation.max_new_tokens, evaluation.draft_lengths, evaluation.batch_size = 4, [2], 2
    parts, memory = estimate(settings, Console(quiet=True))
    names = [part.name for part in parts]
    assert {"target", "initial", "distillspec", "adaspec", "the target's signal"} <= set(names)
    assert all(part.seconds > 0 for part in parts)
    assert memory > 1e6
    assert not (tmp_path / "tiny-estimate").exists()
    assert not (tmp_path / "tiny" / "target").exists()
    console = Console(record=True, width=120)
    show(parts, memory, console)
    assert "total" in console.export_text()
