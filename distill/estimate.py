"""``--estimate``: what a run will read and take, from a few steps of each of its parts on this machine.

The run's own data and models are used, in a folder that is removed again: as many examples as two steps need, a few
steps of every training, and a few texts for the measurement at the end. What grows with their number is scaled up.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from decode.progress import duration, working
from distill import ranks
from distill.config.run import Settings
from distill.data.batches import TokenDataset
from distill.data.context import DATA, MEASUREMENT, StageContext
from distill.files import remove
from distill.pipeline import alone_in, measure
from distill.responses.texts import ANSWERS
from distill.run_stages import run_stages
from distill.stages import run_of, stage_fingerprints
from distill.teacher.store import LOSSES, SIGNAL
from distill.trainer import peak_memory

STEPS = 8
"""Steps of every training; the first one is not counted."""
TEXTS = 4
"""Texts that are decoded one by one."""


@dataclass(frozen=True)
class Part:
    """A part of a run: tokens read and seconds."""

    name: str
    seconds: float
    tokens: float = 0.0


def estimate(settings: Settings, console: Console) -> tuple[list[Part], float]:
    """Run a little of everything; the tokenised data are kept for the run itself.

    Returns:
        The parts of the run, and the bytes of memory of the largest: of the GPU, or of this process.

    Raises:
        decode.errors.UserError: What the run itself would refuse.
    """
    settings = copy.deepcopy(settings)
    settings.validate()
    real, small = StageContext(settings, run_of(settings), console), _shortened(settings)
    run = run_of(small)
    remove(run.folder)
    try:
        with alone_in(real.run, settings, console), alone_in(run, small, console):
            largest = max(draft.training_of(settings.training).batch_size for draft in settings.drafts)
            responses = settings.teacher.responses
            batch = responses.batch_size if responses.from_target else 1
            small.teacher.examples = min(len(real.examples), max(2 * largest, batch))
            context = StageContext(small, run, Console(quiet=True))
            context.corpus = real.corpus
            console.print(f"a few steps of every part, on {context.device}: minutes", highlight=False)
            for stage in stage_fingerprints(small):
                with working(console, f"a few steps of {stage}"):
                    run_stages(context, (stage,), take_over=False)
            with working(console, MEASUREMENT):
                measure(context)
            return [Part(DATA, real.measured[DATA].seconds), *_parts(real, context)], peak_memory(context.device)
    finally:
        remove(run.folder)


def show(parts: list[Part], memory: float, console: Console) -> None:
    """Print the estimate."""
    table = Table("part", "tokens", "takes about", box=None, pad_edge=False)
    for part in [*parts, Part("total", sum(part.seconds for part in parts))]:
        table.add_row(part.name, f"{part.tokens / 1e6:.2f} M" if part.tokens else "", duration(part.seconds))
    console.print(table)
    console.print(f"largest memory: {memory / 1e9:.2f} GB; stages are counted one after another", highlight=False)


def _shortened(settings: Settings) -> Settings:
    """Return the same run with a few steps of every training, in one process."""
    small = copy.deepcopy(settings)
    small.name, small.tracker.kind, small.export.hub = f"{settings.name}-estimate", "none", None
    trainer, texts = small.trainer, small.evaluation
    trainer.accumulate *= ranks.process_count(trainer.accelerator, trainer.devices, trainer.num_nodes)
    trainer.devices, trainer.num_nodes, trainer.strategy, trainer.validate_every = 1, 1, "auto", 10**6
    for training in (small.target.training, small.student.training, small.training):
        training.steps, training.epochs = (None, None) if training.steps == training.epochs else (STEPS, None)
    for draft in small.drafts:
        draft.training = {name: value for name, value in draft.training.items() if name not in ("steps", "epochs")}
    texts.prompts, texts.accuracy_prompts = (min(n, texts.batch_size) for n in (texts.prompts, texts.accuracy_prompts))
    texts.decode_prompts = min(texts.decode_prompts, TEXTS)
    return small


def _parts(real: StageContext, small: StageContext) -> list[Part]:
    settings, found = real.settings, small.measured
    parts, more = [], len(real.examples) / len(small.examples)
    for kind, name in ((ANSWERS, "the target's answers"), (SIGNAL, "the target's signal"), (LOSSES, f"the {LOSSES}")):
        if (made := found.get(f"{kind} train")) is not None:
            parts.append(Part(name, made.seconds * more, 0 if kind == ANSWERS else made.count * more))
    for stage, seen in small.seen.items():
        if stage in ("target", "initial"):
            model = settings.target if stage == "target" else settings.student
            steps = model.training.steps_for(len(TokenDataset.of(real.corpus.train)))
        else:
            steps = settings.draft(stage).training_of(settings.training).steps_for(len(real.examples))
        a_batch = (seen.seconds - seen.first) / max(1, seen.batches - 1)
        batches = steps * small.settings.trainer.accumulate
        validations = 2 + steps // settings.trainer.validate_every
        seconds = a_batch * batches + validations * seen.validation / max(1, seen.validations)
        trainer = settings.trainer
        processes = ranks.process_count(trainer.accelerator, trainer.devices, trainer.num_nodes)
        parts.append(Part(stage, seconds / processes, seen.tokens / max(1, seen.batches) * batches))
    texts, few = settings.evaluation, small.settings.evaluation
    ratios = {"decoding": texts.decode_prompts / few.decode_prompts}
    seconds = found[MEASUREMENT].seconds
    for name, made in found.items():
        if name.startswith(f"{MEASUREMENT}: "):
            seconds += made.seconds * (ratios.get(name.partition(": ")[2], texts.prompts / few.prompts) - 1)
    return [*parts, Part(MEASUREMENT, seconds)]
