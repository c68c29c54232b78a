"""Which of the processes of a distributed run this is, and how they wait for one another.

The first process writes files, the others wait until they are there. They watch the disk instead of meeting at a
barrier: what takes the first one hours (computing a cache, say) would run into the time limit of a collective.
"""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist
from lightning.pytorch.utilities import rank_zero_only

from decode.errors import UserError

Found = TypeVar("Found")

EVERY = 0.2  # seconds between two looks at the disk
STARTED = time.time()  # this process was ready to begin; older failures are of other starts
PARENT = os.getppid()  # what started this process
_FOLDER: Path | None = None  # where failed processes leave their reasons, during a run


def rank() -> int:
    """Number of this process, from the process group or else from the environment of torchrun, Slurm or Lightning."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank()
    return int(getattr(rank_zero_only, "rank", None) or 0)


def world() -> int:
    """Number of processes that train together; 1 before training has begun."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def started() -> int:
    """Number of processes that were started together, before training has begun too."""
    names = ("WORLD_SIZE", "SLURM_NTASKS") if _several() else ()
    return max(world(), *(int(os.environ.get(name) or 1) for name in names), 1)


def check_alone(command: str) -> None:
    """Refuses to run a command of one process in several.

    Raises:
        UserError: it was started as several.
    """
    if (count := started()) > 1:
        raise UserError(
            f"{command} runs in one process, but {count} were started: start it without torchrun or srun. To train in "
            "several processes, run python -m distill or python -m probes first; this command reuses their models"
        )


def is_first() -> bool:
    """Whether this process is the one that writes files."""
    return rank() == 0


def local_device(accelerator: str, devices: int | str = "auto") -> torch.device:
    """The device on which Lightning trains in this process; it is the same before training has begun.

    Args:
        accelerator: ``trainer.accelerator``.
        devices: ``trainer.devices``; a list such as ``1,3`` names the GPUs that the processes take in turn.
    """
    if not _on_gpus(accelerator):
        return torch.device("cpu")
    own, listed = int(os.environ.get("LOCAL_RANK") or os.environ.get("SLURM_LOCALID") or 0), _listed(devices)
    return torch.device("cuda", listed[own % len(listed)] if listed else own % torch.cuda.device_count())


def process_count(accelerator: str, devices: int | str = "auto", nodes: int = 1) -> int:
    """How many processes Lightning trains with under these settings, before training has begun."""
    if str(devices) in ("auto", "-1"):
        return nodes * (torch.cuda.device_count() if _on_gpus(accelerator) else 1)
    return nodes * (len(_listed(devices)) or int(devices))


def _on_gpus(accelerator: str) -> bool:
    return accelerator in ("auto", "gpu", "cuda") and torch.cuda.is_available()


def _listed(devices: int | str) -> list[int]:
    """The GPUs that a list such as ``1,3`` names; none for a number."""
    return [int(item) for item in str(devices).split(",") if item.strip()] if "," in str(devices) else []


def exchange(value: Found) -> list[Found]:
    """The values of all processes, by rank."""
    if world() == 1:
        return [value]
    values: list[Found] = [value] * world()
    dist.all_gather_object(values, value)
    return values


def _several() -> bool:
    """Whether this process was started as one of several."""
    return world() > 1 or any(name in os.environ for name in ("LOCAL_RANK", "SLURM_LOCALID"))


@contextmanager
def failing_together(folder: Path) -> Iterator[None]:
    """Inside, a process that fails leaves its reason in ``folder``, and those that wait for it fail with it.

    Raises:
        UserError: Another process has failed, or was killed, of which this one noticed only that it is gone.
    """
    global _FOLDER
    _FOLDER = folder
    try:
        yield
    except BaseException as error:
        if not _several() or isinstance(error, GeneratorExit):
            raise
        if isinstance(error, RuntimeError) and (reason := _failed_elsewhere(seconds=3)) is not None:
            raise UserError(reason) from error
        known = error
        if isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and "gloo" in str(error)):
            known = UserError(
                f"process {rank()} lost the connection to another process, which reported no error: it was probably "
                "killed (out of memory) or its machine failed. Run the same command again to continue from the last "
                f"checkpoint ({error})"
            )
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"failed-{rank()}.txt").write_text(f"{type(known).__name__}: {known}", encoding="utf-8")
        raise known from (None if known is error else error)
    finally:
        _FOLDER = None


def _failed_elsewhere(seconds: float = 0.0) -> str | None:
    """What another process of this start has failed with; looked for so long."""
    end = time.monotonic() + seconds
    while _FOLDER is not None:
        for note in _FOLDER.glob("failed-*.txt"):
            number = note.stem.split("-")[1]
            if int(number) != rank() and note.stat().st_mtime >= STARTED:
                return f"process {number} has failed, and this one (process {rank()}) ends with it: {note.read_text()}"
        if time.monotonic() >= end:
            break
        time.sleep(EVERY)
    return None


def wait_for(look: Callable[[], Found | None], what: str, seconds: float | None = None) -> Found:
    """Looks again and again until the first process has put something on disk.

    Args:
        look: Returns what is waited for, or None.
        what: Named in the error.
        seconds: Longest wait; None: the hours in the environment variable DRAFTSMITH_WAIT_HOURS, 12 without it.

    Raises:
        UserError: It is not there in time, or a process has failed meanwhile.
    """
    if seconds is None:
        seconds = 3600 * float(os.environ.get("DRAFTSMITH_WAIT_HOURS") or 12)
    end = time.monotonic() + seconds
    while True:
        began = time.monotonic()
        if (found := look()) is not None:
            return found
        spent = time.monotonic() - began
        if (reason := _failed_elsewhere()) is not None:
            raise UserError(reason)
        if os.getppid() != PARENT:
            raise UserError(
                f"the process that started process {rank()} has ended while it waited for {what}: see the log of that "
                "process, and run the same command again to continue"
            )
        if time.monotonic() > end:
            raise UserError(
                f"process {rank()} has waited {seconds / 3600:.2g} hours for {what} from another process, which has "
                "ended or needs longer: look at its log, check that all processes see the same output_dir, and set "
                "DRAFTSMITH_WAIT_HOURS to more hours if it is still computing"
            )
        time.sleep(max(EVERY, 20 * spent))  # looking may mean reading large files
