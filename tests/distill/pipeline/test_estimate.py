"""``--estimate``: every part of a run appears, and the run itself is left as it was."""

from pathlib import Path

from rich.console import Console
from tiny_run import tiny_settings

from distill.estimate import estimate


def test_every_part_is_estimated_in_a_folder_that_is_removed(tmp_path: Path) -> None:
    settings = tiny_settings(tmp_path)
    settings.data.train_examples, settings.teacher.signal = 64, "hidden"
    settings.training.steps = None  # every draft has a length of its own
    for draft in settings.drafts:
        draft.training = {"epochs": 1}
    evaluation = settings.evaluation
    evaluation.prompts, evaluation.accuracy_prompts, evaluation.decode_prompts = 4, 4, 2
    evaluation.max_new_tokens, evaluation.draft_lengths, evaluation.batch_size = 4, [2], 2
    console = Console(record=True, width=120)
    parts = estimate(settings, console)
    assert {"target", "initial", "distillspec", "adaspec", "signal"} <= set(parts)
    assert all(seconds > 0 for seconds, _ in parts.values())
    assert not (tmp_path / "tiny-estimate").exists()
    assert not (tmp_path / "tiny" / "target").exists()
    assert "total" in console.export_text()
