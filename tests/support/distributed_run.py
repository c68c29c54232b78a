"""Started twice by `test_distributed`: trains the tiny run in two processes, in several ways, one after another.

Usage: distributed_run.py FOLDER RANK PORT
"""

import json
import os
import sys
from pathlib import Path

FOLDER, RANK, PORT = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
os.environ |= {
    "RANK": RANK,
    "LOCAL_RANK": RANK,
    "WORLD_SIZE": "2",
    "LOCAL_WORLD_SIZE": "2",
    "GROUP_RANK": "0",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": PORT,
    "TORCHELASTIC_RUN_ID": "test",
}

import torch  # noqa: E402

torch.set_num_threads(1)

from distributed_settings import WAYS, settings_of  # noqa: E402
from rich.console import Console  # noqa: E402

from distill.core.run_dir import RunDir  # noqa: E402
from distill.data.stage_context import StageContext  # noqa: E402
from distill.pipeline.runner import run_stages  # noqa: E402

if __name__ == "__main__":
    for way in WAYS:
        settings = settings_of(way, FOLDER / "two")
        settings.trainer.devices, settings.trainer.strategy = 2, WAYS[way].strategy
        run = RunDir(FOLDER / "two" / settings.name, [c.name for c in settings.comparisons])
        ran = run_stages(StageContext(settings, run, Console(quiet=RANK == "1")))
        (FOLDER / f"{way}-{RANK}.json").write_text(json.dumps(ran))
