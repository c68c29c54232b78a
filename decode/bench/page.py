"""Tables and pages of all reports: one definition of every column, rendered for a terminal, in Markdown and in HTML.

A page is one file that loads nothing from elsewhere, has no script, and follows the reader's light or dark scheme. The
template ``html_page.html`` escapes all text (pairs of backticks become code); only figures hold markup, the SVG of
`plots`.
"""

import csv
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeGuard

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape
from rich.table import Table as RichTable

from decode.errors import write_text
from decode.trace import FORMULAS

Row = Mapping[str, Any]
Figure = tuple[str, str]
"""A plot as SVG, and its caption."""

WRITERS = {
    "accepted": "drafted and accepted",
    "corrected": "corrected by the target",
    "bonus": "added by the target after a whole accepted draft",
    "rejected": "drafted and rejected",
    "target": "written by the target alone",
    "prompt": "prompt",
}
"""Who wrote a token: the class of its mark, and its meaning in the legend."""


class Column(NamedTuple):
    """How the values under one key of a row are shown."""

    label: str
    format: str  # format specification of numbers, which are aligned to the right; empty: text
    error: str  # key of the standard error, or of the interval ``[low, high]``, that is shown beside the value
    formula: str  # definition, listed at the end of a page


with Path(__file__).with_name("columns.csv").open(newline="", encoding="utf-8") as file:
    COLUMNS = {
        row.pop("key"): Column(**row | {"formula": row["formula"].format_map(FORMULAS)}) for row in csv.DictReader(file)
    }
"""The columns of all tables by the key of their values, as ``columns.csv`` defines them."""


def finite(value: Any) -> TypeGuard[float]:
    """Whether a value is a finite number and not a truth value."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def present(value: Any) -> bool:
    """Whether a value is neither None nor an empty text nor a number that is not finite."""
    return value not in (None, "") and (not isinstance(value, float) or finite(value))


def cell(row: Row, key: str) -> str:
    """The value of a row as text, with its standard error or interval; a dash if there is none."""
    value, column = row.get(key), COLUMNS[key]
    if not present(value):
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if not finite(value):
        return str(value)
    text, error = format(value, column.format), row.get(column.error)
    if finite(error):
        return f"{text} ± {error:{column.format.removeprefix('+')}}"
    if isinstance(error, Sequence) and all(map(finite, error)):
        return f"{text} ({error[0]:{column.format}}–{error[1]:{column.format}})"
    return text


def filled(keys: Iterable[str], rows: Sequence[Row]) -> list[str]:
    """The keys under which any row has a value."""
    return [key for key in keys if any(present(row.get(key)) for row in rows)]


def console_table(title: str, keys: Iterable[str], rows: Sequence[Row]) -> RichTable:
    """A table for a terminal; columns without values are left out, and ``style`` of a row is its style."""
    grid = RichTable(title=title or None, title_justify="left", caption_justify="left", box=None, pad_edge=False)
    keys = filled(keys, rows)
    for key in keys:
        label, spec, _, _ = COLUMNS[key]
        # if the table is too wide, words are wrapped, or folded, before numbers are cut
        grid.add_column(label, justify="right" if spec else "left", no_wrap=bool(spec), min_width=1, overflow="fold")
    for row in rows:
        grid.add_row(*(cell(row, key) for key in keys), style=row.get("style", ""))
    return grid


def plain_table(title: str, headings: Sequence[str], rows: Iterable[Sequence[str]]) -> RichTable:
    """A table of texts for a terminal; the first column is aligned left, the others right."""
    grid = RichTable(title=title or None, title_justify="left", box=None, pad_edge=False, header_style="bold")
    for place, heading in enumerate(headings):
        grid.add_column(heading, justify="right" if place else "left")
    for row in rows:
        grid.add_row(*row)
    return grid


def markdown_table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """`plain_table` as Markdown."""
    rule = ["---", *["---:"] * (len(headings) - 1)]
    return "\n".join(f"| {' | '.join(line)} |" for line in (headings, rule, *rows))


def markdown(keys: Iterable[str], rows: Sequence[Row]) -> str:
    """`console_table` as Markdown."""
    keys = filled(keys, rows)
    return markdown_table([COLUMNS[key].label for key in keys], [[cell(row, key) for key in keys] for row in rows])


@dataclass(frozen=True)
class Table:
    """A table of a page; columns that are empty in every row are left out."""

    keys: Sequence[str]  # of `COLUMNS`
    rows: Sequence[Row]
    title: str = ""
    folded: bool = False  # hide it below its title until that is clicked
    note: str = ""  # line below it


@dataclass(frozen=True)
class Sample:
    """A generated text: tokens ``{text, who}`` with `who` a key of `WRITERS`, and a caption."""

    tokens: Sequence[Mapping[str, str]]
    caption: str


@dataclass(frozen=True)
class Section:
    """A part of a page; its parts are shown in the order of the fields."""

    heading: str = ""
    text: str = ""
    facts: Mapping[str, Any] = field(default_factory=dict)  # only values that are `present`
    tables: Sequence[Table] = ()
    figures: Sequence[Figure] = ()
    samples: Sequence[Sample] = ()
    code: Mapping[str, str] = field(default_factory=dict)  # preformatted texts by their captions
    cards: Sequence[tuple[str, str]] = ()  # values in large type, with what they are: shown above the text
    folded: bool = False  # hide all of it below its heading until that is clicked


def write_page(path: Path, title: str, headline: str, sections: Sequence[Section]) -> None:
    """Write a page; an existing file is replaced only by a complete one.

    Args:
        path: of the file.
        title: heading of the page and of its window.
        headline: the answer in a sentence.
        sections: in order.
    """
    loader = FileSystemLoader(Path(__file__).parent)
    templates = Environment(
        loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    templates.filters |= {
        "code": lambda text: Markup(re.sub(r"`([^`]+)`", r"<code>\1</code>", str(escape(text)))),
        "visible": lambda token: Markup(str(escape(token)).replace("\n", '<i class="newline">⏎</i>\n')),
    }
    templates.globals |= {"cell": cell, "columns": COLUMNS, "filled": filled, "present": present, "writers": WRITERS}
    page = templates.get_template("html_page.html").render(title=title, headline=headline, sections=sections)
    write_text(path, page.lstrip())
