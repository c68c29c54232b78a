"""Everything that ``python -m probes`` does: target, texts, features, probes, the choice of the exit, real runs."""

from __future__ import annotations

import json
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from decode.core.sampling import Warp
from decode.drafters.acceptance_probe import save_probes
from decode.measure import machine
from decode.measure.statistics import plain
from decode.models.fast import FastRunner
from decode.models.open import load_model
from decode.models.open_runner import open_runner
from distill.core.files import write_json
from distill.core.run_dir import RunDir
from distill.data.stage_context import StageContext
from distill.pipeline.runner import plan_stages
from distill.pipeline.stage_fingerprint import stage_fingerprints
from distill.tracking.logger import finish, for_stage, make_logger, where
from probes.context import Lab, Mode, add_features, read_prompts
from probes.exit_search import advise, choose, find_subset, run_best
from probes.features import exit_layers
from probes.page import write_page
from probes.predict import HINDSIGHT, METHODS, Choice, best_of
from probes.report import console_tables, findings
from probes.settings import Settings
from probes.train import learn, learn_for_draft


def run_probes(settings: Settings, console: Console | None = None) -> dict[str, Any]:
    """Train, judge, choose, confirm and report.

    Returns:
        What was added to the run's ``report.json``.

    Raises:
        UserError: settings, data or models that cannot be used.
    """
    settings.validate()
    console = console or Console()
    began = time.monotonic()
    threads = torch.get_num_threads()
    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    run = RunDir(Path(settings.output_dir) / settings.name, [comparison.name for comparison in settings.comparisons])
    run.work.mkdir(parents=True, exist_ok=True)
    logger = make_logger(settings.tracker, run.folder, settings.name, asdict(settings))
    bench = StageContext(settings, run, console, logger)
    try:
        _ensure_target(bench)
        console.print("[bold]probes[/bold]", highlight=False)
        wanted = settings.target
        model = load_model(
            run.target, device=bench.device, dtype=wanted.dtype, trust_remote_code=wanted.trust_remote_code
        )
        lab = Lab(settings, bench, model, exit_layers(model, settings.probes.layers), console, logger)
        added = _experiment(lab)
        _log(for_stage(logger, "probes"), added)
    finally:
        finish(logger)
        torch.set_num_threads(threads)
    added["probe_settings"]["seconds"]["total"] = time.monotonic() - began
    _write(run.folder, added)
    console.print(console_tables(added))
    console.print(f"\nreport  {run.folder / 'probes.html'}\nprobes  {run.folder / 'probes'}", highlight=False)
    console.print(f"track   {where(logger)}\ntime    {time.monotonic() - began:.0f} s", highlight=False)
    return added


def _ensure_target(bench: StageContext) -> None:
    """Trains the run's target if it is not there."""
    run = bench.run
    if run.record("target") is not None:
        return
    stage, title, make = plan_stages(bench)[0]
    key, made_from = stage_fingerprints(bench.settings)[stage]
    bench.console.print(f"[bold]{title}[/bold]", highlight=False)
    made = make(key)
    made.record.made_from = made_from
    run.put(stage, made.record, made.save)


def _experiment(lab: Lab) -> dict[str, Any]:
    """From texts to the rows of the report."""
    settings = lab.settings.probes
    modes = [
        Mode("greedy", Warp(), "match", ("match",)),
        Mode("sampled", Warp(settings.temperature, top_p=settings.top_p), settings.sampled_label, ("accept", "top-p")),
    ]
    prompts = read_prompts(lab)
    for mode in modes:
        add_features(lab, mode, prompts)
    probes, rows, check = learn(lab, modes)
    folder = lab.bench.run.folder / "probes"
    save_probes(folder, lab.model, probes)
    rows += learn_for_draft(lab, modes, folder)
    runner = open_runner(lab.model)
    choices: dict[str, list[Choice]] = {}
    elsewhere: dict[str, list[Choice]] = {}
    table: list[dict[str, Any]] = []
    subset: dict[str, Any] = {}
    costs: dict[str, Any] = {}
    if isinstance(runner, FastRunner):
        lab.console.print(f"  {machine.set_threads(runner, settings.threads)[1]}", highlight=False)
        for mode in modes:
            choices[mode.name], elsewhere[mode.name], costs[mode.name] = choose(lab, mode, probes, runner, prompts)
        subset = find_subset(lab, modes[0], runner, costs["greedy"])
        for mode in modes:
            table += run_best(lab, mode, choices[mode.name], subset, str(folder))
        save_probes(folder, lab.model, probes, advise(table))
    else:
        kind = lab.model.config.model_type
        lab.console.print(
            f"  [yellow]{kind}: no decoding with early exits here, so probes are judged but no exit is chosen[/yellow]"
        )
    return plain(
        {
            "probes": rows,
            "self_speculation": table,
            "probe_settings": {
                "layers": int(lab.model.config.get_text_config().num_hidden_layers),
                "tokens": {f"{m.name}/{split}": len(f) for m in modes for split, f in m.features.items()},
                "labels": {mode.name: mode.label for mode in modes},
                "temperature": settings.temperature,
                "top_p": settings.top_p,
                "predicted": {
                    name: [
                        vars(c) for m in (*METHODS, HINDSIGHT) for e in lab.exits for c in best_of(_at(found, e), m, 1)
                    ]
                    for name, found in choices.items()
                },
                "predicted_where_weights_decide": {
                    name: [vars(c) for m in (*METHODS, HINDSIGHT) for c in best_of(found, m, 1)]
                    for name, found in elsewhere.items()
                },
                "costs": costs,
                "subset": subset,
                "scikit_learn": check,
                "cache_bytes_per_token": runner.cache_bytes_per_token if isinstance(runner, FastRunner) else 0,
                "machine": machine.describe(lab.model.device),
                "seconds": lab.seconds,
            },
        }
    )


def _at(choices: list[Choice], layer: int) -> list[Choice]:
    return [c for c in choices if c.exit_layer == layer]


def _log(logger: Any, added: dict[str, Any]) -> None:
    """The numbers by which runs are compared, to the tracker."""
    if logger is None:
        return
    for row in added["probes"]:
        name = f"{row['model']}/{row['label']}"
        values = {f"{name}/{k}": row[k] for k in ("auroc", "brier", "ece", "auroc_token_probability") if row[k]}
        logger.log_metrics(values, step=row["layer"])
    for row in added["self_speculation"]:
        if row["best"] and row["speedup"]:
            mode = "greedy" if row["temperature"] == 0 else "sampled"
            logger.log_metrics({f"speedup/{mode}/{row['title']}": row["speedup"]}, step=0)
    logger.save()


def _write(folder: Path, added: dict[str, Any]) -> None:
    """Adds to the run's report without touching what others wrote there, and writes the page."""
    path = folder / "report.json"
    try:
        report = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        report = {"name": folder.name}
    added["probe_findings"] = findings(added)
    slim = [{k: v for k, v in row.items() if k != "bins"} for row in added["probes"]]
    write_json(path, {**report, **added, "probes": slim})
    write_page(folder / "probes.html", folder.name, added)
