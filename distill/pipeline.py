"""The whole run: stages in order, each skipped if nothing it depends on has changed, then export and measurement."""

import copy
import json
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import cast

import yaml
from rich.console import Console

from decode.errors import UserError
from decode.files import read_json, scratch_folder, write_json, write_text
from decode.progress import working
from distill import ranks
from distill.checks import check_engine, check_length, signal_sizes
from distill.config import Settings
from distill.config.base import ENGINES, Signal, Values, change
from distill.data.chat import show
from distill.engine.check import holds
from distill.export.card import PROFILE, add_measurements, exported_facts
from distill.export.draft import check_export_path, check_gguf, export_draft, export_gguf
from distill.export.head import export_head
from distill.files import fingerprint, free_bytes, sizes
from distill.fingerprints import inputs, measurement_fingerprint, stage_fingerprints
from distill.networks.models import multiplies_bfloat16, open_frozen
from distill.responses.target import answered_texts
from distill.results.report import console_tables, write_report
from distill.results.tracking import finish, log_report, make_logger, tried, where
from distill.run import Run, alone_in
from distill.stages import run_stages


def run_pipeline(settings: Settings, console: Console | None = None) -> Run:
    """Do everything that ``python -m distill`` does, in each of the processes that were started.

    Raises:
        decode.errors.UserError: Settings, data or models that cannot be used.
    """
    settings.validate()
    ranks.start(settings.trainer)
    first = ranks.is_first()
    run = Run(settings, console)
    check_export_path(run.export, settings.student.draft)
    check_gguf(settings.export, settings.student.draft)
    with alone_in(run):
        prepare_settings(run)
        if first:
            run.logger = make_logger(settings.tracker, run.folder, settings.name, asdict(run.settings), settings.tags)
        try:
            run_stages(run, rehearse=rehearse)
            if first:  # the other processes have no more to do, and wait for the end
                report = measure(run)
        finally:
            finish(run.logger)
        ranks.barrier()
    if first:
        if report:
            run.console.print()
            run.console.print(console_tables(report))
        made = [f"report  {run.folder / 'report.html'}"] * bool(report) + [f"draft   {run.export}"]
        made += [f"track   {where(run.logger)}", f"time    {time.monotonic() - run.started:.0f} s"]
        run.console.print("\n" + "\n".join(made), highlight=False)
    return run


# -- settings that depend on the machine ------------------------------------------------------------------------------

ROOM = 0.9
"""Part of the free disk that signals chosen by ``auto`` may take."""


def prepare_settings(run: Run) -> None:
    """Give a run settings without any ``auto`` that depends on the machine: number formats, and the kind of signal.

    They are the first process's. Where the kind of signal has to be chosen, the data are read.
    """
    run.settings = with_formats(run.settings)
    if run.settings.teacher.signal == "auto":
        run.settings.teacher.signal = _choose_signal(run)
    run.settings = ranks.exchange(run.settings)[0]


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
    read = inputs(settings, ("data", "target", "head", "frozen", "answers", "written"))
    key = fingerprint(read, settings.teacher.signal_k, settings.trainer.validation_examples)
    known = read_json(note)
    if known.get("made_from") != key:
        needed, room = signal_sizes(run), ROOM * free_bytes(run.work)
        kind = next(kind for kind, size in needed.items() if size <= room)
        known = {"signal": kind, "made_from": key}
        if kind != "hidden":
            needs = ", ".join(f"{kind} may need {size / 1e9:.2f} GB" for kind, size in needed.items() if size)
            run.line(f"signal: {kind} ({needs}; {ROOM:.0%} of the free disk are {room / 1e9:.2f} GB)")
        if ranks.is_first():
            write_json(note, known)
    return cast("Signal", known["signal"])


def show_example(settings: Settings, console: Console | None = None) -> None:
    """Print one training example with its label mask, as the stages will see it; a given target answers its prompt."""
    with scratch_folder() as folder:
        shown = with_formats(settings)
        change(shown, output_dir=str(folder), teacher__examples=1, trainer__validation_examples=1)
        if shown.data.from_target:
            change(shown.data, train_examples=1, validation_examples=1, test_examples=1)
        run = Run(shown, console)
        run.prompts_together = 8
        rows = run.examples
        if shown.teacher.responses.from_target and shown.target.model is not None and not shown.teacher.served:
            rows, _, _ = answered_texts(run, open_frozen(shown.target, shown.target.model, run.device))
        show(rows[0], run.tokenizer, run.console)


def check_command(run: Run) -> None:
    """``python -m distill check-engine``: print the command of a server, then compare every layer."""
    if not run.settings.teacher.in_engine:
        kinds = " and ".join(ENGINES)
        raise UserError(
            f"teacher.signal is {run.settings.teacher.signal}, and check-engine is about {kinds}: set it so"
        )
    with alone_in(run):
        check_length(run)
        run_stages(run, ("target",), check=False)
        length, given = run.settings.data.max_length, run.settings.teacher.engine.arguments
        served = run.protocol.command(run.served_folder, run.engine_layers, length, given)
        run.console.print(f"a server for these settings, for teacher.engine.urls:\n{served}", soft_wrap=True)
        megabytes = run.bytes_in_flight / 1e6
        run.console.print(f"its states take at most {megabytes:.1f} MB in the folder at a time", soft_wrap=True)
        if not run.settings.teacher.engine.urls:
            return
        try:
            check_engine(run)
            _ = run.states  # compares as it is opened
        finally:
            run.close()
    run.console.print("the engine gives the target's states", highlight=False)


def rehearse(run: Run) -> None:
    """Export, evaluate and report the student in the place of a draft, in a folder that is removed.

    So what would refuse at the end does so before the drafts are trained. An engine is not asked.

    Raises:
        UserError: With what is refused.
    """
    small = copy.deepcopy(run.settings)
    with (
        scratch_folder() as folder,
        working(run.console, "export and evaluation are tried with the student", bars=False),
    ):
        name, draft = next(iter(small.drafts.items()))
        small.drafts = {name: replace(draft, reference=None)}
        change(small, output_dir=str(folder), tracker="none", export__choose="best", export__gguf=[])
        if small.teacher.in_engine:
            small.evaluation = False
        if small.evaluation:
            decoded = min(1, small.evaluation.decode_prompts)
            change(small.evaluation, prompts=2, accuracy_prompts=2, decode_prompts=decoded, max_new_tokens=4)
            change(small.evaluation, draft_lengths=small.evaluation.draft_lengths[:1])
        trial = Run(small, Console(quiet=True))
        trial.corpus = run.corpus
        if small.evaluation and run.settings.trainer.attention == "auto":
            trial.frozen = run.frozen
        for stage in ("target", "initial", *trial.trained):
            made = "target" if stage == "target" else "initial"
            trial.folder.mkdir(parents=True, exist_ok=True)
            trial.path(stage).symlink_to(run.path(made).resolve(), target_is_directory=True)
            write_json(trial.work / f"{stage}.json", vars(run.record(made)))
        measure(trial)
        one = replace(run.settings.export, gguf=run.settings.export.gguf[:1])
        export_gguf(trial.export, trial.target, one, write=False)


# -- export and measurement -------------------------------------------------------------------------------------------

PROBED = ("probes", "self_speculation", "probe_settings")
"""Parts of a report that ``python -m probes`` adds, which stay true as long as the target does."""


def measure(run: Run) -> Values:
    """Export the chosen draft, then evaluate and report, unless all is there and nothing it depends on has changed.

    Returns:
        The report; nothing where ``evaluation`` is false.
    """
    settings, began = run.settings, time.monotonic()
    title = "evaluation" if settings.evaluation else "export"
    run.console.print(f"[bold]{title}[/bold] ({run.progress()})", highlight=False)
    key, target = measurement_fingerprint(settings), stage_fingerprints(settings)["target"]
    note, path = run.work / "report.json", run.folder / "report.json"
    known, report = read_json(note), read_json(path) if settings.evaluation else {}
    if known.get("fingerprint") == key:
        profile, intact = read_json(run.export / PROFILE), known.get("export") == sizes(run.export)
        if intact and profile and bool(report) == bool(settings.evaluation):
            run.line(f"up to date: {path if report else run.export}")
            if "served" in report:  # by `measure_served`
                return {}
            if report and profile.get("served"):
                write_report(run.folder, report)  # the page shows what serve-check added
            if report and settings.upload:
                run.logger = tried(run.logger, run.line)
                log_report(run.logger, report, run.folder, upload=True)
            return report
        run.line("the report or the export is not as it was written, and is made again")
    run.logger = tried(run.logger, run.line)
    write_settings(settings, run.folder / "settings.yaml")
    chosen, trust = run.chosen(settings.export.choose), settings.target.trust_remote_code
    models = run.drafts[chosen], run.target, run.export, settings.export
    if settings.student.draft.head:
        export_head(*models, length=settings.student.steps, trust_remote_code=trust, name=chosen)
    else:
        trust_draft = settings.student.trust_remote_code
        export_draft(*models, trust_remote_code=trust, trust_draft_code=trust_draft, name=chosen)
    export_gguf(run.export, run.target, settings.export)
    run.line(f"{run.export} [dim]{chosen}[/dim]")
    if settings.evaluation and settings.teacher.in_engine and not holds(run.target, run.device):
        from distill.results.served import measure_served

        run.line("this process has no memory for the target, so that the draft is measured in vLLM")
        with working(run.console, "evaluation in vLLM"):
            measure_served(run)
        report = {}
    elif settings.evaluation:
        from distill.results.evaluate import evaluate

        with working(run.console, "evaluation", bars=False):
            measured = evaluate(run)
        kept = report if known.get("target") in (None, target) else {}
        report = {"name": run.settings.name, **measured, "settings": asdict(settings)}
        report |= {part: kept[part] for part in PROBED if part in kept}
        report["commands"] = {"reproduce": f"python -m distill --config {run.folder / 'settings.yaml'}"}
        add_measurements(run.export, report, chosen)
        report["exported"] = exported_facts(run.export)
        write_report(run.folder, report)
        report = read_json(path)
        log_report(run.logger, report, run.folder, upload=settings.upload)
    write_json(note, {"fingerprint": key, "target": target, "export": sizes(run.export)})
    run.line(f"{path if report else run.export} [dim]{time.monotonic() - began:.1f} s[/dim]")
    return report


def write_settings(settings: Settings, path: Path) -> None:
    """Write all settings of the run as a configuration file."""
    values = json.loads(json.dumps(asdict(settings)))  # YAML knows no constrained types
    write_text(path, yaml.safe_dump(values, sort_keys=False, allow_unicode=True))
