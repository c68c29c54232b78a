"""The search for exit, stop rule and threshold: speedups are predicted, and the best settings run for real."""

from collections.abc import Mapping, Sequence
from typing import Any

from decode.core.method_options import MethodOptions
from decode.drafters.acceptance_probe import KINDS, AcceptanceProbe
from decode.drafters.layer_search import search
from decode.measure.bench.compare_methods import Benchmark
from decode.measure.bench.method_entries import BenchEntry
from decode.measure.bench.session import BenchOptions, Session
from decode.measure.bootstrap_statistics import median_interval, paired_ratios, plain
from decode.measure.costs.cost_model import CostMeter
from decode.measure.costs.exit_costs import measure, of_weights
from decode.measure.predicted_speedup import replayed_speedup
from decode.methods import SELF_SPECULATIVE
from decode.models.runners.fast_runner import FastRunner
from probes.calibration_and_metrics import probability
from probes.probe_context import Mode, ProbeContext
from probes.simulated_speedup import HINDSIGHT, METHODS, Choice, best_of, predict, split_texts

UNTUNED = 6
"""Tokens a draft in the example of LayerSkip's library, on which AdaSPEED's authors built: the constant length that one
gets without tuning. Which one their baseline had they do not say."""


def predict_speedups(
    context: ProbeContext, mode: Mode, probes: Sequence[AcceptanceProbe], runner: FastRunner
) -> tuple[list[Choice], list[Choice], dict[str, Any]]:
    """Predicted speedups of all settings, on the held-out texts that chose nothing but penalties.

    Returns:
        The settings priced by this machine's costs, and by `exit_costs.of_weights`; the costs here.
    """
    settings, held = context.options, mode.features["validation"]
    found: tuple[list[Choice], list[Choice]] = ([], [])
    mine = {(p.layer, p.kind): p for p in probes if p.label == mode.label}
    with context.step("costs", f"costs of the exits, {mode.name}"):
        halves = [ids[: (len(ids) + start) // 2] for ids, start in mode.texts["validation"][:3]]
        confidences = {k: mine[context.exits[0], k] for k in KINDS}
        costs = measure(runner, context.exits, confidences, mode.warp, halves, longest=settings.window)
    with context.step("choice", f"predicted speedup of every setting, {mode.name}"):
        weights = of_weights(context.model, context.exits)
        for i, layer in enumerate(held.exits):
            scores = {"token": held.token_probability[i]} | {k: probability(mine[layer, k], held) for k in KINDS}
            priced = predict(
                split_texts(held.outcome[i], held.text),
                {name: split_texts(values, held.text) for name, values in scores.items()},
                layer, [costs, weights], window=settings.window, thresholds=settings.thresholds,
            )  # fmt: skip
            for choices, some in zip(found, priced):
                choices += some
    best = max((c for c in found[0] if c.method != HINDSIGHT), key=lambda c: c.speedup)
    stop = f", threshold {best.threshold:g}" if best.threshold is not None else ""
    context.say(
        f"best predicted: {best.method}, exit after layer {best.exit_layer}, window {best.window}{stop}: "
        f"{best.speedup:.2f}x"
    )
    rows = {
        layer: {
            "draft": cost.cost_ratio,
            "verify": cost.to_dict()["verify_cost"],
            "per_token": cost.draft_overhead,
            "per_round": cost.overhead,
        }
        for layer, cost in costs.exits.items()
    }
    step = costs.exits[context.exits[0]].target_seconds
    return *found, {"step_seconds": step, "exits": rows, "confidence": costs.confidence}


def find_subset(context: ProbeContext, mode: Mode, runner: FastRunner, costs: Mapping[str, Any]) -> dict[str, Any]:
    """Draft & Verify's skip sets with the best predicted speedup."""
    texts = [text for text in mode.texts["validation"] if len(text[0]) > text[1]][: context.options.subset_prompts]
    if not texts:
        return {}
    with context.step("subset", "search of a layer subset"):
        cost = CostMeter(runner, widths=(1, 2, 3, 5, 9, 13)).run(seconds=2.0)
        fixed = next(iter(costs["exits"].values()))["per_token"] + costs["confidence"].get("token", 0.0)
        found = search(
            runner, texts, mode.warp, speedup=replayed_speedup, verify_cost=cost.v, fixed=min(0.5, fixed + 0.05)
        )
    return {
        "skip_attention": found.layers("attention"),
        "skip_mlp": found.layers("mlp"),
        "alpha": found.alpha,
        "draft_length": found.draft_length,
        "predicted_speedup": found.speedup,
    }


def entry_of(choice: Choice, temperature: float, title: str, method: str = "", **options: Any) -> BenchEntry:
    """A predicted choice as a line of a benchmark, perhaps of another method or with other options."""
    given = MethodOptions(**choice.options() | options)
    parts = {"E": given.exit_layer, "k": given.draft_length, "γ": given.threshold}
    name = " ".join([title, *(f"{short}{value:g}" for short, value in parts.items() if value is not None)])
    return BenchEntry(method or choice.method, options=given, temperature=temperature, name=name)


def run_best(
    context: ProbeContext, mode: Mode, choices: Sequence[Choice], subset: Mapping[str, Any], folder: str
) -> list[dict[str, Any]]:
    """Real runs of the best predicted settings of every method.

    Returns:
        Rows like those of `decode bench`, with ``title``, ``exit_layer``, ``threshold``, ``target_acceptance``,
        ``predicted_speedup``, ``best`` (the fastest of its title), ``speedup_vs_layerskip`` and
        ``speedup_vs_untuned`` with their intervals (where the cache is separate, also ``speedup_vs_shared`` at the
        same setting).
    """
    options, warp = context.options, mode.warp
    entries: dict[str, tuple[BenchEntry, str, float | None]] = {}

    def add(choice: Choice, title: str, predicted: float | None, method: str = "", **changes: Any) -> None:
        entry = entry_of(choice, warp.temperature, title, method, probes=folder, **changes)
        entries[entry.label] = entry, title, predicted

    for method in METHODS:
        for choice in best_of(choices, method, options.confirm):
            add(choice, method, choice.speedup)
    fixed = best_of(choices, "layerskip", len(choices))
    for choice in [c for c in fixed if c.window == UNTUNED][:1]:
        add(choice, "layerskip-untuned", choice.speedup)
    add(fixed[0], "layerskip-separate", None, "layerskip-separate")
    if subset and (subset["skip_attention"] or subset["skip_mlp"]):
        skips = {key: subset[key] for key in ("skip_attention", "skip_mlp")}
        stop = best_of(choices, "draft-verify", 1)[0]
        predicted = subset["predicted_speedup"]
        add(stop, "draft-verify-subset", predicted, exit_layer=None, target_acceptance=None, **skips)
    session = BenchOptions(
        max_new_tokens=options.max_new_tokens, repeats=options.repeats, seed=context.settings.seed, warp=warp,
        threads=options.threads, costs=False, samples=0,
    )  # fmt: skip
    with context.step("confirmation", f"real runs of {len(entries)} settings, {mode.name}"):
        benchmark = Benchmark(Session(context.model, None, context.stages.corpus.tokenizer, session))
        rows = benchmark.run([context.suite()], [entry for entry, _, _ in entries.values()])
    records = {name: record for (_, _, name), record in benchmark.records.items()}
    own = ("exit_layer", "threshold", "target_acceptance")
    for row in rows:
        row |= {"title": row["method"], "top_p": warp.top_p, **dict.fromkeys(own)}
        if row["name"] in entries:
            entry, title, predicted = entries[row["name"]]
            row |= {"title": title, "predicted_speedup": predicted} | {key: getattr(entry.options, key) for key in own}
    for row in rows:
        rivals = [r for r in rows if r["title"] == row["title"]]
        row["best"] = row is max(rivals, key=lambda r: r["tokens_per_second"] or 0.0)
    fastest = {row["title"]: row["name"] for row in rows if row["best"]}
    for row in rows:
        others = {"layerskip": fastest.get("layerskip"), "untuned": fastest.get("layerskip-untuned")}
        if row["title"] == "layerskip-separate":
            others["shared"] = row["name"].replace(row["title"], "layerskip")
        for key, other in others.items():
            if other is not None and records[other].texts and records[row["name"]].texts:
                ratios = paired_ratios(records[row["name"]], records[other])
                middle, *interval = median_interval(ratios, seed=context.settings.seed)
                row |= {f"speedup_vs_{key}": middle, f"speedup_vs_{key}_ci95": interval}
    return [plain(row) for row in rows]


def advise(table: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Options of the fastest run of each method and mode, which decoding takes where none are given."""
    advice: dict[str, dict[str, Any]] = {"greedy": {}, "sampled": {}}
    keys = ("exit_layer", "draft_length", "threshold", "target_acceptance")
    for row in table:
        if row["best"] and row["method"] in SELF_SPECULATIVE and row["title"] == row["method"]:
            given = {key: row[key] for key in keys if row[key] is not None}
            advice["greedy" if row["temperature"] == 0 else "sampled"][row["method"]] = given
    return advice
