"""``--estimate``: what a run will read, write and take, from a few steps of each of its parts on this machine.

The run's own data and models are used, in a folder that is removed again: as many examples as two steps need, a few
steps of every training, batches as large as the run's, a batch of texts and a few timed ones for the measurement at
the end. What depends on the number of texts is scaled up. A run notes what it took in the same parts, and an estimate
after it shows both.
"""

from __future__ import annotations

import copy
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from decode.errors import read_json
from decode.progress import duration, working
from distill import ranks
from distill.checks import Plan, plan_reference
from distill.config.drafts import ComparisonSettings
from distill.config.run import HubSettings, Settings
from distill.data.batches import Seen, TokenDataset
from distill.data.context import DATA, MEASUREMENT, Measured, StageContext
from distill.files import RunDir, remove
from distill.pipeline import PREPARED, REST, TAKEN, Part, alone_in, files_size, measure, run_of, taken_parts
from distill.responses.texts import ANSWERS
from distill.run_stages import run_stages
from distill.stages import plan_of, stage_fingerprints
from distill.teacher.store import LOSSES, SIGNAL
from distill.trainer import peak_memory

STEPS = 8
"""Of every training; the first one is not counted."""
TIMED = 4
"""Texts that are decoded one by one."""
MAPPED = [PREPARED[kind][0] for kind in (SIGNAL, LOSSES)]
"""Parts whose files are memory-mapped."""


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
            answers = settings.reference.responses
            batch = answers.batch_size if answers.from_target else 1
            # as two steps of any distillation take, and a batch of answers
            small.reference.examples = min(len(real.examples), max(2 * largest, batch))
            if settings.target.trained and real.corpus.answered:  # it does not end its texts yet
                length = -(-real.validation.label_count // len(real.validation))
                small.evaluation.max_new_tokens = min(settings.evaluation.max_new_tokens, length)
            context = StageContext(small, run, Console(quiet=True))
            context.corpus = real.corpus
            console.print(f"a few steps of every part, on {context.device}: minutes", highlight=False)
            began = time.monotonic()
            stages = stage_fingerprints(small)
            for stage in stages:
                with working(console, f"a few steps of {stage}"):
                    run_stages(context, (stage,), take_over=False)
            with working(console, MEASUREMENT):
                measure(context)
            rest = time.monotonic() - began - sum(part.seconds for part in taken_parts(context))
            parts = [Part(DATA, seconds=real.measured[DATA].seconds), *_parts(real, context)]
            parts.append(Part(REST, seconds=rest * (1 + len(settings.comparisons) / len(stages))))
            memory: float = peak_memory(context.device)
            if context.device.type == "cpu":  # the signals' files count as memory of who has read them
                sizes = [sum(p.bytes for p in of if p.name in MAPPED) for of in (parts, taken_parts(context))]
                memory += sizes[0] - sizes[1]
            return Estimate(parts, memory, str(context.device))
    finally:
        remove(run.folder)


def show(found: Estimate, settings: Settings, console: Console) -> None:
    """Prints it, and what a run has taken, where there was one."""
    known = read_json(run_of(settings).work / TAKEN)
    taken = {name: Part(**part) for name, part in known.get("parts", {}).items()}
    table = Table("part", box=None, pad_edge=False)
    for column in ("tokens", "writes", "takes about"):
        table.add_column(column, justify="right")
        if taken:
            table.add_column("took", justify="right", style="dim")
    rows = [(part, taken.get(part.name)) for part in found.parts]
    whole, known_parts = _sum(found.parts), [own for _, own in rows if own is not None]
    for part, own in (*rows, (whole, _sum(known_parts) if len(known_parts) == len(rows) else None)):
        cells = zip(_cells(part), _cells(own))
        table.add_row(part.name, *(text for pair in cells for text in (pair if taken else pair[:1])))
    console.print(table)
    folder = Path(settings.output_dir)
    place = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    memory = f"{_size(found.memory)} ({found.place}{', took ' + _size(known['memory']) if known else ''})"
    console.print(
        f"most memory: {memory}; disk: {_size(whole.bytes)} needed, {_size(shutil.disk_usage(place).free)} free"
        + ("; times are for one stage after another" if settings.stages_at_once > 1 else ""),
        highlight=False,
    )


def _sum(parts: Sequence[Part]) -> Part:
    """All of them together."""
    return Part("in all", 0, *(sum(getattr(part, name) for part in parts) for name in ("bytes", "seconds")))


def _cells(part: Part | None) -> tuple[str, str, str]:
    if part is None:
        return "–", "–", "–"
    tokens = f"{part.tokens / 1e6:.2f} M" if part.tokens else ""
    return tokens, _size(part.bytes) if part.bytes else "", duration(part.seconds)


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
    texts, small.export.choose, small.export.hub = small.evaluation, "draft", HubSettings()
    texts.prompts, texts.accuracy_prompts = (min(n, texts.batch_size) for n in (texts.prompts, texts.accuracy_prompts))
    texts.decode_prompts = min(texts.decode_prompts, TIMED)
    return small


def _parts(real: StageContext, small: StageContext) -> list[Part]:
    settings, parts = real.settings, []
    texts, few, checked = len(real.examples), len(small.examples), len(real.validation)
    more = texts / few
    written = settings.reference.responses.from_target or not real.corpus.answered
    labels = more if written else real.examples.label_count / small.examples.label_count
    for kind, (name, folder, patterns) in PREPARED.items():
        if (found := small.measured.get(f"{kind} train")) is None:
            continue
        checks = small.measured.get(f"{kind} validation", Measured(0.0, 0))  # as many as in the run
        count = found.count * more if written else len(real.examples.ids)
        a_piece = (found.seconds + checks.seconds) / (found.count + checks.count)
        sizes = [files_size(small.run.work / folder, pattern) for pattern in patterns]
        same = files_size(small.run.work / folder, "*_validation.npy") if kind == SIGNAL else 0
        size = same + (sum(sizes) - same) * labels
        if kind == ANSWERS:
            count, size = texts, sum(sizes) * (texts + checked) / (few + checked)
        seconds = a_piece * (count + checks.count)
        parts.append(Part(name, 0 if kind == ANSWERS else count + checks.count, size, seconds))
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
        (_, before), (_, plan) = plan_of(small, None if plain else small.settings.draft), plan_of(real, draft)
        name = "reference" if draft is None else draft.name
        known, count = None if written else real.examples, before.steps * before.batch_size
        parts.append(_training(name, small.seen[stage], plan, count, known, real, small.run, stage))
    parts.append(_measurement(real, small))
    return parts


def _measurement(real: StageContext, small: StageContext) -> Part:
    """The end of a run: what was measured on a few texts, for as many as there will be."""
    texts, few, found = real.settings.evaluation, small.settings.evaluation, small.measured
    drafts = len(real.run.drafts) / len(small.run.drafts)
    answered, answers = (max(each.prompts, each.accuracy_prompts) for each in (texts, few))
    times = {
        "greedy texts of the target": answered / answers,
        "texts of the target, T = 1": texts.prompts / few.prompts,
        "acceptance, T = 1": drafts * texts.prompts / few.prompts,
        "acceptance, greedy": drafts * texts.prompts / few.prompts,
        "decoding": texts.decode_prompts / few.decode_prompts,
    }
    seconds = found[MEASUREMENT].seconds
    seconds += sum(found[f"{MEASUREMENT}: {name}"].seconds * (more - 1) for name, more in times.items())
    return Part(MEASUREMENT, bytes=files_size(small.run.export, "**/*"), seconds=seconds)


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
    return Part(name, tokens, files_size(run.path(stage or name), "**/*"), seconds / _processes(real.settings))


def _processes(settings: Settings) -> int:
    trainer = settings.trainer
    return ranks.process_count(trainer.accelerator, trainer.devices, trainer.num_nodes)


def _size(value: float) -> str:
    return f"{value / 1e9:.2f} GB" if value >= 1e9 else f"{value / 1e6:.1f} MB"
