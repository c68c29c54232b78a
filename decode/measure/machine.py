"""The machine of a measurement, its load, and the number of threads that suits a model."""

import os
import platform
import re
import timeit
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import torch
import transformers
from transformers import PreTrainedModel

from decode.errors import Fields
from decode.models.api import Read
from decode.models.check import open_runner

BUSY = 0.25  # share of processor time of other processes above which measured speeds are not reliable
SLOW = 0.05  # if one token takes longer than these seconds, one thread is not tried, and all are used
CLEARLY = 0.85  # waiting for a descheduled thread is expensive, so all threads have to be so much faster than one
HARDWARE = ("cpu", "cores", "device", "accelerator")  # facts without which costs are those of another machine


def describe(device: torch.device | str = "cpu") -> Fields:
    """Processor, cores, threads, accelerator and library versions, for reports."""
    device, info = torch.device(device), Path("/proc/cpuinfo")
    named = re.search(r"^model name\s*: (.*)", info.read_text(encoding="utf-8") if info.exists() else "", re.MULTILINE)
    facts: Fields = {
        "cpu": named[1] if named else platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "device": str(device),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    if device.type == "cuda":
        facts["accelerator"] = torch.cuda.get_device_name(device)
    return facts


def sentence(facts: Mapping[str, Any]) -> str:
    """`describe` in one line."""
    where = facts.get("accelerator") or f"{facts['cpu']}, {facts['cores']} cores"
    return f"{where}, threads: {facts['threads']}, torch {facts['torch']}, transformers {facts['transformers']}"


def load_warning(threads: int | None = None) -> str:
    """A warning if processes other than our `threads` kept the processors busy in the last minute; else empty."""
    others = (psutil.getloadavg()[0] - (threads or torch.get_num_threads())) / (os.cpu_count() or 1)
    if others <= BUSY:
        return ""
    return f"other processes take {others:.0%} of the processors' time; measure speeds again on an idle machine"


@contextmanager
def using_threads(count: int) -> Iterator[None]:
    """Set torch's thread count inside the block."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@torch.inference_mode()
def choose_threads(model: PreTrainedModel, asked: int | None = None) -> tuple[int, str]:
    """The thread count that was asked for, or the faster of one and all (those of now), measured on this model.

    Small models are often fastest on one thread: handing out work costs more than the work. The layouts of weights are
    measured with the count that is chosen here, so this is done before.

    Returns:
        The count, and why it was chosen. Torch's own is as before.
    """
    most = torch.get_num_threads()
    if asked is not None or most == 1 or model.device.type != "cpu":
        return asked or most, f"threads: {asked or most}"
    runner = open_runner(model)
    length, token, cache = min(64, runner.limit - 1), torch.zeros(1, dtype=torch.long), runner.new_cache()
    runner.forward([Read(cache, token.expand(length))], last=0)

    def step() -> None:
        runner.forward([Read(cache, token)])
        cache.truncate(length)

    def fastest(count: int) -> float:
        with using_threads(count):
            return min(timeit.repeat(step, number=1, repeat=7))

    single, multi = min(timeit.repeat(step, number=1, repeat=2)), 0.0
    if single <= SLOW:
        rounds = [(fastest(1), fastest(most)) for _ in range(3)]  # interleaved: other load affects both alike
        single, multi = map(min, zip(*rounds))
    cache.close()
    best = most if multi < CLEARLY * single else 1
    measured = f"{1e3 * single:.2f} ms with 1, {1e3 * multi:.2f} ms with {most}" if multi else f"more than {SLOW:g} s"
    return best, f"threads: {best} (a one-token target forward takes {measured})"
