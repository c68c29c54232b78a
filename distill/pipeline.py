"""The whole run: stages in order, each skipped if nothing it depends on has changed, then export and measurement."""

from __future__ import annotations

import copy
import json
import shutil
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

import yaml
from rich.console import Console

from decode.errors import read_json, scratch_folder, write_text
from decode.progress import output_console, working
from distill import ranks
from distill.checks import signal_sizes
from distill.config import EvaluationSettings, Settings, Signal
from distill.data.chat import show
from distill.export.card import add_measurements, exported_facts
from distill.export.draft import check_export_path, check_gguf, export_draft, export_gguf
from distill.export.head import export_head
from distill.files import files_state, fingerprint, sizes, write_json
from distill.models import multiplies_bfloat16
from distill.report import console_tables, figures, write_report
from distill.responses.target import answered_texts
from distill.run import Run, alone_in, data_key, measurement_fingerprint, stage_fingerprints
from distill.stages import run_stages
from distill.tracking import finish, log_report, make_logger, where


def run_pipeline(settings: Settings, console: Console | None = None) -> Run:
    """Do everything that ``python -m distill`` does, in each of the processes that were started.

    Raises:
        decode.errors.UserError: Settings, data or models that cannot be used.
    """
    settings.validate()
    ranks.start(settings.trainer)
    first = ranks.is_first()
    run = Run(settings, (console or output_console()) if first else Console(quiet=True))
    check_export_path(run.export, settings.student.version)
    check_gguf(settings.export, settings.student.version)
    with alone_in(run):
        run.settings = prepare_settings(settings, run.console)
        if first:
            run.logger = make_logger(settings.tracker, run.folder, settings.name, asdict(run.settings))
        try:
            run_stages(run)
            if first:  # the other processes have no more to do, and wait for the end
                report = measure(run)
        finally:
            finish(run.logger)
        ranks.barrier()
    if first:
        facts = {"draft": run.export, "track": where(run.logger), "time": f"{time.monotonic() - run.started:.0f} s"}
        if report:
            run.console.print()
            run.console.print(console_tables(report))
            facts = {"report": run.folder / "report.html"} | facts
        run.console.print("\n" + "\n".join(f"{name:<7} {value}" for name, value in facts.items()), highlight=False)
    return run


# -- settings that depend on the machine ------------------------------------------------------------------------------

ROOM = 0.9
"""Part of the free disk that signals chosen by ``auto`` may take."""


def prepare_settings(settings: Settings, console: Console | None = None) -> Settings:
    """Return a copy without any ``auto`` that depends on the machine: number formats, and the kind of signal.

    They are the first process's. Where the kind of signal has to be chosen, the data are read.
    """
    prepared = with_formats(settings)
    if prepared.teacher.signal == "auto":
        prepared.teacher.signal = _choose_signal(Run(prepared, console))
    return ranks.exchange(prepared)[0]


def with_formats(settings: Settings) -> Settings:
    """Return a copy whose number formats are none of them ``auto``."""
    prepared = copy.deepcopy(settings)
    fast = multiplies_bfloat16(ranks.local_device(settings.trainer))
    if prepared.trainer.precision == "auto":
        prepared.trainer.precision = "bf16-mixed" if fast else "32-true"
    for model in (prepared.target, prepared.student):
        if model.dtype == "auto":
            model.dtype = "bfloat16" if fast else "float32"
    return prepared


def _choose_signal(run: Run) -> Signal:
    """Return the first kind of signal that the disk has room for. It is noted, so that a rerun has the same."""
    settings, note = run.settings, run.work / "signal.json"
    teacher, target, student = settings.teacher, settings.target, settings.student
    model = files_state([target.model]) or [target.model, asdict(target.architecture)]
    head = [student.kind, asdict(student.block)]
    key = fingerprint(data_key(settings), teacher.examples, teacher.responses.key(), teacher.signal_k, model, head)
    known = read_json(note)
    if known.get("made_from") != key:
        needed, place = signal_sizes(run), next(path for path in (run.work, *run.work.parents) if path.exists())
        room = ROOM * shutil.disk_usage(place).free
        fitting = [kind for kind, size in needed.items() if size <= room]
        known = {"signal": fitting[0] if fitting else "online", "made_from": key}
        if known["signal"] != "hidden":
            needs = ", ".join(f"{kind} may need {size / 1e9:.2f} GB" for kind, size in needed.items())
            run.line(f"signal: {known['signal']} ({needs}; {ROOM:.0%} of the free disk are {room / 1e9:.2f} GB)")
        if ranks.is_first():
            write_json(note, known)
    return cast("Signal", known["signal"])


def show_example(settings: Settings, console: Console | None = None) -> None:
    """Print one training example with its label mask, as the stages will see it; a given target answers its prompt."""
    settings.validate()
    console, shown = console or output_console(), with_formats(settings)
    if shown.data.from_target:
        shown.data.train_examples = shown.data.validation_examples = shown.data.test_examples = 1
    shown.teacher.examples = shown.trainer.validation_examples = 1
    with scratch_folder() as folder:
        shown.output_dir = str(folder)
        run = Run(shown, console)
        run.prompts_together = 8
        rows = run.examples
        if shown.teacher.responses.from_target and shown.target.model is not None and not shown.target.sharded:
            rows, _, _ = answered_texts(run, run.at_work(run.open_target(shown.target.model)))
        show(rows[0], run.tokenizer, console)


# -- export and measurement -------------------------------------------------------------------------------------------

PROBED = ("probes", "self_speculation", "probe_settings")
"""Parts of a report that ``python -m probes`` adds, which stay true as long as the target does."""
MEASURED = ("name", "target", "drafts", "paired", "decoding", "profile", "analysis", "samples")
"""Parts that no other command changes."""


def measure(run: Run) -> dict[str, Any]:
    """Export the chosen draft, then evaluate and report, unless all is there and nothing it depends on has changed.

    Returns:
        The report; nothing where ``evaluation`` is false.
    """
    settings, began = run.settings, time.monotonic()
    title = "evaluation" if settings.evaluation else "export"
    run.console.print(f"[bold]{title}[/bold] ({run.progress()})", highlight=False)
    key, target = measurement_fingerprint(settings), stage_fingerprints(settings)["target"][0]
    note, path = run.work / "report.json", run.folder / "report.json"
    known, report = read_json(note), read_json(path) if settings.evaluation else {}
    if known.get("fingerprint") == key:
        if known == _state(key, target, report, run.export):
            run.line(f"up to date: {path if report else run.export}")
            if report and read_json(run.export / "speculation_profile.json").get("served"):
                write_report(run.folder, report)  # the page shows what serve-check added
            return report
        run.line("the report or the export is not as it was written, and is made again")
    write_settings(settings, run.folder / "settings.yaml")
    chosen = run.chosen(settings.export.choose)
    models, trust = (run.drafts[chosen], run.target, run.export, settings.export), settings.target.trust_remote_code
    if settings.student.is_head:
        export_head(*models, length=settings.student.steps, trust_remote_code=trust, name=chosen)
    else:
        trust_draft = settings.student.trust_remote_code
        export_draft(*models, trust_remote_code=trust, trust_draft_code=trust_draft, name=chosen)
    export_gguf(run.export, run.target, settings.export)
    run.line(f"{run.export} [dim]{chosen}[/dim]")
    if isinstance(settings.evaluation, EvaluationSettings):
        report = _evaluated(run, chosen, {} if known.get("target") not in (None, target) else report)
    write_json(note, _state(key, target, report, run.export))
    run.line(f"{path if report else run.export} [dim]{time.monotonic() - began:.1f} s[/dim]")
    return report


def _evaluated(run: Run, chosen: str, before: dict[str, Any]) -> dict[str, Any]:
    """Measure the drafts, write the report and add to the export what was measured; return the report.

    Args:
        run: The run.
        chosen: Name of the exported draft.
        before: The last report, with parts of other commands that are kept.
    """
    from distill.evaluate import Evaluation

    with working(run.console, "evaluation", bars=False):
        measured = Evaluation(run).report()
    kept = {part: before[part] for part in PROBED if part in before}
    commands = {"reproduce": f"python -m distill --config {run.folder / 'settings.yaml'}"}
    report = {"name": run.settings.name, **measured, "settings": asdict(run.settings), **kept, "commands": commands}
    add_measurements(run.export, report, chosen)
    report["exported"] = exported_facts(run.export)
    write_report(run.folder, report)
    report = read_json(run.folder / "report.json")
    log_report(run.logger, report, lambda: {name: svg for name, (svg, _) in figures(report).items()})
    return report


def _state(key: str, target: str, report: dict[str, Any], export: Path) -> dict[str, Any]:
    """Return what is noted of a finished measurement, to notice damage.

    People may edit the export's README, and serve-check adds to the profile what was served.
    """
    profile = read_json(export / "speculation_profile.json")
    suffixes, written = (".json", ".safetensors", ".gguf"), sizes(export)
    return {
        "fingerprint": key,
        "target": target,
        "report": fingerprint({part: report.get(part) for part in MEASURED}),
        "export": {n: b for n, b in written.items() if n.endswith(suffixes) and n != "speculation_profile.json"},
        "profile": fingerprint({name: value for name, value in profile.items() if name != "served"}),
    }


def write_settings(settings: Settings, path: Path) -> None:
    """Write all settings of the run as a configuration file."""
    values = json.loads(json.dumps(asdict(settings)))  # YAML knows no constrained types
    write_text(path, yaml.safe_dump(values, sort_keys=False, allow_unicode=True))
