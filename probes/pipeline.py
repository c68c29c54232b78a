"""Everything that ``python -m probes`` does: target, texts, features, probes, the choice of the exit, real runs."""

import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.loggers import Logger
from rich.console import Console
from transformers import PreTrainedModel

from decode.bench import machine
from decode.bench.statistics import plain
from decode.drafters.probe import AcceptanceProbe, save_probes
from decode.errors import read_json
from decode.models.choose_runner import open_runner
from decode.models.fast_runner import FastRunner
from decode.models.loading import check_tokenizers, load_model, load_tokenizer
from decode.progress import output_console
from decode.sampling import LogitsWarper
from distill import ranks
from distill.data.context import StageContext
from distill.files import write_json
from distill.pipeline import alone_in, run_of, say_end
from distill.run_stages import run_stages
from distill.tracking import finish, for_stage, make_logger
from probes.exit_search import HINDSIGHT, METHODS, Choice, advise, best_of, find_subset, predict_speedups, run_best
from probes.features import FILES, Features, exit_layers
from probes.fit import calibrate, evaluate_exits, scikit_check, train_probes
from probes.labels import Mode, ProbeContext
from probes.report import console_tables, findings, write_page
from probes.settings import ProbesSettings

Rows = list[dict[str, Any]]


def run_probes(settings: ProbesSettings, console: Console | None = None) -> dict[str, Any]:
    """Train probes, measure them, choose an exit, run the best settings and report.

    Several processes train the target, write its texts and read them together; the rest is done by the first one. The
    run's target is trained first if it is not there, or was made from other settings; the run's folder is locked
    meanwhile.

    Returns:
        What was added to the run's ``report.json``; nothing in processes other than the first.

    Raises:
        UserError: settings, data or models that cannot be used, or another process at work in the run's folder.
    """
    settings.validate()
    first = ranks.is_first()
    console = (console or output_console()) if first else Console(quiet=True)
    began, threads, run = time.monotonic(), torch.get_num_threads(), run_of(settings)
    try:
        with alone_in(run, settings, console):
            logger = make_logger(settings.tracker, run.folder, settings.name, asdict(settings)) if first else None
            try:
                added = _experiment(settings, StageContext(settings, run, console, logger))
                if not first:
                    return {}
                _log(for_stage(logger, "probes"), added)
            finally:
                finish(logger)
            added["probe_settings"]["seconds"]["total"] = time.monotonic() - began
            _write(run.folder, added)
    finally:
        torch.set_num_threads(threads)
    console.print(console_tables(added))
    say_end(console, began, logger, report=run.folder / "probes.html", probes=run.folder / "probes")
    return added


def _experiment(settings: ProbesSettings, stages: StageContext) -> dict[str, Any]:
    """From the target to the rows of the report."""
    run_stages(stages, only=("target",))
    stages.console.print("[bold]probes[/bold]", highlight=False)
    options, target, folder = settings.probes, settings.target, stages.run.folder / "probes"
    model = stages.load_target()
    context = ProbeContext(settings, stages, model, exit_layers(model, options.layers))
    sampled = LogitsWarper(options.temperature, top_p=options.top_p)
    known = [
        Mode("greedy", LogitsWarper(), "match", ("match",)),
        Mode("sampled", sampled, options.sampled_label, ("accept", "top-p")),
    ]
    modes = [mode for mode in known if mode.name in options.modes]
    prompts = context.prompts()
    for mode in modes:
        context.add_features(mode, prompts)
    draft, seen_by_draft = _features_of_draft(context, modes)
    if not ranks.is_first():
        return {}
    for left in context.folder.glob(FILES):  # by a run that was killed
        left.unlink()
    probes, rows, check = _train(context, modes)
    save_probes(folder, model, probes)
    if draft is not None:
        rows += _train_for_draft(context, modes, draft, seen_by_draft, folder / "draft")
    torch.set_num_threads(options.threads or torch.get_num_threads())  # how weights are packed is measured
    runner = open_runner(model, pack="auto")
    found: dict[str, tuple[list[Choice], list[Choice], dict[str, Any]]] = {}
    table: Rows = []
    subset: dict[str, Any] = {}
    if isinstance(runner, FastRunner):
        for sentence in filter(None, (machine.set_threads(runner, options.threads)[1], runner.packing)):
            context.say(sentence)
        found = {mode.name: predict_speedups(context, mode, probes, runner) for mode in modes}
        subset = find_subset(context, modes[0], runner, found[modes[0].name][2])
        for mode in modes:
            table += run_best(context, mode, found[mode.name][0], subset, str(folder))
        save_probes(folder, model, probes, advise(table))
    else:
        context.say(
            f"[yellow]{model.config.model_type}: no decoding with early exits here; probes are measured, but no exit "
            "is chosen[/yellow]"
        )
    record = stages.run.record("target")
    facts = {
        "layers": int(model.config.get_text_config().num_hidden_layers),
        "tokens": {f"{m.name}/{split}": len(f) for m in modes for split, f in m.features.items()},
        "labels": {mode.name: mode.label for mode in modes},
        "temperature": options.temperature,
        "top_p": options.top_p,
        "predicted": {mode: [row for e in context.exits for row in _best(f[0], e)] for mode, f in found.items()},
        "predicted_where_weights_decide": {mode: _best(f[1]) for mode, f in found.items()},
        "costs": {mode: f[2] for mode, f in found.items()},
        "subset": subset,
        "scikit_learn": check,
        "cache_bytes_per_token": runner.cache_bytes_per_token if isinstance(runner, FastRunner) else 0,
        "machine": machine.describe(model.device),
        "target_training": record.history if record is not None and target.model is not None else [],
        "seconds": context.seconds,
    }
    return plain({"probes": rows, "self_speculation": table, "probe_settings": facts})


def _best(choices: list[Choice], layer: int | None = None) -> Rows:
    """The best setting of each method, at one exit layer or at any."""
    at = [c for c in choices if layer in (None, c.exit_layer)]
    return [vars(c) for method in (*METHODS, HINDSIGHT) for c in best_of(at, method, 1)]


def _train(context: ProbeContext, modes: list[Mode]) -> tuple[list[AcceptanceProbe], Rows, dict[str, Any]]:
    """Probes of all labels and exits with their metrics, and scikit-learn's beside them."""
    probes: list[AcceptanceProbe] = []
    rows: Rows = []
    for mode in modes:
        for label in mode.labels:
            with context.step("training", f"probes, {mode.name}, label {label}"):
                logger = for_stage(context.stages.logger, f"probes-{label}")
                made, measured = _train_label(context, mode.features, label, logger)
            probes += made
            rows += [row | {"mode": mode.name, "model": "target"} for row in measured]
    return probes, rows, _compare_with_scikit(context, modes[0]) if context.options.check else {}


def _features_of_draft(
    context: ProbeContext, modes: list[Mode]
) -> tuple[PreTrainedModel | None, dict[str, dict[str, Features]]]:
    """A separate draft model, if one is named, and the features at its last layer by mode and split."""
    name = context.options.draft
    if name is None:
        return None, {}
    trust = context.settings.target.trust_remote_code
    check_tokenizers(context.stages.corpus.tokenizer, load_tokenizer(name, trust_remote_code=trust))
    draft = load_model(name, device=context.model.device, dtype="float32", trust_remote_code=trust)
    with context.step("draft", "texts read by the draft model", bars=False):
        return draft, {mode.name: context.read(mode, draft) for mode in modes}


def _train_for_draft(
    context: ProbeContext,
    modes: list[Mode],
    draft: PreTrainedModel,
    features: dict[str, dict[str, Features]],
    folder: Path,
) -> Rows:
    """The same for a separate draft model's last hidden state."""
    probes: list[AcceptanceProbe] = []
    rows: Rows = []
    for mode in modes:
        with context.step("draft", f"probes of the draft model, {mode.name}", bars=False):
            made, measured = _train_label(context, features[mode.name], mode.label)
        probes += made
        rows += [row | {"mode": mode.name, "model": "draft"} for row in measured]
    save_probes(folder, draft, probes)
    return rows


def _train_label(
    context: ProbeContext, features: dict[str, Features], label: str, logger: Logger | None = None
) -> tuple[list[AcceptanceProbe], Rows]:
    """Calibrated probes of one label at every exit, and their metrics on the test texts."""
    probes = train_probes(features["train"], features["validation"], label, context.options, logger)
    for probe in probes:
        calibrate(probe, features["validation"])
    return probes, evaluate_exits(probes, features["validation"], features["test"], label, context.options.bins)


def _compare_with_scikit(context: ProbeContext, mode: Mode) -> dict[str, Any]:
    """The same fits by scikit-learn, one by one, and by us, at once: do they agree, and what do they cost?"""
    options, (train, held, test) = context.options, (mode.features[s] for s in ("train", "validation", "test"))
    strength = options.l2[len(options.l2) // 2]
    with context.step("scikit-learn", "the same fits by scikit-learn, one by one"):
        aurocs, spent, fits = scikit_check(train, test, mode.label, strength)
    began = time.perf_counter()
    ours = train_probes(train, held, mode.label, replace(options, l2=[strength]), early_stopping=False)
    seconds = time.perf_counter() - began
    ranked = [row["auroc"] for row in evaluate_exits(ours, held, test, mode.label, options.bins)]
    return {"auroc": aurocs, "auroc_ours": ranked, "seconds": spent, "seconds_ours": seconds, "fits": fits}


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
    added["probe_findings"] = findings(added)
    slim = [{k: v for k, v in row.items() if k != "bins"} for row in added["probes"]]
    write_json(path, {"name": folder.name, **read_json(path), **added, "probes": slim})
    write_page(folder / "probes.html", folder.name, added)
