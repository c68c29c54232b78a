"""Writes a run's report: `report.json` for machines, `report.html` for people, and the tables for the console."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Group
from rich.text import Text

from decode.core.atomic_files import write_text
from decode.measure.bootstrap_statistics import plain
from decode.report.bench_tables import console_table
from decode.report.html_page import Column
from distill.report.run_page import TABLES, build_page, decoding_row, draft_row
from distill.report.run_summary import exported_row, fastest, findings

Row = Mapping[str, Any]

ORDER = ("name", "created", "verdict", "target", "drafts", "paired", "decoding", "profile", "analysis", "samples",
         "exported", "settings", "machine", "commands")  # fmt: skip
"""Order of the keys in report.json; others follow."""
CONSOLE = {"parameters", "offline_alpha_greedy", "seconds", "accepted_per_drafted"}
"""Columns of the page that the console's tables go without."""


def write_report(run_dir: str | Path, report: Row) -> None:
    """Write `report.json` and `report.html` below `run_dir`, each replaced only when complete.

    Args:
        run_dir: the run's folder.
        report: `name`; `target` {parameters, accuracy}; `drafts` [{name, offline_alpha, offline_alpha_se,
            optimiser_steps, teacher_tokens}]; `decoding` [{draft, temperature, draft_length, tokens_per_second,
            speedup, speedup_ci95, speedup_vs_generate, predicted_speedup, block_efficiency, alpha,
            accepted_per_drafted, identical_to_target}]; each of these keys, None where it was not measured.
            Optional: `created`, `paired` [{a, b, difference, se, p_value, n, label}], `profile`, `analysis`
            {margins, kl, acceptance_by_position, curves, selected_tokens}, `samples` [{prompt, tokens: [{text,
            who}]}], `exported` {length, token_map, gguf_type}, with which engines take the export, `settings`,
            `machine`, `commands`.
    """
    data = plain(dict(report))
    data["verdict"] = [finding.text for finding in findings(data)]
    ordered = {key: data[key] for key in (*ORDER, *sorted(set(data) - set(ORDER))) if key in data}
    content = json.dumps(ordered, indent=2, ensure_ascii=False, allow_nan=False, default=str)
    folder = Path(run_dir)
    page = build_page(json.loads(content), folder)
    write_text(folder / "report.json", content + "\n")
    page.write(folder / "report.html")


def console_tables(report: Row) -> Group:
    """What the terminal shows at the end of a run: drafts, decoding, and the findings in sentences."""
    report = plain(dict(report))
    best = exported_row(report)
    rows = [decoding_row(row) | {"style": "bold" if row is best else ""} for row in fastest(report["decoding"])]
    colours = {"good": "green", "warn": "yellow", "bad": "red"}
    return Group(
        console_table("Drafts", _short("drafts"), [draft_row(row) for row in report["drafts"]]),
        console_table("\nDecoding, each draft at its fastest length", _short("decoding"), rows),
        *(Text(f.text.replace("`", ""), style=colours.get(f.tone, "")) for f in findings(report)),
    )


def _short(table: str) -> list[Column]:
    return [column for column in TABLES[table] if column.key not in CONSOLE]
