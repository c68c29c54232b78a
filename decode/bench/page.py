"""A report page as data: a title, a headline and blocks in order; `html_page.html` renders them into one file.

The page loads nothing from elsewhere, follows the reader's light or dark scheme, and needs no script to be read. The
template escapes all text (pairs of backticks become code); only `Figures` hold markup, the SVG of `plots`.
"""

import csv
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any, Literal, TypeGuard

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape

from decode.errors import write_text
from decode.trace import FORMULAS

Row = Mapping[str, Any]
Tone = Literal["plain", "good", "warn", "bad"]

WRITERS = {
    "accepted": "drafted and accepted",
    "corrected": "corrected by the target",
    "bonus": "added by the target after a whole accepted draft",
    "rejected": "drafted and rejected",
    "target": "written by the target alone",
    "prompt": "prompt",
}
"""Who wrote a token: the class of its mark, and what the legend says."""


@dataclass(frozen=True)
class Badge:
    """A small label in a table cell, such as lossless or relaxed."""

    text: str
    tone: Tone = "plain"


LOSSLESS, RELAXED = Badge("lossless", "good"), Badge("relaxed", "warn")


@dataclass(frozen=True)
class Column:
    """A table column."""

    key: str  # key of the row
    label: str  # heading
    formula: str = ""  # definition, shown as a tooltip of the heading and in the list below the table
    format: str | Callable[[Any], str] = ""  # format specification (`.2f`) or function for values that are not None
    best: Literal["max", "min"] | None = None  # mark the largest or the smallest value of the column
    error: str = ""  # key of the value's standard error, or of its interval ``[low, high]``, shown beside it
    numeric: bool = False  # align to the right even if the values are text
    bar: bool = False  # draw a bar under the value, as long as its share of the largest

    def text(self, row: Row) -> str:
        """The row's value as it is shown; a dash where there is none."""
        value = row.get(self.key)
        if not present(value):
            return "–"
        if callable(self.format):
            return self.format(value)
        if isinstance(value, bool):
            return "yes" if value else "no"
        return format(value, self.format) if finite(value) else str(getattr(value, "text", value))

    def error_text(self, row: Row) -> str:
        """The standard error or the interval as it is shown; empty where there is none."""
        error = row.get(self.error) if self.error and present(row.get(self.key)) else None
        if isinstance(error, Sequence):
            return f"{error[0]:{self.format}}–{error[1]:{self.format}}" if all(map(finite, error)) else ""
        unsigned = str(self.format).removeprefix("+")
        return f"± {error:{unsigned}}" if finite(error) else ""


def read_columns(path: Path) -> dict[str, tuple[Column, ...]]:
    """The columns of a CSV file by their table; in a formula, ``{alpha}`` stands for its definition in `FORMULAS`."""
    found: dict[str, tuple[Column, ...]] = {}
    with path.open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            table, formula, best = row.pop("table"), row.pop("formula").format_map(FORMULAS), row.pop("best") or None
            flags = {name: bool(row.pop(name)) for name in ("numeric", "bar")}
            found[table] = (*found.get(table, ()), Column(**row, formula=formula, best=best, **flags))  # type: ignore
    return found


@dataclass(frozen=True)
class Tile:
    """A key figure: label above, value large, note below; ``tags`` as those of a block."""

    label: str
    value: str
    note: str = ""
    tone: Tone = "plain"
    tags: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Block:
    """Something that a page shows.

    Args:
        tags: values by which the filters of a page show or hide the block.
    """

    folded: str = ""  # if given, the block hides behind this line until it is clicked
    tags: Mapping[str, str] = field(default_factory=dict)

    @property
    def kind(self) -> str:
        """The macro of the template that shows it."""
        return type(self).__name__.lower()


@dataclass(frozen=True)
class Heading(Block):
    """A heading with an optional explanation; ``level`` 2 or 3."""

    text: str
    lead: str = ""
    level: int = 2


@dataclass(frozen=True)
class Text(Block):
    """A paragraph; boxed and coloured if it has a tone."""

    text: str
    tone: Tone | None = None


@dataclass(frozen=True)
class Tiles(Block):
    """Key figures in a row."""

    tiles: Sequence[Tile]


@dataclass(frozen=True)
class Group:
    """Rows of a table below a heading of their own, with a note and links (label to address)."""

    rows: Sequence[Row]
    heading: str = ""
    note: str = ""
    links: Mapping[str, str] = field(default_factory=dict)
    tags: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Table(Block):
    """A table; columns that are empty in every row are left out."""

    columns: Sequence[Column]  # what to show, in order
    rows: Sequence[Row | Group]  # values by column key, or groups of them
    caption: str = ""  # line above the table
    legend: bool = True  # list the formulas below
    name: str = ""  # class of the table; `all-runs` can be sorted by clicking a heading

    @property
    def groups(self) -> list[Group]:
        """The rows as groups."""
        flat = [row for row in self.rows if not isinstance(row, Group)]
        return ([Group(flat)] if flat else []) + [row for row in self.rows if isinstance(row, Group)]

    @property
    def shown(self) -> list[tuple[Column, bool]]:
        """The columns that hold anything, and whether their values are numbers."""
        rows = [row for group in self.groups for row in group.rows]
        values = {c: [v for row in rows if present(v := row.get(c.key))] for c in self.columns}
        return [(c, c.numeric or all(map(finite, found))) for c, found in values.items() if found]

    def cells(self) -> Iterable[tuple[Group, list[list[dict[str, Any]]]]]:
        """Each group with its rows of cells, ready to be shown; the best value is that of its group."""
        longest = {
            c.key: max(_numbers(c, (row for g in self.groups for row in g.rows)), default=0) for c in self.columns
        }
        for group in self.groups:
            best = {c.key: _best(c, group.rows) for c in self.columns}
            yield group, [[_cell(c, n, row, best[c.key], longest[c.key]) for c, n in self.shown] for row in group.rows]


@dataclass(frozen=True)
class Figures(Block):
    """Figures (SVG, caption) side by side where there is room."""

    figures: Sequence[tuple[str, str]]


@dataclass(frozen=True)
class Sample:
    """A generated text: tokens ``{text, who}`` with `who` a key of `WRITERS`, and a caption."""

    tokens: Sequence[Mapping[str, str]]
    caption: str = ""


@dataclass(frozen=True)
class Samples(Block):
    """Generated texts side by side, with a mark on each token that says who wrote it."""

    samples: Sequence[Sample]

    @property
    def writers(self) -> dict[str, str]:
        """The marks that occur, with their meanings."""
        found = {_writer(token) for sample in self.samples for token in sample.tokens} - {"prompt"}
        return {who: meaning for who, meaning in WRITERS.items() if who in found}


@dataclass(frozen=True)
class Code(Block):
    """Text to paste, or preformatted text to look at."""

    text: str
    caption: str = ""


@dataclass(frozen=True)
class Facts(Block):
    """Names and values in a compact list (provenance)."""

    facts: Mapping[str, Any]


@dataclass
class Page:
    """A page.

    Args:
        filters: names of tags to their values and what these are called; with them the page has a filter and a script.
    """

    title: str  # heading and window title
    headline: str  # the sentence that gives the answer
    kicker: str  # short line above the title (project, kind of report)
    blocks: Sequence[Block]  # what follows, in order
    filters: Mapping[str, Mapping[str, str]] = field(default_factory=dict)

    def html(self) -> str:
        """The whole document."""
        return _templates().get_template("html_page.html").render(page=self, figure_number=count()).lstrip()

    def write(self, path: str | Path) -> None:
        """Write the page; an existing file is replaced only by a complete one."""
        write_text(path, self.html())


def finite(value: Any) -> TypeGuard[float]:
    """Whether a value is a number that can be drawn; truth values are not."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def present(value: Any) -> bool:
    """Whether there is something to show: neither None nor an empty text nor a number that is not finite."""
    return value not in (None, "") and (not isinstance(value, float) or finite(value))


@cache
def _templates() -> Environment:
    loader = FileSystemLoader(Path(__file__).parent)
    environment = Environment(
        loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= {
        "code": lambda text: Markup(re.sub(r"`([^`]+)`", r"<code>\1</code>", str(escape(text)))),
        "own_ids": _own_ids, "next": next, "present": present, "visible": _visible, "writer": _writer,
    }  # fmt: skip
    return environment


def _own_ids(svg: str, number: int) -> Markup:
    """An SVG whose ids, and references to them, differ from those of the page's other figures."""
    return Markup(re.sub(r'( id="|url\(#|href="#)', rf"\g<1>f{number}-", svg))


def _visible(token: str) -> Markup:
    """A token's text; a line end gets a mark, so that a token that is one can be seen."""
    return Markup(str(escape(token)).replace("\n", '<i class="newline">⏎</i>\n'))


def _writer(token: Mapping[str, str]) -> str:
    return who if (who := token.get("who", "target")) in WRITERS else "target"


def _numbers(column: Column, rows: Iterable[Row]) -> list[float]:
    return [value for row in rows if finite(value := row.get(column.key))]


def _best(column: Column, rows: Sequence[Row]) -> float | None:
    numbers = _numbers(column, rows)
    if column.best is None or len(set(numbers)) < 2:
        return None
    best = max(numbers) if column.best == "max" else min(numbers)
    return best if 2 * numbers.count(best) <= len(numbers) else None  # a mark on most rows marks nothing


def _cell(column: Column, numeric: bool, row: Row, best: float | None, longest: float) -> dict[str, Any]:
    value = row.get(column.key)
    return {
        "text": column.text(row),
        "error": column.error_text(row),
        "tone": getattr(value, "tone", None),
        "classes": " ".join(["num"] * numeric + ["best"] * (best is not None and value == best)),
        "bar": 100 * value / longest if column.bar and longest > 0 and finite(value) else 0.0,
    }
