"""What the parts of a run took: tokens, bytes, seconds, memory. ``--estimate`` shows it beside what it estimated."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path

from decode.core.atomic_files import read_json
from distill.core.file_fingerprints import write_json
from distill.data.stage_context import DATA, MEASUREMENT, StageContext
from distill.teacher.distillation_data import ANSWERS, LOSSES, SIGNAL
from distill.training.training_speed import peak_memory

TAKEN = "taken.json"
REST = "opening, checking, saving"
PREPARED = {
    ANSWERS: ("the target's answers", "responses", ("*.jsonl",)),
    SIGNAL: ("the target's signal", "signals", ("target_*.npy", "features_*.npy")),
    LOSSES: (f"the {LOSSES}", "signals", ("reference_*.npy",)),
}
"""What is kept of frozen models: how it is called, and its files."""


@dataclass(frozen=True)
class Part:
    """A part of the run: what it is, tokens read, bytes written, seconds."""

    name: str
    tokens: float = 0.0
    bytes: float = 0.0
    seconds: float = 0.0


def note_taken(context: StageContext, seconds: float) -> None:
    """Writes what the parts that a run has made just now took, beside those that it made before.

    Args:
        context: Of the run.
        seconds: Of all of them.
    """
    note, parts = context.run.work / TAKEN, taken_parts(context)
    if not context.seen:
        return
    known = read_json(note)
    if context.settings.stages_at_once == 1:  # else their times overlap
        parts.append(Part(REST, seconds=seconds - sum(part.seconds for part in parts)))
    peak = max(peak_memory(context.device), known.get("memory", 0))
    made = known.get("parts", {}) | {part.name: asdict(part) for part in parts}
    write_json(note, {"memory": peak, "parts": made})


def taken_parts(context: StageContext) -> list[Part]:
    """What each part took that is made by now."""
    found, work, parts = context.measured, context.run.work, []
    if DATA in found:
        parts.append(Part(DATA, seconds=found[DATA].seconds))
    for kind, (name, folder, patterns) in PREPARED.items():
        if made := [found[key] for split in ("train", "validation") if (key := f"{kind} {split}") in found]:
            tokens = 0 if kind == ANSWERS else sum(each.count for each in made)
            size = sum(files_size(work / folder, pattern) for pattern in patterns)
            parts.append(Part(name, tokens, size, sum(each.seconds for each in made)))
    for stage, seen in context.seen.items():
        name = context.settings.draft.name if stage == "draft" else stage
        size = files_size(context.run.path(stage), "**/*")
        parts.append(Part(name, seen.tokens, size, seen.seconds + seen.validation))
    if MEASUREMENT in found:
        parts.append(
            Part(MEASUREMENT, bytes=files_size(context.run.export, "**/*"), seconds=found[MEASUREMENT].seconds)
        )
    return parts


def files_size(folder: Path, pattern: str) -> int:
    """Size of the files of a folder that is not a link."""
    if not pattern or folder.is_symlink():
        return 0
    return sum(path.stat().st_size for path in folder.glob(pattern) if path.is_file())
