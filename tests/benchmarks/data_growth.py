"""What rows of training data cost: memory and seconds as their number grows, in one process and in several.

    python tests/benchmarks/data_growth.py 10000 100000

Pairs of a JSONL file become a corpus, states of 64 numbers for each token are kept, and batches with them are read at
random. Memory is what a process holds for itself (RssAnon), without the files that all processes map.
"""

import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random

WIDTH = 64


def write_rows(path: Path, count: int) -> None:
    """Write pairs of about 600 bytes."""
    words, chance = [f"word{n}" for n in range(500)], Random(0)
    with path.open("w") as file:
        for number in range(count):
            prompt, response = (" ".join(chance.choices(words, k=40)) for _ in range(2))
            file.write(json.dumps({"prompt": f"{number} {prompt}", "response": response}) + "\n")


def held() -> float:
    """Megabytes that this process holds for itself."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon")) / 1000


@contextmanager
def part(name: str, rows: int, start: float) -> Iterator[None]:
    """Print the most memory that a part takes above `start`, and its CPU time, its children's included."""
    most, ended = [0.0], threading.Event()

    def watch() -> None:
        while not ended.wait(0.02):
            most[0] = max(most[0], held())

    watcher, before = threading.Thread(target=watch), os.times()
    watcher.start()
    yield
    ended.set()
    watcher.join()
    now = os.times()
    seconds = sum(now[:4]) - sum(before[:4])
    print(f"  {name:<28}{most[0] - start:8.0f} MB {held() - start:8.0f} MB after {1e6 * seconds / rows:8.0f} us a row")


def work(folder: Path, rows: int) -> None:
    """One process of the training."""
    import numpy as np
    import torch

    from distill import ranks
    from distill.config import TrainerSettings
    from distill.config.data import DataSettings
    from distill.data.corpus import load_corpus
    from distill.data.dataset import FEATURES, Batch, Examples
    from distill.kept import Kept
    from distill.signal.kept import keep_columns

    trainer = TrainerSettings(devices=int(os.environ.get("WORLD_SIZE", "1")), accelerator="cpu")
    ranks.start(trainer)
    rank = ranks.rank()
    warm, source = (DataSettings(source=str(folder / name), max_length=2048) for name in ("warm.jsonl", "rows.jsonl"))
    tokenizer = load_corpus(warm, seed=0, folder=folder / "warm").tokenizer
    start = held()
    print(f"process {rank}, {rows} rows")
    for title, train in (("a sample of 1000", 1000), ("all rows", None)):
        with part(title, rows, start):
            source.train_examples = train
            corpus = load_corpus(source, seed=0, folder=folder / f"corpus-{train}", tokenizer=tokenizer)
    with part("ids and labels", rows, start):
        examples = Examples.of(corpus.train)

    def states(batch: Batch) -> dict[str, torch.Tensor]:
        return {FEATURES: batch["input_ids"][..., None].expand(-1, -1, WIDTH).to(torch.int16)}

    with part("keeping states", rows, start):
        keep_columns(Kept({FEATURES: ((WIDTH,), "int16")}, folder / "states"), [examples], states)
    with part("500 batches of 16", 8000, start):
        for step in range(500):
            examples.batch(np.random.default_rng(step).integers(len(examples), size=16))


def main() -> None:
    """Start the processes for each number of rows."""
    for count in map(int, sys.argv[1:]):
        for world in (1, 2):
            with tempfile.TemporaryDirectory() as folder:
                write_rows(Path(folder, "rows.jsonl"), count)
                write_rows(Path(folder, "warm.jsonl"), 200)
                size = Path(folder, "rows.jsonl").stat().st_size / 1e6
                print(f"{count} rows, {size:.0f} MB, {world} processes", flush=True)
                environment = os.environ | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(20000 + os.getpid() % 20000)}
                began, processes = time.perf_counter(), []
                for rank in range(world):
                    place = {
                        "RANK": str(rank),
                        "LOCAL_RANK": str(rank),
                        "WORLD_SIZE": str(world),
                        "LOCAL_WORLD_SIZE": str(world),
                    }
                    place |= {"GROUP_RANK": "0", "ROLE_RANK": str(rank)} | {
                        "TORCHELASTIC_RUN_ID": "x",
                        "TORCHELASTIC_MAX_RESTARTS": "0",
                        "TORCHELASTIC_RESTART_COUNT": "0",
                    }
                    command = [sys.executable, __file__, "--work", folder, str(count)]
                    processes.append(subprocess.Popen(command, env=environment | (place if world > 1 else {})))
                if any(process.wait() for process in processes):
                    sys.exit("a process failed")
                print(f"  {time.perf_counter() - began:.0f} s", flush=True)


if __name__ == "__main__":
    if sys.argv[1] == "--work":
        work(Path(sys.argv[2]), int(sys.argv[3]))
    else:
        main()
