"""The machine of a measurement, its load, which speeds are results, and the number of threads that suits a model."""

import os
import platform
import re
import time
import timeit
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import torch
import transformers

from decode.files import Fields
from decode.measure.statistics import LEAST, finite
from decode.models.api import Model, Read

BUSY = 0.25  # load of other programs for each core above which measured speeds are not reliable
FULL = 0.9  # share of the processors' time in use from which on programs wait for one another
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


def _times() -> tuple[float, float, float]:
    """Seconds: the clock, and the processors' time of this process and of all."""
    used = psutil.cpu_times()
    parts = ("user", "nice", "system", "irq", "softirq", "steal")
    return time.perf_counter(), time.process_time(), sum(getattr(used, part, 0.0) for part in parts)


@contextmanager
def other_load() -> Iterator[Fields]:
    """Note the load by other programs inside the block: the processors that they used, or would have with more cores.

    The fields are ``load`` and ``cores``, from the end of the block on.
    """
    noted, cores, before = Fields(), os.cpu_count() or 1, _times()
    try:
        yield noted
    finally:
        clock, process, used = (after - start for after, start in zip(_times(), before))
        load = max(0.0, (used - process) / max(clock, 1e-9))
        if used > FULL * cores * clock:  # time in use does not show how many wait for it
            load = max(load, psutil.getloadavg()[0] - torch.get_num_threads())
        noted |= {"load": load, "cores": cores}


def conditions(row: Mapping[str, Any]) -> str:
    """What stands beside an interval: the number of timed prompts, and the load of the machine by other programs."""
    prompts, load = row.get("prompts"), row.get("load")
    parts = [] if prompts is None else [f"{prompts} prompt{'s' * (prompts != 1)}"]
    return ", ".join(parts if load is None else [*parts, f"load {round(load, 1):g} on {row['cores']} cores"])


def doubt(row: Mapping[str, Any]) -> str:
    """Why the speedup in a row, measured or predicted, is not a result, and what to do; empty where it is one.

    It goes by the row's ``accepted_length``, ``least_cost`` (`decode.measure.costs.Costs.least`), ``prompts`` and load,
    as far as they are known.
    """
    speedup = row.get("speedup", row.get("predicted_speedup"))
    length = row.get("accepted_length", row.get("served_length"))
    least, prompts, reasons = row.get("least_cost"), row.get("prompts", row.get("texts")), []
    if not finite(speedup):
        return ""
    if (row.get("load") or 0) > BUSY * row.get("cores", 1):
        reasons.append(f"the machine was busy ({conditions({**row, 'prompts': None})})")
    if finite(least) and least < SURE:
        reasons.append(f"several tokens seemed to take the target {least:.2f} times as long as one: v(n) is below 1")
    # model.generate is another program, whose forwards may be faster
    if finite(length) and speedup > length + 1e-6 and not row.get("baseline"):
        reasons.append(f"it is above the accepted length of {length:.2f}, which bounds it")
    cures = ["measure again on an idle machine"] if reasons else []
    if prompts is not None and prompts < LEAST:
        reasons.append(f"{prompts} prompts were timed, expected {LEAST} or more")
        cures.append("time more (--limit; of a training --evaluation.decode-prompts, of probes --probes.bench-prompts)")
    return "; ".join(reasons) + f": {' and '.join(cures)}" if reasons else ""


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
