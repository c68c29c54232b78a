"""Two processes, over gloo, end with the weights of one: DDP, FSDP, scopes, micro-batches, own texts, online."""

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from distributed_settings import SLOW, WAYS, settings_of
from families import build_tiny, in_double
from safetensors.torch import load_file
from some_rows import every_token
from tiny_run import run_tiny, tiny_settings

from distill.config.training import TrainingSettings
from distill.data.batches import Batch, TokenDataset
from distill.data.chat import IGNORE
from distill.data.loader import OptimizerStep, Schedule, TrainLoader
from distill.losses.objective import Objective, Selection
from distill.modules import CausalLMModule, DistillModule
from distill.pipeline import write_settings
from distill.ranks import wait_for
from distill.stages import RunDir
from distill.teacher.signals import Teacher

HERE = Path(__file__).parents[2] / "support"


def started(folder: Path, world: int, ways: Iterable[str], *, seconds: int = 200) -> tuple[list[int], str]:
    """Has so many processes train in these ways; returns how they ended, and what they printed."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    path = os.pathsep.join(map(str, (HERE, HERE.parents[1])))
    command = [sys.executable, str(HERE / "distributed_run.py"), str(folder)]
    environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    rest = [port, str(world), ",".join(ways)]
    processes = [
        subprocess.Popen(
            [*command, str(rank), *rest],
            env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for rank in range(world)
    ]  # fmt: skip
    try:
        printed = [process.communicate(timeout=seconds)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    return [process.returncode for process in processes], "\n".join(printed)


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder where two processes have trained in every way."""
    folder = tmp_path_factory.mktemp("distributed")
    ended, printed = started(folder, 2, WAYS)
    assert ended == [0, 0], printed
    return folder


def check_against_one(folder: Path, way: str, world: int) -> None:
    """The models that several processes have trained are those of one."""
    settings, chosen = settings_of(way, folder / "one"), (WAYS | SLOW)[way]
    if "microbatch" in chosen.scopes:  # the same micro-batches, all by one process
        settings.trainer.accumulate *= world
    ran, one, _ = run_tiny(settings)
    assert json.loads((folder / f"{way}-0.json").read_text()) == ran
    trained = {stage for stage in ran if one.record(stage).history}  # type: ignore[union-attr]
    if way != next(iter(WAYS)):  # the first way's target, taken over: a process that is late finds it there
        trained -= {"target"}
    assert trained <= set(json.loads((folder / f"{way}-1.json").read_text()))
    run = RunDir(folder / "several" / way)
    for stage in ran:
        ours, theirs = (load_file(r.path(stage) / "model.safetensors") for r in (run, one))
        assert ours.keys() == theirs.keys()
        gaps = torch.cat([(ours[name].double() - theirs[name].double()).abs().ravel() for name in ours])
        if chosen.strategy == "ddp":  # in double precision
            assert gaps.max() < 1e-7, stage
        else:  # where a gradient is next to zero Adam makes a step of its rounding; a draft's selection may differ
            assert gaps.mean() < (1e-4 if stage not in ("target", "initial", "distillspec") else 1e-6), stage
            assert gaps.max() < (5e-3 if stage not in ("target", "initial", "distillspec") else 5e-4), stage
        found, wanted = run.record(stage), one.record(stage)
        assert found is not None
        assert wanted is not None
        assert [row["step"] for row in found.history] == [row["step"] for row in wanted.history]
        for row, other in zip(found.history, wanted.history):
            assert row == pytest.approx(other, abs=1e-4)
        if stage not in ("target", "initial"):
            for count in ("teacher_tokens", "selected_tokens"):
                assert found.account[count] == pytest.approx(wanted.account[count], abs=2)


@pytest.mark.parametrize("way", WAYS)
def test_two_processes_end_with_the_weights_of_one(two: Path, way: str) -> None:
    check_against_one(two, way, 2)


def test_only_the_first_process_leaves_files(two: Path) -> None:
    assert not list(two.rglob(".tmp-*"))
    assert not list(two.rglob("step-*"))  # checkpoints of finished stages


@pytest.mark.slow
def test_four_processes_end_with_the_weights_of_one(tmp_path: Path) -> None:
    ways = [*WAYS, *SLOW]
    ended, printed = started(tmp_path, 4, ways, seconds=900)
    assert ended == [0] * 4, printed
    for way in ways:
        check_against_one(tmp_path, way, 4)


@pytest.mark.slow
def test_four_processes_go_on_from_the_shares_that_two_have_written(tmp_path: Path) -> None:
    ended, printed = started(tmp_path, 2, ["fsdp"], "1")
    assert 0 not in ended, printed
    (kept,) = (tmp_path / "several/fsdp/work").rglob("step-*.ckpt")
    assert len(list(kept.glob("*.distcp"))) == 2
    ended, printed = started(tmp_path, 4, ["fsdp"], seconds=600)
    assert ended == [0] * 4, printed
    assert "continuing from step 2" in printed
    check_against_one(tmp_path, "fsdp", 4)


@pytest.mark.slow
def test_torchrun_ends_all_within_a_minute_of_a_kill_and_says_which_one_was_killed(tmp_path: Path) -> None:
    settings = tiny_settings(tmp_path)
    settings.target.training.steps, settings.trainer.devices, settings.trainer.strategy = 10_000, 2, "ddp"
    write_settings(settings, tmp_path / "settings.yaml")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*torchrun, "-m", "distill", "--config", str(tmp_path / "settings.yaml")]
    with (tmp_path / "printed.txt").open("w+") as printed:
        agent = subprocess.Popen(command, cwd=HERE.parents[1], stdout=printed, stderr=subprocess.STDOUT)
        try:
            wait_for(lambda: list(tmp_path.rglob("step-*.ckpt")) or None, "a checkpoint", 180)
            two = {process.environ().get("RANK"): process for process in psutil.Process(agent.pid).children()}
            two["1"].kill()
            assert agent.wait(60) != 0
        finally:
            agent.kill()
        assert not any(process.is_running() for process in two.values())
        printed.seek(0)
        assert "Signal 9 (SIGKILL)" in printed.read()


# -- the parts --------------------------------------------------------------------------------------------------------


def rows() -> TokenDataset:
    lengths = [4, 6, 3, 5, 7, 4, 5]
    ids = [list(range(2, 2 + n)) for n in lengths]
    return TokenDataset.from_lists(ids, [[IGNORE, *row[1:]] for row in ids])


@pytest.mark.parametrize(("world", "micros"), [(1, 1), (2, 1), (1, 3), (2, 2)])
def test_a_step_is_dealt_out_whole_and_every_part_knows_all_counts(world: int, micros: int) -> None:
    made = rows()
    schedule = Schedule(made.lengths, 7, seed=1)
    dealt = [
        list(TrainLoader(made, schedule, 2, rank, world, micros=micros, look_ahead=micros > 1)) for rank in range(world)
    ]
    steps = [batch["step"] for batches in dealt for batch in batches[:micros]]
    assert [step.part for step in steps] == list(range(world * micros))
    assert all(step.tokens == made.labels_of(schedule.batch(0)) for step in steps)
    assert sum(step.weight for step in steps) == pytest.approx(world * micros)
    for batches in dealt:
        assert len(batches) == 2 * micros
        for batch in batches[:micros]:
            labels = int((batch["labels"][:, 1:] != IGNORE).sum())
            assert labels == batch["step"].counts[batch["step"].part].sum()
        assert len(batches[0]["step"].ahead) == (micros if micros > 1 else 0)


def test_the_choice_among_micro_batches_is_the_one_among_the_whole_step() -> None:
    generator = torch.Generator().manual_seed(0)
    counts = [5, 3, 0, 7, 4, 6]
    values = [torch.randint(0, 4, (n,), generator=generator).float() for n in counts]  # many ties
    whole = OptimizerStep(np.array([counts]))
    sequence = torch.repeat_interleave(torch.arange(6), torch.tensor(counts))
    wanted = whole.choose([torch.cat(values)], [sequence], Selection(0.3).choose)[0]
    assert len(wanted) == Selection(0.3, "global").count(np.array([counts])) == 8
    parts = [list(range(6))[m::2] for m in range(2)]
    table = np.array([[counts[i] for i in part] for part in parts])
    split = OptimizerStep(table, micros=2)
    chosen = split.choose(
        [torch.cat([values[i] for i in part]) for part in parts],
        [torch.repeat_interleave(torch.arange(3), torch.tensor([counts[i] for i in part])) for part in parts],
        Selection(0.3).choose,
    )
    starts = np.concatenate([[0], np.cumsum(counts)])
    place = [torch.cat([torch.arange(starts[i], starts[i + 1]) for i in part]) for part in parts]
    assert sorted(torch.cat([p[c] for p, c in zip(place, chosen)]).tolist()) == wanted.tolist()


@pytest.mark.parametrize("normalisation", ["paper", "official"])
@pytest.mark.parametrize("scope", [None, "global"])
def test_the_parts_gradients_average_to_the_whole_step_s(scope: Any, normalisation: Any) -> None:
    made = rows()
    made.signals["reference_loss"] = np.random.default_rng(1).random(made.label_count).astype(np.float32)
    schedule = Schedule(made.lengths, 7, seed=1)
    selection = None if scope is None else Selection(0.4, scope, normalisation)
    model = in_double(build_tiny("llama", seed=5, dtype=torch.float64))
    module = DistillModule(
        model, TrainingSettings(), 4, target=Teacher(in_double(build_tiny("llama", seed=4, dtype=torch.float64))),
        objective=Objective(selection=selection),
    )  # fmt: skip

    def gradients(batches: list[Batch]) -> list[torch.Tensor]:
        module.zero_grad()
        for batch in batches:  # Lightning divides by the number of batches
            (module.training_step(batch, 0) / len(batches)).backward()
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    whole = gradients(list(TrainLoader(made, schedule, 1)))
    micros = gradients(list(TrainLoader(made, schedule, 1, micros=3, look_ahead=scope == "global")))
    halves = [next(iter(TrainLoader(made, schedule, 1, rank, 2))) for rank in (0, 1)]
    for found in (micros, gradients(halves) if scope != "global" else micros):
        assert all(torch.allclose(a, b, atol=1e-6, rtol=1e-4) for a, b in zip(found, whole, strict=True))


@pytest.mark.parametrize("world", [1, 2])
def test_parts_of_next_token_training_average_to_the_whole_step(world: int) -> None:
    made, model = rows(), build_tiny("llama", seed=5)
    schedule = Schedule(made.lengths, 7, seed=1)
    module = CausalLMModule(model, TrainingSettings(), 4)
    for everything in (False, True):
        labelled = every_token(made) if everything else made
        whole = next(iter(TrainLoader(labelled, schedule, 1)))
        wanted = module.training_step(whole, 0).item()
        parts = [batch for rank in range(world) for batch in TrainLoader(labelled, schedule, 1, rank, world, micros=2)]
        found = [module.training_step(batch, 0).item() for batch in parts]
        assert sum(found) / len(found) == pytest.approx(wanted, rel=1e-6)
