"""Everything that ``python -m probes`` does: target, texts, features, probes, the choice of the exit, real runs."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from transformers import PreTrainedModel

from decode import machine
from decode.cost import CostModel, measure_cost
from decode.drafters.layer_subset import search
from decode.errors import UserError
from decode.exits import PartialRunner, cache_bytes
from decode.load import check_tokenizers, load_model, load_tokenizer, stop_ids
from decode.methods import SELF_SPECULATIVE
from decode.probe import KINDS, AcceptanceProbe, save_probes
from decode.rows import plain
from decode.runner import open_runner
from decode.suites import Prompt, Suite
from decode.suites.presets import PRESETS
from decode.suites.scorers import SCORERS
from decode.warp import Warp
from distill.data.examples import prompt_ids
from distill.files import write_json
from distill.keys import stage_keys
from distill.pipeline import plan_stages
from distill.run import Run
from distill.stages import Bench
from distill.tracking import finish, for_stage, make_logger, where
from probes.choose import Choice, best_of, measure, predict, split_texts
from probes.confirm import Candidate, confirm
from probes.features import Features, collect, exit_layers
from probes.judge import auroc_gain, calibrate, judge_exits, probability, scikit_check
from probes.module import Training, train_probes
from probes.report import console_tables, findings, write_page
from probes.settings import Settings
from probes.texts import Text, write_texts

METHODS = ("layerskip", "draft-verify", "adaspeed", "adaspeed-probe", "confidence-probe")
MODES = ("greedy", "sampled")


@dataclass
class Mode:
    """One decoding mode: its warp, the label its decoder's probes use, and features by split."""

    name: str
    warp: Warp
    label: str
    labels: tuple[str, ...]
    features: dict[str, Features] = field(default_factory=dict)
    texts: dict[str, list[Text]] = field(default_factory=dict)


@dataclass
class Lab:
    """What the steps work with."""

    settings: Settings
    bench: Bench
    model: PreTrainedModel
    exits: list[int]
    console: Console
    logger: Any = None
    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def step(self, name: str, title: str) -> Iterator[None]:
        """Says what is being done, and times it."""
        began = time.perf_counter()
        with self.console.status(f"  {title}"):
            yield
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - began
        self.console.print(f"  {title} [dim]{self.seconds[name]:.1f} s[/dim]", highlight=False)

    @property
    def stops(self) -> set[int]:
        """Tokens that end a text."""
        return set(stop_ids(self.model, self.bench.corpus.tokenizer))


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
    run = Run(Path(settings.output_dir) / settings.name, [comparison.name for comparison in settings.comparisons])
    run.work.mkdir(parents=True, exist_ok=True)
    logger = make_logger(settings.tracker, run.folder, settings.name, asdict(settings))
    bench = Bench(settings, run, console, logger)
    try:
        _ensure_target(bench)
        console.print("[bold]probes[/bold]", highlight=False)
        model = load_model(run.target, dtype=settings.target.dtype).to(bench._device())
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


def _ensure_target(bench: Bench) -> None:
    """Trains the run's target if it is not there."""
    run = bench.run
    if run.record("target") is not None:
        return
    stage, title, make = plan_stages(bench)[0]
    key, made_from = stage_keys(bench.settings)[stage]
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
    prompts = _prompts(lab)
    for mode in modes:
        _features(lab, mode, prompts)
    probes, rows, check = _train(lab, modes)
    folder = lab.bench.run.folder / "probes"
    save_probes(folder, lab.model, probes)
    rows += _draft_probes(lab, modes, folder)
    runner = open_runner(lab.model)
    choices: dict[str, list[Choice]] = {}
    table: list[dict[str, Any]] = []
    subset: dict[str, Any] = {}
    costs: dict[str, Any] = {}
    if isinstance(runner, PartialRunner):
        lab.console.print(f"  {machine.set_threads(runner, settings.threads)[1]}", highlight=False)
        for mode in modes:
            choices[mode.name], costs[mode.name] = _choose(lab, mode, probes, runner, prompts)
        subset = _subset(lab, modes[0], runner, costs["greedy"])
        for mode in modes:
            table += _confirm(lab, mode, choices[mode.name], subset, str(folder))
        save_probes(folder, lab.model, probes, _advice(table))
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
                    name: [vars(c) for m in METHODS for e in lab.exits for c in best_of(_at(found, e), m, 1)]
                    for name, found in choices.items()
                },
                "costs": costs,
                "subset": subset,
                "scikit_learn": check,
                "cache_bytes_per_token": cache_bytes(runner, runner.depth) if isinstance(runner, PartialRunner) else 0,
                "machine": machine.describe(lab.model.device),
                "seconds": lab.seconds,
            },
        }
    )


def _at(choices: list[Choice], layer: int) -> list[Choice]:
    return [c for c in choices if c.exit_layer == layer]


# -- data ----------------------------------------------------------------------------------------------------------


def _prompts(lab: Lab) -> dict[str, list[list[int]]]:
    """Prompts of the three splits as token ids; no text of one is in another."""
    settings, corpus = lab.settings.probes, lab.bench.corpus
    counts = {"train": settings.prompts, "validation": settings.validation_prompts, "test": settings.test_prompts}
    found = {}
    for split, count in counts.items():
        rows = getattr(corpus, split)
        rows = rows.select(range(min(count, len(rows))))
        found[split] = [prompt_ids(ids, labels) for ids, labels in zip(rows["input_ids"], rows["labels"])]
        found[split] = [ids for ids in found[split] if ids]
        if not found[split]:
            raise UserError(f"the {split} split has no prompts; plain texts need a longer data.max_length")
    return found


def _features(lab: Lab, mode: Mode, prompts: dict[str, list[list[int]]]) -> None:
    """Has the target write its texts, and reads them once."""
    settings, seed = lab.settings.probes, lab.settings.seed
    with lab.step("texts", f"{mode.name} texts of the target"):
        for i, (split, some) in enumerate(prompts.items()):
            mode.texts[split] = write_texts(
                lab.model, some, mode.warp, stop_ids=lab.stops, max_new_tokens=settings.max_new_tokens,
                batch_size=settings.batch_size, seed=seed + i,
            )  # fmt: skip
    with lab.step("features", f"{mode.name} texts read once, {len(lab.exits)} exits"):
        for i, (split, texts) in enumerate(mode.texts.items()):
            mode.features[split] = collect(
                lab.model, texts, mode.warp, exits=lab.exits, positions=settings.positions,
                batch_size=settings.batch_size, seed=seed + i,
            )  # fmt: skip


# -- probes --------------------------------------------------------------------------------------------------------


def _train(lab: Lab, modes: list[Mode]) -> tuple[list[AcceptanceProbe], list[dict[str, Any]], dict[str, Any]]:
    """Probes of all labels and exits, their judgement, and scikit-learn's beside ours."""
    settings = lab.settings.probes
    training = Training(tuple(settings.l2), settings.max_epochs, settings.patience, settings.class_balance)
    probes: list[AcceptanceProbe] = []
    rows: list[dict[str, Any]] = []
    for mode in modes:
        train, held, test = (mode.features[split] for split in ("train", "validation", "test"))
        for label in mode.labels:
            with lab.step("training", f"probes, {mode.name}, label {label}"):
                made = train_probes(train, held, label, training, for_stage(lab.logger, f"probes-{label}"))
            for probe in made:
                calibrate(probe, held)
            judged = judge_exits(made, held, test, label, settings.bins)
            for row in judged:
                row |= {"mode": mode.name, "model": "target"} | _gains(row, made, test)
            probes += made
            rows += judged
    check: dict[str, Any] = {}
    if settings.check:
        greedy = modes[0].features
        with lab.step("scikit-learn", "scikit-learn's logistic regression, layer by layer"):
            aurocs, spent = scikit_check(greedy["train"], greedy["test"], "match", min(settings.l2))
        exact = Training((min(settings.l2),), settings.max_epochs, settings.max_epochs)
        began = time.perf_counter()
        ours = train_probes(greedy["train"], greedy["validation"], "match", exact)
        mine = time.perf_counter() - began
        plain_rows = judge_exits(ours, greedy["validation"], greedy["test"], "match", settings.bins)
        check = {
            "auroc": aurocs,
            "auroc_ours": [row["auroc"] for row in plain_rows],
            "seconds": spent,
            "seconds_ours": mine,
            "fits": len(aurocs),
            "fits_ours": len(ours),
        }
    return probes, rows, check


def _gains(row: dict[str, Any], probes: list[AcceptanceProbe], test: Features) -> dict[str, Any]:
    """Intervals of what the probes gain in AUROC over the token probability."""
    at = test.exits.index(row["layer"])
    outcome = test.outcome[at] if row["label"] == "accept" else test.labels[row["label"]][at]
    return {
        f"auroc_gain_ci95_{p.kind.replace('-', '_')}": auroc_gain(
            probability(p, test), test.token_probability[at], outcome, test.text
        )
        for p in probes
        if p.layer == row["layer"]
    }


def _draft_probes(lab: Lab, modes: list[Mode], folder: Path) -> list[dict[str, Any]]:
    """The same for a separate draft model's last hidden state."""
    settings = lab.settings.probes
    if settings.draft is None:
        return []
    trust = lab.settings.target.trust_remote_code
    check_tokenizers(lab.bench.corpus.tokenizer, load_tokenizer(settings.draft, trust_remote_code=trust))
    draft = load_model(settings.draft, trust_remote_code=trust).to(lab.model.device)
    training = Training(tuple(settings.l2), settings.max_epochs, settings.patience, settings.class_balance)
    probes: list[AcceptanceProbe] = []
    rows: list[dict[str, Any]] = []
    for mode in modes:
        with lab.step("draft", f"probes of the draft model, {mode.name}"):
            found = {
                split: collect(
                    lab.model,
                    texts,
                    mode.warp,
                    draft=draft,
                    positions=settings.positions,
                    batch_size=settings.batch_size,
                    seed=lab.settings.seed + i,
                )  # fmt: skip
                for i, (split, texts) in enumerate(mode.texts.items())
            }
            made = train_probes(found["train"], found["validation"], mode.label, training)
        for probe in made:
            calibrate(probe, found["validation"])
        judged = judge_exits(made, found["validation"], found["test"], mode.label, settings.bins)
        rows += [row | {"mode": mode.name, "model": "draft"} | _gains(row, made, found["test"]) for row in judged]
        probes += made
    save_probes(folder / "draft", draft, probes)
    return rows


# -- choice and confirmation -----------------------------------------------------------------------------------------


def _choose(
    lab: Lab, mode: Mode, probes: list[AcceptanceProbe], runner: PartialRunner, prompts: dict[str, list[list[int]]]
) -> tuple[list[Choice], dict[str, Any]]:
    """Predicted speedups of all settings, on the held-out texts that chose nothing but penalties."""
    settings, held = lab.settings.probes, mode.features["validation"]
    mine = {(p.layer, p.kind): p for p in probes if p.label == mode.label}
    with lab.step("costs", f"costs of the exits, {mode.name}"):
        costs = measure(
            runner, lab.exits, {kind: mine[lab.exits[0], kind] for kind in KINDS}, mode.warp,
            prompts["validation"][:3], max_new_tokens=settings.max_new_tokens,
        )  # fmt: skip
    found: list[Choice] = []
    with lab.step("choice", f"predicted speedup of every setting, {mode.name}"):
        for i, layer in enumerate(held.exits):
            confidences = {"token": held.token_probability[i]} | {k: probability(mine[layer, k], held) for k in KINDS}
            found += predict(
                split_texts(held.outcome[i], held.text),
                {name: split_texts(values, held.text) for name, values in confidences.items()},
                layer, costs, window=settings.window, thresholds=settings.thresholds,
            )  # fmt: skip
    told = {
        "step_seconds": next(iter(costs.exits.values())).target_seconds,
        "exits": {layer: _cost_row(cost) for layer, cost in costs.exits.items()},
        "confidence": costs.confidence,
    }
    best = max(found, key=lambda c: c.speedup)
    lab.console.print(
        f"  best predicted: {best.method}, exit after layer {best.exit_layer}, window {best.window}"
        + (f", threshold {best.threshold:g}" if best.threshold is not None else "")
        + f": {best.speedup:.2f}x",
        highlight=False,
    )
    return found, told


def _cost_row(cost: CostModel) -> dict[str, Any]:
    return {
        "draft": cost.cost_ratio,
        "verify": [[n, v] for n, v in sorted(cost.verify_cost.items())],
        "per_token": cost.draft_overhead,
        "per_round": cost.overhead,
    }


def _subset(lab: Lab, mode: Mode, runner: PartialRunner, costs: dict[str, Any]) -> dict[str, Any]:
    """Draft & Verify's skip sets with the best predicted speedup."""
    count = lab.settings.probes.subset_prompts
    if not count:
        return {}
    with lab.step("subset", "search of a layer subset"):
        cost = measure_cost(runner, widths=(1, 2, 3, 5, 9, 13), seconds=2.0)
        some = next(iter(costs["exits"].values()))
        handling = some["per_token"] + costs["confidence"].get("token", 0.0)
        texts = [text for text in mode.texts["validation"] if len(text[0]) > text[1]][:count]
        found = search(runner, texts, mode.warp, verify_cost=cost.v, fixed=min(0.5, handling + 0.05))
    return {
        "skip_attention": found.layers("attention"),
        "skip_mlp": found.layers("mlp"),
        "alpha": found.alpha,
        "draft_length": found.draft_length,
        "predicted_speedup": found.speedup,
    }


def _confirm(lab: Lab, mode: Mode, choices: list[Choice], subset: dict[str, Any], folder: str) -> list[dict[str, Any]]:
    """Real runs of the best predicted settings of every method."""
    settings = lab.settings.probes
    candidates = [Candidate.of(c) for method in METHODS for c in best_of(choices, method, settings.confirm)]
    shared = next(c for c in candidates if c.method == "layerskip")
    candidates.append(replace(shared, method="layerskip-separate", title="layerskip-separate", predicted=None))
    if subset and (subset["skip_attention"] or subset["skip_mlp"]):
        threshold = best_of(choices, "draft-verify", 1)[0].threshold
        skips = {key: subset[key] for key in ("skip_attention", "skip_mlp")}
        given = {**skips, "draft_length": settings.window, "threshold": threshold}
        candidates.append(Candidate("draft-verify", given, subset["predicted_speedup"], "draft-verify-subset"))
    with lab.step("confirmation", f"real runs of {len(candidates)} settings, {mode.name}"):
        return confirm(
            lab.model, lab.bench.corpus.tokenizer, _suite(lab), candidates, mode.warp, probes=folder,
            max_new_tokens=settings.max_new_tokens, repeats=settings.repeats, seed=lab.settings.seed,
            threads=settings.threads,
        )  # fmt: skip


def _suite(lab: Lab) -> Suite:
    source, corpus = lab.settings.data.source, lab.bench.corpus
    rows = corpus.test.select(range(min(lab.settings.probes.bench_prompts, len(corpus.test))))
    prompts = [
        Prompt(f"test/{i}", text, answer) for i, (text, answer) in enumerate(zip(rows["prompt"], rows["response"]))
    ]
    preset = PRESETS.get(source)
    score = SCORERS.get(preset.scorer) if preset is not None and preset.scorer else None
    return Suite(source, prompts, None if score is None else (lambda p, text: score(text, p.reference or "")))


def _advice(table: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Options of the fastest run of each method and mode, which decoding takes where none are given."""
    advice: dict[str, dict[str, Any]] = {mode: {} for mode in MODES}
    for row in table:
        if row["best"] and row["method"] in SELF_SPECULATIVE and row["title"] == row["method"]:
            given = {
                "exit_layer": row["exit_layer"],
                "draft_length": row["draft_length"],
                "threshold": row["threshold"],
            }
            mode = "greedy" if row["temperature"] == 0 else "sampled"
            advice[mode][row["method"]] = {key: value for key, value in given.items() if value is not None}
    return advice


# -- results -------------------------------------------------------------------------------------------------------


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
