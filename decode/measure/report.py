"""Tables and pages of all reports, with one definition of every column; and the report of ``bench``.

A page is one file that loads nothing from elsewhere, has no script, and follows the reader's light or dark scheme. The
template ``html_page.html`` escapes all text (pairs of backticks become code); only figures hold markup, the SVG of
`plots`.
"""

import csv
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape
from rich.table import Table as TerminalTable

from decode.core.round import FORMULAS
from decode.files import Fields, read_json, write_json, write_text
from decode.measure import plots
from decode.measure.benchmark import BASELINE, Benchmark
from decode.measure.machine import busy, conditions, doubt, sentence
from decode.measure.statistics import finite
from decode.progress import fitting_table

Row = plots.Row

# -- tables and pages -------------------------------------------------------------------------------------------------


class Column(NamedTuple):
    """How the values under one key of a row are shown."""

    bench: str  # in a benchmark's tables: console (and page), page (alone), or empty
    label: str
    format: str  # format specification of numbers, which are aligned to the right; empty: text
    error: str  # key of the standard error, or of the interval ``[low, high]``, that is shown beside the value
    formula: str  # definition, listed at the end of a page


with Path(__file__).with_name("columns.csv").open(newline="", encoding="utf-8") as file:
    COLUMNS = {
        row.pop("key"): Column(**row | {"formula": row["formula"].format_map(FORMULAS)}) for row in csv.DictReader(file)
    }
"""The columns of all tables by the key of their values, as ``columns.csv`` defines them."""


def present(value: Any) -> bool:
    """Whether a value is neither None nor an empty text nor a number that is not finite."""
    return value not in (None, "") and (not isinstance(value, float) or finite(value))


def cell(row: Row, key: str) -> str:
    """The value of a row as text, with its standard error or interval; a dash if there is none.

    A speedup that is no result (see `decode.measure.machine.doubt`) has a question mark in place of its interval.
    """
    value, column = row.get(key), COLUMNS[key]
    if not present(value):
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if not finite(value):
        return str(value)
    text, error = format(value, column.format), row.get(column.error)
    if "speedup" in key and doubt(row):
        return f"{text} ?"
    if finite(error):
        return f"{text} ± {error:{column.format.removeprefix('+')}}"
    if isinstance(error, list | tuple):
        return f"{text} ({error[0]:{column.format}}–{error[1]:{column.format}})"
    return text


def filled(keys: Iterable[str], rows: Sequence[Row]) -> list[str]:
    """The keys under which any row has a value."""
    return [key for key in keys if any(present(row.get(key)) for row in rows)]


def doubts(rows: Iterable[Row]) -> str:
    """Why speedups of a page's rows are marked with a question mark; empty if none is."""
    why = doubt(*rows)
    return f"A ? marks a speedup that is not reliable: {why}." if why else ""


def texts_of(keys: Iterable[str], rows: Sequence[Row]) -> tuple[list[str], list[list[str]]]:
    """The headings of the columns with values, and the cells of each row."""
    keys = filled(keys, rows)
    return [COLUMNS[key].label for key in keys], [[cell(row, key) for key in keys] for row in rows]


def console_table(title: str, keys: Iterable[str], rows: Sequence[Row], below: Iterable[str] = ()) -> TerminalTable:
    """A table for a terminal; columns without values are left out, and ``style`` of a row is its style."""
    headings, cells = texts_of(keys := filled(keys, rows), rows)
    return fitting_table(
        headings,
        [(line, row.get("style", "")) for line, row in zip(cells, rows)],
        title=title, right=[i for i, key in enumerate(keys) if COLUMNS[key].format],
        below=list(below),
    )  # fmt: skip


def markdown_table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table of texts as Markdown; the first column is aligned left, the others right."""
    rule = ["---", *["---:"] * (len(headings) - 1)]
    return "\n".join(f"| {' | '.join(line)} |" for line in (headings, rule, *rows))


def markdown(keys: Iterable[str], rows: Sequence[Row]) -> str:
    """`console_table` as Markdown."""
    return markdown_table(*texts_of(keys, rows))


def comma_separated(rows: Sequence[Row]) -> str:
    """Rows as CSV: their numbers and texts, intervals as ``[low, high]``, and what is `doubt`ed."""
    import pandas

    table = [
        {key: value for key, value in row.items() if "_ci95" in key or not isinstance(value, dict | list)}
        | {"doubt": doubt(row)} for row in rows
    ]  # fmt: skip
    return pandas.DataFrame(table, dtype=object).to_csv(index=False)


@dataclass(frozen=True)
class Table:
    """A table of a page; columns that are empty in every row are left out."""

    keys: Sequence[str]  # of `COLUMNS`
    rows: Sequence[Row]
    title: str = ""
    folded: bool = False  # hide it below its title until that is clicked
    note: str = ""  # line below it


@dataclass(frozen=True)
class Section:
    """A part of a page; its parts are shown in the order of the fields."""

    heading: str = ""
    text: str = ""
    facts: Row = field(default_factory=dict)  # only values that are `present`
    tables: Sequence[Table] = ()
    figures: Sequence[str] = ()  # SVG
    code: Mapping[str, str] = field(default_factory=dict)  # preformatted texts by their captions
    cards: Sequence[tuple[str, str]] = ()  # values in large type, with what they are: shown above the text
    folded: bool = False  # hide all of it below its heading until that is clicked


def write_page(path: Path, title: str, headline: str, sections: Iterable[Section]) -> None:
    """Write a page with its answer in a sentence as headline, and below it why speedups of its tables are no results.

    An existing file is replaced only by a complete one.
    """
    templates = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    templates.filters["code"] = lambda text: Markup(re.sub(r"`([^`]+)`", r"<code>\1</code>", str(escape(text))))
    templates.globals |= {"cell": cell, "columns": COLUMNS, "filled": filled, "present": present}
    sections = list(sections)
    tables = [table for section in sections for table in section.tables]
    why = doubts(row for table in tables if table.keys != OF_CATEGORY for row in table.rows)  # those have a note
    page = templates.get_template("html_page.html")
    write_text(path, page.render(title=title, headline=headline, doubts=why, sections=sections).lstrip())


# -- the report of a benchmark ----------------------------------------------------------------------------------------

KEYS = [key for key, column in COLUMNS.items() if column.bench]
"""Columns of the page's tables."""
OF_CATEGORY = ("category", "name", "prompts", "speedup", "accepted_length", "alpha")


def keys_of(rows: Sequence[Row]) -> list[str]:
    """The columns that say something of these rows."""
    relaxed = any(row["kind"] == "relaxed" for row in rows)
    return [key for key in KEYS if relaxed or key not in ("kind", "tv_spent")]


def mode(temperature: float) -> str:
    """``greedy``, or the temperature."""
    return "greedy" if temperature == 0 else f"T = {temperature:g}"


def by_block(rows: Iterable[Row]) -> dict[str, list[Row]]:
    """Rows by suite, temperature and batch size, with what stands beside intervals, as a title."""
    blocks: dict[str, list[Row]] = {}
    for row in rows:
        size = f", batch size {row['batch_size']}" if row["batch_size"] > 1 else ""
        title = f"{row['suite']}, {mode(row['temperature'])}{size}, {conditions(row)}"
        blocks.setdefault(title, []).append(row)
    return blocks


def drafting(rows: Iterable[Row]) -> list[Row]:
    """Our own methods that draft and have a speedup, the fastest first."""
    ours = [r for r in rows if r["speedup"] and not r["baseline"] and r["method"] != BASELINE]
    return sorted(ours, key=lambda r: -r["speedup"])


def by_category(rows: Sequence[Row]) -> Table:
    """A table of what the five fastest methods of a block have in each category of its suite, if it has several."""
    fastest = [row for row in drafting(rows) if row["recommended"]][:5]
    parts = [{**row, **part} for row in fastest for part in row.get("categories") or ()]
    note = "" if doubts(rows) else doubts(parts)  # most have fewer prompts than the block
    return Table(OF_CATEGORY, parts, "By category", folded=True, note=note)


def console_tables(rows: Sequence[Row]) -> Iterable[TerminalTable]:
    """The rows of each block for a terminal, with what is noted about them."""
    for title, block in by_block(rows).items():
        keys = [key for key in keys_of(block) if COLUMNS[key].bench == "console"]
        shown = [{**row, "alpha_se": None, "accuracy_se": None} for row in block]  # which the page shows
        yield console_table(title, keys, shown, [f"{r['name']}: {r['note']}" for r in block if r["note"]])


def answers(rows: Sequence[Row]) -> list[str]:
    """For each block the fastest lossless method, if one gains, and the lossless methods whose greedy texts differ.

    A method is judged at its recommended draft length (`decode.measure.benchmark.recommend`). Methods whose texts
    differ are not called the fastest, at any temperature: only greedy texts show whether a method is lossless. If the
    loop without a draft is one of them, its forward itself gives other logits, and no method is called the fastest.
    Where the fastest has no result (see `doubts`), no other is called the fastest.
    """
    lines, place = [], itemgetter("suite", "batch_size", "name")
    wrong = {place(r) for r in rows if r["kind"] == "lossless" and r["identical_to_target"] is False}
    for title, block in by_block(rows).items():
        differ, parts = [r for r in block if place(r) in wrong], []
        best = [r for r in drafting(block) if r["kind"] == "lossless" and r["recommended"] and r not in differ]
        if best and all(r["method"] != BASELINE for r in differ):
            parts.append(f"fastest lossless method {best[0]['name']}: speedup {cell(best[0], 'speedup')}")
            if doubt(best[0]):
                parts = ["no speedup is reliable"]
            elif best[0]["speedup"] < 1:
                parts = ["no lossless method is faster than no draft"]
        if differ and not block[0]["temperature"]:
            parts.append(f"texts differ from model.generate's: {', '.join(r['name'] for r in differ)}")
        if parts:
            lines.append(f"{title}: {'; '.join(parts)}")
    return lines


def write_report(bench: Benchmark, settings: Row, folder: Path) -> list[Path]:
    """Write the rows and the settings as bench-DATE.json, the page, and the rows as CSV; other benches are kept."""
    session, now = bench.session, datetime.now(UTC)
    path, page, table = (folder / f"bench-{now:%Y%m%d-%H%M%S}.{kind}" for kind in ("json", "html", "csv"))
    ours: Fields = {
        "methods": bench.rows,
        "machine": session.facts(),
        "bench": {
            "created": now.isoformat(timespec="seconds"),
            "settings": dict(settings),
            "costs": {name or "": costs.to_dict() for name, costs in session.costs.items()},
            "stopped": bench.stopped,
            "notes": session.notes,
        },
    }
    write_json(path, ours)
    headline, *others = answers(bench.rows) or [""]
    write_page(page, "Decoding methods compared", headline, [Section(text=" ".join(others)), *sections(**ours)])
    write_text(table, comma_separated(bench.rows))
    return [path, page, table]


def latest(folder: Path) -> Fields:
    """What the last benchmark in a folder wrote as JSON; empty without any."""
    return read_json(max(folder.glob("bench-*.json"), default=folder / "bench.json"))


def sections(methods: Sequence[Row], machine: Fields, bench: Fields) -> Iterable[Section]:
    """The page of a benchmark, from the keys of its JSON file; the plot of speeds has recommended draft lengths alone.

    Where the machine was busy there is no such plot.
    """
    disturbed = any(map(busy, methods))
    for title, rows in by_block(methods).items():
        fastest = [row for row in drafting(rows) if row["recommended"]]
        sure = [row for row in rows if row["recommended"] and not (disturbed or doubt(row))]
        figures = [plots.speedup_bars(sure)] if drafting(sure) else []
        if positions := {
            row["name"]: row["acceptance_by_position"] for row in fastest[:5] if row["acceptance_by_position"]
        }:
            figures.append(plots.acceptance_by_position(positions))
        text = bench["notes"].get(rows[0]["suite"], "")
        yield Section(title, text, tables=[Table(keys_of(rows), rows), by_category(rows)], figures=figures)
    where = {"machine": sentence(machine), "threads": machine["note"]}
    yield Section("Machine and settings", facts=where | bench["settings"], folded=True)
