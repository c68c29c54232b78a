"""The choice of exit layer, stop rule and threshold: speedups are predicted, then the best settings are run."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from decode.bench.benchmark import BenchEntry, Benchmark
from decode.bench.costs import CostModel, exit_costs, measure_costs
from decode.bench.prediction import replayed_speedup, speedup
from decode.bench.records import paired_ratios
from decode.bench.session import BenchOptions, Session
from decode.bench.statistics import median_interval, plain
from decode.bench.suites import Suite
from decode.drafters.early_exit import Text, search
from decode.drafters.probe import KINDS, AcceptanceProbe
from decode.method_options import MethodOptions
from decode.methods import SELF_SPECULATIVE
from decode.models.fast_runner import FastRunner
from decode.sampling import LogitsWarper
from distill.data.context import StageContext
from probes.features import Features
from probes.fit import logits
from probes.labels import Mode
from probes.settings import ProbeSettings

STOPPED = {
    "draft-verify": "token",
    "adaspeed": "token",
    "adaspeed-probe": "probe",
    "confidence-probe": "confidence-probe",
}
"""Methods with a threshold, and the confidence that they compare with it."""
PRODUCT = {"adaspeed", "adaspeed-probe", "confidence-probe"}  # methods that multiply the confidence over the draft
METHODS = ("layerskip", *STOPPED)
THRESHOLDS = 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.98


@dataclass
class Choice:
    """A setting of a method with its predicted speedup over decoding without a draft."""

    method: str
    exit_layer: int
    window: int  # largest number of tokens drafted in a round
    threshold: float | None  # of the stop rule; None for a constant length
    speedup: float
    accepted: float  # predicted share of the drafted tokens that are accepted


def simulate(
    outcome: Sequence[float],
    confidence: Sequence[float] | None,
    window: int,
    threshold: float = 0.0,
    *,
    product: bool = False,
) -> tuple[list[int], list[int]]:
    """Replay the rounds of decoding one text.

    Args:
        outcome: for each position whether its drafted token is accepted.
        confidence: confidence of each drafted token; None drafts to the window.
        window: largest number of tokens drafted in a round.
        threshold: a draft ends with the token whose confidence (or product of confidences) is below it.
        product: multiply the confidences over the draft.

    Returns:
        Tokens drafted and tokens accepted in each round.
    """
    drafted, accepted, start, n = [], [], 0, len(outcome)
    while start < n:
        k, aggregate = 0, 1.0
        while k < min(window, n - start):
            if confidence is not None:
                aggregate = aggregate * confidence[start + k] if product else confidence[start + k]
            k += 1
            if aggregate < threshold:
                break
        m = 0
        while m < min(k, n - start - 1) and outcome[start + m] > 0:
            m += 1
        drafted.append(k)
        accepted.append(m)
        start += m + 1
    return drafted, accepted


def predict(
    outcomes: Sequence[Sequence[float]],
    confidences: Mapping[str, Sequence[Sequence[float]]],
    exit_layer: int,
    cost: CostModel,
    reading: Mapping[str, float],
    window: int,
) -> list[Choice]:
    """All settings of one exit layer with their predicted speedups.

    Args:
        outcomes: acceptance at every position, by text.
        confidences: the same for ``token`` and the kinds of probes.
        exit_layer: the exit.
        cost: what drafting and verifying cost with this exit.
        reading: what reading a confidence adds to each drafted token (see `decode.bench.costs.exit_costs`).
        window: longest draft.
    """
    settings: list[tuple[str, int, float | None]] = [("layerskip", k, None) for k in range(1, window + 1)]
    settings += [(m, window, t) for m, rule in STOPPED.items() if rule in confidences for t in THRESHOLDS]
    found = []
    for method, length, threshold in settings:
        rule = STOPPED.get(method, "length")
        drafted: list[int] = []
        accepted: list[int] = []
        for i, outcome in enumerate(outcomes):
            confidence = confidences[rule][i] if rule in confidences else None
            d, a = simulate(outcome, confidence, length, threshold or 0.0, product=method in PRODUCT)
            drafted += d
            accepted += a
        priced = replace(cost, draft_overhead=cost.draft_overhead + reading.get(rule, 0.0))
        speed = speedup(sum(accepted) + len(accepted), Counter(drafted), priced)
        found.append(Choice(method, exit_layer, length, threshold, speed, sum(accepted) / max(1, sum(drafted))))
    return found


def best_of(choices: Sequence[Choice], method: str, count: int = 1) -> list[Choice]:
    """The settings of a method with the largest predicted speedups."""
    return sorted((c for c in choices if c.method == method), key=lambda c: -c.speedup)[:count]


def by_text(values: Tensor, text: Tensor) -> list[list[float]]:
    """Values of positions ``[n]`` as one list for each text."""
    counts = torch.bincount(text)
    return [part.tolist() for part in values.split(counts[counts > 0].tolist())]


def predict_all(
    runner: FastRunner,
    mode: Mode,
    held: Features,
    probes: Sequence[AcceptanceProbe],
    options: ProbeSettings,
) -> tuple[list[Choice], dict[str, Any]]:
    """Predicted speedups of all settings on the validation texts, and the measured costs.

    Args:
        runner: the target.
        mode: the decoding mode, with its validation texts.
        held: features of these texts.
        probes: the mode's probes.
        options: settings of this command.
    """
    mine = {(probe.layer, probe.kind): probe for probe in probes}
    prompts = [ids[: (len(ids) + start) // 2] for ids, start in mode.texts["validation"][:3]]
    timed = {kind: mine[held.exits[0], kind] for kind in KINDS}
    costs, reading = exit_costs(runner, held.exits, timed, mode.warp, prompts, longest=options.window)
    found: list[Choice] = []
    for i, layer in enumerate(held.exits):
        scores = {"token": held.token_probability[i]}
        scores |= {kind: logits(mine[layer, kind], held).sigmoid() for kind in KINDS}
        confidences = {name: by_text(values, held.text) for name, values in scores.items()}
        found += predict(by_text(held.outcome[i], held.text), confidences, layer, costs[layer], reading, options.window)
    rows = {
        layer: {
            "draft": cost.cost_ratio,
            "verify": cost.to_dict()["verify_cost"],
            "per_token": cost.draft_overhead,
            "per_round": cost.overhead,
        }
        for layer, cost in costs.items()
    }
    step = costs[held.exits[0]].target_seconds
    return found, {"step_seconds": step, "exits": rows, "confidence": reading}


def find_subset(
    runner: FastRunner, texts: Sequence[Text], warp: LogitsWarper, costs: Mapping[str, Any]
) -> dict[str, Any]:
    """Draft & Verify's set of skipped sublayers with the best predicted speedup on some texts."""
    cost = measure_costs(runner, widths=(1, 2, 3, 5, 9, 13))
    fixed = next(iter(costs["exits"].values()))["per_token"] + costs["confidence"].get("token", 0.0)
    found = search(runner, texts, warp, speedup=replayed_speedup, verify_cost=cost.v, fixed=min(0.5, fixed + 0.05))
    return {
        "skip_attention": found.layers("attention"),
        "skip_mlp": found.layers("mlp"),
        "predicted_speedup": found.speedup,
    }


def run_best(
    context: StageContext,
    model: Any,
    suite: Suite,
    mode: Mode,
    choices: Sequence[Choice],
    subset: Mapping[str, Any],
    options: ProbeSettings,
) -> list[dict[str, Any]]:
    """Decode with the best predicted settings of every method.

    Returns:
        Rows as those of `decode bench`, with ``title``, ``exit_layer``, ``threshold``, ``target_acceptance``,
        ``predicted_speedup``, ``best`` (the fastest of its title) and ``speedup_vs_layerskip`` with its interval.
    """
    entries: dict[str, tuple[BenchEntry, str, float]] = {}

    def add(choice: Choice, title: str, predicted: float, **changes: Any) -> None:
        values: dict[str, Any] = {"exit_layer": choice.exit_layer, "draft_length": choice.window}
        if choice.threshold is not None:  # the controller starts at the threshold and is steered to its acceptance
            values |= {"threshold": choice.threshold, "target_acceptance": min(0.99, max(0.01, choice.accepted))}
        given = MethodOptions(**values | {"probes": str(context.run.folder / "probes")} | changes)
        shown = {"E": given.exit_layer, "k": given.draft_length, "γ": given.threshold}
        name = " ".join([title, *(f"{short}{value:g}" for short, value in shown.items() if value is not None)])
        entry = BenchEntry(choice.method, options=given, temperature=mode.warp.temperature, name=name)
        entries[name] = entry, title, predicted

    for method in METHODS:
        for choice in best_of(choices, method, options.confirm):
            add(choice, method, choice.speedup)
    if skips := {key: subset[key] for key in ("skip_attention", "skip_mlp") if subset.get(key)}:
        stop, predicted = best_of(choices, "draft-verify")[0], subset["predicted_speedup"]
        add(stop, "draft-verify-subset", predicted, exit_layer=None, target_acceptance=None, **skips)
    session = BenchOptions(
        max_new_tokens=options.max_new_tokens,
        repeats=options.repeats,
        seed=context.settings.seed,
        warp=mode.warp,
        threads=options.threads,
        costs=False,
        samples=0,
    )
    benchmark = Benchmark(Session(model, None, context.corpus.tokenizer, session))
    rows = benchmark.run([suite], [entry for entry, _, _ in entries.values()])
    for row in rows:
        row |= {"title": row["method"], "top_p": mode.warp.top_p, "predicted_speedup": None}
        row |= dict.fromkeys(("exit_layer", "threshold", "target_acceptance"))
        if row["name"] in entries:
            entry, row["title"], row["predicted_speedup"] = entries[row["name"]]
            row |= {key: getattr(entry.options, key) for key in ("exit_layer", "threshold", "target_acceptance")}
    for row in rows:
        rivals = [other for other in rows if other["title"] == row["title"]]
        row["best"] = row is max(rivals, key=lambda other: other["tokens_per_second"] or 0.0)
    records = {name: record for (*_, name), record in benchmark.records.items()}
    reference = records[next(row["name"] for row in rows if row["best"] and row["title"] == "layerskip")]
    for row in rows:
        if records[row["name"]].texts and reference.texts:
            middle, *interval = median_interval(
                paired_ratios(records[row["name"]], reference), seed=context.settings.seed
            )
            row |= {"speedup_vs_layerskip": middle, "speedup_vs_layerskip_ci95": interval}
    return [plain(row) for row in rows]


def fastest_options(table: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Options of the fastest run of each method and mode, which decoding uses if none are given."""
    found: dict[str, dict[str, Any]] = {"greedy": {}, "sampled": {}}
    keys = ("exit_layer", "draft_length", "threshold", "target_acceptance")
    for row in table:
        if row["best"] and row["method"] in SELF_SPECULATIVE and row["title"] == row["method"]:
            given = {key: row[key] for key in keys if row[key] is not None}
            found["greedy" if row["temperature"] == 0 else "sampled"][row["method"]] = given
    return found
