"""Whole runs that several processes and one must end alike, and runs that are refused.

Started by `test_fsdp_and_ddp` once for every process, whose rank stands in its environment: FOLDER WAYS.
"""

import json
import os
import shutil
import sys
import tempfile
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import noise
import torch
from families import build_tiny
from pairs import make_tokenizer
from rich.console import Console
from tiny_run import altered, given, tiny_settings

from decode.errors import UserError
from distill import fingerprints, ranks
from distill.__main__ import main as command
from distill.config import Settings
from distill.config.models import StudentSettings
from distill.pipeline import run_pipeline, write_settings
from distill.run import Run, alone_in
from distill.stages import run_stages

WAYS = {  # changes of a run's settings
    "ddp": {
        "trainer__accumulate": 8,
        "0__on_policy": 0.5,
        "trainer__precision": "64-true",
        "trainer__callbacks": [{"class_path": "LearningRateMonitor"}],  # which needs a logger on every rank
    },
    "fsdp": {"trainer__strategy": "fsdp", "teacher__signal": "online"},
    "heads": {"student": StudentSettings(kind="eagle3", unroll=2, draft_vocab=64), "target__architecture__layers": 4},
}
WAYS["heads"] |= {"teacher__signal": "online", "trainer__precision": "64-true"}
FAST = ("ddp", "fsdp")
"""Trained by two processes; the others by four, in `make test-slow`."""


def settings_of(way: str, folder: Path, processes: int = 1) -> Settings:
    """A short run; so many processes train the same micro-batches as one, among whose tokens AdaSPEC selects.

    In float64 rounding alone never decides which token is selected.
    """
    changes = {"trainer__accumulate": 4, "trainer__strategy": "ddp", "trainer__devices": processes} | WAYS[way]
    changes["trainer__accumulate"] //= processes
    if processes == 1:
        changes |= {"trainer__strategy": "auto", "trainer__devices": 1}
    settings = altered(tiny_settings(folder, name=way), trainer__validate_every=2, **changes)
    settings.teacher.responses.max_new_tokens = 8
    for training in (settings.target.training, settings.student.training, settings.training):
        training.steps, training.batch_size = 2, 8
    return settings


def refusals(folder: Path, rank: int, world: int) -> None:
    """Runs that cannot be made: one of the processes is on another disk, or lacks files that the first one has."""
    ranks.SEEN = 0.0
    rows, chats = folder / "rows.jsonl", Path("chats.jsonl")
    rows.write_text('{"a": "b"}\n')
    os.chdir(machine := Path(tempfile.mkdtemp()))
    tokenizer = make_tokenizer()
    model = given(
        machine / "target", tokenizer, build_tiny("llama", vocab_size=len(tokenizer), max_position_embeddings=512)
    )
    chats.write_text('{"prompt": "a", "response": "b"}\n' * 80)
    if rank:
        shutil.rmtree("target")
        chats.unlink()
    cases: dict[str, dict[str, Any]] = {
        "disk": {"output_dir": str(folder / f"disk{rank}")},
        "model": {"target": replace(model, model="./target")},
        "file": {"data__files": {"train": str(chats)}},
        "corpus": {"data__source": str(rows)},
        "all": {"trainer__attention": "flash_attention_2"},
    }
    usual, told = partial(settings_of, "ddp", folder / "refused", world), {}
    if not rank:
        write_settings(usual(), Path("settings.yaml"))
    try:
        command(["--config", "settings.yaml"])  # before the processes have joined
    except UserError as error:
        told["settings"] = str(error)
    for name, changes in cases.items():
        try:
            run_pipeline(altered(usual(), **changes), Console(quiet=True))
        except UserError as error:
            told[name] = str(error)
    (folder / f"refusals-{rank}.json").write_text(json.dumps(told))


def main(folder: Path, ways: list[str]) -> None:
    """Trains in these ways, one after another."""
    torch.set_num_threads(1)
    noise.install()
    rank, world = os.environ["RANK"], int(os.environ["WORLD_SIZE"])
    for way in ways:
        if way == "refusals":
            refusals(folder, int(rank), world)
            continue
        if way == "command":
            command(["--config", str(folder / "command.yaml")])
            continue
        run = Run(settings_of(way, folder / "several", world), Console(quiet=rank != "0"))
        ranks.start(run.settings.trainer)
        with alone_in(run):
            made = run_stages(run)
            fingerprints.VERSION += int(rank)  # as where a machine has copies of the same models, of another time
            assert not run_stages(run)
        (folder / f"{way}-{rank}.json").write_text(json.dumps(made))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2].split(","))
