"""Adaptix (Liu, Lei, Zhang & Xu, AAAI 2025): tables 1 and 2, the ablations, and the orderings of its main results."""

from __future__ import annotations

from collections.abc import Mapping

from decode.papers import Paper
from decode.papers.results import (
    Estimate,
    Ordering,
    Result,
    Results,
    Table,
    accepted_length,
    difference,
    faster,
    number,
    ratio_text,
    reach,
    speed_ratio,
)

TABLE_1 = {
    ("mt_bench", "vicuna-7b"): "16.31 18.93 24.77 12.95 1.97 1.89 2.42",
    ("mt_bench", "vicuna-13b"): "25.43 32.73 44.07 22.94 1.98 1.85 2.39",
    ("mt_bench", "vicuna-33b"): "28.63 40.53 52.97 24.96 1.95 1.83 2.29",
    ("mt_bench", "llama2-7b"): "16.08 18.84 25.58 13.85 1.96 1.96 2.30",
    ("mt_bench", "llama2-13b"): "27.13 31.24 44.76 25.13 1.95 1.96 2.32",
    ("alpaca", "vicuna-7b"): "14.24 18.73 24.49 12.81 2.22 1.89 2.33",
    ("alpaca", "vicuna-13b"): "22.94 32.60 43.60 24.06 2.21 1.86 2.26",
    ("alpaca", "vicuna-33b"): "26.03 40.58 52.52 24.62 2.11 1.82 2.21",
    ("alpaca", "llama2-7b"): "14.13 19.28 25.38 12.90 2.21 1.97 2.37",
    ("alpaca", "llama2-13b"): "23.66 31.18 44.04 23.57 2.15 1.96 2.32",
    ("humaneval", "vicuna-7b"): "14.90 18.99 25.49 11.24 2.21 2.10 2.67",
    ("humaneval", "vicuna-13b"): "20.17 27.43 45.13 19.96 2.50 2.23 2.81",
    ("humaneval", "vicuna-33b"): "24.91 31.34 52.32 21.19 2.29 2.02 2.62",
    ("humaneval", "llama2-7b"): "14.37 15.28 25.91 11.68 2.19 2.27 2.63",
    ("humaneval", "llama2-13b"): "25.46 26.72 45.25 21.82 2.01 2.17 2.60",
}
"""Latency in ms a token of REST, lookahead, autoregressive and Adaptix; accept length of REST, lookahead, Adaptix."""
ABLATION = {
    "adaptix": "2.42 at 12.95 ms, 574 MB (tables 1 and 2); 2.30 in the text on n-grams",
    "adaptix adaptive=false": "below the adaptive one at every length (figure 4a, no numbers)",
    "adaptix texts=121000": "2.30 at 13.09 ms, 253 MB (table 2)",
    "adaptix texts=2500": "2.30 at 13.09 ms with a sixth of the corpus (table 2)",
    "adaptix order=2": "1.80 (bi-grams)",
    "adaptix order=4": "1.82 (4-grams)",
    "adaptix searches=50": "shorter with fewer searches (figure 5, no numbers)",
    "adaptix searches=300": "longer with more searches (figure 5, no numbers)",
    "adaptix-best-first": "ours; the paper's greedy search reaches 1.493",
}
"""What the paper says of each line, Vicuna-7B on MT-Bench."""
ORDER = ("rest", "lookahead", "autoregressive", "adaptix")
MEMORY = "REST 12 GB, Adaptix 574 MB (main results)"


def _milliseconds(found: Result | None) -> str:
    return "–" if found is None else number(1000 / found.row["tokens_per_second"], ".2f")


def _length(found: Result | None) -> str:
    return "–" if found is None else number(found.row["block_efficiency"], ".2f")


def _ours(results: Results, block: tuple[str, float]) -> list[str]:
    found = {name: results.find(name, block) for name in ORDER}
    return [
        *(_milliseconds(found[name]) for name in ORDER),
        *(_length(found[name]) for name in ("rest", "lookahead", "adaptix")),
    ]


def tables(runs: Mapping[str, Results]) -> list[Table]:
    """Table 1 with our lines between the paper's, then the ablations with the memory of table 2."""
    main = Table(
        "Adaptix, table 1: latency (ms a token) and average accept length (tokens a target forward)",
        ["", *(f"ms: {name}" for name in ORDER), *(f"length: {name}" for name in ("rest", "lookahead", "adaptix"))],
        note=f"paper: A6000, 33B on an H100; its REST takes several threads. Memory: {MEMORY}",
    )
    ablations = []
    ours: dict[tuple[str, str], list[str]] = {}
    for config, results in runs.items():
        if any(row["name"].startswith("adaptix ") for row in results.rows):
            ablations += [_ablation(results, block) for block in results.blocks]
        if any(row["name"] == "rest" for row in results.rows):
            memory = ", ".join(f"{name} {size / 1e6:.2f} MB" for name, size in sorted(results.stores.items()))
            main.note += f". {config}: {results.setting}; {memory}"
            ours |= {(suite, config.removesuffix("-code")): _ours(results, (suite, t)) for suite, t in results.blocks}
    for key, cells in ours.items():
        if key not in TABLE_1:
            main.rows.append([f"ours: {key[0]}, {key[1]}", *cells])
    for key, line in TABLE_1.items():
        main.rows.append([f"paper: {key[0]}, {key[1]}", *line.split()])
        if key in ours:
            main.rows.append([f"ours: {key[0]}, {key[1]}", *ours[key]])
    return [main, *ablations]


def _ablation(results: Results, block: tuple[str, float]) -> Table:
    columns = ["", "accept length", "ms a token", "speedup", "table, MB", "paper: Vicuna-7B, MT-Bench"]
    table = Table(f"Adaptix, ablations, {results.where(block)}", columns, note=results.setting)
    plain = results.find("autoregressive", block)
    names = [r["name"] for r in results.rows if r["suite"] == block[0] and str(r["method"]).startswith("adaptix")]
    for name in names:
        found = results.find(name, block)
        size = number(results.stores.get(store_of(name), 0) / 1e6 or None, ".2f")
        told = ABLATION.get(name, "–")
        table.rows.append(
            [name, _length(found), _milliseconds(found), ratio_text(speed_ratio(found, plain)), size, told]
        )
    return table


def store_of(name: str) -> str:
    """The file that a line's n-grams come from, as `Results.stores` calls it."""
    options = dict(item.split("=") for item in name.split(" ")[1:])
    folder = f"texts-{options['texts']}/" if "texts" in options else ""
    return f"{folder}ngrams-{options.get('order', '3')}"


def orderings(runs: Mapping[str, Results]) -> list[Ordering]:
    """Longer than REST and lookahead, with less memory; adaptive, larger corpora and tri-grams better."""
    made = []
    for results in runs.values():
        for block in results.blocks:
            where = results.where(block)
            adaptix = results.find("adaptix", block)
            for other, title in (
                ("rest", "REST"),
                ("lookahead", "lookahead"),
                ("adaptix adaptive=false", "without learning from the text"),
                ("adaptix texts=2500", "from a sixth of the corpus"),
                ("adaptix texts=121000", "from a sixth of the corpus"),
                ("adaptix order=2", "with bi-grams"),
                ("adaptix order=4", "with 4-grams"),
                ("adaptix searches=50", "with 50 searches"),
            ):
                found = results.find(other, block)
                if adaptix is None or found is None or found.name != other:
                    continue
                longer = difference(adaptix, found, accepted_length)
                if longer is not None:
                    claim = f"Adaptix accepts longer drafts than {title}"
                    made.append(
                        Ordering(
                            claim, longer, reason="; ".join(filter(None, map(reach, (adaptix, found)))), where=where
                        )
                    )
            plain = results.find("autoregressive", block)
            made += faster(adaptix, plain, "Adaptix is faster than autoregressive decoding", where)
            made += faster(adaptix, results.find("rest", block), "Adaptix is faster than REST", where)
        made += _memory(results)
    return made


def _memory(results: Results) -> list[Ordering]:
    store, table = results.stores.get("datastore"), results.stores.get("ngrams-3")
    if not store or not table:
        return []
    ratio = store / table
    claim = f"Adaptix takes less memory than REST ({table / 1e6:.2f} MB against {store / 1e6:.2f} MB, same texts)"
    reason = (
        "the datastore grows with the corpus (tokens and suffix array), the table with its distinct tri-grams, which "
        "a small vocabulary bounds"
    )
    return [Ordering(claim, Estimate(ratio, ratio, ratio), 1.0, "ratio", reason)]


PAPER = Paper("Adaptix: Adaptive Draft-Verification", tables, orderings)
