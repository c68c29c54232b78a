"""EARS (Sun, Mao, Xu & Chen): the tables of section 4.2, and β's trade-off of section 4.3."""

from collections.abc import Mapping
from functools import partial

from decode.papers import Paper
from decode.papers.claims import (
    Block,
    Claim,
    PaperTable,
    Result,
    Results,
    judge,
    number,
    published,
    ratio_text,
    speed_ratio,
)

BASELINE = "vanilla"
MAIN = "ears draft_length=5 beta=0.1"
PUBLISHED = {row["method"]: row for row in published("ears")}
"""Output tokens/s on open questions and accuracy on GSM8K, Qwen3-32B with its Eagle3 head, γ = 5, T = 0.9."""
LOST = 0.0084  # accuracy that β = 0.1 costs in the paper
NOTE = (
    "paper: Qwen3-32B with Qwen3-32B-Eagle3, open questions for the throughput, GSM8K for the accuracy, β = 0.1 alone "
    "(section 4.2). ratio: over the exact rule, median of ratios paired by prompt with its 95 % interval. TV spent: "
    "mean of a(x) − min(1, p/q) at tested tokens, what the rule departs from the target"
)
NUMBERS = {
    "tokens/round": ("block_efficiency", ".3f"), "m/t": ("accepted_per_tested", ".4f"), "TV spent": ("tv_spent", ".4f"),
    "accuracy": ("accuracy", ".3f"), "± se": ("accuracy_se", ".3f"),
}  # fmt: skip
"""Columns behind the ratio, with their fields and formats."""


def _methods(results: Results, block: Block) -> list[Result]:
    names = [r["name"] for r in results.rows if (r["suite"], r["temperature"]) == block and r["method"] == "ears"]
    return [found for name in [BASELINE, *names] if (found := results.find(name, block)) is not None]


def _beta(found: Result) -> float:
    return float(found.name.partition("beta=")[2] or 0.1)


def tables(runs: Mapping[str, Results]) -> list[PaperTable]:
    """Throughput and accuracy of the exact rule and of every β."""
    made = []
    columns = ["", "tokens/s", "ratio", *NUMBERS, "paper: tokens/s", "paper: accuracy"]
    for results in runs.values():
        for block in results.blocks:
            table = PaperTable(f"EARS, {results.where(block)}", columns, note=f"{results.setting}. {NOTE}")
            exact = results.find(BASELINE, block)
            for found in _methods(results, block):
                row, plain = found.row, found.row["method"] == BASELINE
                theirs = PUBLISHED.get(BASELINE if plain else found.name, {})
                table.rows.append(
                    [
                        "Baseline (exact)" if plain else f"EARS, β = {_beta(found):g}",
                        number(row["tokens_per_second"], ".1f"),
                        ratio_text(speed_ratio(found, exact)),
                        *(number(row[key], spec) for key, spec in NUMBERS.values()),
                        *(theirs.get(key, "–") for key in ("tokens/s", "accuracy")),
                    ]
                )
            made.append(table)
    return made


def claims(results: Results, block: Block) -> list[Claim]:
    """Faster than the exact rule, and at what cost in accuracy; more tolerance, more speed."""
    made = [
        Claim("EARS (β = 0.1) is faster than the exact rule", MAIN, BASELINE),
        Claim("EARS (β = 0.1) costs less accuracy than the paper's 0.84 points", MAIN, BASELINE, "score", -LOST),
    ]
    betas = sorted(_methods(results, block)[1:], key=_beta)
    if len(betas) > 1:
        few, much = betas[0], betas[-1]
        made.append(Claim(f"EARS is faster with β = {_beta(much):g} than with {_beta(few):g}", much.name, few.name))
    return made


PAPER = Paper("EARS: Efficient Adaptive Rejection Sampling", tables, partial(judge, claims=claims))
