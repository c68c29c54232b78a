"""The columns of a benchmark with their formulas, its table for a terminal, and its answer in sentences."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.box import Box
from rich.table import Table

from decode.measure.bench.compare_methods import ResultBlock
from decode.measure.bootstrap_statistics import differing, fastest_lossless
from decode.report.html_page import LOSSLESS, RELAXED, Badge, Column, present, read_columns

Row = Mapping[str, Any]

TABLES = read_columns(Path(__file__).with_name("columns.csv"))
COLUMNS = TABLES["bench"]
CATEGORY_COLUMNS = TABLES["category"]
"""Columns of the results by category; all intervals are 95 % bootstrap intervals over prompts."""
ALPHA_COLUMNS = TABLES["alpha"]  # of offline α
COLUMN = {column.key: column for column in COLUMNS}
MOST_LINES = 40  # longer tables by category are for the page
SHORT = {
    "name": "method", "mark": "", "draft_length": "k", "tokens_per_second": "tokens/s", "speedup": "speedup",
    "speedup_vs_generate": "/generate", "predicted_speedup": "predicted", "block_efficiency": "block", "alpha": "α",
    "tv_spent": "TV", "accuracy": "score", "identical_to_target": "same",
}  # fmt: skip
"""Columns of the terminal's table and their labels."""
NARROW = {"draft_length", "predicted_speedup", "block_efficiency", "tv_spent"}
"""What a terminal below 110 columns goes without; the intervals too."""
MARKS = {"lossless": ("=", ""), "relaxed": ("≈", "yellow"), "peer": ("·", "dim")}
"""Mark and colour of a method in the terminal's table."""


def mode(temperature: float) -> str:
    """``greedy``, or the temperature."""
    return "greedy" if temperature == 0 else f"T = {temperature:g}"


def by_block(rows: Iterable[Row]) -> dict[tuple[str, float], list[Row]]:
    """Rows by suite and temperature."""
    found: dict[tuple[str, float], list[Row]] = {}
    for row in rows:
        found.setdefault((row["suite"], row["temperature"]), []).append(row)
    return found


def speed(row: Row) -> float:
    """The speedup, 0 where there is none, for sorting."""
    return float(row.get("speedup") or 0.0)


def drafting(rows: Iterable[Row], lossless: bool | None = None) -> list[Row]:
    """Our own methods that draft and have a speedup, the fastest first; the lossless or the relaxed ones alone."""
    ours = [r for r in rows if r.get("speedup") and not r["peer"] and r["method"] != "autoregressive"]
    return sorted((r for r in ours if lossless in (None, bool(r["lossless"]))), key=speed, reverse=True)


def shown(row: Row) -> dict[str, Any]:
    """A row with what tables show besides the numbers."""
    kind = Badge("peer") if row["peer"] else LOSSLESS if row["lossless"] else RELAXED
    same = Badge("no", "bad") if row.get("identical_to_target") is False else row.get("identical_to_target")
    return {**row, "kind": kind, "identical_to_target": same}


def table(block: ResultBlock, width: int = 130) -> Table:
    """One block for a terminal of this width; lossless and relaxed methods and peers each have a mark."""
    rows = [shown(row) for row in block.rows]
    wide = width >= 110
    columns = [
        replace(
            COLUMN.get(key, Column(key, "")), label=label, error="speedup_ci95" if wide and key == "speedup" else ""
        )
        for key, label in SHORT.items()
        if wide or key not in NARROW
    ]
    title = f"{block.suite}, {mode(block.temperature)}" + ("" if block.complete else " (stopped early)")
    marked = [row | dict(zip(("mark", "style"), MARKS[row["kind"].text])) for row in rows]
    grid = console_table(title, columns, marked)
    grid.caption = "= lossless   [yellow]≈ relaxed: not the target's distribution[/]   · transformers' own"
    for row in rows:
        if row.get("note"):
            grid.add_row(f"{row['name']}: {row['note']}", style="red")
    return grid


def category_groups(rows: Iterable[Row]) -> dict[str, list[Row]]:
    """By category, the rows of one block with the category's numbers; empty where there is one category only."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        for part in row.get("categories") or ():
            found.setdefault(part["category"], []).append({**shown(row), **part})
    return found


def category_table(block: ResultBlock, width: int = 130, most: int = 3) -> Table | None:
    """The fastest lossless methods of a block in each category, for a terminal; None without categories."""
    chosen = [row["name"] for row in drafting(block.rows, lossless=True)[:most]]
    lines: list[Row] = []
    for category, rows in category_groups(block.rows).items():
        best = sorted((r for r in rows if r["name"] in chosen), key=lambda row: chosen.index(row["name"]))
        lines += [{**row, "category": category if i == 0 else " "} for i, row in enumerate(best)]
    if not lines or len(lines) > MOST_LINES:
        return None
    columns = [Column("category", "category"), *(c for c in CATEGORY_COLUMNS if c.key != "kind")]
    if width < 110:
        columns = [replace(c, error="" if c.key != "speedup" else c.error) for c in columns]
    title = f"{block.suite}, {mode(block.temperature)}, by category (95 % intervals over prompts)"
    return console_table(title, columns, lines)


def console_table(title: str, columns: Iterable[Column], rows: Sequence[Row]) -> Table:
    """Rows for a terminal, in the columns of the page that hold anything; ``style`` of a row is its style."""
    columns = [column for column in columns if any(present(row.get(column.key)) for row in rows)]
    grid = Table(title=title or None, title_justify="left", caption_justify="left", box=None, pad_edge=False)
    for column in columns:
        text = not column.numeric and all(isinstance(row.get(column.key), str | Badge | None) for row in rows)
        # where the table is too wide, words take several lines before a number is cut
        grid.add_column(column.label, justify="left" if text else "right", no_wrap=not text, min_width=1)
    for row in rows:
        cells = (" ".join(filter(None, (column.text(row), column.error_text(row)))) for column in columns)
        grid.add_row(*cells, style=row.get("style", ""))
    return grid


def plain_table(title: str, headings: Sequence[str], rows: Iterable[Sequence[str]], box: Box | None = None) -> Table:
    """Cells that are text already, for a terminal; the first column is on the left, the others on the right."""
    grid = Table(title=title or None, title_justify="left", box=box, pad_edge=box is not None, header_style="bold")
    for place, heading in enumerate(headings):
        grid.add_column(heading, justify="right" if place else "left")
    for row in rows:
        grid.add_row(*row)
    return grid


def markdown_table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """The same as GitHub shows it."""
    rule = ["---", *["---:"] * (len(headings) - 1)]
    return "\n".join(f"| {' | '.join(line)} |" for line in (headings, rule, *rows))


def ratios(rows: Sequence[Row]) -> list[str]:
    """The ratios that matter, a sentence for each suite and temperature."""
    lines = []
    for (suite, temperature), block in by_block(rows).items():
        # sampled texts cannot be compared, so that greedy ones judge their methods
        best = fastest_lossless([row for row in rows if row["suite"] == suite], temperature)
        plain, wrong = next((r for r in block if r["method"] == "autoregressive"), {}), differing(block)
        parts = []
        if plain.get("speedup_vs_generate"):
            parts.append(f"without a draft {plain['speedup_vs_generate']:.2f} × model.generate")
        if best is not None:
            parts.append(f"fastest lossless method {best['name']}: {_against(best)}")
        if wrong:
            parts.append(f"not model.generate's texts, though lossless in exact arithmetic: {', '.join(wrong)}")
        if parts:
            lines.append(f"{suite}, {mode(temperature)}: " + "; ".join(parts))
    return lines


def _against(row: Row) -> str:
    interval = COLUMN["speedup"].error_text(row)
    facts = [f"{row['speedup']:.2f} × the loop without a draft" + (f" (95 %: {interval})" if interval else "")]
    if row.get("speedup_vs_generate"):
        facts.append(f"{row['speedup_vs_generate']:.2f} × model.generate")
    if row.get("speedup_vs_assistant"):
        facts.append(f"{row['speedup_vs_assistant']:.2f} × generate(assistant_model=…)")
    if row.get("predicted_speedup") and row.get("speedup_without_prefill"):
        share = row["speedup_without_prefill"] / row["predicted_speedup"]
        facts.append(f"{share:.2f} of the predicted speedup of decoding")
    if row.get("bookkeeping_share") is not None:
        facts.append(f"{row['bookkeeping_share']:.0%} of the time outside the models")
    return ", ".join(facts)
