"""Everything that ``draftsmith probe`` does: target, texts, features, probes, the choice of the exit, real runs."""

from dataclasses import asdict
from functools import partial

import torch
from lightning.pytorch.loggers import Logger
from rich.console import Console
from transformers import PreTrainedModel

from decode.drafters.probe import AcceptanceProbe, save_probes
from decode.files import Fields, read_json, write_json
from decode.measure import machine
from decode.measure.machine import doubt
from decode.measure.statistics import plain
from decode.models.check import open_runner
from decode.models.fast.forward import FastRunner
from decode.models.open import DTYPES
from decode.progress import working
from distill import ranks
from distill.files import fingerprint
from distill.fingerprints import inputs
from distill.pipeline import with_formats
from distill.results.tracking import finish, for_stage, make_logger, tried
from distill.run import Run, alone_in
from distill.stages import run_stages
from probes.exit_search import best_settings, fastest_options
from probes.features import Features, collect, exit_layers, read_engine
from probes.fit import evaluate_exits, train_probes
from probes.labels import Mode, modes_of, write_mode
from probes.report import answer, show, write_report
from probes.settings import ProbeSettings, ProbesSettings


@ranks.together()
def run_probes(settings: ProbesSettings, console: Console | None = None, *, results: bool = True) -> Fields:
    """Train probes, evaluate them, choose an exit, run the best settings and report; return what report.json gains.

    The target is trained first if it is missing or was made from other settings. All processes train it and write its
    texts together; the first one does the rest, and the others return nothing. Results are printed where asked for.

    Raises:
        UserError: Settings, data or models cannot be used, or another process works in the run's folder.
    """
    ranks.start(settings.trainer)
    settings.validate()
    first, threads = ranks.is_first(), torch.get_num_threads()
    run = Run(settings, console)
    added: Fields = {}
    try:
        with alone_in(run):
            run.settings = with_formats(settings)
            if first:
                run.logger = make_logger(settings.tracker, run.folder, settings.name, asdict(settings))
            try:
                exits = exit_layers(int(run.target_config.num_hidden_layers), settings.probes.layers)
                run.logger = tried(run.logger, run.line)
                run_stages(run, only=("target",))
                run.console.print("[bold]probes[/bold]", highlight=False)
                served = settings.teacher.in_engine
                model = run.target_parts().to(DTYPES[run.settings.target.dtype]) if served else run.load_target()
                if served:
                    run.captured_layers = exits
                modes = modes_of(settings.probes, model)
                for mode in modes:
                    write_mode(run, model, mode, settings.probes)
                if first:
                    added = experiment(run, model, modes, exits, settings.probes)
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
    if results:
        show(run.console, added, run.folder / "probes.html")
    return added


def experiment(run: Run, model: PreTrainedModel, modes: list[Mode], exits: list[int], options: ProbeSettings) -> Fields:
    """Train and judge probes of all exits, and choose an exit and a stop rule; return the parts of the report."""
    folder, served = run.folder / "probes", run.settings.teacher.in_engine
    rows, table, probes = list[Fields](), list[Fields](), list[AcceptanceProbe]()
    facts: Fields = {
        "tokens": {}, "tried": [], "temperature": options.temperature, "top_p": options.top_p,
        "machine": machine.describe(model.device), "labels": {mode.name: mode.label for mode in modes},
    }  # fmt: skip
    for mode in modes:
        seen = read(run, model, mode, exits)
        facts["tokens"] |= {f"{mode.name}/{split}": len(features) for split, features in seen.items()}
        with working(run.console, f"probes, {mode.name}, label {mode.label}"):
            trained = fitted(run, mode, seen, options)
            rows += [{"mode": mode.name, **row} for row in evaluate_exits(trained, seen["test"])]
        probes += trained
    save_probes(folder, model, probes)
    run.tokenizer.save_pretrained(folder)  # which keeps what shaped the prompts
    runner = open_runner(model)
    torch.set_num_threads(machine.choose_threads(runner, run.settings.threads)[0])
    if not served and isinstance(runner, FastRunner):
        for mode in modes:
            with working(run.console, f"real rounds of every method's settings, {mode.name}", bars=False):
                measured, tried = best_settings(run, model, mode, exits, options)
            table += measured
            facts["tried"] += tried
        save_probes(folder, model, probes, fastest_options(table))
    else:
        reason = "decoding with early exits is not supported for this family, so no exit is chosen"
        reason = "the target stands in an engine, so no exit is chosen and nothing is decoded" if served else reason
        run.line(f"[yellow]{model.config.model_type}: {reason}[/yellow]")
    added = plain({"probes": rows, "self_speculation": table, "probe_settings": facts})
    return {**added, "probe_findings": [answer(added, mode.name) for mode in modes]}


def read(run: Run, model: PreTrainedModel, mode: Mode, exits: list[int]) -> dict[str, Features]:
    """Read the texts of a mode; return what probes see of each split."""
    by_engine = partial(read_engine, run.states, model) if run.settings.teacher.in_engine else None
    answered = sum(len(ids) > start for texts in mode.texts.values() for ids, start in texts)
    with working(run.console, f"{mode.name} texts read", answered):
        return {
            split: collect(model, texts, mode, exits, run.settings.seed + i, split != "validation", by_engine)
            for i, (split, texts) in enumerate(mode.texts.items())
        }


def fitted(run: Run, mode: Mode, seen: dict[str, Features], options: ProbeSettings) -> list[AcceptanceProbe]:
    """Train the probes of a mode."""
    train, settings = seen["train"], run.settings
    read_by = inputs(settings, ["frozen", "seed"]), settings.teacher.in_engine
    made_from = fingerprint([run.record("target"), read_by, mode.texts, mode.label, train.exits, options.l2])
    work, logger = run.work / "probes" / f"{mode.name}-{made_from}", for_stage(run.logger, f"probes-{mode.name}")
    return train_probes(train, seen["validation"], mode.label, options.l2, settings.trainer, work, logger)


def _log(logger: Logger, added: Fields) -> None:
    """Log the numbers by which runs are compared."""
    for row in added.get("probes", []):
        values = {f"{row['mode']}/{key}": row[key] for key in ("auroc", "brier", "ece") if row[key] is not None}
        logger.log_metrics(values, step=row["layer"])
    for row in added.get("self_speculation", []):
        if row["speedup"] and not doubt(row):
            name = f"speedup/{'sampled' if row['temperature'] else 'greedy'}/{row['method']}"
            logger.log_metrics({name: row["speedup"]}, step=0)
    logger.save()
