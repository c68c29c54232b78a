"""``--estimate``: what a run will read and take, from a few steps of each of its parts on this machine.

The run's own data and models are used, in a folder that is removed again: as many examples as two steps need, a few
steps of every training, and a few texts for the measurement at the end. What grows with their number is scaled up.
"""

from __future__ import annotations

import copy

from rich.console import Console
from rich.table import Table

from decode.progress import duration, working
from distill import ranks
from distill.config.run import Settings
from distill.data.context import DATA, MEASUREMENT, StageContext
from distill.files import remove
from distill.pipeline import alone_in, measure
from distill.run_stages import run_stages
from distill.stages import run_of, stage_fingerprints
from distill.trainer import peak_memory

STEPS = 8
"""Steps of every training; the first one is not counted."""
TEXTS = 4
"""Texts that are decoded one by one."""


def estimate(settings: Settings, console: Console) -> dict[str, tuple[float, float]]:
    """Run a little of everything and print what the run will take; the tokenised data are kept for the run itself.

    Returns:
        Seconds and tokens of every part.

    Raises:
        decode.errors.UserError: What the run itself would refuse.
    """
    settings = copy.deepcopy(settings)
    settings.validate()
    small = copy.deepcopy(settings)
    small.name, small.tracker.kind, small.export.hub = f"{settings.name}-estimate", "none", None
    trainer, texts, run = small.trainer, small.evaluation, run_of(small)
    processes = ranks.process_count(trainer)
    trainer.accumulate *= processes
    trainer.devices, trainer.num_nodes, trainer.strategy, trainer.validate_every = 1, 1, "auto", 10**6
    for training in (small.target.training, small.student.training):
        training.steps, training.epochs = (None, None) if training.steps == training.epochs else (STEPS, None)
    small.training.steps, small.training.epochs = STEPS, None
    for draft in small.drafts:
        draft.training = {name: value for name, value in draft.training.items() if name not in ("steps", "epochs")}
    texts.prompts, texts.accuracy_prompts = (min(n, texts.batch_size) for n in (texts.prompts, texts.accuracy_prompts))
    texts.decode_prompts = min(texts.decode_prompts, TEXTS)
    real, context = StageContext(settings, run_of(settings), console), StageContext(small, run, Console(quiet=True))
    remove(run.folder)
    try:
        with alone_in(real.run, settings, console), alone_in(run, small, console):
            responses = settings.teacher.responses
            needed = [2 * draft.training_of(settings.training).batch_size for draft in settings.drafts]
            needed.append(responses.batch_size if responses.from_target else 1)
            small.teacher.examples = min(len(real.examples), max(needed))
            context.corpus = real.corpus
            console.print(f"a few steps of every part, on {context.device}: minutes", highlight=False)
            for stage in stage_fingerprints(small):
                with working(console, f"a few steps of {stage}"):
                    run_stages(context, (stage,), take_over=False)
            with working(console, MEASUREMENT):
                measure(context)
    finally:
        remove(run.folder)
    parts = {DATA: (real.measured[DATA][0], 0.0)} | _scaled(real, context, processes)
    table = Table("part", "tokens", "takes about", box=None, pad_edge=False)
    for name, (seconds, tokens) in parts.items():
        table.add_row(name, f"{tokens / 1e6:.2f} M" if tokens else "", duration(seconds))
    table.add_row("total", "", duration(sum(seconds for seconds, _ in parts.values())))
    console.print(table)
    memory = f"largest memory: {peak_memory(context.device) / 1e9:.2f} GB"
    console.print(f"{memory}; stages are counted one after another", highlight=False)
    return parts


def _scaled(real: StageContext, small: StageContext, processes: int) -> dict[str, tuple[float, float]]:
    """Return seconds and tokens of the run's parts, from those of the short one."""
    settings, parts = real.settings, dict[str, tuple[float, float]]()
    more = len(real.examples) / len(small.examples)
    texts, few, measurement = settings.evaluation, small.settings.evaluation, small.measured[MEASUREMENT][0]
    for name, (seconds, count) in small.measured.items():
        if name.endswith(" train"):  # what is prepared for trainings
            parts[name.removesuffix(" train")] = seconds * more, count * more
        elif name.startswith(f"{MEASUREMENT}: "):
            decoding = name.endswith(": decoding")
            ratio = texts.decode_prompts / few.decode_prompts if decoding else texts.prompts / few.prompts
            measurement += seconds * (ratio - 1)
    for stage, seen in small.seen.items():
        if stage in ("target", "initial"):
            model = settings.target if stage == "target" else settings.student
            steps = model.training.steps_for(len(real.corpus.train))
        else:
            steps = settings.draft(stage).training_of(settings.training).steps_for(len(real.examples))
        batches = steps * small.settings.trainer.accumulate
        seconds = (seen.seconds - seen.first) / max(1, seen.batches - 1) * batches
        seconds += (2 + steps // settings.trainer.validate_every) * seen.validation / max(1, seen.validations)
        parts[stage] = seconds / processes, seen.tokens / max(1, seen.batches) * batches
    return parts | {MEASUREMENT: (measurement, 0.0)}
