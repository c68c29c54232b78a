"""Two processes, over gloo, end with the weights of one: DDP, FSDP, micro-batches, own texts, online; and refusals."""

import json
import multiprocessing
import os
import platform
import re
import socket
from collections.abc import Iterable
from contextlib import redirect_stdout
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from families import build_tiny
from pairs import make_tokenizer
from rich.console import Console
from safetensors.torch import load_file
from tiny_run import altered, bench, given, run_tiny, tiny_settings

from decode.errors import UserError
from distill import fingerprints, ranks
from distill.__main__ import main as command
from distill.config import Settings
from distill.config.models import StudentSettings, TargetSettings
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
    usual = {"trainer__accelerator": "cpu", "trainer__accumulate": 4, "trainer__strategy": "ddp"}
    changes = usual | {"trainer__devices": processes} | WAYS[way]
    changes["trainer__accumulate"] //= processes
    if processes == 1:
        changes |= {"trainer__strategy": "auto", "trainer__devices": 1}
    settings = altered(tiny_settings(folder, name=way), trainer__validate_every=2, **changes)
    settings.teacher.responses.max_new_tokens = 8
    for training in (settings.target.training, settings.student.training, settings.training):
        training.steps, training.warmup_steps, training.batch_size = 2, 1, 8
    return settings


def refuse(folder: Path, rank: int, world: int) -> None:
    """Runs that cannot be made: one of the processes is on another disk, or lacks files that the first one has."""
    ranks.SEEN = 0.0
    rows, chats, machine = folder / "rows.jsonl", Path("chats.jsonl"), folder / f"machine{rank}"
    rows.write_text('{"a": "b"}\n')
    machine.mkdir()
    os.chdir(machine)
    if not rank:
        tokenizer = make_tokenizer()
        given(Path("target"), tokenizer, build_tiny("llama", vocab_size=len(tokenizer), max_position_embeddings=512))
        chats.write_text('{"prompt": "a", "response": "b"}\n' * 80)
    cases: dict[str, dict[str, Any]] = {
        "disk": {"output_dir": str(folder / f"disk{rank}")},
        "model": {"target": TargetSettings(kind="as_is", model="./target")},
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


def work(folder: Path, ways: Iterable[str], rank: int, environment: dict[str, str]) -> None:
    """One of several processes, which trains in these ways, one after another."""
    os.environ |= environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    world = int(environment["WORLD_SIZE"])
    for way in ways:
        if way == "refusals":
            refuse(folder, rank, world)
            continue
        if way == "command":
            with (folder / f"printed-{rank}.txt").open("w") as file, redirect_stdout(file):
                command(["--config", str(folder / "command.yaml")])
            continue
        run = Run(settings_of(way, folder / "several", world), Console(quiet=rank > 0))
        ranks.start(run.settings.trainer)
        with alone_in(run):
            made = run_stages(run)
            fingerprints.VERSION += rank  # as where a machine has copies of the same models, of another time
            assert not run_stages(run)
        (folder / f"{way}-{rank}.json").write_text(json.dumps(made))


def trained(folder: Path, world: int, ways: Iterable[str], *, seconds: int = 200) -> Path:
    """The folder, where so many processes have trained in these ways; only the first one has left files."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    environment = {
        "WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world), "GROUP_RANK": "0", "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port, "TORCHELASTIC_RUN_ID": "test",
    }  # fmt: skip
    fork = multiprocessing.get_context("fork")  # which imports nothing again
    processes = [fork.Process(target=work, args=(folder, ways, rank, environment)) for rank in range(world)]
    for process in processes:
        process.start()
    try:
        for process in processes:
            process.join(seconds)
        assert [process.exitcode for process in processes] == [0] * world
    finally:
        for process in processes:
            process.kill()
    assert not list(folder.rglob(".tmp-*"))
    assert not list((folder / "several").rglob("*.ckpt"))  # checkpoints of finished stages
    return folder


@pytest.fixture(scope="module")
def two(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("distributed")
    settings = altered(settings_of("ddp", folder, 2), name="command", evaluation=False)
    del settings.drafts["adaspec"]
    write_settings(settings, folder / "command.yaml")
    (Run(settings).work / ".tmp-left").mkdir(parents=True)  # of a killed run: the first process deletes it
    return trained(folder, 2, ["refusals", "command", *FAST])


def check_against_one(folder: Path, way: str, world: int) -> None:
    made, one, _ = run_tiny(settings_of(way, folder / "one"))
    for rank in range(world):
        assert json.loads((folder / f"{way}-{rank}.json").read_text()) == made
    several, _ = bench(settings_of(way, folder / "several", world))
    for stage in made:
        ours, theirs = (load_file(run.path(stage) / "model.safetensors") for run in (several, one))
        assert ours.keys() == theirs.keys()
        gaps = torch.cat([(ours[name].double() - theirs[name].double()).abs().ravel() for name in ours])
        record, wanted = (run.record(stage) or pytest.fail(stage) for run in (several, one))
        assert [row["step"] for row in record.history] == [row["step"] for row in wanted.history]
        if one.settings.trainer.precision == "64-true":
            assert gaps.max() < 1e-7, stage
        else:  # where a gradient is next to zero AdamW makes a step of its rounding, and selections differ
            assert gaps.mean() < (1e-6 if stage in ("target", "initial", "distillspec") else 1e-4), stage
        for row, other in zip(record.history[:1], wanted.history[:1]):  # before the first step rounding alone differs
            assert row == pytest.approx(other, abs=1e-5)
        if stage not in ("target", "initial"):
            for count in ("teacher_tokens", "selected_tokens"):
                assert record.account[count] == pytest.approx(wanted.account[count], abs=2)


def test_what_stops_one_process_is_told_by_all_with_its_number_and_machine(two) -> None:
    told, others = (json.loads((two / f"refusals-{rank}.json").read_text()) for rank in range(2))
    assert told == others
    there, away = (f"{two / disk / 'ddp'} on {platform.node()}" for disk in ("disk0", "disk1"))
    assert f"{there}, where process 0 works, is not seen alike by all processes (process 1: {away})" in told["disk"]
    assert "give all of them the same output_dir" in told["disk"]
    missing = {"model": "there is no folder './target'", "file": "there is no file 'chats.jsonl'"}
    for case, words in (missing | {"settings": "has no configuration file 'settings.yaml'"}).items():
        assert re.match(f"process 1 on {platform.node()}: .*{words}", told[case])
    assert told["corpus"].startswith(f"process 0 on {platform.node()}: ")
    assert "has the columns 'a'" in told["corpus"]
    assert re.match("trainer.attention is flash_attention_2", told["all"])  # which each of them finds
    assert not list(two.glob("disk*/*"))


def test_the_command_trains_in_two_processes_of_which_the_first_prints(two) -> None:
    first, other = ((two / f"printed-{rank}.txt").read_text() for rank in range(2))
    assert (first.count("stage 4 of 4"), other) == (1, "")
    assert (two / "command/export/model.safetensors").exists()


@pytest.mark.parametrize("way", FAST)
def test_two_processes_end_with_the_weights_of_one(two, way: str) -> None:
    check_against_one(two, way, 2)


@pytest.mark.slow
def test_four_processes_end_with_the_weights_of_one(tmp_path) -> None:
    trained(tmp_path, 4, WAYS, seconds=900)
    for way in WAYS:
        check_against_one(tmp_path, way, 4)
