"""No tensor is left on the CPU where a GPU trains: whole runs on a device that refuses to mix with it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SUPPORT = Path(__file__).parents[2] / "support"


SLOW = [pytest.param(way, marks=pytest.mark.slow) for way in ("hidden", "topk", "packed", "eagle", "eagle3", "mtp")]


@pytest.mark.parametrize("way", ["own", *SLOW])
def test_a_run_keeps_its_tensors_together_and_ends_with_the_weights_of_the_cpu(tmp_path: Path, way: str) -> None:
    """In a process of its own: PyTorch knows of the device until it ends."""
    path = os.pathsep.join(map(str, (SUPPORT, SUPPORT.parents[1])))
    ran = subprocess.run(
        [sys.executable, str(SUPPORT / "pretend_gpu_run.py"), str(tmp_path), way],
        env=os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr[-4000:]
    assert ran.stdout.count("the largest difference") == 3
