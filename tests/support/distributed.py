"""Trainings that several processes and one must end alike: whole runs, and parts of a batch without a label; refusals.

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
import numpy as np
import torch
from families import build_tiny, in_double
from heads import draft_of
from pairs import make_tokenizer
from rich.console import Console
from some_rows import TRAINING, add_column, some_rows
from tiny_run import altered, given, tiny_settings

from decode.errors import UserError
from distill import fingerprints, ranks
from distill.__main__ import main as command
from distill.config import DraftSettings, Settings, TrainerSettings
from distill.config.models import StudentSettings
from distill.data.dataset import DistillDataModule, Schedule, TrainingBatches
from distill.pipeline import run_pipeline, write_settings
from distill.run import Run, alone_in
from distill.stages import run_stages
from distill.training.modules import DistillModule
from distill.training.trainer import fit

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
        training.steps, training.batch_size = 4, 8
    return settings


PARTS = ("language model", "eagle", "eagle3", "dspark")


def train_part(kind: str, folder: Path, world: int) -> None:
    """Trains by all processes, and writes the weights and the learning curve; one has two micro-batches a step.

    A second process has no label in the first step, and no process in the second.
    """
    target = in_double(build_tiny("llama", num_hidden_layers=4, seed=4, dtype=torch.float64))
    schedule = Schedule(some_rows(16).lengths, 4, seed=1)
    for k in (1.0, 0.4):
        examples = some_rows(16, empty=[*schedule.batch(0)[1::2].tolist(), *schedule.batch(1).tolist()])
        draft, signal = draft_of(kind, target)
        reference = np.random.default_rng(0).random((examples.label_count, getattr(draft, "steps", draft.depth)))
        add_column(examples, "reference_loss", reference)
        settings = DraftSettings(divergence="kl_tv", reference="y" if k < 1 else None, k=k)
        module = DistillModule(draft, signal, TRAINING, 4, settings=settings)
        trainer = TrainerSettings(
            accelerator="cpu", devices=world, strategy="ddp" if world > 1 else "auto", accumulate=2 // world,
            precision="64-true", validate_every=2,
        )  # fmt: skip
        data = DistillDataModule(TrainingBatches(examples, schedule, 4, index=draft), some_rows(5, seed=3, empty=[1]))
        work = folder / f"checkpoints-{kind}-{k}-{world}"
        history, _, _ = fit(module, data, trainer, work, name=kind, console=Console(quiet=True))
        torch.save((history, module.model.state_dict()), folder / f"{kind}-{k}-{world}-{module.global_rank}.pt")


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
        if way in PARTS:
            train_part(way, folder, world)
            continue
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
