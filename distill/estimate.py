"""``--estimate``: tokens, time and memory of a run, from a batch of texts and a few steps of every part, scaled up."""

import copy
import time
from typing import Any, ClassVar

import torch
from lightning.pytorch.callbacks import Callback
from rich.console import Console, Group
from transformers.utils import logging as hf_logging

from decode.files import scratch_folder
from decode.progress import duration, fitting_table, working
from distill.config import Settings
from distill.config.base import change
from distill.data.dataset import Examples
from distill.dry_run import shorten
from distill.pipeline import with_formats
from distill.responses.target import answered_texts
from distill.run import Run
from distill.signal.target import BYTES
from distill.stages import run_stages
from distill.training.trainer import peak_memory

STEPS = 8  # of every training; the first one is not counted
PROMPTS, FEW = 48, 4  # that the target writes, in one batch: for training, and for validation and test


class StepTimes(Callback):
    """Notes when every batch has been trained on, and the tokens that it has."""

    ends: ClassVar[list[tuple[float, int]]] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Note a batch."""
        if pl_module.device.type == "cuda":
            torch.cuda.synchronize(pl_module.device)
        self.ends.append((time.perf_counter(), batch["input_ids"].numel()))


def estimate(settings: Settings, console: Console) -> dict[str, tuple[float, float]]:
    """Run a little of everything, and print and return the seconds and tokens of every part of the run.

    Tokenised data are kept for the run itself.
    """
    hf_logging.disable_progress_bar()
    full, parts = with_formats(settings), {}
    with scratch_folder() as folder:
        run = Run(_small(full, str(folder)), Console(quiet=True))
        run.prompts_together = PROMPTS + 4 * FEW
        began, written = time.perf_counter(), full.data.from_target
        if not written:
            run.corpus = Run(full, console).corpus
        here = len(run.corpus.train)
        train = full.data.limits["train"] or here if written else here
        parts["the data"] = (time.perf_counter() - began) * train / here, 0.0
        count = min(train, full.teacher.examples or train)
        trainings = {"target": (full.target.training, train), "initial": (full.student.training, train)}
        trainings |= {draft.name: (draft.training_of(full.training), count) for draft in full.drafts}
        for stage, (training, examples) in trainings.items():
            if stage == "initial" and full.teacher.responses.from_target:  # which may be trained on the answers
                target = None if full.teacher.served else run.at_work(run.open_target())
                began = time.perf_counter()
                with working(console, "one batch of answers"):
                    rows = Examples.of(answered_texts(run, target)[0])
                del target
                more = count / len(rows)
                parts["answers"] = (time.perf_counter() - began) * more, more * float(rows.lengths.sum())
            StepTimes.ends.clear()
            with working(console, f"a few steps of {stage}"):
                run_stages(run, (stage,), check=stage == "initial")
            if len(StepTimes.ends) > 1:
                (first, *_), (last, *_) = StepTimes.ends[0], StepTimes.ends[-1]
                batches = training.steps_for(examples) * full.trainer.accumulate / (len(StepTimes.ends) - 1)
                parts[stage] = (last - first) * batches, sum(size for _, size in StepTimes.ends[1:]) * batches
    for part, (seconds, tokens) in parts.items():
        console.print(f"{part:<20} {tokens / 1e6:10.2f} M tokens {duration(seconds):>12}", highlight=False)
    console.print(states_table(run))
    total, memory = duration(sum(seconds for seconds, _ in parts.values())), peak_memory(run.device) / 1e9
    console.print(
        f"total {total} and {memory:.2f} GB on {run.device} in one process, without signals, validations and evaluation"
    )
    return parts


LINKS = {"NVLink": 450e9, "PCIe 5": 64e9, "Ethernet 100G": 12.5e9, "Ethernet 10G": 1.25e9}
"""Bytes a second in one direction: NVLink 4 of a GPU, 16 lanes, and networks, at their nominal speeds."""


def states_table(run: Run) -> Group:
    """What the target's states take that a head or draft reads: kept on disk, or sent by a serving engine."""
    width, planes = int(run.target_config.hidden_size), len(run.engine_layers)
    title = f"States that the draft reads: {planes} layers of {width} numbers for each token"
    headings, rows = ("format", "bytes a token", "GB a million tokens", *(f"tokens/s, {link}" for link in LINKS)), []
    for name, (size, scale) in BYTES.items():
        count = planes * (width * size + scale)
        speeds = (f"{speed / count:,.0f}" for speed in LINKS.values())
        rows.append(((name, f"{count:,}", f"{count / 1e3:.2f}", *speeds), ""))
    return fitting_table(headings, rows, title=title, right=range(1, len(headings)))


def _small(full: Settings, folder: str) -> Settings:
    """Return the settings of a run of a few steps on a few texts, in one process."""
    small, signal, given = copy.deepcopy(full), full.teacher.signal, full.trainer.callbacks
    callback = {"class_path": "distill.estimate.StepTimes"}
    shorten(small, steps=STEPS, epochs=None)
    if small.data.from_target:
        change(small.data, train_examples=PROMPTS, validation_examples=FEW, test_examples=FEW)
    largest = max(draft.training_of(small.training).batch_size for draft in small.drafts)
    change(
        small, output_dir=folder, tracker="none", trainer__devices=1, trainer__num_nodes=1, trainer__strategy="auto",
        trainer__validate_every=10**6, trainer__validation_examples=FEW, trainer__callbacks=[*given, callback],
        teacher__signal="hidden" if signal == "auto" else signal,
        teacher__examples=max(full.teacher.responses.batch_size, 2 * largest),
    )  # fmt: skip
    return small
