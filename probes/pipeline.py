"""Everything that ``python -m probes`` does: target, texts, features, probes, the choice of the exit, real runs."""

from dataclasses import asdict

import torch
from lightning.pytorch.loggers import Logger
from rich.console import Console

from decode.files import Fields, read_json, write_json
from decode.measure.machine import doubt
from decode.models.open import DTYPES
from distill import ranks
from distill.pipeline import prepare_settings, with_formats
from distill.results.tracking import finish, for_stage, make_logger
from distill.run import Run, alone_in
from distill.stages import run_stages
from probes.blocks import block_experiment
from probes.exit_search import exit_experiment
from probes.features import exit_layers
from probes.labels import modes_of, write_mode
from probes.report import show, write_report
from probes.settings import ProbesSettings


def run_probes(settings: ProbesSettings, console: Console | None = None) -> Fields:
    """Train probes, evaluate them, choose an exit, run the best settings and report; return what report.json gains.

    The target (for a block head, every stage) is trained first if it is missing or was made from other settings. All
    processes train it and write its texts together; the first one does the rest, and the others return nothing.

    Raises:
        UserError: Settings, data or models cannot be used, or another process works in the run's folder.
    """
    settings.validate()
    ranks.start(settings.trainer)
    first, threads = ranks.is_first(), torch.get_num_threads()
    options, blocks = settings.probes, settings.student.draft.method == "block"
    run = Run(settings, console)
    added: Fields = {}
    try:
        with alone_in(run):
            if blocks:
                prepare_settings(run)
            else:
                run.settings = with_formats(settings)
            if first:
                run.logger = make_logger(settings.tracker, run.folder, settings.name, asdict(settings))
            try:
                run_stages(run, only=None if blocks else ("target",))
                run.console.print("[bold]probes[/bold]", highlight=False)
                served = settings.teacher.in_engine
                model = run.target_parts().to(DTYPES[run.settings.target.dtype]) if served else run.load_target()
                if served:
                    run.captured_layers = exit_layers(model, options.layers)
                modes = modes_of(options, model)
                for mode in modes:
                    write_mode(run, model, mode, options)
                if first:
                    added = (block_experiment if blocks else exit_experiment)(run, model, modes, options)
                    path = run.folder / "report.json"
                    write_json(path, {"name": settings.name, **read_json(path), **added})
                    write_report(path.with_name("probes.html"), settings.name, added)
                    if logger := for_stage(run.logger, "probes"):
                        _log(logger, added)
            finally:
                run.close()
                finish(run.logger)
            ranks.barrier()
    finally:
        torch.set_num_threads(threads)
    show(run.console, added, run.folder / "probes.html")
    return added


def _log(logger: Logger, added: Fields) -> None:
    """Log the numbers by which runs are compared."""
    for row in added.get("probes", []):
        values = {f"{row['mode']}/{key}": row[key] for key in ("auroc", "brier", "ece") if row[key] is not None}
        logger.log_metrics(values, step=row["layer"])
    fastest = [row for row in added.get("self_speculation", []) if row["speedup"] and not doubt(row)]
    for row in fastest:
        name = f"speedup/{'sampled' if row['temperature'] else 'greedy'}/{row['method']}"
        logger.log_metrics({name: row["speedup"]}, step=0)
    logger.save()
