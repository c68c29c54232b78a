"""What a soak sees as wrong, and (slow) its short form: three kills and one damaged file."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest


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
