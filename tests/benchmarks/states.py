"""States out of vLLM beside those of a forward pass here: tokens per CPU second, and memory over many texts.

    python tests/benchmarks/states.py --config C --url http://127.0.0.1:8000/v1 [--texts 2000] [--png FILE]

The server is one that python -m distill check-engine prints the command of, on this machine, with one thread
(OMP_NUM_THREADS=1 VLLM_CPU_OMP_THREADS_BIND=nobind). CPU seconds are those of all its processes and of this one.
"""

from __future__ import annotations

import argparse
import itertools
import os
import shutil
import time
from pathlib import Path

import numpy as np
import psutil
import torch
import yaml

from decode.commands.cli import parse
from distill.__main__ import FOREIGN
from distill.config import Settings
from distill.data.dataset import Examples
from distill.pipeline import with_formats
from distill.run import Run
from distill.signal.target import read_states
from distill.stages import run_stages

BATCH, IN_FLIGHT = 16, 8


def of_engine() -> tuple[float, float]:
    """CPU seconds and resident bytes of all processes of vLLM."""
    seconds = memory = 0.0
    for process in psutil.process_iter(["name", "cmdline"]):
        words = " ".join([process.info["name"] or "", *(process.info["cmdline"] or [])])
        if "vllm" in words.lower() and process.pid != os.getpid():
            times = process.cpu_times()
            seconds, memory = seconds + times.user + times.system, memory + process.memory_info().rss
    return seconds, memory


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--config", required=True)
    arguments.add_argument("--url", required=True)
    arguments.add_argument("--texts", type=int, default=2000)
    arguments.add_argument("--png", help="file for a picture of memory over texts")
    given = arguments.parse_args()
    torch.set_num_threads(1)
    settings = with_formats(parse(Settings, ["--config", given.config], prog="states", foreign=FOREIGN))
    settings.teacher.signal, settings.teacher.engine.urls = "vllm", [given.url]
    settings.teacher.engine.in_flight, settings.teacher.examples = IN_FLIGHT, None
    run = Run(settings)
    run_stages(run, ("target",), check=False)
    examples = Examples.of(run.corpus.train)
    texts = [examples.ids[examples.span(i % len(examples))][:-1].tolist() for i in range(given.texts)]
    files, curve, tokens = run.states, list[tuple[int, float, float, int]](), 0
    folder = Path("/dev/shm")
    cpu, own, began = of_engine()[0], time.process_time(), time.perf_counter()
    first = shutil.disk_usage(folder).used
    files.coming = iter(texts)
    for start in range(0, len(texts), BATCH):
        for states in files.take(texts[start : start + BATCH]):
            tokens += len(states)
        if start % (5 * BATCH) == 0:
            resident = psutil.Process().memory_info().rss
            curve.append((start, of_engine()[1] / 1e6, resident / 1e6, shutil.disk_usage(folder).used - first))
    seconds, cpu, own = time.perf_counter() - began, of_engine()[0] - cpu, time.process_time() - own
    run.close()
    print(f"engine: {tokens:,} tokens, {seconds:.0f} s, CPU {cpu:.1f} s there and {own:.1f} s here, "
          f"{tokens / (cpu + own):,.0f} tokens per CPU second")  # fmt: skip
    model, layers, read = run.load_target("float32", "cpu"), run.captured_layers, 0
    own = time.process_time()
    for numbers in itertools.islice(examples.batches(BATCH), max(1, given.texts // BATCH)):
        batch = examples.batch(np.asarray(numbers))
        read_states(model, layers, batch)
        read += int(examples.lengths[numbers].sum())
    own = time.process_time() - own
    print(f"here: {read:,} tokens, {read / own:,.0f} tokens per CPU second")
    most = max(row[3] for row in curve)
    print(
        yaml.safe_dump(
            {
                "texts, MB of the engine, MB here, bytes in /dev/shm": [
                    [round(x) for x in row] for row in curve[:: max(1, len(curve) // 8)]
                ]
            }
        )
    )
    print(f"at most {most:,} bytes in {folder} at a time")
    if given.png:
        import matplotlib.pyplot as plt

        figure, axes = plt.subplots(figsize=(6, 3))
        for column, name in ((1, "engine, MB"), (2, "trainer, MB")):
            axes.plot([row[0] for row in curve], [row[column] for row in curve], label=name)
        axes.set(xlabel="texts", ylim=(0, None))
        axes.legend()
        figure.tight_layout()
        figure.savefig(given.png, dpi=120)


if __name__ == "__main__":
    main()
