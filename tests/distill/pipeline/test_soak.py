"""What a soak sees as wrong, and (slow) its short form: three kills and one damaged file."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
from soak import PHASES, Ledger, alter, draw, truncate


@pytest.mark.slow
def test_a_run_killed_three_times_ends_bit_by_bit_as_an_undisturbed_one() -> None:
    # in a process of its own: one that has used threads must not be forked
    script = Path(__file__).parents[2] / "support" / "soak.py"
    paths = os.pathsep.join([str(script.parents[2]), os.environ.get("PYTHONPATH", "")])
    ended = subprocess.run(
        [sys.executable, str(script), "--seed", "1", "--kills", "3", "--short"],
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": paths}, capture_output=True, text=True, timeout=400,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "sound: after 3 kills" in ended.stdout


def test_more_than_an_interval_lost_a_stage_cut_short_and_skipped_steps_are_faults() -> None:
    def faults(*starts: list[dict[str, object]]) -> list[str]:
        ledger = Ledger()
        for events in starts:
            list(ledger.take(events))
        ledger.close()
        return ledger.faults

    begun, at_nine = {"start": "draft", "step": 0, "steps": 12}, {"stage": "draft", "step": 9}
    ended = {"stage": "draft", "step": 12}
    assert faults([begun, at_nine], [begun | {"step": 5}, ended]) == []
    assert faults([begun, at_nine], [begun, ended]) == ["draft: killed at step 9, went on from 0"]
    assert faults([begun, at_nine], [begun | {"step": 10}, ended]) == ["draft: killed at step 9, went on from 10"]
    assert faults([begun, at_nine], []) == ["draft: ended at step 9 of 12"]


def test_kills_are_spread_over_all_phases_in_their_order_and_repeat_with_the_seed() -> None:
    moments = {phase: ["step 1", "step 2", *["open file"] * 5] for phase in PHASES} | {"draft: signals": []}
    kills = draw(moments, 20, random.Random(4))
    assert kills == draw(moments, 20, random.Random(4)) != draw(moments, 20, random.Random(5))
    assert {kill.phase for kill in kills} == set(PHASES) - {"draft: signals"}
    places = [PHASES.index(kill.phase) for kill in kills]
    assert places == sorted(places)
    assert all(1 <= kill.moment <= 7 and 0 <= kill.delay <= 0.03 for kill in kills)
    assert sum(kill.moment <= 2 for kill in kills) >= 6
    assert kills[-1].delay == 0


@pytest.mark.parametrize("name", ["note.json", "lines.jsonl", "weights.safetensors"])
def test_damage_changes_the_file_and_altering_keeps_its_size(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    content = b'{"crc32": 120, "ids": [7, 70]}\n{"crc32": 9, "ids": [3, 10]}\n'
    path.write_bytes(content)
    alter(path)
    changed = path.read_bytes()
    assert sum(a != b for a, b in zip(content, changed, strict=True)) == 1
    truncate(path)
    assert path.stat().st_size == len(content) // 2
