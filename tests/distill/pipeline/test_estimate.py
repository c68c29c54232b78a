"""``--estimate``: every part of a run appears, and the run itself is left as it was. The time left during a run."""

import re
from pathlib import Path

from rich.console import Console
from tiny_run import bench, tiny_settings

from distill.estimate import estimate
from distill.files import write_json
from distill.run_stages import REST, progress
from distill.stages import stage_fingerprints


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


def test_finished_trainings_tell_the_time_of_the_others_by_examples_and_parameters(tmp_path: Path) -> None:
    settings = tiny_settings(tmp_path)
    settings.training.steps = 24  # twice the steps of target and student
    context, keys = bench(settings)[0], stage_fingerprints(settings)
    assert progress(context, "target") == "stage 1 of 5"

    def finish(stage: str, parameters: int, seconds: float) -> None:
        record = {"fingerprint": keys[stage][0], "parameters": parameters, "seconds": seconds}
        write_json(context.run.work / f"{stage}.json", record)

    finish("target", 9 * REST, 1000.0)  # ten times REST with what does not depend on them: 100 s each
    finish("initial", REST, 200.0)
    said = progress(context, "distillspec")  # two drafts, of twice the student's work each
    assert re.fullmatch(r"stage 3 of 5; \d+ s so far, about 13 min of training left", said), said
    for name in ("distillspec", "adaspec"):
        finish(name, REST, 1.0)
    assert re.fullmatch(r"stage 5 of 5; \d+ s so far", progress(context))
