"""What a run makes of the devices of a machine, of torchrun and of Slurm."""

import os
import re
import sys
from contextlib import nullcontext
from datetime import timedelta
from functools import partial
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from pairs import make_tokenizer
from rich.console import Console
from tiny_run import altered, random_target, tiny_settings

from decode.errors import UserError
from distill import ranks
from distill.__main__ import main
from distill.config import TrainerSettings
from distill.config.teacher import EngineSettings
from distill.engine.vllm import server_gpus
from distill.pipeline import check_command, run_pipeline
from distill.rehearse import shrink

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone"]


@pytest.fixture
def two_gpus(monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)


@pytest.mark.parametrize(
    ("arguments", "variables", "processes"),
    [
        (["--trainer.devices", "auto"], {}, 2),
        ([], {}, 1),  # models this small train no faster on two
        (["--trainer.accelerator", "cpu"], {}, 1),
        (["--trainer.devices", "1,0"], {"RANK": "0", "WORLD_SIZE": "1"}, 2),  # as some containers set them
        (["--trainer.devices", "auto"], {"RANK": "0", "WORLD_SIZE": "2"}, 1),
        (["--trainer.devices", "auto", "--trainer.num_nodes", "2"], {}, 1),
    ],
)
def test_the_first_command_starts_a_process_for_every_gpu_of_one_machine_where_no_launcher_did(
    two_gpus, monkeypatch, tmp_path, arguments: list[str], variables: dict[str, str], processes: int
) -> None:
    monkeypatch.chdir(tmp_path)
    execute, here = Mock(side_effect=SystemExit), Mock()
    monkeypatch.setattr(os, "execv", execute)
    monkeypatch.setattr("distill.pipeline.run_pipeline", here)
    for name, value in ({"OMP_NUM_THREADS": "1", "PYTHONSAFEPATH": ""} | variables).items():
        monkeypatch.setenv(name, value)
    command = ["--config", "configs/quickstart.yaml", *arguments]
    with pytest.raises(SystemExit) if processes > 1 else nullcontext():
        main(list(command))
    launched = [*TORCHRUN, f"--nproc-per-node={processes}", "-m", "distill", *command]
    assert [call.args[1] for call in execute.mock_calls] == [launched] * (processes > 1)
    assert here.called == (processes == 1)
    assert os.environ["PYTHONSAFEPATH"] == "1" * (processes > 1)  # no file of the working directory stands for a module


def test_from_python_several_devices_are_refused_with_what_starts_them(two_gpus, tmp_path) -> None:
    settings = altered(tiny_settings(tmp_path), trainer__accelerator="auto")
    with pytest.raises(UserError, match=r"devices is auto .* 2 processes, and 1 were started: draftsmith distill"):
        run_pipeline(settings)


SLURM = {f"SLURM_{name}": value for name, value in {"NTASKS": "2", "NTASKS_PER_NODE": "2", "JOB_NAME": "x"}.items()}


@pytest.mark.parametrize("devices", ["auto", 4])
@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"}, r"which is \d processes, and 2 were started"),
        (SLURM | {"SLURM_PROCID": "0", "SLURM_STEP_ID": "0"}, r"which is \d processes, and 2 were started"),
        (SLURM, "batch script started this process alone: put srun before the command"),
    ],
)
def test_what_was_started_and_what_settings_mean_are_compared_before_anything_is_made(
    variables: dict[str, str], words: str, devices, monkeypatch, tmp_path
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match=words):
        run_pipeline(altered(tiny_settings(tmp_path), trainer__devices=devices))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("devices", ["0", "two", "0,2", "3"])
def test_devices_that_are_not_there_are_refused(two_gpus, devices: str) -> None:
    with pytest.raises(UserError, match=rf"trainer.devices is {devices}, expected auto, a number from 1 up"):
        ranks.process_count(TrainerSettings(devices=devices))


def test_a_list_names_the_gpus_that_train_and_the_others_are_for_servers(two_gpus, monkeypatch) -> None:
    one = TrainerSettings(devices=[1])
    assert (ranks.process_count(one), str(ranks.local_device(one)), ranks.one_device(one)) == (1, "cuda:1", [1])
    for devices, expected in (("auto", ([], [0, 1])), (1, ([1], [0])), ([1], ([0], [1])), ("1,0", ([], [1, 0]))):
        assert ranks.gpus(TrainerSettings(devices=devices)) == expected
    assert ranks.gpus(TrainerSettings(devices=[4, 5])) == ([], [])  # of another machine
    assert ranks.gpus(TrainerSettings(accelerator="cpu")) == ([0, 1], [])
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5")
    assert ranks.gpus(TrainerSettings()) == ([], [])


URLS = ["http://127.0.0.1:8000/v1", "http://localhost:8001/v1"]
SHARE, PAIR = "--gpu-memory-utilization", "--tensor-parallel-size"


@pytest.mark.parametrize(
    ("urls", "arguments", "free", "trained", "expected"),
    [
        (URLS, [], 4, 4, [[0], [1]]),
        (URLS, [f"{PAIR}=2"], 4, 4, [[0, 1], [2, 3]]),
        ([], [PAIR, "4"], 4, 4, [[0, 1, 2, 3]]),  # of the command that check-engine prints
        (["http://far:8000/v1"], [], 0, 8, []),
        (URLS[:1], [f"{SHARE}=0.4"], 0, 1, [[0]]),
        (URLS, [f"{SHARE}=0.4"], 1, 1, [[0], [1]]),
        (URLS, [], 0, 0, [[], []]),
        (URLS, [f"{PAIR}=2"], 3, 5, r"take 4 of its 8 GPUs, .*\[3, 4, 5, 6, 7\]: .*devices '\[4, 5, 6, 7\]'"),
        (URLS[:1], [f"{SHARE}=0.95"], 0, 1, r"take 1 of its 1 GPUs, .*\[0\]: put --gpu-memory-utilization=0.4"),
    ],
)
def test_no_server_that_takes_all_memory_is_put_on_a_gpu_that_trains(
    urls: list[str], arguments: list[str], free: int, trained: int, expected: list[list[int]] | str
) -> None:
    engine, gpus = EngineSettings(urls=urls, arguments=arguments), range(free + trained)
    refused = isinstance(expected, str)
    with pytest.raises(UserError, match=expected) if refused else nullcontext():
        assert [*server_gpus(engine, gpus[:free], gpus[free:]).values()] == expected


def test_the_run_its_dry_run_and_the_printed_command_share_the_gpus_out(monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(ranks, "gpus", lambda trainer: ([2], [0, 1]))
    console, target = Console(record=True, width=2000), random_target(tmp_path / "model", make_tokenizer())
    settings = altered(tiny_settings(tmp_path, target=target), teacher__signal="vllm")
    check_command(settings, console)
    assert re.search(rf"^CUDA_VISIBLE_DEVICES=2 PYTHONPATH=\S+ vllm serve {tmp_path}\S+ ", console.export_text(), re.M)
    settings.teacher.engine.urls = URLS
    for refused in (run_pipeline, shrink, partial(check_command, console=console)):
        with pytest.raises(UserError, match=r"take 2 of its 3 GPUs, and trainer.devices takes \[0, 1\]: leave them 2"):
            refused(settings)
    settings.teacher.engine.arguments, settings.trainer.num_nodes = [f"{SHARE}=0.3"], 2
    with pytest.raises(UserError, match=r"each of the trainer.num_nodes machines would ask itself"):
        settings.validate()


def test_tasks_of_slurm_take_the_devices_of_their_number(two_gpus, monkeypatch) -> None:
    slurm = {"NTASKS": "4", "NTASKS_PER_NODE": "2", "PROCID": "3", "LOCALID": "1", "NODEID": "1", "JOB_NAME": "train"}
    for name, value in slurm.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    trainer = TrainerSettings(num_nodes=2)
    here = ranks.environment().local_rank()
    assert (ranks.rank(), here, ranks.process_count(trainer)) == (3, 1, 4)
    assert not ranks.is_first()
    assert ranks.local_device(trainer) == torch.device("cuda:1")
    with pytest.raises(UserError, match="ablate runs in one process, but 4 were started"):
        ranks.check_alone("ablate")


def test_processes_wait_for_each_other_in_a_group_of_their_own_and_collectives_are_given_up_sooner(monkeypatch) -> None:
    opened, waiting, reduced = Mock(), Mock(), Mock()
    for name, value in {"init_process_group": opened, "new_group": waiting, "all_reduce": reduced}.items():
        monkeypatch.setattr(dist, name, value)
    monkeypatch.setattr(ranks, "_waiting", None)
    variables = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    for name, value in (variables | dict.fromkeys(("TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT"), "1")).items():
        monkeypatch.setenv(name, value)
    ranks.start(TrainerSettings(devices=2, accelerator="cpu"))
    assert opened.call_args.kwargs["timeout"] <= timedelta(hours=1)
    assert waiting.call_args.kwargs["timeout"] >= timedelta(hours=12)
    assert waiting.call_args.kwargs["backend"] == "gloo"
    monkeypatch.setattr(ranks, "world", lambda: 2)
    ranks.barrier()
    assert reduced.call_args.args[2] is waiting.return_value
    assert reduced.return_value.wait.call_args.args[0] >= timedelta(hours=12)


def test_a_process_whose_neighbour_ended_in_a_training_says_so_in_a_line() -> None:
    with pytest.raises(UserError, match="another process has ended, and its output says why"), ranks.together():
        raise RuntimeError("[pair.cc:553] Connection closed by peer [127.0.0.1]:39297. This is typically caused by")
    with pytest.raises(KeyError), ranks.together():
        raise KeyError("key")
