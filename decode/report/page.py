"""Builds one self-contained HTML page: no fonts, no network; light and dark, wide and narrow.

A page is a list of parts. All text is escaped; only `Page.figure` (an SVG made by `decode.report.plots`) and `Page.add` take
markup. A page runs no script, unless it is given one of its own.
"""  # noqa: E501

from __future__ import annotations

import html
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from decode.core.files import write_text
from decode.report.markup import (
    LOSSLESS,
    RELAXED,
    Badge,
    Column,
    Tone,
    cell_text,
    formulas,
    is_number,
    present,
    text,
    unique_ids,
    visible,
)
from decode.report.style import CSS

__all__ = ["LOSSLESS", "RELAXED", "Badge", "Column", "Page", "Tile", "Tone", "token_spans", "unique_ids"]


@dataclass(frozen=True)
class Tile:
    """A key figure: label above, value large, note below."""

    label: str
    value: str
    note: str = ""
    tone: Tone = "plain"


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
        style: style sheet after the common one.
        script: run when the page is there; the page has to make sense without it.
    """

    title: str
    lead: str = ""
    kicker: str = ""
    parts: list[str] = field(default_factory=list)
    figures: int = 0
    style: str = ""
    script: str = ""

    def tiles(self, tiles: Iterable[Tile]) -> Page:
        """Key figures in a row."""
        cells = "".join(
            f'<div class="tile {tile.tone}"><dt>{text(tile.label)}</dt>'
            f"<dd><b>{text(tile.value)}</b><small>{text(tile.note)}</small></dd></div>"
            for tile in tiles
        )
        return self.add(f'<dl class="tiles">{cells}</dl>')

    def section(self, heading: str, lead: str = "") -> Page:
        """A heading with an optional explanation."""
        anchor = re.sub(r"[^a-z0-9]+", "-", heading.lower()).strip("-")
        return self.add(f'<h2 id="{anchor}">{text(heading)}</h2>' + (f"<p>{text(lead)}</p>" if lead else ""))

    def paragraph(self, content: str) -> Page:
        """A paragraph."""
        return self.add(f"<p>{text(content)}</p>")

    def note(self, content: str, tone: Tone = "plain") -> Page:
        """A boxed remark."""
        return self.add(f'<p class="note {tone}">{text(content)}</p>')

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
        columns = [c for c in columns if any(present(row.get(c.key)) for row in rows)]
        best = {c.key: _best(c, rows) for c in columns}
        numeric = {
            c.key: c.numeric or all(is_number(v) for row in rows if present(v := row.get(c.key))) for c in columns
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
            f"<tbody>{body}</tbody></table></div>" + (formulas(columns) if legend else "")
        )
        return self.add(f"<details><summary>{text(folded)}</summary>{table}</details>" if folded else table)

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
        return self.add(f'<div class="gallery">{"".join(cells)}</div>') if cells else self

    def tokens(self, tokens: Iterable[Mapping[str, str]], caption: str = "", legend: bool = True) -> Page:
        """A generated text with a mark on each token that says who wrote it.

        Args:
            tokens: `{text, who}`, with `who` a key of `WRITERS`.
            caption: heading, such as the name of the prompt.
            legend: whether to explain the marks that occur.
        """
        tokens = list(tokens)
        title = f"<figcaption>{text(caption)}</figcaption>" if caption else ""
        key = writers_key(_writer(token) for token in tokens) if legend else ""
        return self.add(f'<figure class="text">{title}<pre>{token_spans(tokens)}</pre>{key}</figure>')

    def code(self, content: str, caption: str = "") -> Page:
        """Text to paste."""
        title = f"<figcaption>{text(caption)}</figcaption>" if caption else ""
        return self.add(f'<figure class="code">{title}<pre><code>{text(content)}</code></pre></figure>')

    def facts(self, facts: Mapping[str, Any]) -> Page:
        """Names and values in a compact list (provenance)."""
        rows = "".join(
            f"<dt>{text(name)}</dt><dd>{text(value)}</dd>" for name, value in facts.items() if present(value)
        )
        return self.add(f'<dl class="facts">{rows}</dl>')

    def details(self, summary: str, content: str) -> Page:
        """Preformatted text that opens on a click."""
        return self.add(f"<details><summary>{text(summary)}</summary><pre>{text(content)}</pre></details>")

    def html(self) -> str:
        """The whole document."""
        kicker = f'<p class="kicker">{text(self.kicker)}</p>' if self.kicker else ""
        lead = f'<p class="lead">{text(self.lead)}</p>' if self.lead else ""
        return (
            '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
            '<meta name="viewport" content="width=device-width, initial-scale=1">'
            f'<meta name="color-scheme" content="light dark"><title>{text(self.title)}</title>'
            f"<style>{CSS}{self.style}</style></head>\n<body><main>\n"
            f"<header>{kicker}<h1>{text(self.title)}</h1>{lead}</header>\n"
            + "\n".join(self.parts)
            + "\n</main>"
            + (f"<script>{self.script}</script>" if self.script else "")
            + "</body></html>\n"
        )

    def write(self, path: str | Path) -> None:
        """Writes the page; an existing file is replaced only by a complete one."""
        write_text(path, self.html())

    def add(self, part: str) -> Page:
        """A part that is markup already; whoever made it has escaped all text."""
        self.parts.append(part)
        return self


def _best(column: Column, rows: Sequence[Mapping[str, Any]]) -> Any:
    values = [row.get(column.key) for row in rows]
    numbers: list[float] = [v for v in values if v is not None and is_number(v) and present(v)]
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
    return f"<td{attribute}>{cell_text(column, value)}</td>"


def _writer(token: Mapping[str, str]) -> str:
    return who if (who := token.get("who", "target")) in WRITERS else "target"


def token_spans(tokens: Iterable[Mapping[str, str]], titles: bool = True) -> str:
    """Tokens as marked spans; the title that says who wrote each of them costs most of the bytes."""

    def span(token: Mapping[str, str]) -> str:
        who = _writer(token)
        title = f' title="{text(WRITERS[who])}"' if titles else ""
        return f'<span class="w-{who}"{title}>{visible(token["text"])}</span>'

    return "".join(map(span, tokens))


def writers_key(used: Iterable[str]) -> str:
    """What the marks of these writers mean."""
    found = set(used) - {"prompt"}
    keys = "".join(f'<span class="w-{who}">{text(told)}</span> ' for who, told in WRITERS.items() if who in found)
    return f'<p class="key">{keys}</p>'
