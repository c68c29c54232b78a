"""The machine of a measurement, what disturbed it, which speeds are results, and how many threads suit a model."""

import os
import platform
import re
import time
import timeit
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers

from decode.files import Fields
from decode.measure.statistics import LEAST, finite
from decode.models.api import Model, Read

UNDISTURBED = 0.95  # least share of the timed rounds in which no thread waits for a processor
THREADS = Path("/proc/self/task")  # Linux counts how long each thread was ready to run without a processor
SURE = 0.95  # v(n) is 1 or more; where it is 1, as on a GPU, this is room for its error
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


def _delays() -> dict[str, float]:
    """Seconds that each thread of this process was ready and had no processor; empty where the system does not tell."""
    try:
        return {path.parent.name: int(path.read_text().split()[1]) / 1e9 for path in THREADS.glob("*/schedstat")}
    except (OSError, ValueError, IndexError):  # a thread has just ended, or the kernel does not count
        return {}


@contextmanager
def timed(device: torch.device) -> Iterator[Fields]:
    """Note, at the end of the block, the share of its time in which the most delayed thread waited for no processor.

    This is ``cpu_share``. It is below 1 where other programs had the processors; a thread that sleeps until another one
    has done its part waits for none. On a GPU, and where the system does not tell, nothing is noted.
    """
    noted, clock, before = Fields(), time.perf_counter(), _delays()
    try:
        yield noted
    finally:
        spent, after = max(time.perf_counter() - clock, 1e-9), _delays()
        if device.type == "cpu" and before and after:
            waited = max(seconds - before.get(thread, 0.0) for thread, seconds in after.items())
            noted["cpu_share"] = min(1.0, max(0.0, 1 - waited / spent))


def busy(row: Mapping[str, Any]) -> bool:
    """Whether other programs disturbed the measurement of a row (see `timed`)."""
    share = row.get("cpu_share")
    return share is not None and share < UNDISTURBED


def conditions(row: Mapping[str, Any]) -> str:
    """What stands beside an interval: the number of timed prompts."""
    prompts = row.get("prompts")
    return "" if prompts is None else f"{prompts} prompt{'s' * (prompts != 1)}"


def doubt(*rows: Mapping[str, Any]) -> str:
    """Why speedups in rows, measured or predicted, are no results, and what to do; empty where all are.

    It goes by a row's ``accepted_length``, ``least_cost`` (`decode.measure.costs.Costs.least`), ``prompts`` and
    ``cpu_share``, as far as they are known.
    """
    reasons: dict[str, str] = {}  # with what to do
    idle, more = (
        "measure again on an idle machine",
        "time more (--limit; of a training --evaluation.decode-prompts, of probes --probes.bench-prompts)",
    )
    for row in rows:
        speedup = row.get("speedup", row.get("predicted_speedup"))
        length = row.get("accepted_length", row.get("served_length"))
        least, prompts = row.get("least_cost"), row.get("prompts", row.get("texts"))
        if not finite(speedup):
            continue
        if busy(row):
            reasons[f"the machine was busy (threads waited over {1 - UNDISTURBED:.0%} of the time)"] = idle
        if finite(least) and least < SURE:
            reasons["several tokens seemed to take the target less time than one (v(n) is below 1)"] = idle
        # model.generate is another program, whose forwards may be faster
        if finite(length) and speedup > length + 1e-6 and not row.get("baseline"):
            reasons["the speedup is above the accepted length, which bounds it"] = idle
        if prompts is not None and prompts < LEAST:
            reasons[f"fewer than {LEAST} prompts were timed"] = more
    return f"{' and '.join(reasons)}; {' and '.join(dict.fromkeys(reasons.values()))}" if reasons else ""


@contextmanager
def using_threads(count: int | None) -> Iterator[None]:
    """Set torch's thread count, which is the process's, inside the block; None: leave it."""
    before = torch.get_num_threads()
    try:
        if count is not None:
            torch.set_num_threads(count)
        yield
    finally:
        if count is not None:
            torch.set_num_threads(before)


@torch.inference_mode()
def choose_threads(runner: Model, asked: int | None = None) -> tuple[int, str]:
    """The thread count that was asked for, or the faster of one and all (those of now), measured on this model.

    Small models are often fastest on one thread: handing out work costs more than the work.

    Returns:
        The count, and why it was chosen. Torch's own is as before.
    """
    most = torch.get_num_threads()
    if asked is not None or most == 1 or runner.device.type != "cpu":
        return asked or most, f"threads: {asked or most}"
    length, token, cache = min(64, runner.limit - 1), torch.zeros(1, dtype=torch.long), runner.new_cache()
    runner.forward([Read(cache, token.expand(length))], last=0)

    def step() -> None:
        runner.forward([Read(cache, token)])
        cache.truncate(length)

    def fastest(count: int, repeats: int = 7) -> float:
        with using_threads(count):
            return min(timeit.repeat(step, number=1, repeat=repeats))

    best, measured = most, f"more than {SLOW:g} s"
    if fastest(most, 2) <= SLOW:
        rounds = [(fastest(1), fastest(most)) for _ in range(3)]  # interleaved: other load affects both alike
        single, multi = map(min, zip(*rounds))
        best = most if multi < CLEARLY * single else 1
        measured = f"{1e3 * single:.2f} ms with 1, {1e3 * multi:.2f} ms with {most}"
    cache.close()
    return best, f"threads: {best} (a one-token target forward takes {measured})"
