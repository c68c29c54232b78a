"""The report of ``bench --batch-sizes``: ``batches`` in report.json, and a page with speedup over batch size."""

import json
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from itertools import groupby
from pathlib import Path
from typing import Any

from rich.table import Table as Grid

from decode.core.files import read_json, write_text
from decode.measure import machine
from decode.measure.bench_session import Session
from decode.report import plots
from decode.report.page import Block, Facts, Figures, Heading, Page, Table, Text
from decode.report.tables import TABLES, by_block, console_table, mode, shown

Row = Mapping[str, Any]

COLUMNS = TABLES["batch"]
SHORT = [column for column in COLUMNS if column.key not in ("seconds_per_text", "alpha")]  # for a terminal
FAIRNESS = (
    "At batch size B a method decodes B texts at once; a finished text's place is taken by a waiting one. All methods "
    "decode the same prompts in turn, in an order that turns from repeat to repeat. transformers' generate gets "
    "batches of B, sorted by length. Intervals are 95 % bootstrap intervals over prompts and repeats. Time includes "
    "reading the prompts."
)


def write_batch_report(
    rows: Sequence[Row], session: Session, settings: Mapping[str, Any], folder: Path
) -> tuple[Path, Path]:
    """Write the rows into report.json, whose other keys stay, and the page batches.html."""
    path, page = folder / "report.json", folder / "batches.html"
    facts = machine.describe(session.runner.device) | {"note": "; ".join([session.threads, *session.packing])}
    created = datetime.now(UTC).isoformat(timespec="seconds")
    batches = {"created": created, "settings": dict(settings), "machine": facts, "rows": list(rows)}
    content = read_json(path) | {"batches": batches}
    write_text(path, json.dumps(content, indent=1, ensure_ascii=False) + "\n")
    batch_page(batches).write(page)
    return path, page


def batch_page(batches: Mapping[str, Any]) -> Page:
    """The page, from the key ``batches`` of report.json."""
    headline, *others = conclusions(batches["rows"]) or [""]
    blocks: list[Block] = [Text(line) for line in others]
    for (suite, temperature), rows in by_block(batches["rows"]).items():
        blocks += [
            Heading(f"{suite}, {mode(temperature)}"),
            Figures(
                [
                    (plots.speedup_by_batch(by_method(rows)), "Bars are 95 % intervals."),
                    (plots.throughput_by_batch(by_method(rows, baselines=True)), ""),
                ]
            ),
            *(
                Table(COLUMNS, some, f"batch size {size}", legend=size == rows[-1]["batch_size"])
                for size, some in by_size(rows)
            ),
        ]
    blocks += [
        Heading("How this was measured", FAIRNESS),
        Facts({"machine": machine.sentence(batches["machine"]), "threads": batches["machine"].get("note")}),
        Facts({name: value for name, value in batches["settings"].items() if value != []}),
    ]
    return Page("Decoding several texts at once", headline, "draftsmith bench", blocks)


def by_size(rows: Iterable[Row]) -> list[tuple[int, list[dict[str, Any]]]]:
    """The rows of one suite and temperature by batch size, as tables show them."""
    keys = ("ms_per_token", "ms_per_token_ci95")

    def made(row: Row) -> dict[str, Any]:
        middle, ends = row["seconds_per_token"], row["seconds_per_token_ci95"]
        values = (1e3 * middle, [1e3 * end for end in ends]) if middle is not None else (None, None)
        return shown({**row, **dict(zip(keys, values))})

    return [(size, [made(row) for row in some]) for size, some in groupby(rows, key=lambda row: row["batch_size"])]


def by_method(rows: Iterable[Row], *, baselines: bool = False) -> dict[str, list[Row]]:
    """The rows of one suite and temperature by method, those without a draft if asked for."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        if baselines or not (row["peer"] or row["method"] == "autoregressive"):
            found.setdefault(row["name"], []).append(row)
    return found


def batch_table(rows: Sequence[Row]) -> list[Grid]:
    """A table for a terminal for each suite, temperature and batch size."""
    return [
        console_table(f"{suite}, {mode(temperature)}, batch size {size}", SHORT, made)
        for (suite, temperature), some in by_block(rows).items()
        for size, made in by_size(some)
    ]


def conclusions(rows: Sequence[Row]) -> list[str]:
    """For each suite and temperature the fastest lossless method of every batch size, and where drafting loses."""
    lines = []
    for (suite, temperature), some in by_block(rows).items():
        parts, losing = [], None
        for size, of_size in by_size(some):
            drafting = [row for row in of_size if row["lossless"] and row["speedup"] and not row["peer"]]
            drafting = [row for row in drafting if row["method"] != "autoregressive"]
            if drafting:
                best = max(drafting, key=lambda row: row["speedup"])
                parts.append(f"{best['speedup']:.2f} × at batch {size} ({best['name']})")
                losing = None if best["speedup"] >= 1 else losing or size
        if parts:
            end = f"; drafting loses from batch {losing} on" if losing else ""
            lines.append(f"{suite}, {mode(temperature)}: " + ", ".join(parts) + end)
    return lines
