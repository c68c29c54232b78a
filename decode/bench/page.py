"""A report page as data: a title, a headline and blocks in order; ``html_page.html`` renders them into one file.

The page loads nothing from elsewhere, follows the reader's light or dark scheme, and has no script. The template
escapes all text (pairs of backticks become code); only `Figures` hold markup, the SVG of `plots`.
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
"""Who wrote a token: the class of its mark, and its meaning in the legend."""


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
    formula: str = ""  # definition: the tooltip of the heading, and listed below the table
    format: str | Callable[[Any], str] = ""  # format specification (`.2f`) or function for values that are not None
    best: Literal["max", "min"] | None = None  # mark the largest or the smallest value of the column
    error: str = ""  # key of the value's standard error, or of its interval ``[low, high]``, shown beside it
    numeric: bool = False  # align to the right even if the values are text
    bar: bool = False  # draw a bar under the value, proportional to the largest

    def text(self, row: Row) -> str:
        """The row's value as text; a dash if there is none."""
        value = row.get(self.key)
        if not present(value):
            return "–"
        if callable(self.format):
            return self.format(value)
        if isinstance(value, bool):
            return "yes" if value else "no"
        return format(value, self.format) if finite(value) else str(getattr(value, "text", value))

    def error_text(self, row: Row) -> str:
        """The standard error or the interval as text; empty if there is none."""
        error = row.get(self.error) if self.error and present(row.get(self.key)) else None
        if isinstance(error, Sequence):
            return f"{error[0]:{self.format}}–{error[1]:{self.format}}" if all(map(finite, error)) else ""
        return f"± {error:{str(self.format).removeprefix('+')}}" if finite(error) else ""


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
    """A key figure: label above, value large, note below."""

    label: str
    value: str
    note: str = ""
    tone: Tone = "plain"


@dataclass(frozen=True, kw_only=True)
class Block:
    """Something that a page shows; ``folded`` hides it below this line until it is clicked."""

    folded: str = ""

    @property
    def kind(self) -> str:
        """Name of the block in the template."""
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
    """Rows of a table below a heading of their own."""

    rows: Sequence[Row]
    heading: str = ""
    note: str = ""


@dataclass(frozen=True)
class Table(Block):
    """A table; columns that are empty in every row are left out."""

    columns: Sequence[Column]
    rows: Sequence[Row | Group]  # values by column key, or groups of them
    caption: str = ""  # line above the table
    legend: bool = True  # list the formulas below

    @property
    def groups(self) -> list[Group]:
        """The rows as groups."""
        flat = [row for row in self.rows if not isinstance(row, Group)]
        return ([Group(flat)] if flat else []) + [row for row in self.rows if isinstance(row, Group)]

    @property
    def shown(self) -> list[tuple[Column, bool]]:
        """The columns that have values, and whether these are numbers."""
        rows = [row for group in self.groups for row in group.rows]
        values = {c: [v for row in rows if present(v := row.get(c.key))] for c in self.columns}
        return [(c, c.numeric or all(map(finite, found))) for c, found in values.items() if found]

    def cells(self) -> Iterable[tuple[Group, list[list[dict[str, Any]]]]]:
        """Each group with its rows of cells as the template shows them; the best value is that of its group."""

        def numbers(column: Column, rows: Iterable[Row]) -> list[float]:
            return [value for row in rows if finite(value := row.get(column.key))]

        every = [row for group in self.groups for row in group.rows]
        for group in self.groups:
            lines: list[list[dict[str, Any]]] = [[] for _ in group.rows]
            for column, numeric in self.shown:
                known, longest = numbers(column, group.rows), max(numbers(column, every), default=0)
                best = None
                if column.best is not None and len(set(known)) > 1:
                    best = max(known) if column.best == "max" else min(known)
                    if 2 * known.count(best) > len(known):
                        best = None  # a mark on most rows would mean nothing
                for line, row in zip(lines, group.rows):
                    value = row.get(column.key)
                    line.append(
                        {
                            "text": column.text(row),
                            "error": column.error_text(row),
                            "tone": getattr(value, "tone", None),
                            "classes": " ".join(["num"] * numeric + ["best"] * (best is not None and value == best)),
                            "bar": 100 * value / longest if column.bar and longest > 0 and finite(value) else 0.0,
                        }
                    )
            yield group, lines


@dataclass(frozen=True)
class Figures(Block):
    """Figures (SVG, caption) side by side if there is room."""

    figures: Sequence[tuple[str, str]]


@dataclass(frozen=True)
class Sample:
    """A generated text: tokens ``{text, who}`` with `who` a key of `WRITERS`, and a caption."""

    tokens: Sequence[Mapping[str, str]]
    caption: str = ""


@dataclass(frozen=True)
class Samples(Block):
    """Generated texts side by side; a mark on each token shows who wrote it."""

    samples: Sequence[Sample]

    @property
    def writers(self) -> dict[str, str]:
        """The marks that occur, with their meanings."""
        found = {_writer(token) for sample in self.samples for token in sample.tokens} - {"prompt"}
        return {who: meaning for who, meaning in WRITERS.items() if who in found}


@dataclass(frozen=True)
class Code(Block):
    """Preformatted text."""

    text: str
    caption: str = ""


@dataclass(frozen=True)
class Facts(Block):
    """Names and values in a compact list."""

    facts: Mapping[str, Any]


@dataclass
class Page:
    """A page."""

    title: str  # heading and window title
    headline: str  # the answer in one line
    kicker: str  # short line above the title (project, kind of report)
    blocks: Sequence[Block] = field(default_factory=list)

    def html(self) -> str:
        """The whole document."""
        return _templates().get_template("html_page.html").render(page=self, figure_number=count()).lstrip()

    def write(self, path: str | Path) -> None:
        """Write the page; an existing file is replaced only by a complete one."""
        write_text(path, self.html())


def finite(value: Any) -> TypeGuard[float]:
    """Whether a value is a finite number and not a truth value."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def present(value: Any) -> bool:
    """Whether a value is neither None nor an empty text nor a number that is not finite."""
    return value not in (None, "") and (not isinstance(value, float) or finite(value))


@cache
def _templates() -> Environment:
    loader = FileSystemLoader(Path(__file__).parent)
    environment = Environment(
        loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )

    def own_ids(svg: str, number: int) -> Markup:  # ids and references that differ from those of other figures
        return Markup(re.sub(r'( id="|url\(#|href="#)', rf"\g<1>f{number}-", svg))

    environment.filters |= {
        "code": lambda text: Markup(re.sub(r"`([^`]+)`", r"<code>\1</code>", str(escape(text)))),
        "own_ids": own_ids,
        "next": next,
        "present": present,
        "visible": lambda token: Markup(str(escape(token)).replace("\n", '<i class="newline">⏎</i>\n')),
        "writer": _writer,
    }
    return environment


def _writer(token: Mapping[str, str]) -> str:
    return who if (who := token.get("who", "target")) in WRITERS else "target"
