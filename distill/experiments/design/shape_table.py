"""What is known of each shape, as rows of tables and of design.json."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from rich.table import Table

from decode.bench.page import read_columns
from decode.bench.report import console_table
from distill.experiments.design.draft_shapes import Shape
from distill.experiments.design.predicted_speedup import Forecast
from distill.experiments.design.shape_costs import Price

Status = Literal["", "no training", "pruned", "out", "left", "not reached", "winner"]


@dataclass
class Entry:
    """A shape, and what is known of it."""

    shape: Shape  # which
    price: Price | None  # its costs; None: it cannot be run here
    needed: float | None = None  # acceptance rate from which it gains; None: even 1 is not enough
    at_ceiling: float | None = None  # speedup at the highest acceptance rate expected of any draft
    # acceptance rate from which it is faster than the best method known before training
    needed_for_best: float | None = None
    # no training; pruned before or between the rounds; out of the race after a round; left; the winner
    status: Status = ""
    reason: str = ""  # why it was pruned
    steps: int = 0  # of its longest training
    alpha: float | None = None  # acceptance after it, as first drafted token
    alpha_se: float | None = None  # its standard error over texts
    speedup: float | None = None  # predicted from it, with the best draft length
    length: int | None = None  # that draft length; of REST the mean size of its trees
    seconds: float = 0.0  # of the longest training
    step_seconds: float | None = None  # of a training step
    full: Forecast | None = None  # extrapolated to the full length of the run's training
    history: list[tuple[int, float, float]] = field(default_factory=list)  # (steps, α, speedup) of all its trainings

    def prune(self, reason: str) -> None:
        """Leave it out, and say why."""
        self.status, self.reason = "pruned", reason

    @property
    def forecast(self) -> float:
        """The speedup it is ranked by: after a full training, or as it is where nothing is trained."""
        if self.full is not None:
            return self.full.speedup
        return self.speedup or 0.0

    def row(self) -> dict[str, Any]:
        """As data, and as a row of the tables."""
        full = self.full
        known = {
            **self.shape.row(),
            "status": self.status,
            "reason": self.reason,
            "parameters": self.price.parameters or None if self.price else None,
            "c": self.price.c if self.price and self.price.cost.cost_ratio else None,
            "needed_alpha": self.needed,
            "needed_for_best": self.needed_for_best,
            "speedup_at_ceiling": self.at_ceiling,
            "steps": self.steps or None,
            "alpha": self.alpha,
            "alpha_se": self.alpha_se,
            "speedup": self.speedup,
            "draft_length": self.length,
            "seconds": self.seconds or None,
            "step_seconds": self.step_seconds,
            "history": [list(point) for point in self.history],
        }
        if full is not None:
            known |= {
                "full_alpha": full.alpha,
                "full_alpha_ci95": [full.low, full.high],
                "full_speedup": full.speedup,
                "full_speedup_ci95": [full.speedup_low, full.speedup_high],
                "full_draft_length": full.length,
            }
        return known


TABLES = read_columns(Path(__file__).with_name("columns.csv"))
COLUMNS = TABLES["shapes"]


def ranked(entries: Sequence[Entry]) -> list[Entry]:
    """The best first; what was pruned last."""
    order = {"winner": 0, "left": 1, "no training": 1, "out": 1, "": 1, "not reached": 1, "pruned": 2}
    return sorted(entries, key=lambda e: (order[e.status], -e.forecast, -(e.at_ceiling or 0.0)))


SHORT = {"status": "", "c": "c", "needed_alpha": "gains at α", "steps": "steps", "alpha": "α", "full_alpha": "in full",
         "full_speedup": "speedup", "full_draft_length": "k"}  # fmt: skip
"""Columns of the terminal's table, and what it calls them."""


def show(entries: Sequence[Entry], default: Shape) -> Table:
    """The shapes for a terminal; the speedup of what needs no training is its own."""
    rows = []
    for entry in ranked(entries):
        mark = " *" * (entry.shape == default)
        style = "bold green" if entry.status == "winner" else "dim" if entry.status == "pruned" else ""
        row = entry.row() | {"name": entry.shape.name + mark, "style": style}
        if not entry.shape.trained:
            row |= {"full_speedup": entry.speedup, "full_draft_length": entry.length}
        rows.append(row)
    by_key = {column.key: column for column in COLUMNS}
    short = [replace(by_key[key], label=label, error="") for key, label in SHORT.items()]
    grid = console_table("", [by_key["name"], *short], rows)
    grid.caption = "* as configured.   in full, speedup, k: predicted for a full training"
    return grid
