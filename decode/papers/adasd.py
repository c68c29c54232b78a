"""AdaSD (Lu, Hong & Liu, arXiv 2512.11280): tables 1 to 5, and the orderings of sections 5.2 and 5.3."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

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
COLUMNS = ("tks/sec", "JSDist", "#cand", "#match", "AccRate", "acc", "speedup")
PAIRS = {
    "llama-70b-8b": "Llama 3.1 70B – Llama 3.1 8B",
    "llama-70b-1b": "Llama 3.1 70B – Llama 3.2 1B",
    "qwen-72b-7b": "Qwen 2.5 72B – Qwen 2.5 7B",
}
NEAREST = ("llama-70b-8b", "gsm8k")
"""The paper's setting that stands beside ours where ours is another one: word problems."""
WITHIN = 0.02
"""Accuracy that the paper says is lost at most (abstract)."""


def paper_rows(pair: str, suite: str) -> dict[str, list[str]]:
    """The paper's numbers of one setting, by row, in the order of `COLUMNS`."""
    lines = (line.split() for line in APPENDIX_B[pair, suite].strip().splitlines())
    return {name: ["–" if value == "-" else value for value in values] for name, *values in lines}


def _table(config: str, results: Results, block: tuple[str, float]) -> Table:
    pair, suite = config.removesuffix("-mmlu"), block[0].split(":")[0]
    setting = (pair, suite) if (pair, suite) in APPENDIX_B else NEAREST
    theirs = paper_rows(*setting)
    vanilla = results.find("vanilla", block)
    columns = ["", *COLUMNS, *(f"paper: {c}" for c in COLUMNS)]
    where = f"paper: {PAIRS[setting[0]]}, {setting[1]} (tables 3 to 5)"
    table = Table(f"AdaSD, {results.where(block)}", columns, note=f"{results.setting}. {where}. {NOTE}")
    rows: dict[str, Result | None] = {}
    if results.alone is not None and results.alone.blocks:
        rows["Draft"] = results.alone.find("autoregressive", results.alone.blocks[0])
    rows |= {row: results.find(method, block) for row, method in ROWS.items()}
    for name, found in rows.items():
        table.rows.append([name, *_ours(found, vanilla, name), *theirs[name]])
    return table


NOTE = (
    "speedup: over Vanilla, median of ratios paired by prompt with its 95 % interval (Draft: ratio of medians, not "
    "paired). JSDist: the verification threshold at the end. #cand, #match: drafted and kept tokens a round; AccRate "
    "their ratio"
)


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


def tables(runs: Mapping[str, Results]) -> list[Table]:
    """One table a setting, as in appendix B, with the paper's own numbers in the right half."""
    return [_table(config, results, block) for config, results in runs.items() for block in results.blocks]


def orderings(runs: Mapping[str, Results]) -> list[Ordering]:
    """AdaSD faster than vanilla with accuracy within two points; both thresholds better than one."""
    found = []
    for results in runs.values():
        for block in results.blocks:
            where = results.where(block)
            adasd, vanilla = results.find("adasd", block), results.find("vanilla", block)
            found += faster(adasd, vanilla, "AdaSD is faster than vanilla speculative decoding", where)
            lost = difference(adasd, vanilla, score)
            if lost is not None:
                claim = "AdaSD keeps vanilla's accuracy to within 2 points"
                found.append(Ordering(claim, lost, -WITHIN, "points", where=where))
            found += faster(adasd, results.find("adasd-gen-only", block), "AdaSD is faster than Gen-Only", where)
            found += faster(adasd, results.find("adasd-verify-only", block), "AdaSD is faster than Verify-Only", where)
    return found


APPENDIX_B: dict[tuple[str, str], str] = {
    ("llama-70b-8b", "gsm8k"): """
        Draft 36.446 - - - - 0.828 2.624
        Target 4.842 - - - - 0.939 0.349
        Vanilla 13.890 - 5.000 4.057 0.811 0.945 1.000
        AssistedGen 16.062 - 7.898 6.311 0.799 0.944 1.156
        Gen-Only 16.243 - 11.157 7.850 0.704 0.943 1.169
        Verify-Only 14.431 0.310 5.000 4.270 0.854 0.933 1.039
        AdaSD 17.505 0.309 11.472 8.737 0.762 0.937 1.260
        Variant-A 16.213 0.048 11.059 7.824 0.707 0.938 1.167
        Variant-B 16.399 0.069 11.121 7.935 0.714 0.942 1.181
        Variant-C 16.733 0.179 11.387 8.261 0.725 0.931 1.205""",
    ("llama-70b-1b", "gsm8k"): """
        Draft 99.919 - - - - 0.375 6.080
        Target 4.842 - - - - 0.939 0.295
        Vanilla 16.434 - 5.000 3.596 0.719 0.939 1.000
        AssistedGen 19.892 - 6.918 5.047 0.730 0.936 1.210
        Gen-Only 21.126 - 10.438 6.189 0.593 0.939 1.286
        Verify-Only 17.192 0.375 4.967 3.806 0.766 0.941 1.046
        AdaSD 23.202 0.369 10.823 7.007 0.647 0.931 1.412
        Variant-A 20.899 0.059 10.394 6.218 0.598 0.935 1.272
        Variant-B 21.214 0.099 10.404 6.243 0.600 0.943 1.291
        Variant-C 21.811 0.254 10.581 6.562 0.620 0.943 1.327""",
    ("qwen-72b-7b", "gsm8k"): """
        Draft 38.796 - - - - 0.867 2.667
        Target 4.728 - - - - 0.913 0.325
        Vanilla 14.546 - 5.000 4.228 0.846 0.912 1.000
        AssistedGen 18.721 - 10.038 8.335 0.830 0.917 1.287
        Gen-Only 18.054 - 14.254 9.967 0.699 0.920 1.241
        Verify-Only 14.663 0.321 4.971 4.287 0.862 0.918 1.008
        AdaSD 18.588 0.324 14.491 10.434 0.720 0.914 1.278
        Variant-A 18.267 0.025 14.431 10.225 0.709 0.914 1.256
        Variant-B 18.265 0.044 14.361 10.176 0.709 0.914 1.256
        Variant-C 18.364 0.174 14.347 10.236 0.713 0.914 1.262""",
    ("llama-70b-8b", "humaneval"): """
        Draft 36.257 - - - - 0.634 2.532
        Target 4.838 - - - - 0.750 0.338
        Vanilla 14.319 - 5.000 4.264 0.853 0.768 1.000
        AssistedGen 18.137 - 9.095 7.927 0.872 0.756 1.267
        Gen-Only 18.017 - 13.274 9.972 0.751 0.762 1.258
        Verify-Only 14.499 0.309 4.970 4.361 0.877 0.793 1.013
        AdaSD 18.839 0.313 13.491 10.634 0.788 0.744 1.316
        Variant-A 17.896 0.030 13.168 9.889 0.751 0.762 1.250
        Variant-B 18.000 0.048 12.874 9.789 0.760 0.701 1.257
        Variant-C 18.197 0.167 13.069 10.022 0.767 0.774 1.271""",
    ("llama-70b-1b", "humaneval"): """
        Draft 100.683 - - - - 0.348 5.764
        Target 4.838 - - - - 0.750 0.277
        Vanilla 17.467 - 5.000 3.915 0.783 0.756 1.000
        AssistedGen 23.265 - 7.759 6.362 0.820 0.774 1.332
        Gen-Only 24.842 - 11.962 7.930 0.663 0.768 1.422
        Verify-Only 17.793 0.359 5.000 4.041 0.808 0.726 1.019
        AdaSD 26.045 0.356 12.240 8.512 0.695 0.738 1.491
        Variant-A 24.943 0.039 11.950 8.055 0.674 0.750 1.428
        Variant-B 24.809 0.070 11.826 8.001 0.677 0.738 1.420
        Variant-C 24.795 0.229 11.936 7.993 0.670 0.780 1.420""",
    ("qwen-72b-7b", "humaneval"): """
        Draft 38.724 - - - - 0.720 2.840
        Target 4.717 - - - - 0.787 0.346
        Vanilla 13.634 - 5.000 3.942 0.788 0.799 1.000
        AssistedGen 17.482 - 9.745 7.720 0.792 0.799 1.282
        Gen-Only 16.733 - 13.199 8.832 0.669 0.787 1.227
        Verify-Only 13.821 0.354 5.000 4.026 0.805 0.780 1.014
        AdaSD 16.752 0.344 13.252 8.879 0.670 0.817 1.229
        Variant-A 16.711 0.025 13.199 8.832 0.669 0.787 1.226
        Variant-B 16.712 0.051 13.199 8.832 0.669 0.787 1.226
        Variant-C 16.416 0.206 13.282 8.705 0.655 0.793 1.204""",
    ("llama-70b-8b", "mmlu"): """
        Draft 33.274 - - - - 0.695 4.206
        Target 4.376 - - - - 0.836 0.553
        Vanilla 7.912 - 5.000 2.162 0.432 0.835 1.000
        AssistedGen 7.970 - 5.581 2.482 0.445 0.835 1.007
        Gen-Only 8.023 - 6.297 2.726 0.433 0.831 1.014
        Verify-Only 8.481 0.418 5.000 2.386 0.477 0.833 1.072
        AdaSD 8.623 0.419 6.147 3.032 0.493 0.822 1.090
        Variant-A 8.044 0.123 6.278 2.729 0.435 0.839 1.017
        Variant-B 8.170 0.230 6.169 2.770 0.449 0.832 1.033
        Variant-C 8.504 0.351 6.316 2.966 0.470 0.837 1.075""",
    ("llama-70b-1b", "mmlu"): """
        Draft 95.141 - - - - 0.453 10.878
        Target 4.376 - - - - 0.836 0.500
        Vanilla 8.746 - 5.000 1.714 0.343 0.838 1.000
        AssistedGen 8.920 - 4.759 1.845 0.388 0.833 1.020
        Gen-Only 9.085 - 5.205 1.956 0.376 0.835 1.039
        Verify-Only 9.385 0.465 5.000 1.938 0.388 0.816 1.073
        AdaSD 9.937 0.463 5.284 2.265 0.429 0.813 1.136
        Variant-A 9.039 0.150 5.209 1.970 0.378 0.824 1.034
        Variant-B 9.316 0.311 5.342 2.074 0.388 0.816 1.065
        Variant-C 9.817 0.432 5.275 2.246 0.426 0.807 1.122""",
    ("qwen-72b-7b", "mmlu"): """
        Draft 38.544 - - - - 0.725 3.667
        Target 4.690 - - - - 0.845 0.446
        Vanilla 10.511 - 5.000 2.811 0.562 0.837 1.000
        AssistedGen 11.436 - 6.109 3.618 0.592 0.837 1.088
        Gen-Only 10.735 - 8.962 4.210 0.470 0.841 1.021
        Verify-Only 10.952 0.408 4.917 2.983 0.607 0.849 1.042
        AdaSD 11.395 0.407 9.205 4.596 0.499 0.835 1.084
        Variant-A 10.687 0.079 8.956 4.195 0.468 0.837 1.017
        Variant-B 10.735 0.168 8.960 4.216 0.471 0.830 1.021
        Variant-C 11.146 0.341 9.084 4.441 0.489 0.843 1.060""",
}
"""Tables 3 (GSM8K), 4 (HumanEval) and 5 (MMLU); tables 1 and 2 repeat parts of them."""

PAPER = Paper("AdaSD: Adaptive Speculative Decoding", tables, orderings, draft_alone=True)
