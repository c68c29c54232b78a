"""``--estimate``: tokens, time and memory of every part of a run, from one batch of texts and a few steps of it here.

The run's own models are used, in a folder that is removed again. What grows with the number of texts or steps is scaled
up; validations, export and evaluation are not counted.
"""

from __future__ import annotations

import time
from typing import Any, ClassVar

import numpy as np
import torch
from lightning.pytorch.callbacks import Callback
from rich.console import Console
from rich.table import Table

from decode.errors import scratch_folder
from decode.progress import duration, working
from distill import ranks
from distill.config import Settings
from distill.data.dataset import Examples
from distill.pipeline import with_formats
from distill.responses.target import answered_texts
from distill.run import Run
from distill.stages import run_stages
from distill.trainer import peak_memory

STEPS = 8
"""Steps of every training; the first one is not counted."""
PROMPTS, FEW = 48, 4
"""Prompts that the target writes, in one batch: for training, and for validation and test."""


class StepTimes(Callback):
    """Notes when every batch has been trained on, and the tokens that it has."""

    ends: ClassVar[list[tuple[float, int]]] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Note a batch."""
        if pl_module.device.type == "cuda":
            torch.cuda.synchronize(pl_module.device)
        self.ends.append((time.perf_counter(), batch["input_ids"].numel()))


def estimate(settings: Settings, console: Console) -> dict[str, tuple[float, float]]:
    """Run a little of everything and print what the run will take; tokenised data are kept for the run itself.

    Returns:
        Seconds and tokens of every part.

    Raises:
        decode.errors.UserError: What the run itself would refuse.
    """
    settings.validate()
    full, parts, table = with_formats(settings), dict[str, tuple[float, float]](), Table(box=None, pad_edge=False)
    for column in ("part", "tokens", "takes about", "largest memory so far"):
        table.add_column(column)

    def add(part: str, seconds: float, tokens: float) -> None:
        parts[part] = seconds, tokens
        memory = f"{peak_memory(run.device) / 1e9:.2f} GB"
        table.add_row(part, f"{tokens / 1e6:.2f} M", duration(seconds), memory)

    with scratch_folder() as folder:
        small = _small(full)
        small.output_dir = str(folder)
        run = Run(small, Console(quiet=True))
        run.prompts_together = PROMPTS + 4 * FEW
        console.print(f"one batch of texts and a few steps of every part, on {run.device}: minutes", highlight=False)
        began, more = time.perf_counter(), 1.0
        if full.data.from_target:
            train = int(full.data.train_limit or 1)
            more = train / len(run.corpus.train)  # which the target writes here
        else:
            run.corpus = Run(full, console).corpus
            train = len(run.corpus.train)
        add("the data", (time.perf_counter() - began) * more, 0)
        count = min(train, full.teacher.examples or train)
        trainings = {"target": (full.target.training, train), "initial": (full.student.training, train)}
        trainings |= {draft.name: (draft.training_of(full.training), count) for draft in full.drafts}
        for stage, (training, examples) in trainings.items():
            if stage == "initial":  # which may be trained on answers
                target, began = run.at_work(run.open_target()), time.perf_counter()
                with working(console, "one batch of answers"):
                    rows = Examples.of(answered_texts(run, target)[0])
                tokens = count * float(rows.lengths.mean())
                if full.teacher.responses.from_target:
                    add("answers", (time.perf_counter() - began) * count / len(rows), tokens)
                if full.teacher.signal != "online":  # where the target runs in every step
                    batch = rows.batch(np.arange(min(16, len(rows))))["input_ids"].to(target.device)
                    began = time.perf_counter()
                    with torch.no_grad():
                        target.base_model(input_ids=batch).last_hidden_state.sum().item()  # which waits for the device
                    add("signal", (time.perf_counter() - began) * count / len(batch), tokens)
                del target
            StepTimes.ends.clear()
            with working(console, f"a few steps of {stage}"):
                run_stages(run, (stage,), check=stage == "initial")
            if len(StepTimes.ends) > 1:
                times, sizes = zip(*StepTimes.ends)
                batches = training.steps_for(examples) * small.trainer.accumulate
                seconds = (times[-1] - times[0]) / (len(times) - 1) * batches / ranks.process_count(full.trainer)
                add(stage, seconds, sum(sizes) / len(sizes) * batches)
    table.add_row("total", "", duration(sum(seconds for seconds, _ in parts.values())))
    console.print(table)
    console.print("validations, export and evaluation are not counted", highlight=False)
    return parts


def _small(full: Settings) -> Settings:
    """Return the settings of a run of a few steps on a few texts, in one process."""
    small = with_formats(full)
    small.tracker, trainer = "none", small.trainer
    if small.teacher.signal == "auto":
        small.teacher.signal = "hidden"
    trainer.accumulate *= ranks.process_count(trainer)
    trainer.devices, trainer.num_nodes, trainer.strategy, trainer.validate_every = 1, 1, "auto", 10**6
    trainer.callbacks = [*trainer.callbacks, {"class_path": "distill.estimate.StepTimes"}]
    trainer.validation_examples = FEW
    for section in (small.target.training, small.student.training, small.training):
        if section.steps != section.epochs:  # both are null where a model is not trained
            section.steps, section.epochs = STEPS, None
    for draft in small.drafts:
        draft.training = {name: value for name, value in draft.training.items() if name not in ("steps", "epochs")}
    if small.data.from_target:
        small.data.train_examples, small.data.validation_examples, small.data.test_examples = PROMPTS, FEW, FEW
    largest = max(draft.training_of(small.training).batch_size for draft in small.drafts)
    small.teacher.examples = max(small.teacher.responses.batch_size, 2 * largest)
    return small
