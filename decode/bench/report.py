"""The report of ``bench``: tables for a terminal, report.json and the page."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.box import Box
from rich.table import Table as RichTable

from decode.bench import machine, plots
from decode.bench.benchmark import Benchmark
from decode.bench.page import (
    LOSSLESS,
    RELAXED,
    Badge,
    Block,
    Column,
    Facts,
    Figures,
    Group,
    Heading,
    Page,
    Sample,
    Samples,
    Table,
    Text,
    Tile,
    Tiles,
    present,
    read_columns,
)
from decode.bench.records import differing, drafting, fastest_lossless
from decode.errors import read_json, write_text
from decode.trace import FORMULAS

Row = Mapping[str, Any]

TABLES = read_columns(Path(__file__).with_name("columns.csv"))
COLUMNS = TABLES["bench"]
SHORT = (
    "name", "mark", "draft_length", "tokens_per_second", "speedup", "speedup_vs_generate", "predicted_speedup",
    "accepted_length", "alpha", "tv_spent", "accuracy", "identical_to_target",
)  # fmt: skip
"""Columns of the terminal's table."""
NARROW = {"draft_length", "predicted_speedup", "accepted_length", "tv_spent"}
"""Columns that a terminal of less than 110 characters goes without."""
MARKS = {"lossless": ("=", ""), "relaxed": ("≈", "yellow"), "baseline": ("·", "dim")}
"""Mark and colour of a method in the terminal's table."""


def mode(temperature: float) -> str:
    """``greedy``, or the temperature."""
    return "greedy" if temperature == 0 else f"T = {temperature:g}"


def by_block(rows: Iterable[Row]) -> dict[str, list[Row]]:
    """Rows by suite, temperature and batch size, as a title."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        size = row.get("batch_size", 1)
        title = f"{row['suite']}, {mode(row['temperature'])}" + (f", batch size {size}" if size > 1 else "")
        found.setdefault(title, []).append(row)
    return found


def shown(row: Row) -> dict[str, Any]:
    """A row with the badges that tables show."""
    kind = Badge("baseline") if row.get("baseline") else LOSSLESS if row.get("lossless") else RELAXED
    same = Badge("no", "bad") if row.get("identical_to_target") is False else row.get("identical_to_target")
    return {**row, "kind": kind, "identical_to_target": same}


def console_table(title: str, columns: Iterable[Column], rows: Sequence[Row]) -> RichTable:
    """A table for a terminal; columns without values are left out, and ``style`` of a row is its style."""
    columns = [column for column in columns if any(present(row.get(column.key)) for row in rows)]
    grid = RichTable(title=title or None, title_justify="left", caption_justify="left", box=None, pad_edge=False)
    for column in columns:
        text = not column.numeric and all(isinstance(row.get(column.key), str | Badge | None) for row in rows)
        # if the table is too wide, words are wrapped before numbers are cut
        grid.add_column(column.label, justify="left" if text else "right", no_wrap=not text, min_width=1)
    for row in rows:
        cells = (" ".join(filter(None, (column.text(row), column.error_text(row)))) for column in columns)
        grid.add_row(*cells, style=row.get("style", ""))
    return grid


def plain_table(
    title: str, headings: Sequence[str], rows: Iterable[Sequence[str]], box: Box | None = None
) -> RichTable:
    """A table of texts for a terminal; the first column is aligned left, the others right."""
    grid = RichTable(title=title or None, title_justify="left", box=box, pad_edge=box is not None, header_style="bold")
    for place, heading in enumerate(headings):
        grid.add_column(heading, justify="right" if place else "left")
    for row in rows:
        grid.add_row(*row)
    return grid


def markdown_table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """`plain_table` as Markdown."""
    rule = ["---", *["---:"] * (len(headings) - 1)]
    return "\n".join(f"| {' | '.join(line)} |" for line in (headings, rule, *rows))


def block_table(title: str, rows: Sequence[Row], width: int = 130) -> RichTable:
    """The rows of one block for a terminal of this width."""
    keys = [key for key in SHORT if width >= 110 or key not in NARROW]
    known = {column.key: column for column in COLUMNS} | {"mark": Column("mark", "")}
    columns = [replace(known[key], error=known[key].error if key == "speedup" and width >= 110 else "") for key in keys]
    marked = [row | dict(zip(("mark", "style"), MARKS[row["kind"].text])) for row in map(shown, rows)]
    grid = console_table(title, columns, marked)
    grid.caption = "= lossless   [yellow]≈ relaxed[/]   · transformers' own"
    for row in rows:
        if row.get("note"):
            grid.add_row(f"{row['name']}: {row['note']}", style="red")
    return grid


def answers(rows: Sequence[Row]) -> list[str]:
    """For each block the fastest lossless method, and the lossless methods whose greedy texts differ."""
    lines = []
    for title, block in by_block(rows).items():
        # greedy texts show whether a method is lossless; sampled ones of the same suite and size cannot
        like = [row for row in rows if all(row.get(k) == block[0].get(k) for k in ("suite", "batch_size"))]
        parts, best = [], fastest_lossless(like, block[0]["temperature"])
        if best is not None:
            ends = next(column for column in COLUMNS if column.key == "speedup").error_text(best)
            parts.append(f"fastest lossless method {best['name']}: speedup {best['speedup']:.2f}")
            parts[0] += f" ({ends})" if ends else ""
            if best.get("speedup_vs_generate"):
                parts[0] += f", {best['speedup_vs_generate']:.2f} over model.generate"
        if wrong := differing(block):
            parts.append(f"texts differ from model.generate's: {', '.join(wrong)}")
        if parts:
            lines.append(f"{title}: {'; '.join(parts)}")
    return lines


def write_report(
    bench: Benchmark,
    settings: Mapping[str, Any],
    folder: Path,
) -> tuple[Path, Path]:
    """Write report.json and the page.

    Other keys of an existing report.json are kept; ``methods``, ``bench`` and ``machine`` are set. The page is
    report.html, or bench.html if report.json is that of another command.
    """
    session, path = bench.session, folder / "report.json"
    content = read_json(path)
    beside = bool(content.keys() - {"methods", "bench", "machine"})
    content |= {
        "methods": bench.rows,
        "machine": session.facts(),
        "bench": {
            "created": datetime.now(UTC).isoformat(timespec="seconds"),
            "settings": dict(settings),
            "costs": {name or "": costs[1].to_dict() for name, costs in session.costs.items()},
            "stopped": bench.stopped,
            "analysis": bench.analysis,
            "notes": session.notes,
        },
    }
    write_text(path, json.dumps(content, indent=1, ensure_ascii=False) + "\n")
    html = folder / ("bench.html" if beside else "report.html")
    bench_page(content).write(html)
    return path, html


def bench_page(content: Mapping[str, Any]) -> Page:
    """The page of a benchmark, from the keys ``methods``, ``bench`` and ``machine`` of report.json."""
    bench, about, methods = content["bench"], content["machine"], content["methods"]
    headline, *others = answers(methods) or [""]
    blocks: list[Block] = [*map(Text, others)]
    if (best := fastest_lossless(methods)) is not None:
        names = {"speedup": "over no draft", "speedup_vs_generate": "over model.generate"}
        names |= {"speedup_vs_assistant": "over HF assistant", "accepted_length": "accepted length"}
        tiles = [Tile(name, f"{best[key]:.2f}", best["name"]) for key, name in names.items() if best.get(key)]
        blocks.insert(0, Tiles(tiles))
    blocks += by_batch(methods)
    details = by_block(bench["analysis"])
    for title, rows in by_block(methods).items():
        found, repeats = details.get(title, []), rows[0]["repeats"]
        facts = f"{max(row['prompts'] for row in rows)} prompts, {repeats} repeat{'s' * (repeats != 1)}. "
        fast = [detail for row in drafting(rows)[:2] for detail in found if detail["name"] == row["name"]]
        samples = [
            Sample(sample["tokens"], f"{detail['name']}: {sample['prompt'].strip()[:160]}")
            for detail in fast
            for sample in detail["samples"][:1]
        ]
        blocks += [
            Heading(title, (facts + bench.get("notes", {}).get(rows[0]["suite"], "")).strip()),
            Table(COLUMNS, [shown(row) for row in rows]),
        ]
        groups: dict[str, list[Row]] = {}
        for row in rows:
            for part in row["categories"]:
                groups.setdefault(part["category"], []).append({**shown(row), **part})
        if groups:
            parts = [
                Group(some, name or "no category", f"{some[0]['prompts']} prompts") for name, some in groups.items()
            ]
            blocks += [Heading("By category", level=3), Table(TABLES["category"], parts, legend=False)]
        blocks += [Figures(block_figures(rows, found)), *([Samples(samples)] if samples else [])]
    if costs := {name or "target alone": cost["verify_cost"] for name, cost in bench["costs"].items()}:
        blocks += [
            Heading("Costs", "In one-token target forwards: c of a draft forward, v(n) of an n-token target forward."),
            Figures([(plots.verify_cost({name: dict(v) for name, v in costs.items()}), "")]),
            Facts({f"c of {name}": f"{cost['cost_ratio']:.3f}" for name, cost in bench["costs"].items() if name}),
        ]
    blocks += [
        Heading("Machine and settings"),
        Facts({"machine": machine.sentence(about), "threads": about.get("note")}),
        Facts({name: value for name, value in bench["settings"].items() if value != []}),
    ]
    return Page("Decoding methods compared", headline, "draftsmith bench", blocks)


def by_batch(rows: Sequence[Row]) -> list[Block]:
    """Speedup and throughput over batch size by suite and temperature; nothing for a single size."""
    blocks: list[Block] = []
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(f"{row['suite']}, {mode(row['temperature'])}", []).append(row)
    for title, some in groups.items():
        if len({row.get("batch_size", 1) for row in some}) < 2:
            continue
        speedups: dict[str, list[tuple[Any, ...]]] = {}
        rates: dict[str, list[tuple[Any, ...]]] = {}
        for row in some:
            if row.get("speedup") and not row["baseline"] and row["method"] != "autoregressive":
                point = (row["batch_size"], row["speedup"], *row["speedup_ci95"])
                speedups.setdefault(row["name"], []).append(point)
            rates.setdefault(row["name"], []).append((row["batch_size"], row["tokens_per_second"]))
        x = "sequences at once (batch size)"
        speedup, rate = "tokens/s ÷ without a draft (×)", "Σ tokens ÷ seconds"
        figures = [
            (plots.lines(speedups, "Speedup by batch size", x, speedup, log_x=True, at_one=True), ""),
            (plots.lines(rates, "Tokens per second by batch size", x, rate, log_x=True, log_y=True), ""),
        ]
        blocks += [Heading(f"By batch size: {title}"), Figures(figures)]
    return blocks


def block_figures(rows: Sequence[Row], details: Iterable[Row]) -> list[tuple[str, str]]:
    """The plots (SVG, caption) of one block; those without data are left out."""
    figures = [(plots.speedup_bars(rows), "")]
    relaxed = drafting(rows, lossless=False)[:5]
    compared = relaxed + drafting(rows, lossless=True)[:2]
    labels = {"tv_spent": f"TV spent: {FORMULAS['tv_spent'].split(',')[0]}", "accuracy": "accuracy: mean score"}
    for key, label in labels.items():
        if relaxed and len({row.get(key) for row in compared} - {None}) > 1:
            figures.append((plots.points(compared, key, "speedup", "Speed against quality", label, "speedup (×)"), ""))
    distinct: dict[str, Row] = {}  # the fastest method of each prediction, to one digit
    for row in drafting(rows):
        if row.get("predicted_speedup") and row.get("speedup_without_prefill"):
            distinct.setdefault(f"{row['predicted_speedup']:.1f}", row)
    if distinct:
        title, ylabel = "Measured against predicted speedup", "measured speedup of decoding (×)"
        xlabel = f"predicted: {FORMULAS['predicted_speedup']}"
        keys = "predicted_speedup", "speedup_without_prefill"
        figures.append((plots.points(list(distinct.values())[:7], *keys, title, xlabel, ylabel, diagonal=True), ""))
    known = {detail["name"]: detail for detail in details if detail.get("acceptance_by_position")}
    chosen = [known[row["name"]] for row in drafting(rows) if row["name"] in known][:5]
    positions = {d["name"]: [p for p in d["acceptance_by_position"] if p["tested"] >= 30] for d in chosen}
    if positions := {name: rates for name, rates in positions.items() if len(rates) > 1}:
        figures.append((plots.acceptance_by_position(positions), "Positions reached at least 30 times."))
    if chosen:
        figures.append((plots.draft_lengths({d["name"]: d["draft_lengths"] for d in chosen[:3]}), ""))
    return figures
