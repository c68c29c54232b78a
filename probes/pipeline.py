"""Everything that ``python -m probes`` does: target, texts, features, probes, the choice of the exit, real runs."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

import torch
from rich.console import Console
from transformers import PreTrainedModel

from decode.bench import machine
from decode.bench.page import Section, Table, console_table, write_page
from decode.bench.statistics import plain
from decode.drafters.probe import AcceptanceProbe, save_probes
from decode.errors import read_json
from decode.models.choose_runner import open_runner
from decode.models.fast_runner import FastRunner
from decode.models.loading import check_tokenizers, load_model, load_tokenizer
from decode.progress import output_console, working
from distill import ranks
from distill.data.context import StageContext
from distill.data.corpus import test_suite
from distill.files import write_json
from distill.pipeline import alone_in, say_end
from distill.run_stages import run_stages
from distill.stages import run_of
from distill.tracking import finish, for_stage, make_logger
from probes.blocks import block_experiment, block_tables
from probes.exit_search import METHODS, Choice, best_of, fastest_options, find_subset, predict_all, run_best
from probes.features import Features, collect, exit_layers
from probes.fit import evaluate_exits, train_probes
from probes.labels import modes_of, prompts_of, write_texts
from probes.report import answer, console_tables, write_report
from probes.settings import ProbesSettings


def run_probes(settings: ProbesSettings, console: Console | None = None) -> dict[str, Any]:
    """Train probes, evaluate them, choose an exit, run the best settings and report.

    The run's target is trained first if it is missing or was made from other settings. Several processes train it and
    write its texts together; the first one does the rest.

    Returns:
        What was added to the run's ``report.json``; nothing in processes other than the first.

    Raises:
        UserError: settings, data or models cannot be used, or another process works in the run's folder.
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
                if settings.student.is_block:
                    path = run.folder / "report.json"
                    write_json(path, {"name": run.folder.name, **read_json(path), **added})
                    tables = [Table(columns, rows, title) for title, columns, rows in block_tables(added)]
                    title = f"{run.folder.name}: acceptance probes inside a block head"
                    write_page(run.folder / "probes.html", title, "", [Section("Probes of a block", "", tables=tables)])
                    for name, columns, rows in block_tables(added):
                        shown = [key for key in columns if not key.startswith("brier")]  # as wide as a terminal
                        console.print(console_table(f"\n{name}", shown, rows))
                    say_end(console, began, logger, report=run.folder / "probes.html")
                    return added
                _log(for_stage(logger, "probes"), added)
            finally:
                finish(logger)
            slim = [{key: value for key, value in row.items() if key != "bins"} for row in added["probes"]]
            path = run.folder / "report.json"
            write_json(path, {"name": run.folder.name, **read_json(path), **added, "probes": slim})
            write_report(run.folder / "probes.html", run.folder.name, added)
    finally:
        torch.set_num_threads(threads)
    console.print(console_tables(added))
    say_end(console, began, logger, report=run.folder / "probes.html", probes=run.folder / "probes")
    return added


def _experiment(settings: ProbesSettings, context: StageContext) -> dict[str, Any]:
    """Do everything; return the parts of the report, and nothing in processes other than the first."""
    options, folder, seconds = settings.probes, context.run.folder / "probes", dict[str, float]()

    @contextmanager
    def step(name: str, title: str) -> Iterator[None]:
        """Print what is done and add its time to ``seconds``."""
        started = time.perf_counter()
        with working(context.console, title, bars=name != "texts"):
            yield
        spent = time.perf_counter() - started
        seconds[name] = seconds.get(name, 0.0) + spent
        context.console.print(f"  {title} [dim]{spent:.1f} s[/dim]", highlight=False)

    run_stages(context, only=None if settings.student.is_block else ("target",))
    context.console.print("[bold]probes[/bold]", highlight=False)
    model = context.load_target()
    modes, prompts = modes_of(options), prompts_of(context, options)
    for mode in modes:
        with step("texts", f"{mode.name} texts of the target"):
            write_texts(context, model, mode, prompts, options)
    if not ranks.is_first():
        return {}
    if settings.student.is_block:
        return block_experiment(context, options, modes)
    exits = exit_layers(model, options.layers)
    models: dict[str, PreTrainedModel | None] = {"target": None}
    if options.draft is not None:
        trust = settings.target.trust_remote_code
        check_tokenizers(context.corpus.tokenizer, load_tokenizer(options.draft, trust_remote_code=trust))
        models["draft"] = load_model(options.draft, device=model.device, dtype="float32", trust_remote_code=trust)
    features: dict[str, dict[str, Features]] = {}  # of the target, by mode and split
    probes: dict[str, dict[str, list[AcceptanceProbe]]] = {name: {} for name in models}
    rows: list[dict[str, Any]] = []
    for name, draft in models.items():
        for mode in modes:
            with step("features", f"{mode.name} texts read"):
                seen = {
                    split: collect(
                        model, texts, mode, exits=exits, draft=draft, batch_size=options.batch_size,
                        positions=None if split == "validation" else options.positions, seed=settings.seed + i,
                    )
                    for i, (split, texts) in enumerate(mode.texts.items())
                }  # fmt: skip
            with step("training", f"probes, {name}, {mode.name}, label {mode.label}"):
                logger = for_stage(context.logger, f"probes-{mode.label}") if draft is None else None
                made = train_probes(seen["train"], seen["validation"], mode.label, options, logger)
                found = evaluate_exits(made, seen["validation"], seen["test"])
            probes[name][mode.name] = made
            rows += [row | {"mode": mode.name, "model": name} for row in found]
            if draft is None:
                features[mode.name] = seen
        everything = [probe for made in probes[name].values() for probe in made]
        save_probes(folder if draft is None else folder / "draft", model if draft is None else draft, everything)
    torch.set_num_threads(options.threads or torch.get_num_threads())  # how weights are laid out is measured
    runner = open_runner(model, pack="auto")
    predicted: dict[str, list[Choice]] = {}
    costs: dict[str, Any] = {}
    table, subset = [], {}
    if isinstance(runner, FastRunner):
        machine.set_threads(runner, options.threads)
        for mode in modes:
            with step("choice", f"predicted speedup of every setting, {mode.name}"):
                held = features[mode.name]["validation"]
                predicted[mode.name], costs[mode.name] = predict_all(
                    runner, mode, held, probes["target"][mode.name], options
                )
        texts = [text for text in modes[0].texts["validation"] if len(text[0]) > text[1]][: options.subset_prompts]
        if texts:
            with step("subset", "search of a layer subset"):
                subset = find_subset(runner, texts, modes[0].warp, costs[modes[0].name])
        suite = test_suite(context.corpus, settings.data.source, options.bench_prompts)
        for mode in modes:
            with step("confirmation", f"real runs of the best settings, {mode.name}"):
                table += run_best(context, model, suite, mode, predicted[mode.name], subset, options)
        of_target = [probe for made in probes["target"].values() for probe in made]
        save_probes(folder, model, of_target, fastest_options(table))
    else:
        context.console.print(
            f"  [yellow]{model.config.model_type}: decoding with early exits is not supported for this family, so "
            "probes are evaluated, but no exit is chosen[/yellow]"
        )
    facts = {
        "layers": int(model.config.get_text_config().num_hidden_layers),
        "tokens": {f"{name}/{split}": len(f) for name, seen in features.items() for split, f in seen.items()},
        "labels": {mode.name: mode.label for mode in modes},
        "temperature": options.temperature,
        "top_p": options.top_p,
        "predicted": {
            name: [
                vars(best_of([c for c in choices if c.exit_layer == layer], method)[0])
                for layer in exits
                for method in METHODS
            ]
            for name, choices in predicted.items()
        },
        "costs": costs,
        "subset": subset,
        "machine": machine.describe(model.device),
        "seconds": seconds,
    }
    added = plain({"probes": rows, "self_speculation": table, "probe_settings": facts})
    return {**added, "probe_findings": [answer(added, mode.name) for mode in modes]}


def _log(logger: Any, added: dict[str, Any]) -> None:
    """Log the numbers by which runs are compared."""
    if logger is None:
        return
    for row in added["probes"]:
        name = f"{row['model']}/{row['mode']}"
        values = {f"{name}/{key}": row[key] for key in ("auroc", "brier", "ece", "auroc_token_probability") if row[key]}
        logger.log_metrics(values, step=row["layer"])
    for row in added["self_speculation"]:
        if row["best"] and row["speedup"]:
            mode = "greedy" if row["temperature"] == 0 else "sampled"
            logger.log_metrics({f"speedup/{mode}/{row['title']}": row["speedup"]}, step=0)
    logger.save()
