"""EARS (Sun, Mao, Xu & Chen): the tables of section 4.2, and β's trade-off of section 4.3."""

from __future__ import annotations

from collections.abc import Mapping

from decode.papers import Paper
from decode.papers.results import (
    Ordering,
    Result,
    Results,
    Table,
    difference,
    faster,
    number,
    ratio_text,
    score,
    speed_ratio,
)

BASELINE = "vanilla"
MAIN = "ears draft_length=5 beta=0.1"
THROUGHPUT = {BASELINE: "49.50", MAIN: "58.47 (+18.12 %)"}
"""Output tokens/s on open questions, Qwen3-32B with its Eagle3 head, γ = 5, T = 0.9."""
ACCURACY = {BASELINE: "96.44 %", MAIN: "95.60 %"}
"""GSM8K, the same setting."""
LOST = 0.0084
"""Accuracy that β = 0.1 costs in the paper."""
NOTE = (
    "paper: Qwen3-32B with Qwen3-32B-Eagle3, open questions for the throughput, GSM8K for the accuracy, β = 0.1 alone "
    "(section 4.2). ratio: over the exact rule, median of ratios paired by prompt with its 95 % interval. TV spent: "
    "mean of a(x) − min(1, p/q) at tested tokens, what the rule departs from the target"
)


def _methods(results: Results, block: tuple[str, float]) -> list[Result]:
    names = [r["name"] for r in results.rows if (r["suite"], r["temperature"]) == block and r["method"] == "ears"]
    return [found for name in [BASELINE, *names] if (found := results.find(name, block)) is not None]


def tables(runs: Mapping[str, Results]) -> list[Table]:
    """Throughput and accuracy of the exact rule and of every β."""
    made = []
    columns = [
        "", "tokens/s", "ratio", "tokens/round", "m/t", "TV spent", "accuracy", "± se",
        "paper: tokens/s", "paper: accuracy",
    ]  # fmt: skip
    for results in runs.values():
        for block in results.blocks:
            table = Table(f"EARS, {results.where(block)}", columns, note=f"{results.setting}. {NOTE}")
            exact = results.find(BASELINE, block)
            for found in _methods(results, block):
                row = found.row
                name = "Baseline (exact)" if found.row["method"] == BASELINE else f"EARS, β = {_beta(found):g}"
                key = BASELINE if found.row["method"] == BASELINE else found.name
                table.rows.append(
                    [
                        name,
                        number(row["tokens_per_second"], ".1f"),
                        ratio_text(speed_ratio(found, exact)),
                        number(row["block_efficiency"], ".3f"),
                        number(row["accepted_per_tested"], ".4f"),
                        number(row["tv_spent"], ".4f"),
                        number(row["accuracy"], ".3f"),
                        number(row["accuracy_se"], ".3f"),
                        THROUGHPUT.get(key, "–"),
                        ACCURACY.get(key, "–"),
                    ]
                )
            made.append(table)
    return made


def _beta(found: Result) -> float:
    return float(found.name.partition("beta=")[2] or 0.1)


def orderings(runs: Mapping[str, Results]) -> list[Ordering]:
    """Faster than the exact rule, and at what cost in accuracy; more tolerance, more speed."""
    made = []
    for results in runs.values():
        for block in results.blocks:
            where, exact = results.where(block), results.find(BASELINE, block)
            betas = sorted(_methods(results, block)[1:], key=_beta) if exact else []
            main = results.find(MAIN, block)
            made += faster(main, exact, "EARS (β = 0.1) is faster than the exact rule", where)
            lost = difference(main, exact, score)
            if lost is not None:
                claim = "EARS (β = 0.1) costs less accuracy than the paper's 0.84 points"
                made.append(Ordering(claim, lost, -LOST, "points", where=where))
            if len(betas) > 1:
                few, much = betas[0], betas[-1]
                claim = f"EARS is faster with β = {_beta(much):g} than with {_beta(few):g}"
                made += faster(much, few, claim, where)
    return made


PAPER = Paper("EARS: Efficient Adaptive Rejection Sampling", tables, orderings)
