"""AdaSPEED (Liu, Pepe, Shephard & Wu): table I, and the orderings of section III."""

from collections.abc import Mapping
from functools import partial

from decode.papers import Paper
from decode.papers.claims import Block, Claim, PaperTable, Results, judge, number, published, ratio_text, speed_ratio

METHODS = {
    "layerskip": "LayerSkip",
    "draft-verify": "Draft & Verify",
    "adaspeed": "AdaSPEED (no probe)",
    "adaspeed-probe": "AdaSPEED (probe)",
    "confidence-probe": "probe on state and confidence (ours)",
}
MODES = ("greedy 1B", "top-p 1B", "greedy 7B", "top-p 7B")
PUBLISHED = {row["method"]: row for row in published("adaspeed")}
"""Tokens/s on CNN/DailyMail (× over LayerSkip), in `MODES`."""
NOTE = (
    "paper: LayerSkip-Llama on CNN/DailyMail (table I). tps: tokens/s; × LayerSkip: median of ratios paired by prompt "
    "with its 95 % interval; E: exit layer and window as advised by the probes or set in the configuration"
)


def tables(runs: Mapping[str, Results]) -> list[PaperTable]:
    """Methods by mode, as table I."""
    made = []
    for results in runs.values():
        modes = ["greedy" if t == 0 else f"top-p, T = {t:g}" for _, t in results.blocks]
        columns = ["Methods", *(f"{mode}: {what}" for mode in modes for what in ("tps", "× LayerSkip", "tokens/round"))]
        where = "; ".join(map(results.where, results.blocks))
        columns += [f"paper: {mode}" for mode in MODES]
        table = PaperTable(f"AdaSPEED, {where}", columns, note=f"{results.setting}. {NOTE}")
        for method, title in METHODS.items():
            cells: list[str] = []
            for block in results.blocks:
                found = results.find(method, block)
                row = {} if found is None else found.row
                ratio = speed_ratio(found, results.find("layerskip", block))
                cells += [number(row.get("tokens_per_second"), ".1f"), ratio_text(ratio)]
                cells.append(number(row.get("block_efficiency"), ".2f"))
            if any(cell != "–" for cell in cells):
                table.rows.append([title, *cells, *(PUBLISHED.get(method, {}).get(mode, "–") for mode in MODES)])
        made.append(table)
    return made


def claims(results: Results, block: Block) -> list[Claim]:
    """Faster than LayerSkip and Draft & Verify; without a probe when greedy, with one when sampling."""
    pairs = [(a, b) for a in ("adaspeed", "adaspeed-probe") for b in ("layerskip", "draft-verify")]
    pairs.append(("adaspeed", "adaspeed-probe") if block[1] == 0 else ("adaspeed-probe", "adaspeed"))
    return [Claim(f"{METHODS[a]} is faster than {METHODS[b]}", a, b) for a, b in pairs]


PAPER = Paper("AdaSPEED: Adaptive Self-Speculative Early-Exit Decoding", tables, partial(judge, claims=claims))
