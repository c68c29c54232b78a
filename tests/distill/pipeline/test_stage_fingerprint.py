"""Fingerprints of stages: what changes them and what does not."""

import json
import os
from pathlib import Path

import pytest
from tiny_run import tiny_settings

from distill.pipeline import stage_fingerprint as keys


@pytest.mark.parametrize("large", [False, True])
def test_a_data_file_is_known_by_its_content_and_a_very_large_one_by_its_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, large: bool
) -> None:
    file = tmp_path / "train.jsonl"
    file.write_text(json.dumps({"question": "1 + 1?", "answer": "2"}) + "\n")
    if large:
        monkeypatch.setattr(keys, "LARGE", 10)
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
