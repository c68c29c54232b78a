"""The search for exit, stop rule and threshold: speedups are predicted, and the best settings run for real."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from decode.drafters.acceptance_probe import KINDS, AcceptanceProbe
from decode.drafters.layer_search import search
from decode.measure.cost import CostModel, measure_cost
from decode.measure.predict import replayed_speedup
from decode.methods import SELF_SPECULATIVE
from decode.models.runners.fast_runner import FastRunner
from decode.prompts.presets import PRESETS
from decode.prompts.scorers import SCORERS
from decode.prompts.suites import Prompt, Suite
from distill.data.tokenize import prompt_part
from probes.benchmark import Candidate, run_candidates
from probes.context import Mode, ProbeContext
from probes.costs import measure, of_weights
from probes.metrics import probability
from probes.predict import METHODS, Choice, best_of, predict, split_texts

UNTUNED = 6
"""Tokens a draft in the example of LayerSkip's library, on which AdaSPEED's authors built: the constant length that one
gets without tuning. Which one their baseline had they do not say."""


def predict_speedups(
    context: ProbeContext,
    mode: Mode,
    probes: list[AcceptanceProbe],
    runner: FastRunner,
    prompts: dict[str, list[list[int]]],
) -> tuple[list[Choice], list[Choice], dict[str, Any]]:
    """Predicted speedups of all settings, on the held-out texts that chose nothing but penalties.

    Returns:
        The settings here, those where weights decide the costs (`of_weights`), and the costs here.
    """
    settings, held = context.options, mode.features["validation"]
    mine = {(p.layer, p.kind): p for p in probes if p.label == mode.label}
    with context.step("costs", f"costs of the exits, {mode.name}"):
        costs = measure(
            runner, context.exits, {kind: mine[context.exits[0], kind] for kind in KINDS}, mode.warp,
            prompts["validation"][:3], max_new_tokens=settings.max_new_tokens,
        )  # fmt: skip
    found: list[Choice] = []
    elsewhere: list[Choice] = []
    with context.step("choice", f"predicted speedup of every setting, {mode.name}"):
        for i, layer in enumerate(held.exits):
            confidences = {"token": held.token_probability[i]} | {k: probability(mine[layer, k], held) for k in KINDS}
            outcomes = split_texts(held.outcome[i], held.text)
            scores: dict[str, Sequence[Sequence[float]]] = {
                name: split_texts(values, held.text) for name, values in confidences.items()
            }
            for choices, at in ((found, costs), (elsewhere, of_weights(context.model, [layer]))):
                choices += predict(outcomes, scores, layer, at, window=settings.window, thresholds=settings.thresholds)
    measured = {
        "step_seconds": next(iter(costs.exits.values())).target_seconds,
        "exits": {layer: _cost_row(cost) for layer, cost in costs.exits.items()},
        "confidence": costs.confidence,
    }
    best = max((c for c in found if c.method in METHODS), key=lambda c: c.speedup)
    context.console.print(
        f"  best predicted: {best.method}, exit after layer {best.exit_layer}, window {best.window}"
        + (f", threshold {best.threshold:g}" if best.threshold is not None else "")
        + f": {best.speedup:.2f}x",
        highlight=False,
    )
    return found, elsewhere, measured


def _cost_row(cost: CostModel) -> dict[str, Any]:
    return {
        "draft": cost.cost_ratio,
        "verify": [[n, v] for n, v in sorted(cost.verify_cost.items())],
        "per_token": cost.draft_overhead,
        "per_round": cost.overhead,
    }


def find_subset(context: ProbeContext, mode: Mode, runner: FastRunner, costs: dict[str, Any]) -> dict[str, Any]:
    """Draft & Verify's skip sets with the best predicted speedup."""
    count = context.options.subset_prompts
    if not count:
        return {}
    with context.step("subset", "search of a layer subset"):
        cost = measure_cost(runner, widths=(1, 2, 3, 5, 9, 13), seconds=2.0)
        some = next(iter(costs["exits"].values()))
        handling = some["per_token"] + costs["confidence"].get("token", 0.0)
        texts = [text for text in mode.texts["validation"] if len(text[0]) > text[1]][:count]
        found = search(
            runner, texts, mode.warp, speedup=replayed_speedup, verify_cost=cost.v, fixed=min(0.5, handling + 0.05)
        )
    return {
        "skip_attention": found.layers("attention"),
        "skip_mlp": found.layers("mlp"),
        "alpha": found.alpha,
        "draft_length": found.draft_length,
        "predicted_speedup": found.speedup,
    }


def run_best(
    context: ProbeContext, mode: Mode, choices: list[Choice], subset: dict[str, Any], folder: str
) -> list[dict[str, Any]]:
    """Real runs of the best predicted settings of every method."""
    settings = context.options
    candidates = [Candidate.of(c) for method in METHODS for c in best_of(choices, method, settings.confirm)]
    untuned = next((c for c in best_of(choices, "layerskip", len(choices)) if c.window == UNTUNED), None)
    if untuned is not None:
        candidates.append(replace(Candidate.of(untuned), title="layerskip-untuned"))
    shared = next(c for c in candidates if c.method == "layerskip")
    candidates.append(replace(shared, method="layerskip-separate", title="layerskip-separate", predicted=None))
    if subset and (subset["skip_attention"] or subset["skip_mlp"]):
        threshold = best_of(choices, "draft-verify", 1)[0].threshold
        skips = {key: subset[key] for key in ("skip_attention", "skip_mlp")}
        options = {**skips, "draft_length": settings.window, "threshold": threshold}
        candidates.append(Candidate("draft-verify", options, subset["predicted_speedup"], "draft-verify-subset"))
    with context.step("confirmation", f"real runs of {len(candidates)} settings, {mode.name}"):
        return run_candidates(
            context.model, context.stages.corpus.tokenizer, _suite(context), candidates, mode.warp, probes=folder,
            max_new_tokens=settings.max_new_tokens, repeats=settings.repeats, seed=context.settings.seed,
            threads=settings.threads,
        )  # fmt: skip


def _suite(context: ProbeContext) -> Suite:
    source, corpus = context.settings.data.source, context.stages.corpus
    rows = corpus.test.select(range(min(context.options.bench_prompts, len(corpus.test))))
    ids = [prompt_part(ids, labels) for ids, labels in zip(rows["input_ids"], rows["labels"])]
    prompts = [
        Prompt(f"test/{i}", text, answer, ids=tuple(known))
        for i, (text, answer, known) in enumerate(zip(rows["prompt"], rows["response"], ids))
    ]
    preset = PRESETS.get(source)
    score = SCORERS.get(preset.scorer) if preset is not None and preset.scorer else None
    return Suite(source, prompts, None if score is None else (lambda p, text: score(text, p.reference or "")))


def advise(table: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Options of the fastest run of each method and mode, which decoding takes where none are given."""
    advice: dict[str, dict[str, Any]] = {"greedy": {}, "sampled": {}}
    for row in table:
        if row["best"] and row["method"] in SELF_SPECULATIVE and row["title"] == row["method"]:
            keys = ("exit_layer", "draft_length", "threshold", "target_acceptance")
            given = {key: row[key] for key in keys}
            mode = "greedy" if row["temperature"] == 0 else "sampled"
            advice[mode][row["method"]] = {key: value for key, value in given.items() if value is not None}
    return advice
