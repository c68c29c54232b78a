"""Text and values as HTML: escaping, badges, table cells, and the ids of figures that share a page."""

from __future__ import annotations

import html
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

Tone = Literal["plain", "good", "warn", "bad"]


@dataclass(frozen=True)
class Badge:
    """A small label in a table cell or tile, such as lossless or relaxed."""

    text: str
    tone: Tone = "plain"


@dataclass(frozen=True)
class Column:
    """A table column.

    Args:
        key: key of the row.
        label: heading.
        formula: definition, shown as a tooltip of the heading and in the legend below the table.
        format: format specification (`.2f`) or function for values that are not None.
        best: mark the largest or the smallest value of the column.
        numeric: align to the right even if the values are text.
    """

    key: str
    label: str
    formula: str = ""
    format: str | Callable[[Any], str] = ""
    best: Literal["max", "min"] | None = None
    numeric: bool = False


LOSSLESS = Badge("lossless", "good")
RELAXED = Badge("relaxed", "warn")


def text(value: Any) -> str:
    """Escapes text for HTML; pairs of backticks become code."""
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", html.escape(str(value)))


def unique_ids(svg: str, prefix: str) -> str:
    """Puts `prefix` before every id of an SVG and every reference to one; several share a page."""
    svg = re.sub(r'(\sid=")', rf"\1{prefix}", svg[max(0, svg.find("<svg")) :])
    svg = re.sub(r"url\(#", f"url(#{prefix}", svg)
    return re.sub(r'(href="#)', rf"\1{prefix}", svg)


def present(value: Any) -> bool:
    """Whether there is something to show: neither None nor NaN."""
    return value is not None and not (isinstance(value, float) and math.isnan(value))


def is_number(value: Any) -> bool:
    """Whether a value is a number; truth values are not."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def cell_text(column: Column, value: Any) -> str:
    """A value as its column shows it; a dash where there is none."""
    if not present(value):
        return '<span class="none">–</span>'
    if isinstance(value, Badge):
        return f'<span class="badge {value.tone}">{text(value.text)}</span>'
    if callable(column.format):
        return text(column.format(value))
    if isinstance(value, bool):
        return "yes" if value else "no"
    return text(format(value, column.format if is_number(value) else ""))


def formulas(columns: Sequence[Column]) -> str:
    """The definitions of the columns that have one, as a list."""
    rows = "".join(f"<dt>{text(c.label)}</dt><dd>{text(c.formula)}</dd>" for c in columns if c.formula)
    return f'<dl class="legend">{rows}</dl>' if rows else ""


def visible(token: str) -> str:
    """Line ends keep their effect and get a visible mark, so that a token that is one can be seen."""
    return html.escape(token).replace("\n", '<i class="nl">⏎</i>\n')
