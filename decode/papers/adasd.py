"""AdaSD (Lu, Hong & Liu, arXiv 2512.11280): tables 3 to 5, and the orderings of sections 5.2 and 5.3."""

from collections.abc import Mapping
from functools import partial
from typing import Any

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

PUBLISHED = published("adasd")  # tables 3 (GSM8K), 4 (HumanEval) and 5 (MMLU); tables 1 and 2 repeat parts of them
COLUMNS = ("tks/sec", "JSDist", "#cand", "#match", "AccRate", "acc", "speedup")
ROWS = {
    "Target": "autoregressive",
    "Vanilla": "vanilla",
    "AssistedGen": "hf-dynamic",
    "Gen-Only": "adasd-gen-only",
    "Verify-Only": "adasd-verify-only",
    "AdaSD": "adasd",
    "Variant-A": "adasd-a",
    "Variant-B": "adasd-b",
    "Variant-C": "adasd-c",
}
"""The paper's rows, and the methods of `decode.methods.METHODS` that they are here."""
PAIRS = {
    "llama-70b-8b": "Llama 3.1 70B – Llama 3.1 8B",
    "llama-70b-1b": "Llama 3.1 70B – Llama 3.2 1B",
    "qwen-72b-7b": "Qwen 2.5 72B – Qwen 2.5 7B",
}
NEAREST = ("llama-70b-8b", "gsm8k")
"""The paper's setting that stands beside ours where ours is another one: word problems."""
CLAIMS = (
    Claim("AdaSD is faster than vanilla speculative decoding", "adasd", "vanilla"),
    # accuracy that the paper says is lost at most (abstract)
    Claim("AdaSD keeps vanilla's accuracy to within 2 points", "adasd", "vanilla", "score", -0.02),
    Claim("AdaSD is faster than Gen-Only", "adasd", "adasd-gen-only"),
    Claim("AdaSD is faster than Verify-Only", "adasd", "adasd-verify-only"),
)
NOTE = (
    "speedup: over Vanilla, median of ratios paired by prompt with its 95 % interval (Draft: ratio of medians, not "
    "paired). JSDist: the verification threshold at the end. #cand, #match: drafted and kept tokens a round; AccRate "
    "their ratio"
)


def paper_rows(pair: str, suite: str) -> dict[str, list[str]]:
    """The paper's numbers of one setting, by row, in the order of `COLUMNS`."""
    return {
        row["method"]: [row[c] for c in COLUMNS] for row in PUBLISHED if (row["pair"], row["suite"]) == (pair, suite)
    }


def tables(runs: Mapping[str, Results]) -> list[PaperTable]:
    """One table a setting, as in appendix B, with the paper's own numbers in the right half."""
    return [_table(config, results, block) for config, results in runs.items() for block in results.blocks]


def _table(config: str, results: Results, block: Block) -> PaperTable:
    setting = (config.removesuffix("-mmlu"), block[0].split(":")[0])
    setting = setting if paper_rows(*setting) else NEAREST
    where = f"paper: {PAIRS[setting[0]]}, {setting[1]} (tables 3 to 5)"
    columns = ["", *COLUMNS, *(f"paper: {c}" for c in COLUMNS)]
    table = PaperTable(f"AdaSD, {results.where(block)}", columns, note=f"{results.setting}. {where}. {NOTE}")
    vanilla = results.find("vanilla", block)
    rows: dict[str, Result | None] = {}
    if results.alone is not None and results.alone.blocks:
        rows["Draft"] = results.alone.find("autoregressive", block)
    rows |= {row: results.find(method, block) for row, method in ROWS.items()}
    theirs = paper_rows(*setting)
    table.rows = [[name, *_ours(found, vanilla, name), *theirs[name]] for name, found in rows.items()]
    return table


def _ours(found: Result | None, vanilla: Result | None, name: str) -> list[str]:
    if found is None:
        return ["–"] * len(COLUMNS)
    row: Any = found.row
    drafts = bool(row.get("drafted_per_round"))
    if name == "Draft":
        speed = row["tokens_per_second"] / vanilla.row["tokens_per_second"] if vanilla else None
        speedup = number(speed, ".3f")
    else:
        speedup = ratio_text(speed_ratio(found, vanilla))
    return [
        number(row["tokens_per_second"], ".1f"),
        number(found.extra.get("verification_threshold"), ".3f"),
        number(row["drafted_per_round"] if drafts else None, ".3f"),
        number(row["block_efficiency"] - 1 if drafts else None, ".3f"),
        number(row["accepted_per_drafted"] if drafts else None, ".3f"),
        number(row["accuracy"], ".3f"),
        speedup,
    ]


PAPER = Paper("AdaSD: Adaptive Speculative Decoding", tables, partial(judge, claims=CLAIMS), draft_alone=True)
