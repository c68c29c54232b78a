"""AdaSPEED (Liu, Pepe, Shephard & Wu): table I, and the orderings of section III."""

from __future__ import annotations

from collections.abc import Mapping

from decode.papers import Paper
from decode.papers.results import Ordering, Results, Table, faster, number, ratio_text, speed_ratio

METHODS = {
    "layerskip": "LayerSkip",
    "draft-verify": "Draft & Verify",
    "adaspeed": "AdaSPEED (no probe)",
    "adaspeed-probe": "AdaSPEED (probe)",
    "confidence-probe": "probe on state and confidence (ours)",
}
TABLE_I = {
    "layerskip": ("68 (1.00)", "43 (1.00)", "34 (1.00)", "29 (1.00)"),
    "draft-verify": ("75 (1.10)", "58 (1.35)", "38 (1.12)", "33 (1.14)"),
    "adaspeed": ("79 (1.16)", "61 (1.42)", "40 (1.18)", "35 (1.21)"),
    "adaspeed-probe": ("75 (1.10)", "65 (1.51)", "38 (1.12)", "36 (1.24)"),
}
"""Tokens/s on CNN/DailyMail (× over LayerSkip): greedy 1B, top-p 1B, greedy 7B, top-p 7B."""
PAPER_COLUMNS = ("paper: greedy 1B", "paper: top-p 1B", "paper: greedy 7B", "paper: top-p 7B")
NOTE = (
    "paper: LayerSkip-Llama on CNN/DailyMail (table I). tps: tokens/s; × LayerSkip: median of ratios paired by prompt "
    "with its 95 % interval; E: exit layer and window as advised by the probes or set in the configuration"
)


def tables(runs: Mapping[str, Results]) -> list[Table]:
    """Methods by mode, as table I."""
    made = []
    for results in runs.values():
        modes = ["greedy" if t == 0 else f"top-p, T = {t:g}" for _, t in results.blocks]
        columns = ["Methods", *(f"{mode}: {what}" for mode in modes for what in ("tps", "× LayerSkip", "tokens/round"))]
        where = "; ".join(map(results.where, results.blocks))
        table = Table(f"AdaSPEED, {where}", [*columns, *PAPER_COLUMNS], note=f"{results.setting}. {NOTE}")
        for method, title in METHODS.items():
            cells: list[str] = []
            for block in results.blocks:
                found = results.find(method, block)
                row = {} if found is None else found.row
                ratio = speed_ratio(found, results.find("layerskip", block))
                cells += [number(row.get("tokens_per_second"), ".1f"), ratio_text(ratio)]
                cells.append(number(row.get("block_efficiency"), ".2f"))
            if any(cell != "–" for cell in cells):
                table.rows.append([title, *cells, *TABLE_I.get(method, ("–",) * 4)])
        made.append(table)
    return made


def orderings(runs: Mapping[str, Results]) -> list[Ordering]:
    """Faster than LayerSkip and Draft & Verify; without a probe when greedy, with one when sampling."""
    made = []
    for results in runs.values():
        for block in results.blocks:
            where = results.where(block)
            rows = {method: results.find(method, block) for method in METHODS}
            for ours in ("adaspeed", "adaspeed-probe"):
                for other in ("layerskip", "draft-verify"):
                    claim = f"{METHODS[ours]} is faster than {METHODS[other]}"
                    made += faster(rows[ours], rows[other], claim, where)
            first, second = ("adaspeed", "adaspeed-probe") if block[1] == 0 else ("adaspeed-probe", "adaspeed")
            claim = f"{METHODS[first]} is faster than {METHODS[second]}"
            made += faster(rows[first], rows[second], claim, where)
    return made


PAPER = Paper("AdaSPEED: Adaptive Self-Speculative Early-Exit Decoding", tables, orderings)
