"""What ``--estimate`` tells of a run, beside what the run then reads and writes."""

from __future__ import annotations

import io
import time
from pathlib import Path

import pytest
from rich.console import Console
from tiny_run import bench, tiny_settings

from distill.config.run import EvaluationSettings
from distill.estimate import measured_estimate, show
from distill.pipeline import measure, note_taken, taken_parts, write_settings
from distill.run_stages import run_stages


def test_tokens_and_bytes_are_those_of_the_run_and_nothing_else_is_left(tmp_path: Path) -> None:
    settings = tiny_settings(tmp_path)
    settings.reference.examples, settings.reference.training.steps = 40, 30
    settings.draft.iso, settings.trainer.validate_every = "epochs", 10
    settings.evaluation = EvaluationSettings(8, 8, 8, 8, draft_lengths=[2], batch_size=4)
    context, _ = bench(settings)
    began = time.monotonic()
    run_stages(context)
    measure(context)
    note_taken(context, time.monotonic() - began)
    write_settings(settings, context.run.folder / "settings.yaml")
    others = context.run.work / "signals" / "features_train.npy"  # as a head of the same target leaves
    others.write_bytes(bytes(10**6))
    found = measured_estimate(settings, Console(quiet=True))
    others.unlink()
    assert [path.name for path in tmp_path.iterdir()] == ["tiny"]
    parts = {part.name: part for part in found.parts}
    assert list(parts) == ["the data", "the target's signal", "the reference's losses", "target", "initial",
                           "reference", "adaspec", "equal-tokens", "measurement and export",
                           "opening, checking, saving"]  # fmt: skip
    taken = {part.name: part for part in taken_parts(context)}
    for name, part in taken.items():  # the same tokens and bytes, by either way of telling them
        assert (part.tokens, part.bytes) == pytest.approx((parts[name].tokens, parts[name].bytes), rel=0.05), name
    assert taken.keys() == parts.keys() - {"opening, checking, saving"}
    show(found, settings, Console(file=(text := io.StringIO()), width=140))
    assert text.getvalue().splitlines()[0].split() == [
        "part",
        "tokens",
        "took",
        "writes",
        "took",
        "takes",
        "about",
        "took",
    ]
    assert "–" not in text.getvalue()
    for name, stage in (("target", "target"), ("reference", "reference"), ("adaspec", "draft")):
        assert parts[name].tokens == pytest.approx(context.seen[stage].tokens, rel=0.05)
        assert parts[name].seconds > 0
    assert parts["measurement and export"].seconds > 0
    signals = context.run.work / "signals"
    for name, pattern in (("the target's signal", "target_*.npy"), ("the reference's losses", "reference_*.npy")):
        written = sum(path.stat().st_size for path in signals.glob(pattern))
        assert parts[name].bytes == pytest.approx(written, rel=0.05)
    assert parts["the target's signal"].tokens == len(context.examples.ids) + len(context.validation.ids)
    assert found.memory > 1e8
    assert settings.reference.training.steps == 30


def test_texts_that_the_target_has_yet_to_write_are_scaled_up(tmp_path: Path) -> None:
    settings = tiny_settings(tmp_path, comparisons=[])
    settings.reference.examples, settings.draft.epochs, settings.draft.iso = 40, 6, "epochs"
    responses = settings.reference.responses
    settings.evaluation = EvaluationSettings(2, 2, 2, 8, draft_lengths=[2])
    responses.source, responses.max_new_tokens, responses.batch_size = "target", 8, 8
    found, text = measured_estimate(settings, Console(quiet=True)), io.StringIO()
    show(found, settings, Console(file=text, width=120))
    assert [part.name for part in found.parts][1:3] == ["the target's answers", "the target's signal"]
    assert found.parts[1].bytes > 0
    tokens = {part.name: part.tokens for part in found.parts}  # 6 passes in steps of 4 texts, and 12 steps of 4
    assert tokens["adaspec"] / tokens["reference"] == pytest.approx(6 * 40 / 4 / 12, rel=0.25)
    assert "most memory" in text.getvalue()
    assert "in all" in text.getvalue()
