"""Started by `test_distributed` once for every process: trains the tiny run, in several ways, one after another.

Usage: distributed_run.py FOLDER RANK PORT WORLD WAYS

WAYS are separated by commas.
"""

import json
import os
import sys
from pathlib import Path

FOLDER, RANK, PORT, WORLD = Path(sys.argv[1]), *sys.argv[2:5]
CHOSEN = sys.argv[5].split(",")
os.environ |= {
    "RANK": RANK,
    "LOCAL_RANK": RANK,
    "WORLD_SIZE": WORLD,
    "LOCAL_WORLD_SIZE": WORLD,
    "GROUP_RANK": "0",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": PORT,
    "TORCHELASTIC_RUN_ID": "test",
}

import torch  # noqa: E402

torch.set_num_threads(1)

from distributed_settings import SLOW, WAYS, settings_of  # noqa: E402
from rich.console import Console  # noqa: E402

from distill.data.context import StageContext  # noqa: E402
from distill.pipeline import alone_in  # noqa: E402
from distill.run_stages import run_stages  # noqa: E402
from distill.stages import run_of  # noqa: E402

if __name__ == "__main__":
    for way in CHOSEN:
        settings = settings_of(way, FOLDER / "several")
        settings.trainer.devices, settings.trainer.strategy = int(WORLD), (WAYS | SLOW)[way].strategy
        if settings.trainer.strategy == "hsdp":  # as on two machines
            settings.trainer.num_nodes, each = 2, int(WORLD) // 2
            settings.trainer.devices, machine = each, int(RANK) // each
            own = {"LOCAL_RANK": str(int(RANK) % each), "LOCAL_WORLD_SIZE": str(each), "GROUP_RANK": str(machine)}
            os.environ |= own
        settings.target.sharded = (WAYS | SLOW)[way].sharded
        run = run_of(settings)
        with alone_in(run, settings):
            ran = run_stages(StageContext(settings, run, Console(quiet=RANK != "0")))
        (FOLDER / f"{way}-{RANK}.json").write_text(json.dumps(ran))
