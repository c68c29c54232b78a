"""Adaptix (Liu, Lei, Zhang & Xu, AAAI 2025): tables 1 and 2, the ablations, and the orderings of its main results."""

from collections.abc import Mapping

from decode.papers import Paper
from decode.papers.claims import (
    Block,
    Claim,
    Estimate,
    Ordering,
    PaperTable,
    Result,
    Results,
    judge,
    number,
    published,
    ratio_text,
    speed_ratio,
)

PUBLISHED = {(row["suite"], row["model"]): row for row in published("adaptix")}
"""Table 1: latency in ms a token, and accept length, by suite and model."""
ABLATION = {row["method"]: row["paper"] for row in published("adaptix_ablation")}
"""What the paper says of each line, Vicuna-7B on MT-Bench."""
ORDER = ("rest", "lookahead", "autoregressive", "adaptix")
DRAFTING = ("rest", "lookahead", "adaptix")
HEADINGS = [*(f"ms: {name}" for name in ORDER), *(f"length: {name}" for name in DRAFTING)]
MEMORY = "REST 12 GB, Adaptix 574 MB (main results)"
LONGER_THAN = {
    "rest": "REST",
    "lookahead": "lookahead",
    "adaptix adaptive=false": "without learning from the text",
    "adaptix texts=2500": "from a sixth of the corpus",
    "adaptix texts=121000": "from a sixth of the corpus",
    "adaptix order=2": "with bi-grams",
    "adaptix order=4": "with 4-grams",
    "adaptix searches=50": "with 50 searches",
}
"""Whose drafts are accepted to a lesser length, by the paper."""
CLAIMS = (
    *(
        Claim(f"Adaptix accepts longer drafts than {title}", "adaptix", name, "length")
        for name, title in LONGER_THAN.items()
    ),
    Claim("Adaptix is faster than autoregressive decoding", "adaptix", "autoregressive"),
    Claim("Adaptix is faster than REST", "adaptix", "rest"),
)


def _milliseconds(found: Result | None) -> str:
    return "–" if found is None else number(1000 / found.row["tokens_per_second"], ".2f")


def _length(found: Result | None) -> str:
    return "–" if found is None else number(found.row["block_efficiency"], ".2f")


def _ours(results: Results, block: Block) -> list[str]:
    found = {name: results.find(name, block) for name in ORDER}
    return [*(_milliseconds(found[name]) for name in ORDER), *(_length(found[name]) for name in DRAFTING)]


def tables(runs: Mapping[str, Results]) -> list[PaperTable]:
    """Table 1 with our lines between the paper's, then the ablations with the memory of table 2."""
    main = PaperTable(
        "Adaptix, table 1: latency (ms a token) and average accept length (tokens a target forward)",
        ["", *HEADINGS],
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
        if key not in PUBLISHED:
            main.rows.append([f"ours: {key[0]}, {key[1]}", *cells])
    for key, row in PUBLISHED.items():
        main.rows.append([f"paper: {key[0]}, {key[1]}", *(row[heading] for heading in HEADINGS)])
        if key in ours:
            main.rows.append([f"ours: {key[0]}, {key[1]}", *ours[key]])
    return [main, *ablations]


def _ablation(results: Results, block: Block) -> PaperTable:
    columns = ["", "accept length", "ms a token", "speedup", "table, MB", "paper: Vicuna-7B, MT-Bench"]
    table = PaperTable(f"Adaptix, ablations, {results.where(block)}", columns, note=results.setting)
    plain = results.find("autoregressive", block)
    names = [r["name"] for r in results.rows if r["suite"] == block[0] and str(r["method"]).startswith("adaptix")]
    for name in names:
        found = results.find(name, block)
        size = number(results.stores.get(store_of(name), 0) / 1e6 or None, ".2f")
        speedup = ratio_text(speed_ratio(found, plain))
        table.rows.append([name, _length(found), _milliseconds(found), speedup, size, ABLATION.get(name, "–")])
    return table


def store_of(name: str) -> str:
    """The file that a line's n-grams come from, as `Results.stores` calls it."""
    options = dict(item.split("=") for item in name.split(" ")[1:])
    folder = f"texts-{options['texts']}/" if "texts" in options else ""
    return f"{folder}ngrams-{options.get('order', '3')}"


def orderings(runs: Mapping[str, Results]) -> list[Ordering]:
    """Longer than REST and lookahead, with less memory; adaptive, larger corpora and tri-grams better."""
    return [o for name, results in runs.items() for o in (*judge({name: results}, CLAIMS), *_memory(results))]


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
