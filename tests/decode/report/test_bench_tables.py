"""Tables for a terminal."""

from __future__ import annotations

import io

from rich.console import Console

from decode.bench.page import Column
from decode.bench.report import console_table


def test_a_table_that_is_too_wide_breaks_names_but_no_numbers() -> None:
    columns = [
        Column("name", "method"),
        Column("speedup", "speedup", format=".2f", error="ci95"),
        Column("ece", "ECE", format=".4f"),
    ]
    row = {"name": "a method with a name that is long", "speedup": 1.82, "ci95": [1.7, 2.08], "ece": 0.0123}
    console = Console(file=io.StringIO(), width=36)
    console.print(console_table("", columns, [row]))
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert "1.82 1.70–2.08" in shown
    assert "0.0123" in shown
    assert "a method with a name that is long" not in shown
