"""The search for exit, stop rule and threshold: speedups are predicted, and the best settings run for real."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from decode.bench.benchmark import Benchmark
from decode.bench.costs import CostMeter
from decode.bench.entries import BenchEntry
from decode.bench.exit_costs import Costs, measure, of_weights
from decode.bench.prediction import replayed_speedup, speedup_of_rounds
from decode.bench.session import BenchOptions, Session
from decode.bench.statistics import median_interval, paired_ratios, plain
from decode.drafters.early_exit import search
from decode.drafters.probe import KINDS, AcceptanceProbe
from decode.method_options import MethodOptions
from decode.methods import SELF_SPECULATIVE
from decode.models.fast_runner import FastRunner
from probes.fit import probability
from probes.labels import Mode, ProbeContext

STOPPED = {
    "draft-verify": "token",
    "adaspeed": "token",
    "adaspeed-probe": "probe",
    "confidence-probe": "confidence-probe",
}
"""Methods that stop by a confidence, and which."""
PRODUCT = {"adaspeed", "adaspeed-probe", "confidence-probe"}
"""Those that multiply it over the draft: AdaSPEED and its variants."""
METHODS = ("layerskip", *STOPPED)  # methods among which the best setting is looked for
HINDSIGHT = "hindsight"
"""No method: the stop rule that knows of each token, once drafted, whether it is accepted. It bounds all of them."""


@dataclass
class Choice:
    """A setting with its predicted speedup over plain decoding."""

    method: str  # a name of `decode.methods.METHODS`
    exit_layer: int  # layers that the draft runs
    window: int  # most tokens a round
    threshold: float | None  # of the stop rule; None for a fixed length
    speedup: float  # predicted
    accepted: float  # predicted share of drafted tokens that are accepted
    tokens: float  # predicted tokens per round

    def options(self) -> dict[str, Any]:
        """As `decode.methods.MethodOptions`: the controller starts at the threshold and is steered to its rate."""
        given: dict[str, Any] = {"exit_layer": self.exit_layer, "draft_length": self.window}
        if self.threshold is not None:
            given |= {"threshold": self.threshold, "target_acceptance": min(0.99, max(0.01, self.accepted))}
        return given


def simulate(
    outcome: Sequence[float],
    confidence: Sequence[float] | None,
    window: int,
    threshold: float = 0.0,
    *,
    product: bool = False,
    ended: bool = False,
) -> tuple[list[int], list[int]]:
    """Rounds of decoding one text: tokens drafted and accepted in each.

    Args:
        outcome: for each position whether its drafted token is accepted.
        confidence: of each drafted token; None drafts to the window.
        window: most tokens a round.
        threshold: drafting ends with the token whose confidence (or their product) falls below.
        product: multiply over the draft.
        ended: the last position is the text's end, which may be drafted; else the budget ends there, which may not.
    """
    drafted, accepted, s, n = [], [], 0, len(outcome)
    while s < n:
        longest = min(window, n - s - (not ended))
        k, aggregate = 0, 1.0
        while k < longest:
            if confidence is not None:
                aggregate = aggregate * confidence[s + k] if product else confidence[s + k]
            k += 1
            if aggregate < threshold:
                break
        m = 0
        while m < min(k, n - s - 1) and outcome[s + m] > 0:
            m += 1
        drafted.append(k)
        accepted.append(m)
        s += m + 1
    return drafted, accepted


def predict(
    outcomes: Sequence[Sequence[float]],
    confidences: Mapping[str, Sequence[Sequence[float]]],
    exit_layer: int,
    costs: Sequence[Costs],
    *,
    window: int,
    thresholds: Sequence[float],
) -> list[list[Choice]]:
    """All settings of one exit layer, priced by each of several costs.

    Args:
        outcomes: acceptance at every position, by text.
        confidences: the same for ``token`` and the kinds of probes.
        exit_layer: which exit they are of.
        costs: of this machine, and of others.
        window: longest draft.
        thresholds: confidence thresholds.
    """
    settings: list[tuple[str, str, int, float | None]] = []
    for k in range(1, window + 1):
        settings += [("layerskip", "length", k, None), (HINDSIGHT, "length", k, 0.5)]
    for method, rule in STOPPED.items():
        settings += [(method, rule, window, t) for t in thresholds if rule in confidences]
    found: list[list[Choice]] = [[] for _ in costs]
    for method, rule, k, threshold in settings:
        values = outcomes if method == HINDSIGHT else confidences.get(rule)
        drafted: list[int] = []
        accepted: list[int] = []
        for i, outcome in enumerate(outcomes):
            sure, product = None if values is None else values[i], method in PRODUCT
            d, a = simulate(outcome, sure, k, threshold or 0.0, product=product, ended=True)
            drafted += d
            accepted += a
        shares = sum(accepted) / max(1, sum(drafted)), 1 + sum(accepted) / max(1, len(drafted))
        for choices, one in zip(found, costs):
            cost = one.exits[exit_layer]
            c = cost.cost_ratio + cost.draft_overhead + one.confidence.get(rule, 0.0)
            speed = speedup_of_rounds(drafted, accepted, c, cost.v, cost.overhead)
            choices.append(Choice(method, exit_layer, k, threshold, speed, *shares))
    return found


def best_of(choices: Sequence[Choice], method: str, count: int) -> list[Choice]:
    """The best predicted settings of a method, from different exits or thresholds."""
    return sorted((c for c in choices if c.method == method), key=lambda c: -c.speedup)[:count]


def split_texts(values: Tensor, text: Tensor) -> list[list[float]]:
    """A value for each position ``[n]`` as one list a text."""
    counts = torch.bincount(text)
    return [part.tolist() for part in values.split(counts[counts > 0].tolist())]


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
