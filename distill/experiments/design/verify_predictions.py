"""Check of the predictions: the winner and two other shapes are trained in full and decoded."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from transformers import PreTrainedModel

from decode.bench.benchmark import Benchmark
from decode.bench.entries import BenchEntry
from decode.bench.session import BenchOptions, Session
from decode.bench.suites import Suite
from decode.method_options import MethodOptions
from decode.models.heads import FeatureHead
from decode.models.loading import open_draft
from decode.sampling import Warp
from distill.data.context import StageContext
from distill.data.corpus import test_suite
from distill.experiments.design.draft_shapes import Shape
from distill.experiments.design.predicted_speedup import best_of
from distill.experiments.design.shape_table import Entry
from distill.experiments.design.training_trials import Model, Trials
from distill.files import RunDir, StageRecord
from distill.stages import StageResult

Row = dict[str, Any]

PROMPTS = 48  # decoded at least: twelve tell no two drafts apart whose speeds differ by less than a fifth


def verified(entries: Sequence[Entry], winner: Entry, default: Shape) -> list[Entry]:
    """The winner, the configuration's own shape, and others from the middle of the ranking on, three in all."""
    trained = sorted((e for e in entries if e.full is not None and e is not winner), key=lambda e: -e.forecast)
    own = [e for e in trained if e.shape == default]
    middle = [e for e in trained[len(trained) // 2 :] if e not in own]
    return [winner, *own, *middle][:3]


def verify(
    chosen: Sequence[Entry], trials: Trials, context: StageContext, warp: Warp, longest: int, folder: RunDir
) -> list[Row]:
    """Train, decode and compare.

    Args:
        chosen: the shapes.
        trials: trains them.
        context: of the run: its settings of evaluation and its test prompts.
        warp: the decoding mode.
        longest: longest draft.
        folder: keeps the trained drafts.
    """
    settings, full = context.settings.evaluation, trials.full_steps
    models: dict[str, Model] = {}
    for entry in chosen:
        context.console.print(f"[bold]in full: {entry.shape.name}[/bold], {full} steps", highlight=False)
        models[entry.shape.name] = _trained(entry.shape, trials, context, folder)
    rows: list[Row] = []
    lengths = {}
    for entry in chosen:
        assert entry.price is not None
        assert entry.full is not None
        alphas = trials.measure(models[entry.shape.name])
        speedup, lengths[entry.shape.name] = best_of(alphas, entry.price, longest)
        rows.append(
            {
                "name": entry.shape.name,
                "steps_tried": entry.steps,
                "alpha_predicted": entry.full.alpha,
                "alpha_predicted_ci95": [entry.full.low, entry.full.high],
                "alpha_measured": alphas[0].mean,
                "alpha_measured_se": alphas[0].se,
                "predicted": entry.full.speedup,
                "predicted_ci95": [entry.full.speedup_low, entry.full.speedup_high],
                "from_measured_alpha": speedup,
                "draft_length": lengths[entry.shape.name],
            }
        )
    options = BenchOptions(
        max_new_tokens=settings.max_new_tokens, repeats=settings.repeats, seed=context.settings.seed,
        threads=settings.threads, costs=False, warp=warp,
    )  # fmt: skip
    benchmark = Benchmark(Session(trials.target, models, context.corpus.tokenizer, options))
    prompts = max(PROMPTS, settings.decode_prompts)
    suite = test_suite(context.corpus, context.settings.data.source, prompts)
    runs = [
        BenchEntry("vanilla", name, MethodOptions(draft_length=k), temperature=warp.temperature, name=name)
        for name, k in lengths.items()
    ]
    context.console.print("[bold]decoding with them[/bold]", highlight=False)
    found = benchmark.run([Suite(suite.name, suite.prompts[:prompts], None)], runs)
    by_name = {row["name"]: row for row in found}
    for row in rows:
        measured = by_name[row["name"]]
        keys = ("speedup", "speedup_ci95", "speedup_without_prefill", "block_efficiency", "identical_to_target")
        row |= {key: measured[key] for key in keys}
    return rows


def _trained(shape: Shape, trials: Trials, context: StageContext, folder: RunDir) -> Model:
    """A draft after a full training, kept in a folder."""
    stage, key = f"full-{shape.slug}", trials.key(shape)
    if folder.finished(stage, key) is None:
        model, seconds = trials.train(shape, trials.full_steps, console=context.console)
        record = StageRecord(key, parameters=sum(p.numel() for p in model.parameters()), seconds=seconds)
        folder.put(stage, record, StageResult(record, model, context.corpus.tokenizer).save)
    made = open_draft(folder.path(stage), trials.target, context.corpus.tokenizer)
    assert isinstance(made, FeatureHead | PreTrainedModel)
    return made


def rank_correlation(a: Sequence[float], b: Sequence[float]) -> float | None:
    """Spearman's; None of fewer than three pairs, or where one side is constant."""
    if len(a) < 3 or len(set(a)) < 2 or len(set(b)) < 2:
        return None
    ranks = [np.argsort(np.argsort(np.asarray(values))).astype(float) for values in (a, b)]
    return float(np.corrcoef(ranks[0], ranks[1])[0, 1])
