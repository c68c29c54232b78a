"""Builds one self-contained HTML page: no scripts, no fonts, no network; light and dark, wide and narrow.

A page is a list of parts. All text is escaped; only `Page.figure` takes markup (an SVG made by `decode.plots`).
"""

from __future__ import annotations

import html
import math
import os
import re
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from decode.style import CSS

Tone = Literal["plain", "good", "warn", "bad"]


@dataclass(frozen=True)
class Badge:
    """A small label in a table cell or tile, such as lossless or relaxed."""

    text: str
    tone: Tone = "plain"


@dataclass(frozen=True)
class Tile:
    """A key figure: label above, value large, note below."""

    label: str
    value: str
    note: str = ""
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

# Who wrote a token: class of the span and its line in the legend.
WRITERS = {
    "accepted": "drafted and accepted",
    "corrected": "corrected by the target",
    "bonus": "added by the target after a whole accepted draft",
    "rejected": "drafted and rejected",
    "target": "written by the target alone",
    "prompt": "prompt",
}


@dataclass
class Page:
    """A page under construction; every method adds a part and returns the page.

    Args:
        title: heading and window title.
        lead: the sentence that gives the answer.
        kicker: short line above the title (project, kind of report).
    """

    title: str
    lead: str = ""
    kicker: str = ""
    parts: list[str] = field(default_factory=list)
    figures: int = 0

    def tiles(self, tiles: Iterable[Tile]) -> Page:
        """Key figures in a row."""
        cells = "".join(
            f'<div class="tile {tile.tone}"><dt>{text(tile.label)}</dt>'
            f"<dd><b>{text(tile.value)}</b><small>{text(tile.note)}</small></dd></div>"
            for tile in tiles
        )
        return self._add(f'<dl class="tiles">{cells}</dl>')

    def section(self, heading: str, lead: str = "") -> Page:
        """A heading with an optional explanation."""
        anchor = re.sub(r"[^a-z0-9]+", "-", heading.lower()).strip("-")
        return self._add(f'<h2 id="{anchor}">{text(heading)}</h2>' + (f"<p>{text(lead)}</p>" if lead else ""))

    def paragraph(self, content: str) -> Page:
        """A paragraph."""
        return self._add(f"<p>{text(content)}</p>")

    def note(self, content: str, tone: Tone = "plain") -> Page:
        """A boxed remark."""
        return self._add(f'<p class="note {tone}">{text(content)}</p>')

    def table(
        self,
        columns: Sequence[Column],
        rows: Sequence[Mapping[str, Any]],
        caption: str = "",
        *,
        folded: str = "",
        legend: bool = True,
    ) -> Page:
        """A table; columns that are empty in every row are left out.

        Args:
            columns: what to show, in order.
            rows: values by column key.
            caption: line above the table.
            folded: if given, the table hides behind this line until it is clicked.
            legend: list the formulas below.
        """
        columns = [c for c in columns if any(_present(row.get(c.key)) for row in rows)]
        best = {c.key: _best(c, rows) for c in columns}
        numeric = {
            c.key: c.numeric or all(_is_number(v) for row in rows if _present(v := row.get(c.key))) for c in columns
        }
        head = "".join(_heading(column, numeric[column.key]) for column in columns)
        body = "".join(
            "<tr>" + "".join(_cell(c, row.get(c.key), numeric[c.key], best[c.key]) for c in columns) + "</tr>"
            for row in rows
        )
        title = f"<caption>{text(caption)}</caption>" if caption else ""
        short = ' class="short"' if len(columns) < 6 else ""
        table = (
            f'<div class="scroll"><table{short}>{title}<thead><tr>{head}</tr></thead>'
            f"<tbody>{body}</tbody></table></div>" + (_legend(columns) if legend else "")
        )
        return self._add(f"<details><summary>{text(folded)}</summary>{table}</details>" if folded else table)

    def figure(self, svg: str, caption: str = "") -> Page:
        """One figure; see `gallery`."""
        return self.gallery([(svg, caption)])

    def gallery(self, figures: Iterable[tuple[str, str]]) -> Page:
        """Figures (SVG markup, caption) side by side where there is room."""
        cells = []
        for svg, caption in figures:
            self.figures += 1
            label = f"<figcaption>{text(caption)}</figcaption>" if caption else ""
            cells.append(f"<figure>{unique_ids(svg, f'f{self.figures}-')}{label}</figure>")
        return self._add(f'<div class="gallery">{"".join(cells)}</div>') if cells else self

    def tokens(self, tokens: Iterable[Mapping[str, str]], caption: str = "", legend: bool = True) -> Page:
        """A generated text with a mark on each token that says who wrote it.

        Args:
            tokens: `{text, who}`, with `who` a key of `WRITERS`.
            caption: heading, such as the name of the prompt.
            legend: whether to explain the marks that occur.
        """
        tokens = list(tokens)
        spans = "".join(
            f'<span class="w-{_writer(token)}" title="{text(WRITERS[_writer(token)])}">{_visible(token["text"])}</span>'
            for token in tokens
        )
        used = [who for who in WRITERS if any(_writer(token) == who for token in tokens)]
        keys = "".join(f'<span class="w-{who}">{text(WRITERS[who])}</span> ' for who in used if who != "prompt")
        title = f"<figcaption>{text(caption)}</figcaption>" if caption else ""
        key = f'<p class="key">{keys}</p>' if legend else ""
        return self._add(f'<figure class="text">{title}<pre>{spans}</pre>{key}</figure>')

    def code(self, content: str, caption: str = "") -> Page:
        """Text to paste."""
        title = f"<figcaption>{text(caption)}</figcaption>" if caption else ""
        return self._add(f'<figure class="code">{title}<pre><code>{text(content)}</code></pre></figure>')

    def facts(self, facts: Mapping[str, Any]) -> Page:
        """Names and values in a compact list (provenance)."""
        rows = "".join(
            f"<dt>{text(name)}</dt><dd>{text(value)}</dd>" for name, value in facts.items() if _present(value)
        )
        return self._add(f'<dl class="facts">{rows}</dl>')

    def details(self, summary: str, content: str) -> Page:
        """Preformatted text that opens on a click."""
        return self._add(f"<details><summary>{text(summary)}</summary><pre>{text(content)}</pre></details>")

    def html(self) -> str:
        """The whole document."""
        kicker = f'<p class="kicker">{text(self.kicker)}</p>' if self.kicker else ""
        lead = f'<p class="lead">{text(self.lead)}</p>' if self.lead else ""
        return (
            '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
            '<meta name="viewport" content="width=device-width, initial-scale=1">'
            f'<meta name="color-scheme" content="light dark"><title>{text(self.title)}</title>'
            f"<style>{CSS}</style></head>\n<body><main>\n<header>{kicker}<h1>{text(self.title)}</h1>{lead}</header>\n"
            + "\n".join(self.parts)
            + "\n</main></body></html>\n"
        )

    def write(self, path: str | Path) -> None:
        """Writes the page; an existing file is replaced only by a complete one."""
        write_text(path, self.html())

    def _add(self, part: str) -> Page:
        self.parts.append(part)
        return self


def write_text(path: str | Path, content: str) -> None:
    """Writes a file through a temporary one in the same folder, so that it is never half there."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(content)
        os.chmod(name, 0o644)
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def text(value: Any) -> str:
    """Escapes text for HTML; pairs of backticks become code."""
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", html.escape(str(value)))


def unique_ids(svg: str, prefix: str) -> str:
    """Puts `prefix` before every id of an SVG and every reference to one; several share a page."""
    svg = re.sub(r'(\sid=")', rf"\1{prefix}", svg[max(0, svg.find("<svg")) :])
    svg = re.sub(r"url\(#", f"url(#{prefix}", svg)
    return re.sub(r'(href="#)', rf"\1{prefix}", svg)


def _present(value: Any) -> bool:
    return value is not None and not (isinstance(value, float) and math.isnan(value))


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _best(column: Column, rows: Sequence[Mapping[str, Any]]) -> Any:
    values = [row.get(column.key) for row in rows]
    numbers: list[float] = [v for v in values if v is not None and _is_number(v) and _present(v)]
    if column.best is None or len(set(numbers)) < 2:
        return None
    best = max(numbers) if column.best == "max" else min(numbers)
    return best if 2 * numbers.count(best) <= len(numbers) else None  # on most rows it would tell nothing


def _heading(column: Column, numeric: bool) -> str:
    title = f' title="{html.escape(column.formula)}"' if column.formula else ""
    return f'<th scope="col"{" class=num" if numeric else ""}{title}>{text(column.label)}</th>'


def _cell(column: Column, value: Any, numeric: bool, best: Any) -> str:
    classes = ["num"] if numeric else []
    if best is not None and value == best:
        classes.append("best")
    attribute = f' class="{" ".join(classes)}"' if classes else ""
    return f"<td{attribute}>{_shown(column, value)}</td>"


def _shown(column: Column, value: Any) -> str:
    if not _present(value):
        return '<span class="none">–</span>'
    if isinstance(value, Badge):
        return f'<span class="badge {value.tone}">{text(value.text)}</span>'
    if callable(column.format):
        return text(column.format(value))
    if isinstance(value, bool):
        return "yes" if value else "no"
    return text(format(value, column.format if _is_number(value) else ""))


def _legend(columns: Sequence[Column]) -> str:
    rows = "".join(f"<dt>{text(c.label)}</dt><dd>{text(c.formula)}</dd>" for c in columns if c.formula)
    return f'<dl class="legend">{rows}</dl>' if rows else ""


def _writer(token: Mapping[str, str]) -> str:
    return who if (who := token.get("who", "target")) in WRITERS else "target"


def _visible(token: str) -> str:
    """Line ends keep their effect and get a visible mark, so that a token that is one can be seen."""
    return html.escape(token).replace("\n", '<i class="nl">⏎</i>\n')
