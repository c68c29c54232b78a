"""The machine of a measurement, its load, and the number of threads that suits a model."""

import os
import platform
import statistics
import time
from pathlib import Path
from typing import Any

import psutil
import torch
import transformers

from decode.models.runner import Runner, synchronize

BUSY = 0.1  # share of processor time of other processes above which measured speeds are not reliable
SLOW = 0.05  # seconds of a one-token forward above which more threads are always faster and are not measured


def describe(device: torch.device | str = "cpu") -> dict[str, Any]:
    """Processor, cores, threads, accelerator and library versions, for reports."""
    device = torch.device(device)
    facts: dict[str, Any] = {
        "cpu": _cpu_name(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "device": str(device),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
        "system": platform.platform(terse=True),
    }
    if device.type == "cuda":
        facts["accelerator"] = torch.cuda.get_device_name(device)
    return facts


def sentence(facts: dict[str, Any]) -> str:
    """`describe` in one line."""
    where = facts.get("accelerator") or f"{facts['cpu']}, {facts['cores']} cores"
    threads = f"{facts['threads']} thread{'s' if facts['threads'] != 1 else ''}"
    others = facts.get("other_processes_share") or 0.0
    load = f", {others:.0%} of the processors' time taken by other processes" if others > BUSY else ""
    return f"{where}, {threads}, torch {facts['torch']}, transformers {facts['transformers']}{load}"


class Load:
    """Processor time of other processes since this object was made."""

    def __init__(self) -> None:
        self._began = _processor_seconds()

    def others(self) -> float:
        """Their share of the time of all processors, including time that a virtual machine's host took."""
        busy, own, whole = (now - then for now, then in zip(_processor_seconds(), self._began))
        return max(0.0, busy - own) / whole if whole > 0 else 0.0

    def warning(self) -> str:
        """A warning if the share is above `BUSY`, otherwise empty."""
        if (share := self.others()) <= BUSY:
            return ""
        return f"other processes took {share:.0%} of the processors' time; measure speeds again on an idle machine"


def _processor_seconds() -> tuple[float, float, float]:
    """Seconds since boot of all processes, of this one with its ended children, and of the processors."""
    every, own = psutil.cpu_times()._asdict(), psutil.Process().cpu_times()
    whole = sum(every.values()) - every.get("guest", 0) - every.get("guest_nice", 0)  # included in user and nice
    busy = whole - every["idle"] - every.get("iowait", 0)
    return busy, own.user + own.system + own.children_user + own.children_system, whole


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


@torch.inference_mode()
def seconds_per_token(runner: Runner, *, context: int = 64, repeats: int = 15) -> float:
    """Median time of a one-token forward at the present thread count."""
    context = max(1, min(context, runner.limit - 1))
    token = torch.zeros(1, dtype=torch.long, device=runner.device)
    cache = runner.new_cache()
    runner.forward([cache], [token.expand(context)], last=0)
    times = []
    for _ in range(repeats):
        synchronize(runner.device)
        began = time.perf_counter()
        runner.forward([cache], [token])
        synchronize(runner.device)
        times.append(time.perf_counter() - began)
        cache.truncate(context)
    cache.close()
    return statistics.median(times)


def set_threads(runner: Runner, threads: int | None = None) -> tuple[int, str]:
    """Set torch's thread count: the one asked for, or the faster of one and all, measured on this model.

    Small models are often fastest on one thread: handing out work costs more than the work.

    Returns:
        The count, and a sentence that says why.
    """
    if threads is not None:
        torch.set_num_threads(threads)
        return threads, f"{threads} thread{'s' if threads > 1 else ''}, as set"
    most = torch.get_num_threads()
    if most == 1 or runner.device.type != "cpu":
        return most, f"{most} thread{'s' if most > 1 else ''}, torch's own choice"
    torch.set_num_threads(1)
    alone = seconds_per_token(runner, context=1, repeats=2)
    if alone > SLOW:
        torch.set_num_threads(most)
        return most, f"{most} threads: a one-token target forward takes {1e3 * alone:.0f} ms on one, enough to share"
    times: dict[int, list[float]] = {1: [], most: []}
    for _ in range(3):  # interleaved, so that other load of the machine affects both
        for count, seen in times.items():
            torch.set_num_threads(count)
            seen.append(seconds_per_token(runner, repeats=7))
    # waiting for a descheduled thread is expensive, so more threads have to be clearly faster
    best = most if min(times[most]) < 0.85 * min(times[1]) else 1
    torch.set_num_threads(best)
    measured = ", ".join(f"{1e3 * min(seen):.2f} ms with {count}" for count, seen in times.items())
    return best, f"{best} thread{'s' if best > 1 else ''}: a one-token target forward takes {measured}"
