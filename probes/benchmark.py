"""Real runs of the settings that were predicted to be the best, beside their baselines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from decode.core.options import MethodOptions
from decode.core.sampling import Warp
from decode.measure.bench_entries import BenchEntry
from decode.measure.bench_session import BenchOptions, Session
from decode.measure.benchmark import Benchmark
from decode.measure.statistics import Record, median_interval, paired_ratios, plain
from decode.prompts.suites import Suite
from probes.predict import HINDSIGHT, Choice

TITLES = {
    "autoregressive": "no drafting",
    "generate": "transformers generate",
    "layerskip": "LayerSkip",
    "layerskip-untuned": "LayerSkip, 6 tokens",
    "layerskip-separate": "LayerSkip, separate cache",
    "draft-verify": "Draft & Verify",
    "draft-verify-subset": "Draft & Verify, subset",
    "adaspeed": "AdaSPEED",
    "adaspeed-probe": "AdaSPEED, probe",
    "confidence-probe": "AdaSPEED, confidence probe",
    HINDSIGHT: "any stop rule, with hindsight",
}
"""How tables call the methods."""


@dataclass
class Candidate:
    """A setting to be run: a method, its options, what was predicted, and the key of its row in the table."""

    method: str
    options: dict[str, Any]
    predicted: float | None
    title: str

    @classmethod
    def of(cls, choice: Choice) -> Candidate:
        """From a predicted choice."""
        return cls(choice.method, choice.options(), choice.speedup, choice.method)

    @property
    def name(self) -> str:
        """Unique in a benchmark."""
        given = {"exit_layer": "E", "draft_length": "k", "threshold": "γ"}
        parts = [f"{short}{self.options[key]:g}" for key, short in given.items() if self.options.get(key) is not None]
        return " ".join([self.title, *parts])


def run_candidates(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    suite: Suite,
    candidates: Sequence[Candidate],
    warp: Warp,
    *,
    probes: str,
    max_new_tokens: int,
    repeats: int,
    seed: int,
    threads: int | None,
) -> list[dict[str, Any]]:
    """Run the candidates on a suite in one decoding mode.

    Returns:
        Rows like those of `decode bench`, with ``title``, ``exit_layer``, ``threshold``, ``target_acceptance``,
        ``predicted_speedup``, ``best`` (the fastest of its title), ``speedup_vs_layerskip`` and
        ``speedup_vs_untuned`` with their intervals (where the cache is separate, also ``speedup_vs_shared`` at the
        same setting).
    """
    options = BenchOptions(
        max_new_tokens=max_new_tokens, repeats=repeats, seed=seed, warp=warp, threads=threads, costs=False, samples=0
    )
    benchmark = Benchmark(Session(model, None, tokenizer, options))
    unique = {candidate.name: candidate for candidate in candidates}
    entries = [
        BenchEntry(
            c.method, options=MethodOptions(**c.options, probes=probes), temperature=warp.temperature, name=c.name
        )
        for c in unique.values()
    ]
    rows = benchmark.run([suite], entries)
    records = {name: record for (_, _, name), record in benchmark.records.items()}
    for row in rows:
        candidate = unique.get(row["name"])
        row["title"] = candidate.title if candidate else row["method"]
        row["top_p"] = warp.top_p
        row["predicted_speedup"] = candidate.predicted if candidate else row["predicted_speedup"]
        given = candidate.options if candidate else {}
        for key in ("exit_layer", "threshold", "target_acceptance"):
            row[key] = given.get(key)
    _mark_best(rows)
    tuned, untuned = (
        next((r["name"] for r in rows if r["title"] == title and r["best"]), None)
        for title in ("layerskip", "layerskip-untuned")
    )
    for row in rows:
        _compare(row, "speedup_vs_layerskip", tuned, records, seed)
        _compare(row, "speedup_vs_untuned", untuned, records, seed)
        if row["title"] == "layerskip-separate":
            twin = row["name"].replace("layerskip-separate", "layerskip")
            _compare(row, "speedup_vs_shared", twin, records, seed)
    return [plain(row) for row in rows]


def _compare(row: dict[str, Any], key: str, other: str | None, records: dict[str, Record], seed: int) -> None:
    """Adds the median of the paired ratios to another row's runs, with its interval."""
    if other in records and records[other].texts and records[row["name"]].texts:
        middle, low, high = median_interval(paired_ratios(records[row["name"]], records[other]), seed=seed)
        row[key], row[f"{key}_ci95"] = middle, [low, high]


def _mark_best(rows: list[dict[str, Any]]) -> None:
    """Marks the fastest row of each title."""
    for row in rows:
        rivals = [r for r in rows if r["title"] == row["title"]]
        row["best"] = row is max(rivals, key=lambda r: r["tokens_per_second"] or 0.0)
