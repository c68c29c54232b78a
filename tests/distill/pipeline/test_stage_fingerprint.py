"""Fingerprints of stages: what changes them and what does not (see also `test_pipeline`)."""

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest
from tiny_run import tiny_settings

from distill import files
from distill.config.drafts import DraftSettings
from distill.config.run import Settings
from distill.stages import RunDir, StageRecord, measurement_fingerprint, stage_fingerprints


def changed(settings: Settings, *changes: tuple[Any, str, Any]) -> set[str]:
    """Stages whose fingerprint differs once attributes are set."""
    before = stage_fingerprints(settings)
    for place, name, value in changes:
        setattr(place, name, value)
    after = stage_fingerprints(settings)
    return {stage for stage in before if before[stage][0] != after[stage][0]}


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
    before = stage_fingerprints(settings)
    os.utime(file, (1, 1))
    touched = stage_fingerprints(settings)
    assert (touched == before) is not large
    file.write_text(file.read_text().replace("2", "3"))
    after = stage_fingerprints(settings)
    for stage in after:
        assert after[stage][0] not in (before[stage][0], touched[stage][0])


def test_where_answers_come_from_is_in_no_fingerprint_but_what_decides_them_is(tmp_path: Path) -> None:
    settings = tiny_settings(tmp_path)
    responses = settings.teacher.responses
    responses.source, server = "target", responses.server
    server.urls = ["http://127.0.0.1:8000/v1"]
    for draft in settings.drafts:
        draft.on_policy = 0.5
    assert changed(settings, (server, "urls", ["http://a:1/v1", "http://b:2/v1"]), (server, "concurrency", 3)) == set()
    distilled = {"distillspec", "adaspec"}
    assert changed(settings, (server, "model", "other")) == distilled
    assert changed(settings, (responses, "temperature", 0.5)) == distilled
    assert changed(settings, (responses, "refresh_every", 7)) == distilled
    assert changed(settings, (settings.trainer, "tf32", True)) == {"target", "initial", *distilled}
    watched = {"log_every_n_steps": 1, "profiler": "simple"}  # no weight depends on them
    assert changed(settings, (settings.trainer, "extra", watched)) == set()
    clipped = watched | {"gradient_clip_val": 0.5}
    assert changed(settings, (settings.trainer, "extra", clipped)) == {"target", "initial", *distilled}


def test_a_target_that_is_taken_as_it_is_stays_whatever_is_trained_for_it(tmp_path: Path) -> None:
    settings = tiny_settings(tmp_path)
    settings.target.kind, settings.target.model = "as_is", str(tmp_path)
    for change in (
        (settings.trainer, "validate_every", 7), (settings.data, "train_examples", 12), (settings.data, "max_length", 90)
    ):  # fmt: skip
        assert changed(settings, change) == {"initial", "distillspec", "adaspec"}
    assert "target" in changed(settings, (settings.data, "chat_template", "{{ messages }}"))


def test_a_draft_depends_on_its_reference_only_where_that_selects(tmp_path: Path) -> None:
    settings = tiny_settings(tmp_path)
    settings.drafts[1].k = 1.0
    assert changed(settings, (settings.drafts[0], "divergence", "tv")) == {"distillspec"}
    settings.drafts[1].scope = "global"
    assert changed(settings, (settings.drafts[1], "k", 0.5)) == {"adaspec"}
    assert changed(settings, (settings.trainer, "accumulate", 2)) == set()  # chosen among all parts of a step
    settings.drafts.append(DraftSettings(name="again", reference="distillspec", scope="global", k=0.5))
    keys = stage_fingerprints(settings)
    assert keys["again"][0] == keys["adaspec"][0]  # a name is no input


def test_another_test_file_is_measured_again_and_trains_nothing(tmp_path: Path) -> None:
    file, settings = tmp_path / "test.jsonl", tiny_settings(tmp_path)
    file.write_text(json.dumps({"question": "1 + 1?", "answer": "2"}) + "\n")
    settings.data.test_file = str(file)
    stages, measured = stage_fingerprints(settings), measurement_fingerprint(settings)
    file.write_text(file.read_text().replace("2", "3"))
    assert stage_fingerprints(settings) == stages
    assert measurement_fingerprint(settings) != measured


def test_a_stage_is_copied_where_a_link_fails_after_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def make(folder: Path) -> None:
        folder.mkdir()
        for name in ("config.json", "model.safetensors"):
            (folder / name).write_text(name)

    donor, run, links = RunDir(tmp_path / "donor"), RunDir(tmp_path / "run"), list[Path]()
    donor.put("target", StageRecord("key"), make)

    def link(source: str, path: str) -> None:
        if links:
            raise OSError(errno.EMLINK, "too many links")
        os_link(source, path)
        links.append(Path(path))

    os_link = os.link
    monkeypatch.setattr(os, "link", link)
    assert run.take_over("target", "key") == donor.target
    assert links
    assert all(each.record("target", "key") for each in (donor, run))


def test_a_student_that_learns_the_targets_texts_depends_on_them(tmp_path: Path) -> None:
    settings = tiny_settings(tmp_path)
    responses = settings.teacher.responses
    assert changed(settings, (responses, "temperature", 0.5)) == set()  # the data has responses
    settings.data.source, settings.target.kind, settings.target.model = "target", "as_is", str(tmp_path)
    responses.source = "target"
    assert "initial" in changed(settings, (responses, "temperature", 0.7))
    settings.target.kind, settings.target.layerskip.own_answers = "finetune", True
    assert "target" in changed(settings, (settings.target, "dtype", "bfloat16"))  # in which it answers before that
