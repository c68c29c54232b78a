"""The results of a configuration: a report of ``bench`` (or of ``distill``) read row by row, and tables of them."""

from __future__ import annotations

import csv
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from decode.measure.costs.cost_model import CostModel
from decode.report.bench_tables import markdown_table, mode

Row = Mapping[str, Any]
Block = tuple[str, float]  # a suite and a temperature


def published(name: str) -> list[dict[str, str]]:
    """Rows of ``NAME.csv``, the numbers that a paper printed; what it left empty is a dash."""
    with (Path(__file__).parent / "published" / f"{name}.csv").open(newline="", encoding="utf-8") as file:
        return [{key: value or "–" for key, value in row.items()} for row in csv.DictReader(file)]


@dataclass
class PaperTable:
    """A table in the paper's layout."""

    title: str
    columns: Sequence[str]
    rows: list[list[str]] = field(default_factory=list)
    note: str = ""

    def markdown(self) -> str:
        """As GitHub shows it."""
        note = f"\n\n{self.note}" if self.note else ""
        return f"**{self.title}**\n\n{markdown_table(self.columns, self.rows)}{note}"


@dataclass(frozen=True)
class Result:
    """A method in one suite at one temperature."""

    row: Row
    prompts: Sequence[Row]
    extra: Row
    cost: CostModel | None

    @property
    def name(self) -> str:
        """As in the bench's table."""
        return str(self.row["name"])


class Results:
    """The report of one configuration (`decode.report.bench_report.write_report`, or a report of ``distill``)."""

    def __init__(self, report: Row, alone: Results | None = None, stores: Mapping[str, int] | None = None) -> None:
        self.report = report  # the whole report
        self.alone = alone  # the draft's own results, where they were measured
        self.stores = dict(stores or {})  # bytes of the files that retrieval drafts from, by name
        self.rows: list[Row] = report.get("methods") or []

    @property
    def blocks(self) -> list[Block]:
        """Suites and temperatures, in order."""
        return list(dict.fromkeys((row["suite"], row["temperature"]) for row in self.rows))

    def find(self, name: str, block: Block) -> Result | None:
        """The first row whose name is this one, or begins with it and an option; None if it was not measured."""
        named = [row for row in self.rows if (row["suite"], row["temperature"]) == block and row.get("prompts")]
        exact = [row for row in named if row["name"] == name]
        row = next(iter(exact or [row for row in named if str(row["name"]).startswith(f"{name} ")]), None)
        if row is None:
            return None
        bench = self.report["bench"]
        here = (row["name"], row["suite"], row["temperature"])
        extra: Row = next((d for d in bench["analysis"] if (d["name"], d["suite"], d["temperature"]) == here), {})
        return Result(row, extra.get("prompts") or [], extra, _cost(bench, row))

    def where(self, block: Block) -> str:
        """Suite, mode and size of the sample."""
        rows = [row for row in self.rows if (row["suite"], row["temperature"]) == block]
        return f"{block[0]}, {mode(block[1])}, {max(row['prompts'] for row in rows)} prompts × {rows[0]['repeats']}"

    @property
    def setting(self) -> str:
        """Models and machine in one line."""
        settings, machine = self.report["bench"]["settings"], self.report["machine"]
        sizes = list(self.report["bench"]["parameters"].values())
        parts = [f"target {settings['target']}{_millions(sizes[0])}"]
        parts += [f"draft {path}{_millions(size)}" for path, size in zip(settings["draft"], sizes[1:])]
        where = machine.get("accelerator") or f"{machine['cpu']}, {machine['threads']} threads"
        return f"ours: {', '.join(parts)}; {where}"


def _millions(count: float) -> str:
    return f" ({count / 1e6:.1f} M)"


def _cost(bench: Row, row: Row) -> CostModel | None:
    """The costs that the row's prediction was computed from."""
    blocks = (
        b["costs"] for b in bench.get("blocks", ()) if all(b[key] == row[key] for key in ("suite", "temperature"))
    )
    found = next(blocks, bench["costs"]).get(row.get("draft") or "")
    return CostModel.from_dict(found) if found else None


def number(value: Any, spec: str) -> str:
    """A number for a table; a dash where there is none."""
    return format(value, spec) if isinstance(value, int | float) and not math.isnan(value) else "–"
