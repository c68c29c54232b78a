"""Fingerprints of stages: what changes them and what does not."""

import json
import os
from pathlib import Path

import pytest
from tiny_run import tiny_settings

from distill.core import file_fingerprints as files
from distill.core import ranks
from distill.pipeline import stage_fingerprint as keys


@pytest.mark.parametrize("large", [False, True])
def test_a_data_file_is_known_by_its_content_and_a_very_large_one_by_its_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, large: bool
) -> None:
    file = tmp_path / "train.jsonl"
    file.write_text(json.dumps({"question": "1 + 1?", "answer": "2"}) + "\n")
    if large:
        monkeypatch.setattr(files, "LARGE", 10)
    settings = tiny_settings(tmp_path)
    settings.data.source, settings.data.train_file = "gsm8k", str(file)
    before = keys.stage_fingerprints(settings)
    os.utime(file, (1, 1))
    touched = keys.stage_fingerprints(settings)
    assert (touched == before) is not large
    file.write_text(file.read_text().replace("2", "3"))
    changed = keys.stage_fingerprints(settings)
    for stage in changed:
        assert changed[stage][0] not in (before[stage][0], touched[stage][0])


def stages_changed(settings, **changes) -> set[str]:  # type: ignore[no-untyped-def]
    """Stages whose fingerprint differs once dotted settings are changed."""
    before = keys.stage_fingerprints(settings)
    for path, value in changes.items():
        section, name = path.split("__")
        setattr(getattr(settings, section), name, value)
    after = keys.stage_fingerprints(settings)
    return {stage for stage in before if before[stage][0] != after[stage][0]}


def test_the_number_format_that_a_trained_target_is_read_in_decides_what_is_distilled(tmp_path: Path) -> None:
    assert stages_changed(tiny_settings(tmp_path), target__dtype="bfloat16") == {"reference", "draft", "equal-tokens"}


def test_a_target_that_is_taken_as_it_is_stays_whatever_is_trained_for_it(tmp_path: Path) -> None:
    settings = tiny_settings(tmp_path)
    settings.target.kind, settings.target.model = "as_is", str(tmp_path)
    for change in ({"trainer__validate_every": 7}, {"data__train_examples": 12}, {"data__max_length": 90}):
        assert "target" not in (changed := stages_changed(settings, **change))
        assert "draft" in changed
    assert "target" in stages_changed(settings, data__chat_template="{{ messages }}")


def test_the_parts_of_a_step_decide_a_selection_within_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert stages_changed(tiny_settings(tmp_path), trainer__accumulate=2) == {"draft"}  # the other selects by sequence
    assert stages_changed(tiny_settings(tmp_path), trainer__devices=2) == {"draft"}
    everything = tiny_settings(tmp_path)
    everything.draft.k = 1.0
    assert stages_changed(everything, trainer__accumulate=2) == set()
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 4)
    assert [ranks.process_count("auto", d) for d in ("auto", -1, 2, "1,3")] == [4, 4, 2, 2]
    assert ranks.process_count("cpu", "auto", nodes=3) == 3
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert [str(ranks.local_device("gpu", d)) for d in ("auto", 2, "1,3")] == ["cuda:1", "cuda:1", "cuda:3"]
    assert str(ranks.local_device("cpu")) == "cpu"


def test_another_test_file_is_measured_again_and_trains_nothing(tmp_path: Path) -> None:
    file, settings = tmp_path / "test.jsonl", tiny_settings(tmp_path)
    file.write_text(json.dumps({"question": "1 + 1?", "answer": "2"}) + "\n")
    settings.data.test_file = str(file)
    stages, measured = keys.stage_fingerprints(settings), keys.measurement_fingerprint(settings)
    file.write_text(file.read_text().replace("2", "3"))
    assert keys.stage_fingerprints(settings) == stages
    assert keys.measurement_fingerprint(settings) != measured
