"""Which of the processes of a distributed run this is, and how they wait for one another.

The first process writes files, the others wait until they are there. They watch the disk instead of meeting at a
barrier: what takes the first one hours (computing a cache, say) would run into the time limit of a collective.
"""

import os
import time
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from lightning.pytorch.utilities import rank_zero_only

from decode.errors import UserError

Found = TypeVar("Found")

PARENT = os.getppid()  # what started this process


def rank() -> int:
    """Number of this process, from the process group or else from the environment of torchrun, Slurm or Lightning."""
    if dist.is_initialized():
        return dist.get_rank()
    return int(getattr(rank_zero_only, "rank", None) or 0)


def world() -> int:
    """Number of processes that train together; 1 before training has begun."""
    return dist.get_world_size() if dist.is_initialized() else 1


def started() -> int:
    """Number of processes that were started together, before training has begun too."""
    several = any(name in os.environ for name in ("LOCAL_RANK", "SLURM_LOCALID"))
    names = ("WORLD_SIZE", "SLURM_NTASKS") if several else ()
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


def process_count(trainer: Any) -> int:
    """How many processes Lightning trains with under a run's section ``trainer``, before training has begun."""
    if str(trainer.devices) in ("auto", "-1"):
        return trainer.num_nodes * (torch.cuda.device_count() if _on_gpus(trainer.accelerator) else 1)
    return trainer.num_nodes * (len(_listed(trainer.devices)) or int(trainer.devices))


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


def wait_for(look: Callable[[], Found | None], what: str, seconds: float | None = None) -> Found:
    """Look again and again until the first process has put something on disk; return what ``look`` found.

    Args:
        look: Returns what is waited for, or None.
        what: Named in the error.
        seconds: Longest wait; None: the hours in the environment variable DRAFTSMITH_WAIT_HOURS, 12 without it.

    Raises:
        UserError: It is not there in time, or the process that started this one has ended.
    """
    if seconds is None:
        seconds = 3600 * float(os.environ.get("DRAFTSMITH_WAIT_HOURS") or 12)
    began = time.monotonic()
    while True:
        started = time.monotonic()
        if (found := look()) is not None:
            return found
        now = time.monotonic()
        if now - began > seconds or os.getppid() != PARENT:
            raise UserError(
                f"process {rank()} has waited {(now - began) / 3600:.2g} hours for {what} from another process, which "
                "has ended or needs longer: look at its log, check that all processes see the same output_dir, and set "
                "DRAFTSMITH_WAIT_HOURS to more hours if it is still computing"
            )
        time.sleep(max(0.2, 20 * (now - started)))  # looking may mean reading large files
