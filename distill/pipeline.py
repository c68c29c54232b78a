"""The whole run: stages in order, each skipped if nothing it depends on has changed, then export and measurement."""

import copy
import json
import time
from dataclasses import asdict
from pathlib import Path

import yaml
from rich.console import Console

from decode.files import read_json, scratch_folder, write_json, write_text
from decode.progress import working
from distill import ranks
from distill.config import Settings
from distill.config.base import Values, change, refuse
from distill.data.chat import show
from distill.engine.check import holds
from distill.engine.vllm import FOLDER, server_command, server_gpus
from distill.export.card import PROFILE, add_measurements, exported_facts
from distill.export.draft import check_export_path, check_gguf, export_draft, export_gguf
from distill.export.head import export_head
from distill.files import fingerprint, sizes
from distill.fingerprints import measurement_fingerprint, stage_fingerprints
from distill.networks.models import multiplies_bfloat16
from distill.responses.target import answered_texts
from distill.results.evaluate import evaluate
from distill.results.report import console_tables, write_report
from distill.results.tracking import finish, log_report, make_logger, tried, where
from distill.run import Run, alone_in
from distill.stages import run_stages


@ranks.together()
def run_pipeline(settings: Settings, console: Console | None = None, *, show: bool = True) -> Run:
    """Do everything that ``draftsmith distill`` does, in each of the processes that were started.

    The results are printed at the end where they are to be shown.

    Raises:
        decode.errors.UserError: Settings, data or models that cannot be used.
    """
    ranks.start(settings.trainer)
    settings.validate()
    first = ranks.is_first()
    run = Run(settings, console)
    check_export_path(run.export, settings.student.draft)
    check_gguf(settings.export, settings.student.draft)
    with alone_in(run):
        run.settings = ranks.exchange(with_formats(run.settings))[0]  # the first process's
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
        if report and show:
            run.console.print()
            run.console.print(console_tables(report))
            run.console.print(f"\nreport  {run.folder / 'report.html'}", highlight=False)
        track, seconds = where(run.logger), time.monotonic() - run.started
        run.console.print(f"draft   {run.export}\ntrack   {track}\ntime    {seconds:.0f} s", highlight=False)
    return run


# -- settings that depend on the machine ------------------------------------------------------------------------------


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
            rows, _, _ = answered_texts(run, run.load_target(path=shown.target.model))
        show(rows[0], run.tokenizer, run.console)


def check_command(settings: Settings, console: Console) -> None:
    """``draftsmith distill check-engine``: print the command of a server, then compare every layer."""
    elsewhere = not settings.teacher.in_engine
    refuse(settings, (elsewhere, "teacher.signal", "and check-engine is about vllm: set it so"))
    run = Run(with_formats(settings), console)
    with alone_in(run):
        run_stages(run, ("target",), check=False)
        length, engine = run.settings.data.max_length, run.settings.teacher.engine
        folder = FOLDER if settings.trainer.num_nodes == 1 else str((run.work / "states").absolute())
        for url, gpus in server_gpus(engine, *ranks.gpus(settings.trainer)).items() or [("", [])]:
            served = server_command(
                run.served_folder, run.engine_layers, length, engine.arguments, url=url, gpus=gpus, folder=folder
            )
            run.console.print(f"a server for these settings, for teacher.engine.urls:\n{served}", soft_wrap=True)
        if not run.settings.teacher.engine.urls:
            return
        try:
            _ = run.states  # compares as it is opened
        finally:
            run.close()
    run.console.print("the engine gives the target's states", highlight=False)


# -- export and measurement -------------------------------------------------------------------------------------------

PROBED = ("probes", "self_speculation", "probe_settings")
"""Parts of a report that ``draftsmith probe`` adds, which stay true as long as the target does."""


def measure(run: Run) -> Values:
    """Export the chosen draft, then evaluate and report, unless all is there and nothing it depends on has changed.

    Returns:
        The report; nothing where ``evaluation`` is false, or this process has no memory for a target in an engine.
    """
    settings, began = run.settings, time.monotonic()
    evaluated = bool(settings.evaluation) and (not settings.teacher.in_engine or holds(run.target, run.device))
    title = "evaluation" if evaluated else "export"
    run.console.print(f"[bold]{title}[/bold] ({run.progress()})", highlight=False)
    key, target = measurement_fingerprint(settings), stage_fingerprints(settings)["target"]
    note, path = run.work / "report.json", run.folder / "report.json"
    before, report = read_json(note), read_json(path) if evaluated else {}
    if before.get("fingerprint") == key:
        if before.get("export") == sizes(run.export) and bool(report) == evaluated:
            run.line(f"up to date: {path if report else run.export}")
            if report and read_json(run.export / PROFILE).get("served"):
                write_report(run.folder, report)  # the page shows what serve-check added
            if report and settings.upload:
                run.logger = tried(run.logger, run.line)
                log_report(run.logger, report, run.folder, upload=True)
            return report
        run.line("the report or the export is not as it was written, and is made again")
    run.logger = tried(run.logger, run.line)
    write_settings(settings, run.folder / "settings.yaml")
    write_json(note, before | {"fingerprint": None})  # a kill leaves no report of another draft that seems up to date
    chosen = export(run)
    export_gguf(run.export, run.target, settings.export)
    if evaluated:
        with working(run.console, "evaluation", bars=False):
            measured = evaluate(run)
        probed = {part: report[part] for part in PROBED if part in report and before.get("target") in (None, target)}
        report = {"name": settings.name, **measured, **probed, "settings": asdict(settings)}
        report["commands"] = {"reproduce": f"draftsmith distill --config {run.folder / 'settings.yaml'}"}
        add_measurements(run.export, report, chosen)
        report["exported"] = exported_facts(run.export)
        report = {**write_report(run.folder, report)}
        log_report(run.logger, report, run.folder, upload=settings.upload)
    elif settings.evaluation:
        run.line(
            "this process has no memory for the target, so that nothing is measured; on a machine that has: "
            f"draftsmith decode serve-check --target {run.target} --draft {run.export} --engine vllm"
        )
    write_json(note, {"fingerprint": key, "target": target, "export": sizes(run.export)})
    run.line(f"{path if report else run.export} [dim]{time.monotonic() - began:.1f} s[/dim]")
    return report


def export(run: Run) -> str:
    """Export the draft that the settings choose, and return its name; an export of something else is kept."""
    settings, trust = run.settings, run.settings.target.trust_remote_code
    chosen = run.chosen(settings.export.choose)
    key = fingerprint(run.draft_record(chosen).fingerprint, asdict(settings.export))
    same = run.bring(run.export, lambda path: read_json(run.note(path)).get("fingerprint") == key)
    models = run.drafts[chosen], run.target, run.export, settings.export
    student, keep = settings.student, None if same else run.keep
    how = Values(trust_remote_code=trust, keep=keep, about=training_facts(run, chosen))
    if student.draft.head:
        export_head(*models, length=student.steps, **how)
    else:
        length = student.steps if student.steps > 1 else None
        export_draft(*models, trust_draft_code=student.trust_remote_code, length=length, **how)
    run.tokenizer.save_pretrained(run.export)  # with what shaped the prompts
    write_json(run.note(run.export), {"fingerprint": key})
    run.line(f"{run.export} [dim]{chosen}[/dim]")
    return chosen


def training_facts(run: Run, chosen: str) -> Values:
    """What the model card says of a draft's training: the target's name on the Hub or folder, recipe, dropped rows."""
    settings, draft, model = run.settings, run.settings.drafts[chosen], str(run.settings.target.model)
    public = settings.target.kind == "as_is" and not Path(model).exists()
    recipe = {"texts": len(run.examples), "max_length": settings.data.max_length, "divergence": draft.divergence}
    return {
        "name": chosen,
        "target": model.partition("@")[0] if public or run.as_it_is else str(run.target),
        "public": public,
        "recipe": recipe | asdict(draft.training_of(settings.training)),
        "dropped": [note.partition(" (row ")[0] for note in run.corpus.notes if " dropped" in note],
    }


def write_settings(settings: Settings, path: Path) -> None:
    """Write all settings of the run as a configuration file."""
    values = json.loads(json.dumps(asdict(settings)))  # YAML knows no constrained types
    write_text(path, yaml.safe_dump(values, sort_keys=False, allow_unicode=True))
