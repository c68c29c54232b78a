"""``python -m decode report RUNS``: one table of the methods that several runs measured."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from decode.bench.page import console_table
from decode.bench.report import mode, shown
from decode.errors import UserError, read_json
from decode.progress import output_console

LISTS = "methods", "decoding", "self_speculation"
"""The keys of the rows in a report of bench, distill and probes."""
KEYS = (
    "run", "suite", "mode", "name", "kind", "speedup", "predicted_speedup", "alpha", "accepted_length", "tv_spent",
    "accuracy", "speedup_vs_generate",
)  # fmt: skip
"""Columns of the table."""


def find_rows(paths: Sequence[str]) -> list[dict[str, Any]]:
    """Rows with a speedup of all report.json files at or below the given paths, in the order of the paths.

    Raises:
        UserError: a path does not exist, or no report has such rows.
    """
    rows = []
    for name in paths:
        path = Path(name)
        if not path.exists():
            raise UserError(f"there is no {name!r}; give folders of runs, such as runs/*")
        for report in sorted(path.rglob("report.json")) if path.is_dir() else [path]:
            content = read_json(report)
            rows += [
                {"run": report.parent.name, "mode": mode(row["temperature"])} | row
                for row in (row for key in LISTS for row in content.get(key, []))
                if row.get("speedup")
            ]
    if not rows:
        raise UserError(
            f"no report.json with measured methods in {', '.join(paths)}; python -m distill, python -m decode bench "
            "and python -m probes write one into the run's folder"
        )
    return rows


def compare_runs(runs: Sequence[str] = ()) -> None:
    """Print the rows of all runs, by suite and temperature, the largest speedup first."""
    rows = find_rows(list(runs) or ["runs"])
    rows.sort(key=lambda row: (row["suite"], row["temperature"], -row["speedup"]))
    output_console().print(console_table("", KEYS, [shown(row) for row in rows]))
    print("speedups compare methods of one run; machines and texts of other runs may differ")
