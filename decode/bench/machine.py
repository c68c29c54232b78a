"""The machine of a measurement, its load, and the number of threads that suits a model."""

import os
import platform
import time
from pathlib import Path
from typing import Any

import psutil
import torch
import transformers

from decode.models.runner import Runner

BUSY = 0.25  # share of processor time of other processes above which measured speeds are not reliable
SLOW = 0.05  # seconds of a one-token forward above which more threads are always faster and are not measured


def describe(device: torch.device | str = "cpu") -> dict[str, Any]:
    """Processor, cores, threads, accelerator and library versions, for reports."""
    device, info = torch.device(device), Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.exists() else []
    names = [line.partition(": ")[2] for line in lines if line.startswith("model name")]
    facts: dict[str, Any] = {
        "cpu": names[0] if names else platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "device": str(device),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    if device.type == "cuda":
        facts["accelerator"] = torch.cuda.get_device_name(device)
    return facts


def sentence(facts: dict[str, Any]) -> str:
    """`describe` in one line."""
    where = facts.get("accelerator") or f"{facts['cpu']}, {facts['cores']} cores"
    return f"{where}, threads: {facts['threads']}, torch {facts['torch']}, transformers {facts['transformers']}"


def load_warning() -> str:
    """A warning if other processes keep the processors busy (by the load of the last minute), otherwise empty."""
    others = (psutil.getloadavg()[0] - torch.get_num_threads()) / (os.cpu_count() or 1)
    if others <= BUSY:
        return ""
    return f"other processes take {others:.0%} of the processors' time; measure speeds again on an idle machine"


@torch.inference_mode()
def set_threads(runner: Runner, threads: int | None = None) -> str:
    """Set torch's thread count: the one asked for, or the faster of one and all, measured on this model.

    Small models are often fastest on one thread: handing out work costs more than the work.

    Returns:
        The count, and why it was chosen.
    """
    most = torch.get_num_threads()
    if threads is not None or most == 1 or runner.device.type != "cpu":
        torch.set_num_threads(threads or most)
        return f"threads: {threads or most}"
    length, token, cache = min(64, runner.limit - 1), torch.zeros(1, dtype=torch.long), runner.new_cache()
    runner.forward([cache], [token.expand(length)], last=0)

    def fastest(count: int, repeats: int) -> float:
        """Seconds of the fastest one-token forward with this many threads."""
        torch.set_num_threads(count)
        times = []
        for _ in range(repeats):
            began = time.perf_counter()
            runner.forward([cache], [token])
            times.append(time.perf_counter() - began)
            cache.truncate(length)
        return min(times)

    times = {1: fastest(1, 2), most: 0.0}
    if times[1] <= SLOW:
        rounds = [(fastest(most, 7), fastest(1, 7)) for _ in range(3)]  # interleaved: other load affects both alike
        times = dict(zip((most, 1), map(min, zip(*rounds))))
    cache.close()
    # waiting for a descheduled thread is expensive, so more threads have to be clearly faster
    best = most if times[most] < 0.85 * times[1] else 1
    torch.set_num_threads(best)
    measured = ", ".join(f"{1e3 * times[n]:.2f} ms with {n}" for n in (1, most) if times[n])
    return f"threads: {best} (a one-token target forward takes {measured})"
