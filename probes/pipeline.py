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
from decode.bench.statistics import plain
from decode.drafters.probe import save_probes
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
from probes.exit_search import METHODS, Choice, best_of, fastest_options, find_subset, predict_all, run_best
from probes.features import Features, collect, exit_layers
from probes.fit import evaluate_exits, train_probes
from probes.labels import Mode, modes_of, prompts_of, write_texts
from probes.report import answer, console_tables, write_page
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
                added = _Experiment(settings, StageContext(settings, run, console, logger)).run()
                if not first:
                    return {}
                _log(for_stage(logger, "probes"), added)
            finally:
                finish(logger)
            added["probe_settings"]["seconds"]["total"] = time.monotonic() - began
            slim = [{key: value for key, value in row.items() if key != "bins"} for row in added["probes"]]
            path = run.folder / "report.json"
            write_json(path, {"name": run.folder.name, **read_json(path), **added, "probes": slim})
            write_page(run.folder / "probes.html", run.folder.name, added)
    finally:
        torch.set_num_threads(threads)
    console.print(console_tables(added))
    say_end(console, began, logger, report=run.folder / "probes.html", probes=run.folder / "probes")
    return added


class _Experiment:
    """The steps between the target and the rows of the report, and the seconds that each took."""

    def __init__(self, settings: ProbesSettings, context: StageContext) -> None:
        self.settings, self.options, self.context = settings, settings.probes, context
        self.seconds: dict[str, float] = {}

    @contextmanager
    def step(self, name: str, title: str, *, bars: bool = True) -> Iterator[None]:
        """Print what is done and add its time to `seconds`."""
        began = time.perf_counter()
        with working(self.context.console, title, bars=bars):
            yield
        spent = time.perf_counter() - began
        self.seconds[name] = self.seconds.get(name, 0.0) + spent
        self.context.console.print(f"  {title} [dim]{spent:.1f} s[/dim]", highlight=False)

    def run(self) -> dict[str, Any]:
        """Do everything; returns the parts of the report, and nothing in processes other than the first."""
        context, options, folder = self.context, self.options, self.context.run.folder / "probes"
        run_stages(context, only=("target",))
        context.console.print("[bold]probes[/bold]", highlight=False)
        model = context.load_target()
        exits, modes, prompts = exit_layers(model, options.layers), modes_of(options), prompts_of(context, options)
        for mode in modes:
            with self.step("texts", f"{mode.name} texts of the target", bars=False):
                write_texts(context, model, mode, prompts, options)
        if not ranks.is_first():
            return {}
        features = {mode.name: self.read(model, mode, exits=exits) for mode in modes}
        probes, rows = {}, []
        for mode in modes:
            with self.step("training", f"probes, {mode.name}, label {mode.label}"):
                logger = for_stage(context.logger, f"probes-{mode.label}")
                seen = features[mode.name]
                made = train_probes(seen["train"], seen["validation"], mode.label, options, logger)
                found = evaluate_exits(made, seen["validation"], seen["test"])
            probes[mode.name] = made
            rows += [row | {"mode": mode.name, "model": "target"} for row in found]
        everything = [probe for made in probes.values() for probe in made]
        save_probes(folder, model, everything)
        if options.draft is not None:
            rows += self.probes_of_draft(model, modes, options.draft)
        torch.set_num_threads(options.threads or torch.get_num_threads())  # how weights are laid out is measured
        runner = open_runner(model, pack="auto")
        predicted: dict[str, list[Choice]] = {}
        costs: dict[str, Any] = {}
        table, subset = [], {}
        if isinstance(runner, FastRunner):
            machine.set_threads(runner, options.threads)
            suite = test_suite(context.corpus, self.settings.data.source, options.bench_prompts)
            for mode in modes:
                with self.step("choice", f"predicted speedup of every setting, {mode.name}"):
                    held = features[mode.name]["validation"]
                    choices, costs[mode.name] = predict_all(runner, mode, held, probes[mode.name], options)
                    predicted[mode.name] = choices
            texts = [text for text in modes[0].texts["validation"] if len(text[0]) > text[1]][: options.subset_prompts]
            if texts:
                with self.step("subset", "search of a layer subset"):
                    subset = find_subset(runner, texts, modes[0].warp, costs[modes[0].name])
            for mode in modes:
                with self.step("confirmation", f"real runs of the best settings, {mode.name}"):
                    table += run_best(context, model, suite, mode, predicted[mode.name], subset, options)
            save_probes(folder, model, everything, fastest_options(table))
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
            "seconds": self.seconds,
        }
        added = plain({"probes": rows, "self_speculation": table, "probe_settings": facts})
        return {**added, "probe_findings": [answer(added, mode.name) for mode in modes]}

    def read(self, model: PreTrainedModel, mode: Mode, **exits: Any) -> dict[str, Features]:
        """Features of a mode's texts by split, at every exit or at a draft model's last layer."""
        found, options = {}, self.options
        with self.step("features", f"{mode.name} texts read"):
            for i, (split, texts) in enumerate(mode.texts.items()):
                found[split] = collect(
                    model,
                    texts,
                    mode,
                    positions=None if split == "validation" else options.positions,
                    batch_size=options.batch_size,
                    seed=self.settings.seed + i,
                    **exits,
                )
        return found

    def probes_of_draft(self, model: PreTrainedModel, modes: list[Mode], name: str) -> list[dict[str, Any]]:
        """Probes of a separate draft model's last hidden state, in ``probes/draft``."""
        trust = self.settings.target.trust_remote_code
        check_tokenizers(self.context.corpus.tokenizer, load_tokenizer(name, trust_remote_code=trust))
        draft = load_model(name, device=model.device, dtype="float32", trust_remote_code=trust)
        probes, rows = [], []
        for mode in modes:
            seen = self.read(model, mode, draft=draft)
            made = train_probes(seen["train"], seen["validation"], mode.label, self.options)
            probes += made
            found = evaluate_exits(made, seen["validation"], seen["test"])
            rows += [row | {"mode": mode.name, "model": "draft"} for row in found]
        save_probes(self.context.run.folder / "probes" / "draft", draft, probes)
        return rows


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
