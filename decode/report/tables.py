"""The results of ``bench``: a terminal table, report.json and a page."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.table import Table

from decode.core.files import write_text
from decode.core.trace import FORMULAS
from decode.measure import machine
from decode.measure.benchmark import Benchmark, Block
from decode.measure.statistics import differing, fastest_lossless
from decode.report import plots
from decode.report.figures import figures, spread
from decode.report.page import LOSSLESS, RELAXED, Badge, Column, Page, Tile

Row = Mapping[str, Any]

COLUMNS = [
    Column("name", "method"),
    Column("kind", "output"),
    Column("draft_length", "k", "draft length, or the window of an adaptive stop rule", "d"),
    Column("tokens_per_second", "tokens/s", "Σ tokens / Σ seconds, the prompt's reading included", ".0f", "max"),
    Column("speedup", "speedup", FORMULAS["speedup"], ".2f", "max"),
    Column("interval", "95 %", "bootstrap interval of the median over prompts"),
    Column("speedup_vs_generate", "vs generate", FORMULAS["speedup_vs_generate"], ".2f"),
    Column("speedup_vs_assistant", "vs assistant", "tokens/s over generate(assistant_model=…), same draft", ".2f"),
    Column("speedup_without_prefill", "decoding only", "speedup with the prompt's reading left out", ".2f"),
    Column("predicted_speedup", "predicted", FORMULAS["predicted_speedup"], ".2f"),
    Column("block_efficiency", "block eff.", FORMULAS["block_efficiency"], ".2f"),
    Column("alpha", "α", FORMULAS["alpha"], ".3f"),
    Column("alpha_se", "± α", "standard error of α over tested positions", ".3f"),
    Column("accepted_per_tested", "Σm/Σt", "accepted / tested tokens", ".3f"),
    Column("accepted_per_drafted", "Σm/Σk", "accepted / drafted tokens", ".3f"),
    Column("tv_spent", "TV spent", FORMULAS["tv_spent"], ".3f"),
    Column("js_distance", "JS dist.", FORMULAS["js_distance"], ".3f"),
    Column("accuracy", "accuracy", "mean score of the suite's own scorer", ".3f"),
    Column("identical_to_target", "identical", "greedy texts equal model.generate's, token by token"),
    Column("bookkeeping_share", "outside models", "share of the time not spent in forwards", ".1%"),
    Column("note", "note"),
]

FAIRNESS = (
    "Every prompt is given to all methods in turn, in an order that turns from repeat to repeat; ratios are taken "
    "between runs side by side, then the median over repeats and over prompts. The baseline of `speedup` is the same "
    "loop without a drafter, on the same forward and cache. Time is wall time of a whole text, reading the prompt "
    "included. "
)
LENGTHS = {
    False: "Texts end where the model ends them. Under greedy decoding all lossless methods write the same tokens; "
    "where lengths may differ (sampling, relaxed rules) a shorter text carries more of its prompt's cost.",
    True: "The end-of-text token is ignored and all texts have the full length, so that speeds are comparable "
    "whatever was written; accuracy is then not a measure of anything.",
}


SHORT = {
    "name": "method", "mark": "", "draft_length": "k", "tokens_per_second": "tokens/s", "speedup": "speedup",
    "interval": "95 %", "speedup_vs_generate": "/generate", "predicted_speedup": "predicted",
    "block_efficiency": "block", "alpha": "α", "tv_spent": "TV", "accuracy": "score", "identical_to_target": "same",
}  # fmt: skip
"""Columns of the terminal's table."""
MARKS = {"lossless": "=", "relaxed": "≈", "peer": "·"}
NARROW = {"interval", "predicted_speedup", "draft_length"}
"""What a terminal below 110 columns goes without."""


def table(block: Block, width: int = 130) -> Table:
    """One block for a terminal of this width; lossless and relaxed methods and peers are told apart."""
    title = f"{block.suite}, {'greedy' if block.temperature == 0 else f'temperature {block.temperature:g}'}"
    if not block.complete:
        title += " (stopped early)"
    rows = [shown(row) for row in block.rows]
    known = {c.key: c for c in COLUMNS} | {"mark": Column("mark", "")}
    wanted = [k for k in SHORT if any(r.get(k) is not None for r in rows) and (width >= 110 or k not in NARROW)]
    grid = Table(
        title=title,
        caption="= lossless   [yellow]≈ relaxed: not the target's distribution[/]   · transformers' own",
        title_justify="left",
        caption_justify="left",
        box=None,
        pad_edge=False,
        header_style="bold",
    )
    for key in wanted:
        grid.add_column(SHORT[key], justify="left" if key in ("name", "mark") else "right", no_wrap=True)
    for row in rows:
        style = {"relaxed": "yellow", "peer": "dim", "lossless": ""}[row["kind"].text]
        grid.add_row(*(_cell(row.get(key), known[key]) for key in wanted), style=style)
        if row.get("note"):
            grid.add_row(f"  {row['note']}", style="red")
    return grid


def _cell(value: Any, column: Column) -> str:
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return "–"
    if isinstance(value, Badge):
        return value.text
    if isinstance(value, bool):
        return "yes" if value else "NO"
    return format(value, str(column.format)) if isinstance(value, int | float) else str(value)


def shown(row: Row) -> dict[str, Any]:
    """A row with what tables show besides the numbers."""
    kind = Badge("peer") if row["peer"] else LOSSLESS if row["lossless"] else RELAXED
    interval = row.get("speedup_ci95")
    told = f"{interval[0]:.2f}–{interval[1]:.2f}" if interval and None not in interval else None
    return {**row, "kind": kind, "mark": MARKS[kind.text], "interval": told, "note": row.get("note") or None}


def ratios(rows: Sequence[Row]) -> list[str]:
    """The ratios that matter, a sentence for each block."""
    lines = []
    for where in dict.fromkeys((row["suite"], row["temperature"]) for row in rows):
        block = [row for row in rows if (row["suite"], row["temperature"]) == where and row.get("speedup")]
        plain = next((r for r in block if r["method"] == "autoregressive"), None)
        # sampled texts cannot be compared, so that greedy ones judge their methods
        best, wrong = fastest_lossless([r for r in rows if r["suite"] == where[0]], where[1]), differing(block)
        parts = []
        if plain is not None and plain.get("speedup_vs_generate"):
            parts.append(f"without a draft {plain['speedup_vs_generate']:.2f} × model.generate")
        if best is not None:
            parts.append(f"fastest lossless method {best['name']}: {_against(best)}")
        if wrong:
            parts.append(f"not model.generate's texts, though lossless in exact arithmetic: {', '.join(wrong)}")
        if parts:
            mode = "greedy" if where[1] == 0 else f"temperature {where[1]:g}"
            lines.append(f"{where[0]}, {mode}: " + "; ".join(parts))
    return lines


def _against(row: Row) -> str:
    told = [f"{row['speedup']:.2f} × the loop without a draft"]
    if row.get("speedup_vs_generate"):
        told.append(f"{row['speedup_vs_generate']:.2f} × model.generate")
    if row.get("speedup_vs_assistant"):
        told.append(f"{row['speedup_vs_assistant']:.2f} × generate(assistant_model=…)")
    if row.get("predicted_speedup") and row.get("speedup_without_prefill"):
        share = row["speedup_without_prefill"] / row["predicted_speedup"]
        told.append(f"{share:.2f} of the predicted speedup of decoding")
    if row.get("bookkeeping_share") is not None:
        told.append(f"{row['bookkeeping_share']:.0%} of the time outside the models")
    return ", ".join(told)


def write_report(
    bench: Benchmark, settings: Mapping[str, Any], folder: Path, notes: Mapping[str, str] | None = None
) -> tuple[Path, Path]:
    """Write report.json and the page.

    A report.json that ``distill`` wrote keeps all that it holds; ``methods``, ``bench`` and ``machine`` are set. The
    page is report.html, or bench.html where distill's report.html already stands.
    """
    session = bench.session
    facts = machine.describe(session.runner.device) | {"note": session.threads}
    path = folder / "report.json"
    content = _read(path)
    beside = bool(content.keys() - {"methods", "bench", "machine"})
    content |= {
        "methods": bench.rows,
        "machine": facts,
        "bench": {
            "created": datetime.now(UTC).isoformat(timespec="seconds"),
            "settings": dict(settings),
            "costs": {name or "": cost.to_dict() for name, cost in session.costs.items()},
            "blocks": [
                {"suite": b.suite, "temperature": b.temperature, "complete": b.complete, "costs": b.costs}
                for b in bench.blocks
            ],
            "analysis": bench.analysis,
            "notes": dict(notes or {}),
            "parameters": {
                name: sum(weight.numel() for weight in model.parameters())
                for name, model in {"": session.model, **session.draft_models}.items()
            },
        },
    }
    write_text(path, json.dumps(content, indent=1, ensure_ascii=False) + "\n")
    html = folder / ("bench.html" if beside else "report.html")
    page(content).write(html)
    return path, html


def _read(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def page(content: Mapping[str, Any]) -> Page:
    """The page of a benchmark, from the keys ``methods``, ``bench`` and ``machine`` of report.json."""
    rows, bench = content["methods"], content["bench"]
    settings, details = bench["settings"], bench["analysis"]
    lines = ratios(rows)
    made = Page("Decoding methods compared", lines[0] if lines else "", "draftsmith bench")
    made.tiles(_tiles(rows))
    for line in lines[1:]:
        made.paragraph(line)
    for where in dict.fromkeys((row["suite"], row["temperature"]) for row in rows):
        chosen = [row for row in rows if (row["suite"], row["temperature"]) == where]
        told = [d for d in details if (d["suite"], d["temperature"]) == where]
        _block(made, where, chosen, told, bench.get("notes", {}).get(where[0], ""))
    made.section("Costs", "In one-token target forwards: c of a draft forward, v(n) of an n-token target forward.")
    made.figure(_costs(bench["costs"]), "Medians of interleaved forwards in the middle of a typical text.")
    made.facts({f"c of {name}": f"{cost['cost_ratio']:.3f}" for name, cost in bench["costs"].items() if name})
    made.section("How this was measured", FAIRNESS + LENGTHS[bool(settings["ignore_eos"])])
    made.facts({"machine": machine.sentence(content["machine"]), "threads": content["machine"].get("note")})
    made.facts({k: v for k, v in settings.items() if v not in (None, [], "")})
    return made


def _tiles(rows: Sequence[Row]) -> list[Tile]:
    best = fastest_lossless(rows)
    if best is None:
        return []
    where = f"{best['name']}, {best['suite']}, " + ("greedy" if best["temperature"] == 0 else "sampled")
    tiles = [Tile("best lossless speedup", f"{best['speedup']:.2f} ×", where, "good" if best["speedup"] > 1 else "bad")]
    for key, label in (("speedup_vs_generate", "over model.generate"), ("speedup_vs_assistant", "over HF assistant")):
        if best.get(key):
            tiles.append(Tile(label, f"{best[key]:.2f} ×", "the same method"))
    checked = [r["identical_to_target"] for r in rows if r["lossless"] and r.get("identical_to_target") is not None]
    if checked:
        told, note = f"{sum(checked)} of {len(checked)}", "lossless methods against model.generate"
        tiles.append(Tile("greedy texts identical", told, note, "good" if all(checked) else "bad"))
    return tiles


def _block(made: Page, where: tuple[str, float], rows: Sequence[Row], details: Sequence[Row], note: str) -> None:
    suite, temperature = where
    mode = "greedy" if temperature == 0 else f"temperature {temperature:g}"
    prompts = max(row["prompts"] for row in rows)
    made.section(f"{suite}, {mode}", f"{prompts} prompts, {rows[0]['repeats']} repeats each. {note}".strip())
    made.table(COLUMNS, [shown(row) for row in rows])
    made.figure(plots.speedup_bars([dict(row) | {"exact": row["lossless"]} for row in rows if row.get("speedup")]))
    made.gallery(figures(rows, details).values())
    for detail in spread(details, rows)[:2]:
        for sample in detail["samples"][:1]:
            made.tokens(sample["tokens"], f"{detail['name']}: {sample['prompt'].strip()[:160]}")


def _costs(costs: Mapping[str, Any]) -> str:
    series = {name or "target alone": cost["verify_cost"] for name, cost in costs.items()}
    return plots.lines(
        series, "Cost of verification", "tokens in one target forward, n", "v(n) (one-token target forwards)",
        markers=True, whole_x=True,
    )  # fmt: skip
