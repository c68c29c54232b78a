"""Two processes, over gloo, end with the weights of one: DDP, FSDP, micro-batches, own texts, online."""

import json
import os
import platform
import re
import socket
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
from distributed import FAST, WAYS, settings_of
from safetensors.torch import load_file
from tiny_run import altered, bench, run_tiny

from distill.pipeline import write_settings
from distill.run import Run

HERE = Path(__file__).parents[2] / "support"


def trained(folder: Path, world: int, ways: Iterable[str], *, seconds: int = 200) -> Path:
    """The folder, where so many processes have trained in these ways; only the first one has left files."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(map(str, (HERE, HERE.parents[1]))), "OMP_NUM_THREADS": "1",
        "WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world), "GROUP_RANK": "0", "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port, "TORCHELASTIC_RUN_ID": "test",
    }  # fmt: skip
    command = [sys.executable, str(HERE / "distributed.py"), str(folder), ",".join(ways)]
    places = [environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(world)]
    piped = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    processes = [subprocess.Popen(command, env=place, **piped) for place in places]
    try:
        printed = [process.communicate(timeout=seconds)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert not any(process.returncode for process in processes), "\n".join(printed)
    for rank, text in enumerate(printed):
        (folder / f"printed-{rank}.txt").write_text(text)
    assert not list(folder.rglob(".tmp-*"))
    assert not list((folder / "several").rglob("*.ckpt"))  # checkpoints of finished stages
    return folder


@pytest.fixture(scope="module")
def two(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("distributed")
    longer = dict.fromkeys(("target__training__steps", "student__training__steps", "training__steps"), 3)
    settings = altered(settings_of("ddp", folder, 2), name="command", evaluation=False, **longer)
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
    assert [(two / f"printed-{rank}.txt").read_text().count("stage 4 of 4") for rank in range(2)] == [1, 0]
    assert (two / "command/export/model.safetensors").exists()


@pytest.mark.parametrize("way", FAST)
def test_two_processes_end_with_the_weights_of_one(two, way: str) -> None:
    check_against_one(two, way, 2)


@pytest.mark.slow
def test_four_processes_end_with_the_weights_of_one(tmp_path) -> None:
    trained(tmp_path, 4, WAYS, seconds=900)
    for way in WAYS:
        check_against_one(tmp_path, way, 4)
