"""The processes of a run: how many there are, which one this is, and how they keep step.

torchrun or srun starts them, or the command itself does (`restart`). Before anything else they join a process group for
their training, in which a collective that hangs is noticed soon, and one of gloo in which they may wait for hours: the
first process writes what is computed once, while the others stand at a `barrier`. What stops one of them is told to all
there (`together`).
"""

import atexit
import os
import platform
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed as dist
from lightning.fabric.accelerators import CPUAccelerator, CUDAAccelerator
from lightning.fabric.plugins.environments import (
    ClusterEnvironment,
    LightningEnvironment,
    SLURMEnvironment,
    TorchElasticEnvironment,
)
from lightning.fabric.utilities.exceptions import MisconfigurationException

from decode.errors import UserError, first_line

Value = TypeVar("Value")

COLLECTIVE, LONGEST_WAIT = timedelta(minutes=30), timedelta(hours=12)
"""How long a collective of a training may take, and how long a process waits for another one."""
TOLD = timedelta(seconds=30)
"""How long a process that stops waits for the others to hear why: they may be in a collective of a training."""
SEEN = 45.0
"""Seconds until a file of another machine has to be seen: NFS may remember for half a minute that there was none."""
_waiting: Any = None  # the group of gloo; None: that of all processes


def environment() -> ClusterEnvironment:
    """What started this process: torchrun or another launcher that sets its variables, srun, or no launcher.

    Raises:
        UserError: Several processes were meant that cannot find each other.
    """
    given = os.environ
    if TorchElasticEnvironment.detect() or ("RANK" in given and int(given.get("WORLD_SIZE") or 1) > 1):
        return TorchElasticEnvironment()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # srun is installed, and not used
        slurm, tasks = SLURMEnvironment.detect(), int(given.get("SLURM_NTASKS") or 1)
        if slurm and (given.get("SLURM_STEP_ID") or given.get("SLURM_PROCID", "0") != "0"):
            try:
                return SLURMEnvironment()
            except RuntimeError as error:
                raise UserError(str(error)) from error
    if slurm and tasks > 1:
        raise UserError(
            f"the job has {tasks} tasks (SLURM_NTASKS), and its batch script started this process alone: put srun "
            "before the command, or SLURM_NTASKS=1, with which it starts a process for each device itself"
        )
    return LightningEnvironment()


def rank() -> int:
    """Number of this process among all."""
    return dist.get_rank() if dist.is_initialized() else environment().global_rank()


def world() -> int:
    """Number of processes in the group; 1 before `start`."""
    return dist.get_world_size() if dist.is_initialized() else 1


def is_first() -> bool:
    """Whether this process is the one that writes files."""
    return rank() == 0


def accelerator(trainer: Any) -> str:
    """Lightning's name of the devices that ``trainer`` means: auto is CUDA where there is one, else the CPU.

    Raises:
        UserError: GPUs are asked for by name, and there is none.
    """
    available = torch.cuda.is_available()
    if trainer.accelerator in ("gpu", "cuda") and not available:
        raise UserError(
            f"trainer.accelerator is {trainer.accelerator} and PyTorch finds no GPU: set it to auto or cpu, or install "
            "a PyTorch that was built for CUDA and check nvidia-smi"
        )
    return "cuda" if available and trainer.accelerator != "cpu" else "cpu"


def _devices(trainer: Any) -> list[int]:
    """The devices of this machine that ``trainer`` means, as Lightning reads them.

    Raises:
        UserError: It means none, or GPUs that are not there.
    """
    kind = CUDAAccelerator if accelerator(trainer) == "cuda" else CPUAccelerator
    wanted, why = kind.auto_device_count() if trainer.devices == "auto" else trainer.devices, ""
    try:
        devices: Any = kind.parse_devices(wanted)
    except (MisconfigurationException, TypeError, ValueError) as error:
        devices, why = None, f" ({error})"
    if not devices:
        raise UserError(f"trainer.devices is {wanted}, expected auto, a number from 1 up, or GPUs such as [0, 1]{why}")
    return list(range(devices)) if isinstance(devices, int) else list(devices)


def gpus(trainer: Any) -> tuple[list[int], list[int]]:
    """The GPUs of this machine that do not train, and those that do; neither where CUDA_VISIBLE_DEVICES names some."""
    if "CUDA_VISIBLE_DEVICES" in os.environ or not torch.cuda.is_available():
        return [], []
    try:
        trained = _devices(trainer) if accelerator(trainer) == "cuda" else []
    except UserError:  # those of another machine, as `process_count` tells in a run
        return [], []
    return [gpu for gpu in range(torch.cuda.device_count()) if gpu not in trained], trained


def local_device(trainer: Any) -> torch.device:
    """The device on which this process trains, and frozen models compute."""
    if accelerator(trainer) == "cpu":
        return torch.device("cpu")
    devices = _devices(trainer)
    return torch.device("cuda", devices[environment().local_rank() % len(devices)])


def one_device(trainer: Any) -> Any:
    """The device of `local_device` alone, as Lightning names it."""
    device = local_device(trainer)
    return [device.index] if device.type == "cuda" else 1


def process_count(trainer: Any) -> int:
    """How many processes the section ``trainer`` means, on all machines."""
    return int(trainer.num_nodes) * len(_devices(trainer))


def restart(trainer: Any, module: str, arguments: list[str]) -> None:
    """Replace this process by torchrun with as many as ``trainer`` means; returns where no more are needed.

    ``module`` is the command, such as ``distill``, and ``arguments`` are its own.
    """
    count = process_count(trainer)
    if count == 1 or trainer.num_nodes > 1 or not isinstance(environment(), LightningEnvironment):
        return
    print(f"{count} processes, one for each device (trainer.devices)", file=sys.stderr, flush=True)
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // count)))
    if os.getcwd() not in sys.path:  # as for the program ``draftsmith``: its processes import no file there either
        os.environ["PYTHONSAFEPATH"] = "1"
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={count}", "-m", module]
    os.execv(sys.executable, [sys.executable, *launcher, *arguments])


def start(trainer: Any) -> None:
    """Join the processes of this run. The settings of every process have to mean as many as were started.

    Raises:
        UserError: Another number was started.
    """
    place, count = environment(), process_count(trainer)
    if (started := place.world_size()) != count:
        raise UserError(
            f"trainer.devices is {trainer.devices} and trainer.num_nodes {trainer.num_nodes}, which is {count} "
            f"processes, and {started} were started: draftsmith distill and probe start those of one machine "
            "themselves; else start as many with torchrun or srun, or change trainer.devices"
        )
    if (device := local_device(trainer)).index:
        torch.cuda.set_device(device)
    if count > 1 and not dist.is_initialized():
        _join(place, device.type == "cuda", COLLECTIVE)


def _join(place: ClusterEnvironment, cuda: bool, timeout: timedelta) -> None:
    """Join the processes that were started, which takes at most this time; so may each collective of a training."""
    os.environ |= {"MASTER_ADDR": place.main_address, "MASTER_PORT": str(place.main_port)}
    backend, count = "cpu:gloo,cuda:nccl" if cuda else "gloo", place.world_size()
    try:
        dist.init_process_group(backend, rank=place.global_rank(), world_size=count, timeout=timeout)
    except dist.DistError as error:
        raise UserError(
            f"not all of the {count} processes came to {place.main_address} within {timeout}: the output of those that "
            f"are missing says why ({first_line(error)})"
        ) from error
    global _waiting
    _waiting = dist.new_group(backend="gloo", timeout=LONGEST_WAIT)
    atexit.register(lambda: dist.is_initialized() and dist.destroy_process_group())


def refuse(error: UserError) -> NoReturn:
    """Raise what stops this process before it has settings, in all processes that were started with it.

    Raises:
        UserError: The error.
    """
    with together():
        with suppress(UserError):  # the others do not come
            if (place := environment()).world_size() > 1:
                _join(place, torch.cuda.is_available(), TOLD)
        raise error


def check_alone(command: str) -> None:
    """Refuse to run a command of one process in several.

    Raises:
        UserError: It was started as several.
    """
    if (count := environment().world_size()) > 1:
        raise UserError(
            f"{command} runs in one process, but {count} were started: start it without torchrun or srun, after "
            "draftsmith distill or draftsmith probe has trained in several; it reuses their models"
        )


class Elsewhere(UserError):
    """What has stopped another process, with its number and machine."""


@contextmanager
def together() -> Iterator[None]:
    """Within it, whatever stops one process is raised by all of them: by the others at their next barrier or exchange.

    Raises:
        UserError: Another process was stopped, or this one, with its number and machine.
    """
    try:
        yield
    except Elsewhere:
        raise
    except Exception as error:
        if "Connection closed by peer" in str(error):  # of gloo, in a training
            ended = "another process has ended, and its output says why; then run the same command again to continue"
            raise Elsewhere(ended) from error
        why, refused = "", isinstance(error, UserError)
        with suppress(RuntimeError):  # the others have ended, or do not come
            why = _stopped(str(error) if refused else f"{type(error).__name__}: {error}", TOLD)
        if why and refused:
            raise Elsewhere(why) from error
        raise


def _stopped(reason: str = "", longest: timedelta = LONGEST_WAIT) -> str:
    """Wait for all processes, and return what stops one of them; ``reason`` stops this one."""
    if world() == 1:
        return ""
    flag = torch.tensor(int(bool(reason)))
    dist.all_reduce(flag, dist.ReduceOp.MAX, _waiting, async_op=True).wait(longest)
    reasons = [""] * world()
    if flag:
        dist.all_gather_object(reasons, reason and f"process {rank()} on {platform.node()}: {reason}", _waiting)
    told = [each for each in reasons if each]
    same = {each.partition(": ")[2] for each in reasons}
    return same.pop() if len(same) == 1 else told[0]


def barrier() -> None:
    """Wait for all processes.

    Raises:
        UserError: One of them was stopped.
    """
    if why := _stopped():
        raise Elsewhere(why)


def anywhere(flag: bool) -> bool:
    """Whether a flag is set in any process, which the hosts tell each other without their devices."""
    if world() == 1:
        return flag
    flags = torch.tensor(int(flag))
    dist.all_reduce(flags, dist.ReduceOp.MAX)
    return bool(flags)


def exchange(value: Value) -> list[Value]:
    """The values of all processes, by rank.

    Raises:
        UserError: One of them was stopped.
    """
    barrier()
    if world() == 1:
        return [value]
    values: list[Value] = [value] * world()
    dist.all_gather_object(values, value, _waiting)
    return values


def soon(seen: Callable[[], bool]) -> bool:
    """Whether this process sees, within `SEEN` seconds, what another one has written."""
    end = time.monotonic() + SEEN * (world() > 1)
    while not (there := seen()) and time.monotonic() < end:
        time.sleep(0.2)
    return there


def check_seen(path: Path) -> None:
    """Wait for all processes, and see to it that a file that the first one has just written is there for each of them.

    Raises:
        UserError: It is not, because the processes work in different folders or on different disks.
    """
    content = exchange(_content(path))[0]
    seen = soon(lambda: _content(path) == content)
    places = exchange((seen, f"{path.parent.parent.absolute()} on {platform.node()}"))
    if blind := [f"process {number}: {where}" for number, (there, where) in enumerate(places) if not there]:
        raise UserError(
            f"{places[0][1]}, where process 0 works, is not seen alike by all processes ({', '.join(blind)}): give all "
            "of them the same output_dir, on a disk that their machines share"
        )


def _content(path: Path) -> str | None:
    try:
        return path.read_text()
    except OSError:
        return None
