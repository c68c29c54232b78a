"""The report of ``bench``: tables for a terminal, report.json and the page."""

import json
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.table import Table as RichTable

from decode.bench import machine, plots
from decode.bench.benchmark import Benchmark
from decode.bench.page import Sample, Section, Table, cell, console_table, write_page
from decode.bench.records import differing, drafting, fastest_lossless
from decode.errors import read_json, write_text
from decode.trace import FORMULAS

Row = Mapping[str, Any]

SHORT = (
    "name", "kind", "draft_length", "tokens_per_second", "speedup", "speedup_vs_generate", "predicted_speedup",
    "accepted_length", "alpha", "tv_spent", "accuracy", "identical_to_target",
)  # fmt: skip
"""Columns of the terminal's table."""
NARROW = {"draft_length", "predicted_speedup"}
"""Columns that a terminal of less than 110 characters goes without."""
ERRORS = {"alpha_se", "accuracy_se"}
"""Errors that the page alone shows, so that a terminal's table keeps its names."""
KEYS = (
    "name", "kind", "draft_length", "tokens_per_second", "speedup", "speedup_vs_generate", "speedup_vs_assistant",
    "speedup_without_prefill", "predicted_speedup", "accepted_length", "alpha", "accepted_per_tested",
    "accepted_per_drafted", "tv_spent", "js_distance", "accuracy", "identical_to_target", "note",
)  # fmt: skip
BY_CATEGORY = (
    "category", "prompts", "name", "kind", "tokens_per_second", "speedup", "speedup_vs_generate", "accepted_length",
    "alpha",
)  # fmt: skip
"""Columns of the page's tables."""
BY_CONCURRENCY = ("name", "batch_size", *BY_CATEGORY[3:])
"""Columns of the table over batch sizes."""
STYLES = {"lossless": "", "relaxed": "yellow", "baseline": "dim"}


def mode(temperature: float) -> str:
    """``greedy``, or the temperature."""
    return "greedy" if temperature == 0 else f"T = {temperature:g}"


def shown(row: Row) -> dict[str, Any]:
    """A row with the kind of its output."""
    return {**row, "kind": "baseline" if row.get("baseline") else "lossless" if row.get("lossless") else "relaxed"}


def by_block(rows: Iterable[Row], *, sizes: bool = True) -> dict[str, list[dict[str, Any]]]:
    """Rows by suite, temperature and, with `sizes`, batch size, as a title."""
    found: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        size = row.get("batch_size", 1) if sizes else 1
        title = f"{row['suite']}, {mode(row['temperature'])}" + (f", batch size {size}" if size > 1 else "")
        found.setdefault(title, []).append(shown(row))
    return found


def by_category(rows: Iterable[Row]) -> list[Row]:
    """The categories of rows of one block, category after category, and last all of them; empty if there is one."""
    parts = [{**row, **part} for row in rows for part in row["categories"]]
    parts += [{**row, "category": "all"} for row in rows if row["categories"]]
    return sorted(parts, key=lambda part: (part["category"] == "all", part["category"]))


def by_concurrency(rows: Iterable[Row]) -> dict[str, list[dict[str, Any]]]:
    """Rows by suite and temperature, as a title, of what was measured at several batch sizes: method after method."""
    found = {}
    for title, block in by_block(rows, sizes=False).items():
        names = [row["name"] for row in block]
        if kept := [row for row in block if names.count(row["name"]) > 1]:
            found[title] = sorted(kept, key=lambda row: names.index(row["name"]))
    return found


def console_tables(rows: Sequence[Row], width: int = 130) -> Iterable[RichTable]:
    """Tables for a terminal: blocks, of the smallest batch the fastest drafts by category, and concurrency."""
    for title, block in by_block(rows).items():
        yield block_table(title, block, width)
        parts = by_category(drafting(block)[:3])
        if parts and block[0]["batch_size"] == min(row["batch_size"] for row in rows):
            yield block_table(f"{title}, by category", parts, width, BY_CATEGORY)
    for title, sizes in by_concurrency(rows).items():
        yield block_table(f"{title}, by concurrency", sizes, width, BY_CONCURRENCY)


def block_table(title: str, rows: Sequence[Row], width: int = 130, columns: Sequence[str] = SHORT) -> RichTable:
    """The rows of one block for a terminal of this width."""
    hidden = ERRORS if width >= 110 else ERRORS | {"speedup_ci95"} | (NARROW if columns is SHORT else set())
    keys = [key for key in columns if key != "kind" or any(row["kind"] == "relaxed" for row in rows)]
    kept = [{**row, "style": STYLES[row["kind"]], **dict.fromkeys(hidden)} for row in rows]
    grid = console_table(title, keys, kept)
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
        best, wrong = fastest_lossless(like, block[0]["temperature"]), differing(block)
        parts = [f"texts differ from model.generate's: {', '.join(wrong)}"] if wrong else []
        if best is not None:
            over = best.get("speedup_vs_generate")
            parts.insert(0, f"fastest lossless method {best['name']}: speedup {cell(best, 'speedup')}")
            parts[0] += f", {over:.2f} over model.generate" if over else ""
        if parts:
            lines.append(f"{title}: {'; '.join(parts)}")
    return lines


def write_report(bench: Benchmark, settings: Mapping[str, Any], folder: Path) -> tuple[Path, Path]:
    """Write report.json and the page.

    Other keys of an existing report.json are kept; ``methods``, ``bench`` and ``machine`` are set. The page is
    report.html, or bench.html if report.json is that of another command.
    """
    session, path = bench.session, folder / "report.json"
    content = read_json(path)
    page = folder / ("bench.html" if content.keys() - {"methods", "bench", "machine"} else "report.html")
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
    headline, *others = answers(bench.rows) or [""]
    write_page(page, "Decoding methods compared", headline, [Section(text=" ".join(others)), *sections(content)])
    return path, page


def sections(content: Mapping[str, Any]) -> Iterable[Section]:
    """The page of a benchmark, from the keys ``methods``, ``bench`` and ``machine`` of report.json."""
    bench, methods = content["bench"], content["methods"]
    details = {
        (title, detail["name"]): detail for title, some in by_block(bench["analysis"]).items() for detail in some
    }
    for title, rows in by_block(methods).items():
        fast = [(row, details[title, row["name"]]) for row in drafting(rows) if (title, row["name"]) in details]
        tables = [Table(KEYS, rows), Table(BY_CATEGORY, by_category(rows), "By category", folded=True)]
        relaxed = any(row["kind"] == "relaxed" for row in rows)
        figures = [(plots.speedup_bars(rows), "Relaxed methods are orange." if relaxed else "")]
        predicted = {
            row["name"]: [(row["predicted_speedup"], row["speedup_without_prefill"])]
            for row, _ in fast[:7]
            if row.get("predicted_speedup") and row.get("speedup_without_prefill")
        }
        if predicted:
            axes = f"predicted: {FORMULAS['predicted_speedup']}", "measured speedup of decoding (×)"
            figures.append((plots.lines(predicted, "Measured against predicted speedup", *axes, diagonal=True), ""))
        positions = {row["name"]: found for row, detail in fast[:5] if (found := detail.get("acceptance_by_position"))}
        if positions:
            figures.append((plots.acceptance_by_position(positions), ""))
        samples = [
            Sample(sample["tokens"], f"{row['name']}: {sample['prompt'].strip()[:160]}")
            for row, detail in fast[:2]
            for sample in detail["samples"][:1]
        ]
        text = f"{max(row['prompts'] for row in rows)} prompts, repeats: {rows[0]['repeats']}. "
        text += bench["notes"].get(rows[0]["suite"], "")
        yield Section(title, text, tables=tables, figures=figures, samples=samples)
    axes, tables, figures = ("sequences at once (batch size)", "tokens/s ÷ without a draft (×)"), [], []
    for title, sizes in by_concurrency(methods).items():
        tables.append(Table(BY_CONCURRENCY, sizes, f"{title}, by concurrency"))
        curves: dict[str, list[tuple[float, ...]]] = {}
        for row in sorted(drafting(sizes), key=lambda row: row["batch_size"]):
            curves.setdefault(row["name"], []).append((row["batch_size"], row["speedup"], *row["speedup_ci95"]))
        if curves:
            figures.append((plots.lines(curves, f"Speedup, {title}", *axes, log_x=True, at_one=True), ""))
    costs = bench["costs"]
    if costs:
        points = {name or "target alone": sorted(cost["verify_cost"]) for name, cost in costs.items()}
        axes = "tokens in one target forward, n", "v(n) = time of n tokens ÷ of 1"
        figures.append((plots.lines(points, "Cost of verification", *axes), ""))
    c = {f"c of {name}": f"{cost['cost_ratio']:.3f}" for name, cost in costs.items() if name}
    yield Section("Batch sizes and costs", f"{FORMULAS['cost_ratio']}. {FORMULAS['verify_cost']}.", c, tables, figures)
    about = content["machine"]
    where = {"machine": machine.sentence(about), "threads": about["note"]}
    yield Section("Machine and settings", facts=where | bench["settings"], folded=True)
