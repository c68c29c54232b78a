"""The table of the page of all runs: one group a comparison, bars on one scale, and the filter over it."""

from __future__ import annotations

import html
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from decode.measure.statistics import differing
from decode.report.figures import speed
from decode.report.markup import Badge, Column, cell_text, formulas, present, text
from decode.report.read_runs import Comparison
from decode.report.tables import COLUMNS

Row = Mapping[str, Any]

KNOWN = {column.key: column for column in COLUMNS}
OUTPUT = Column(
    "output",
    "output",
    "identical: token for token the target's greedy text; lossless: sampled by an exact rule; relaxed: not the "
    "target's distribution",
)
BAR = Column("speedup", "speedup", KNOWN["speedup"].formula + "; beside it the 95 % bootstrap interval", ".2f")
NUMBERS = (
    "predicted_speedup", "alpha", "block_efficiency", "tv_spent", "accuracy", "speedup_vs_generate",
    "tokens_per_second", "draft_length",
)  # fmt: skip
"""Columns after the speedup, in order."""
ERRORS = {"alpha": "alpha_se", "accuracy": "accuracy_se"}
"""Columns that show a standard error beside the value."""


def fastest(rows: Sequence[Row], lossless: bool) -> Row | None:
    """The fastest method that does more than decode token by token; a lossless one whose texts differ is not named."""
    wrong = differing(rows)
    if lossless and any(r["method"] == "autoregressive" and r["name"] in wrong for r in rows):
        return None
    rows = [r for r in rows if r["name"] not in wrong]
    found = [r for r in rows if bool(r["lossless"]) is lossless and r["method"] not in ("autoregressive", "generate")]
    return max((r for r in found if r.get("speedup")), key=speed, default=None)


def interval(row: Row) -> str:
    """The ends of the speedup's interval, in words."""
    ends = row.get("speedup_ci95") if row["method"] != "autoregressive" else None  # its ratio to itself
    return f"{ends[0]:.2f}–{ends[1]:.2f}" if ends and None not in ends else ""


def tags(c: Comparison) -> str:
    """The attributes that the filter reads."""
    tags = {"run": c.run, "suite": c.suite, "temperature": f"{c.temperature:g}"}
    return "".join(f' data-{key}="{html.escape(value)}"' for key, value in tags.items())


def filters(comparisons: Sequence[Comparison]) -> str:
    """The form; the script shows it."""
    temperatures = {f"{c.temperature:g}": c.mode for c in sorted(comparisons, key=lambda c: c.temperature)}
    runs = {c.run: f"{c.run} ({c.date[:10]})" for c in comparisons}
    choices = {
        "suite": {c.suite: c.suite for c in comparisons},
        "temperature": temperatures,
        "run": runs,
    }
    selects = "".join(
        f'<label>{name}<select name="{name}"><option value="">all</option>'
        + "".join(f'<option value="{html.escape(v)}">{html.escape(told)}</option>' for v, told in options.items())
        + "</select></label>"
        for name, options in choices.items()
    )
    return (
        f'<form class="filters" aria-label="Filter" hidden>{selects}'
        '<label>method<input type="search" name="words" placeholder="such as ears" autocomplete="off"></label>'
        '<label class="tick"><input type="checkbox" name="lossless" value="1">lossless only</label>'
        '<button type="reset">show all</button><output></output></form>'
    )


def part(heading: str, content: str, kind: str = "") -> str:
    """A part that hides when the filter leaves nothing of it."""
    title = f"<h2>{text(heading)}</h2>" if heading else ""
    return f'<section class="part {kind}">{title}{content}</section>' if content else ""


def methods(comparisons: Sequence[Comparison], folder: Path) -> str:
    """The part with the table; links are relative to `folder`."""
    rows = [row for c in comparisons for row in c.rows]
    columns = [KNOWN[key] for key in NUMBERS if any(present(row.get(key)) for row in rows)]
    top = 1.04 * max([1.0, *(max([speed(row), *(row.get("speedup_ci95") or [0])[-1:]]) for row in rows)])
    steps = range(0, int(top) + 1, max(1, math.ceil(top / 4)))
    axis = "".join(
        f'<span style="left:calc({tick}/var(--max)*100%)">{tick}{"×" if tick else ""}</span>' for tick in steps
    )
    heads = [
        _head(KNOWN["name"], first="ascending"),
        f'<th scope="col" aria-label="bar"><span class="axis">{axis}</span></th>',
    ]
    heads += [_head(BAR, "num"), _head(OUTPUT, first="ascending"), *(_head(column, "num") for column in columns)]
    bodies = "".join(_body(c, columns, folder) for c in comparisons)
    key = (
        '<li><span class="bar"><i></i></span>lossless</li><li><span class="bar relaxed"><i></i></span>relaxed</li>'
        '<li><span class="bar peer"><i></i></span>transformers\' own</li><li><span class="bar"><u></u></span>95 % '
        'interval</li><li><span class="bar"><s></s></span>predicted</li>'
        '<li><span class="bar"><q></q></span>no draft</li>'
    )
    table = (
        f'<ul class="barkey">{key}</ul>'
        '<div class="scroll" tabindex="0" role="region" aria-label="Methods side by side">'
        f'<table class="methods" style="--max:{top:.3f}"><thead><tr>{"".join(heads)}</tr></thead>{bodies}</table></div>'
    )
    return part("Methods side by side", table + formulas([BAR, OUTPUT, *columns]))


def _head(column: Column, kind: str = "", first: str = "") -> str:
    title = f' title="{html.escape(column.formula)}"' if column.formula else ""
    order = f' data-first="{first}"' if first else ""
    return f'<th scope="col"{f" class={kind}" if kind else ""}{title}{order}>{text(column.label)}</th>'


def _body(c: Comparison, columns: Sequence[Column], folder: Path) -> str:
    """One comparison: its heading, and its methods from the fastest to the slowest."""
    rows = sorted(c.rows, key=speed, reverse=True)
    prompts = max((row.get("prompts") or 0 for row in rows), default=0)
    facts = [f"{prompts} prompts × {rows[0].get('repeats') or 1}" if prompts else "", c.machine, c.date, c.note]
    told = text(" · ".join(filter(None, facts)))
    name = text(c.run)
    if c.page is not None:
        name = f'<a href="{quote(Path(os.path.relpath(c.page, folder)).as_posix())}">{name}</a>'
    heading = (
        f'<tr><th class="group" colspan="{len(columns) + 4}" scope="rowgroup"><div>'
        f"<b>{text(c.suite)}, {text(c.mode)}</b> · {name} <small>({c.part}) {told}</small></div></th></tr>"
    )
    best = fastest(rows, True)
    return f"<tbody{tags(c)}>{heading}{''.join(_row(row, columns, row is best) for row in rows)}</tbody>"


def _row(row: Row, columns: Sequence[Column], best: bool) -> str:
    kind = "peer" if row["peer"] else "" if row["lossless"] else "relaxed"
    note = f"<br><small>{text(row['note'])}</small>" if row.get("note") else ""
    cells = [f"<td>{text(row['name'])}{note}</td>", f"<td{_sorted(row.get('speedup'))}>{_bar(row, kind)}</td>"]
    ends = f" <small>{interval(row)}</small>" if interval(row) else ""
    cells.append(f'<td class="num"{_sorted(row.get("speedup"))}>{cell_text(BAR, row.get("speedup"))}{ends}</td>')
    cells.append(f"<td>{cell_text(OUTPUT, _output(row))}</td>")
    for column in columns:
        value, error = row.get(column.key), row.get(ERRORS.get(column.key, ""))
        beside = f" <small>± {error:.3f}</small>" if present(value) and present(error) else ""
        cells.append(f'<td class="num"{_sorted(value)}>{cell_text(column, value)}{beside}</td>')
    exact = ' data-lossless="1"' if row["lossless"] else ""
    marked = ' class="best"' if best else ""
    return f'<tr{marked} data-name="{html.escape(str(row["name"]).lower())}"{exact}>{"".join(cells)}</tr>'


def _sorted(value: Any) -> str:
    return f' data-v="{value:.6g}"' if present(value) else ' data-v=""'


def _bar(row: Row, kind: str) -> str:
    if not row.get("speedup"):
        return ""
    told, style, marks = f"{row['speedup']:.2f} times", f"--v:{row['speedup']:.3f}", "<q></q><i></i>"
    ends = row.get("speedup_ci95")
    if ends and None not in ends and ends[1] > ends[0]:
        told += f", 95 % interval {interval(row)}"
        style += f";--lo:{ends[0]:.3f};--hi:{ends[1]:.3f}"
        marks += "<u></u>"
    if row.get("predicted_speedup") and row["method"] != "autoregressive":
        told += f", predicted {row['predicted_speedup']:.2f}"
        style += f";--p:{row['predicted_speedup']:.3f}"
        marks += "<s></s>"
    return f'<span class="bar {kind}" role="img" aria-label="{told}" style="{style}">{marks}</span>'


def _output(row: Row) -> Badge:
    same = row.get("identical_to_target")
    if not row["lossless"]:
        return Badge("relaxed", "warn")
    if same is None:
        return Badge("lossless", "good")
    return Badge("identical", "good") if same else Badge("differs", "bad")
