"""Fingerprints of stages: what changes them and what does not."""

import json
import os
from pathlib import Path

import pytest
from tiny_run import tiny_settings

from decode.commands.parsing import parse
from distill import files, ranks
from distill import stages as keys
from distill.config.run import Settings


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
    assert stages_changed(tiny_settings(tmp_path), target__dtype="bfloat16") == {
        "distillspec",
        "adaspec",
        "equal-tokens",
    }


def test_a_target_that_is_taken_as_it_is_stays_whatever_is_trained_for_it(tmp_path: Path) -> None:
    settings = tiny_settings(tmp_path)
    settings.target.kind, settings.target.model = "as_is", str(tmp_path)
    for change in ({"trainer__validate_every": 7}, {"data__train_examples": 12}, {"data__max_length": 90}):
        assert "target" not in (changed := stages_changed(settings, **change))
        assert "draft" in changed
    assert "target" in stages_changed(settings, data__chat_template="{{ messages }}")


def test_the_parts_of_a_step_decide_a_selection_within_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert stages_changed(tiny_settings(tmp_path), trainer__accumulate=2) == {"draft", "equal-tokens"}
    assert stages_changed(tiny_settings(tmp_path), trainer__devices=2) == {"draft", "equal-tokens"}
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


SETTINGS = {
    "trained": "",
    "adapters": "--target.kind=lora --target.model=none --reference.lora.rank=8 --draft.name=own --draft.on_policy=0.5",
    "answers": "--target.kind=as_is --target.model=none --eagle.kind=eagle3 --data.source=target "
    "--teacher.responses.source=target --teacher.responses.server.url=http://127.0.0.1:1/v1",
}
MADE_BEFORE = {
    "trained": {
        "data": "e8d37c35",
        "target": "8a69fa93",
        "initial": "302cd519",
        "distillspec": "572287e5",
        "draft": "21d0bb55",
    },
    "adapters": {
        "data": "e8d37c35",
        "target": "790a65b7",
        "initial": "3c41d00c",
        "distillspec": "15629cc4",
        "draft": "26c8db5d",
    },
    "answers": {
        "data": "166c873a",
        "target": "cdb969cb",
        "initial": "36f72826",
        "distillspec": "9cdd658e",
        "draft": "2503df64",
    },
}


@pytest.mark.parametrize("which", SETTINGS)
def test_a_new_setting_leaves_what_was_made_before_valid(which: str) -> None:
    """If this fails: mark the new setting `LATER`. If a default changed: these are other fingerprints now."""
    settings = parse(Settings, SETTINGS[which].split(), prog="distill", description="")
    made = {"data": files.fingerprint(settings.data.key())[:8]}
    made |= {stage: key[:8] for stage, (key, _) in keys.stage_fingerprints(settings).items()}
    assert made == MADE_BEFORE[which]


def test_a_draft_that_learns_the_targets_texts_before_it_is_distilled_depends_on_them(tmp_path: Path) -> None:
    settings = tiny_settings(tmp_path)
    before = keys.stage_fingerprints(settings)["initial"]
    settings.teacher.responses.temperature = 0.5
    assert keys.stage_fingerprints(settings)["initial"] == before  # the data has responses
    settings.data.source, settings.target.kind, settings.target.model = "target", "as_is", str(tmp_path)
    settings.teacher.responses.source = "target"
    before = keys.stage_fingerprints(settings)["initial"]
    settings.teacher.responses.temperature = 0.7
    assert keys.stage_fingerprints(settings)["initial"] != before
