"""``--estimate``: what a run will read, write and take, from a few steps of each of its parts on this machine.

The run's own data and models are used, in a folder that is removed again: as many examples as two steps need, a few
steps of every training, batches as large as the run's. What depends on the number of texts is scaled up; measurement
and export at the end of a run are not in it.
"""

from __future__ import annotations

import copy
import resource
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from decode.core.progress import duration
from distill.config.run_settings import ComparisonSettings, Settings
from distill.core import ranks
from distill.core.file_fingerprints import remove
from distill.core.run_dir import RunDir
from distill.data.batches.datamodule import Seen
from distill.data.batches.token_dataset import TokenDataset
from distill.data.stage_context import Measured, StageContext
from distill.pipeline.run_pipeline import alone_in, run_of, run_stages
from distill.pipeline.stages import plan_of
from distill.pipeline.training_budget import Plan, plan_reference
from distill.teacher.distillation_data import ANSWERS, LOSSES, SIGNAL

STEPS = 8
"""Of every training; the first one is not counted."""


@dataclass(frozen=True)
class Part:
    """A part of the run: what it is, tokens read, bytes written, seconds."""

    name: str
    tokens: float = 0.0
    bytes: float = 0.0
    seconds: float = 0.0


@dataclass(frozen=True)
class Estimate:
    """The parts of a run, and the most memory that any of them takes: of the GPU, or of this process."""

    parts: list[Part]
    memory: float
    place: str


def measured_estimate(settings: Settings, console: Console) -> Estimate:
    """Runs a little of everything; the tokenised data are kept for the run itself.

    Raises:
        UserError: what the run itself would refuse.
    """
    settings = copy.deepcopy(settings)
    settings.validate()
    real = StageContext(settings, run_of(settings), console)
    small = _shortened(settings)
    run = run_of(small)
    remove(run.folder)
    try:
        with alone_in(real.run, settings, console), alone_in(run, small, console):
            drafts = (None, settings.draft, *settings.comparisons)
            largest = max(plan_of(real, draft)[1].batch_size for draft in drafts)
            small.reference.examples = min(len(real.examples), 2 * largest)  # as two steps of any distillation take
            context = StageContext(small, run, Console(quiet=True))
            context.corpus = real.corpus
            console.print(f"a few steps of every part, on {context.device}", highlight=False)
            run_stages(context)
            memory = _peak(context.device)
            return Estimate(_parts(real, context), memory, str(context.device))
    finally:
        remove(run.folder)


def show(found: Estimate, settings: Settings, console: Console) -> None:
    """Prints it."""
    table = Table("part", "tokens", "writes", "takes about", box=None, pad_edge=False)
    whole = Part("in all", 0, *(sum(getattr(p, name) for p in found.parts) for name in ("bytes", "seconds")))
    for part in (*found.parts, whole):
        tokens = f"{part.tokens / 1e6:.2f} M" if part.tokens else ""
        table.add_row(part.name, tokens, _size(part.bytes), duration(part.seconds))
    console.print(table)
    folder = Path(settings.output_dir)
    place = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    console.print(
        f"most memory: {_size(found.memory)} ({found.place}); disk: {_size(whole.bytes)}, of which "
        f"{_size(shutil.disk_usage(place).free)} are free. Without the measurement and the export at the end",
        highlight=False,
    )


def _shortened(settings: Settings) -> Settings:
    """The same run, a few steps of every training long, in one process."""
    small = copy.deepcopy(settings)
    small.name, small.comparisons, small.tracker.kind = f"{settings.name}-estimate", [], "none"
    trainer = small.trainer
    trainer.accumulate *= _processes(settings)
    trainer.devices, trainer.num_nodes, trainer.strategy = 1, 1, "auto"
    trainer.validate_every, trainer.checkpoint_every = 10**6, None
    for model in (small.target, small.initial):
        if model.trained:
            model.training.steps, model.training.epochs = STEPS, None
    small.reference.training.steps, small.reference.training.epochs, small.draft.epochs = STEPS, None, None
    return small


def _parts(real: StageContext, small: StageContext) -> list[Part]:
    settings, parts = real.settings, []
    texts, few, checked = len(real.examples), len(small.examples), len(real.validation)
    more = texts / few
    written = settings.reference.responses.from_target or not real.corpus.answered
    if (found := small.measured.get(f"{ANSWERS} train")) is not None:
        size = _bytes(small.run.work / "responses", "*.jsonl") * (texts + checked) / (few + checked)
        parts.append(Part("the target's answers", 0, size, found.seconds / found.count * (texts + checked)))
    folder = small.run.work / "signals"
    labels = more if written else real.examples.label_count / small.examples.label_count
    for name, told, patterns in (
        (SIGNAL, "the target's signal", ("target_*.npy", "features_*.npy")),
        (LOSSES, f"the {LOSSES}", ("reference_*.npy",)),
    ):
        if (found := small.measured.get(f"{name} train")) is None:
            continue
        checks = small.measured.get(f"{name} validation", Measured(0.0, 0))  # as many as in the run
        tokens = found.count * more if written else len(real.examples.ids)
        same = _bytes(folder, "*_validation.npy") if name == SIGNAL else 0
        size = same + (sum(_bytes(folder, pattern) for pattern in patterns) - same) * labels
        seconds = found.seconds / found.count * tokens + checks.seconds
        parts.append(Part(told, tokens + checks.count, size, seconds))
    for stage in ("target", "initial"):
        if (seen := small.seen.get(stage)) is not None:
            model = settings.target if stage == "target" else settings.initial
            rows = TokenDataset.of(real.corpus.train)
            plan = plan_reference(model.training, len(rows))
            whole = rows if real.corpus.answered else None
            parts.append(_training(stage, seen, plan, STEPS * plan.batch_size, whole, real, small.run))
    for draft in (None, settings.draft, *settings.comparisons):
        plain = draft is None or (isinstance(draft, ComparisonSettings) and draft.method == "distillspec")
        stage = "reference" if plain else "draft"
        (_, before), (_, plan) = plan_of(small, None if plain else settings.draft), plan_of(real, draft)
        name = "reference" if draft is None else draft.name
        known, count = None if written else real.examples, before.steps * before.batch_size
        parts.append(_training(name, small.seen[stage], plan, count, known, real, small.run, stage))
    return parts


def _training(
    name: str,
    seen: Seen,
    plan: Plan,
    examples: int,
    rows: TokenDataset | None,
    real: StageContext,
    run: RunDir,
    stage: str | None = None,
) -> Part:
    """A training, from some batches of it that held so many examples; ``rows`` are all of its examples, if known."""
    each = seen.tokens / examples if rows is None else float(rows.lengths.mean())
    tokens = plan.steps * plan.batch_size * each
    a_token = (seen.seconds - seen.first) / (seen.tokens * (1 - 1 / max(2, seen.batches)))
    validations = 2 + plan.steps // real.settings.trainer.validate_every
    seconds = tokens * a_token + validations * seen.validation / max(1, seen.validations)
    return Part(name, tokens, _bytes(run.path(stage or name), "**/*"), seconds / _processes(real.settings))


def _processes(settings: Settings) -> int:
    trainer = settings.trainer
    return ranks.process_count(trainer.accelerator, trainer.devices, trainer.num_nodes)


def _bytes(folder: Path, pattern: str) -> int:
    """Size of the files of a folder that is not a link."""
    if not pattern or folder.is_symlink():
        return 0
    return sum(path.stat().st_size for path in folder.glob(pattern) if path.is_file())


def _peak(device: torch.device) -> int:
    """The most memory taken so far, in bytes."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def _size(value: float) -> str:
    return f"{value / 1e9:.2f} GB" if value >= 1e9 else f"{value / 1e6:.1f} MB"
