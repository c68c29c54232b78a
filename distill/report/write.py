"""Writes a run's report: `report.json` for machines, `report.html` for people, and the table for the console."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from decode.core.files import write_text
from distill.report.page import DECODING_COLUMNS, build_page
from distill.report.summary import display, exported_row, fastest, findings

Row = Mapping[str, Any]

# Order of the keys in report.json; others follow. None: the part is optional.
REQUIRED: dict[str, tuple[str, ...] | None] = {
    "name": (),
    "created": None,
    "verdict": None,
    "target": ("parameters", "accuracy"),
    "drafts": ("name", "offline_alpha", "offline_alpha_se", "optimiser_steps", "teacher_tokens"),
    "paired": None,
    "decoding": (
        "draft", "temperature", "draft_length", "tokens_per_second", "speedup", "speedup_ci95",
        "speedup_vs_generate", "predicted_speedup", "block_efficiency", "alpha", "accepted_per_drafted",
        "identical_to_target",
    ),
    "profile": None,
    "analysis": None,
    "samples": None,
    "settings": None,
    "machine": None,
    "commands": None,
}  # fmt: skip


def write_report(run_dir: str | Path, report: Row) -> None:
    """Writes `report.json` and `report.html` below `run_dir`, each replaced only when complete.

    Args:
        run_dir: the run's folder.
        report: required: `name`; `target` {parameters, accuracy}; `drafts` [{name, offline_alpha,
            offline_alpha_se, optimiser_steps, teacher_tokens}]; `decoding` [{draft, temperature, draft_length,
            tokens_per_second, speedup, speedup_ci95, speedup_vs_generate, predicted_speedup, block_efficiency,
            alpha, accepted_per_drafted, identical_to_target}]. Values may be None (not measured), keys may not
            be absent. Optional: `created`, `paired` [{a, b, difference, se, p_value, n, label}], `profile`,
            `analysis` {margins, kl, acceptance_by_position, curves, selected_tokens}, `samples` [{prompt,
            tokens: [{text, who}]}], `settings`, `machine`, `commands`.

    Raises:
        ValueError: naming the required keys that are absent.
    """
    data = plain(report)
    check(data)
    data["verdict"] = [finding.text for finding in findings(data)]
    ordered = {key: data[key] for key in (*REQUIRED, *sorted(set(data) - set(REQUIRED))) if key in data}
    folder = Path(run_dir)
    page = build_page(ordered, folder)
    write_text(folder / "report.json", json.dumps(ordered, indent=2, ensure_ascii=False, allow_nan=False) + "\n")
    page.write(folder / "report.html")


def check(report: Row) -> None:
    """Requires the keys of `REQUIRED`.

    Raises:
        ValueError: naming all that are absent.
    """
    missing: list[str] = []
    for part, keys in REQUIRED.items():
        if keys is None:
            continue
        if part not in report:
            missing.append(part)
            continue
        value = report[part]
        rows = [(f"{part}[{i}]", row) for i, row in enumerate(value)] if isinstance(value, list) else [(part, value)]
        missing += [f"{where}.{key}" for where, row in rows for key in keys if key not in row]
    if missing:
        raise ValueError(f"The report lacks {', '.join(missing)}.")


def plain(value: Any) -> Any:
    """Plain JSON data: numbers that are not finite become None, array scalars numbers, paths text."""
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, str) or value is None or isinstance(value, bool | int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if hasattr(value, "tolist"):  # numpy and torch, scalars and arrays
        return plain(value.tolist())
    if isinstance(value, Sequence | set | frozenset):
        return [plain(item) for item in (sorted(value) if isinstance(value, set | frozenset) else value)]
    return str(value)


def console_table(report: Row) -> Group:
    """What the terminal shows at the end of a run: drafts, decoding, and the findings in sentences."""
    report = plain(report)
    colours = {"good": "green", "warn": "yellow", "bad": "red"}
    sentences = [Text(f.text.replace("`", ""), style=colours.get(f.tone, "")) for f in findings(report)]
    return Group(_drafts_table(report), _decoding_table(report), *sentences)


def _table(title: str, *headings: str) -> Table:
    table = Table(title=title, title_justify="left", box=None, pad_edge=False, header_style="bold")
    for heading in headings:
        table.add_column(heading, justify="left" if heading in ("draft", "output") else "right")
    return table


def _drafts_table(report: Row) -> Table:
    table = _table("Drafts", "draft", "α offline", "± se", "steps", "examples", "teacher tokens", "selected")
    for row in report["drafts"]:
        counts = [
            _number(row.get(k), ",") for k in ("optimiser_steps", "examples", "teacher_tokens", "selected_tokens")
        ]
        alpha = [_number(row[key], ".4f") for key in ("offline_alpha", "offline_alpha_se")]
        table.add_row(display(row["name"]), *alpha, *counts)
    return table


def _decoding_table(report: Row) -> Table:
    headings = ("draft", "T", "k", "tokens/s", "speedup", "95 %", "vs generate", "predicted", "tokens/forward", "α")
    table = _table("\nDecoding, each draft at its fastest length", *headings, "output")
    interval = next(column for column in DECODING_COLUMNS if column.key == "speedup").error_text
    best = exported_row(report)
    for row in fastest(report["decoding"]):
        same = {True: "identical", False: "differs"}.get(row["identical_to_target"], "–")
        table.add_row(
            display(row["draft"]), _number(row["temperature"], "g"), _number(row["draft_length"], "d"),
            _number(row["tokens_per_second"], ",.0f"), _number(row["speedup"], ".2f"), interval(row) or "–",
            _number(row["speedup_vs_generate"], ".2f"), _number(row["predicted_speedup"], ".2f"),
            _number(row["block_efficiency"], ".2f"), _number(row["alpha"], ".3f"), same,
            style="bold" if row is best else "",
        )  # fmt: skip
    return table


def _number(value: Any, spec: str) -> str:
    return format(value, spec) if isinstance(value, int | float) else "–"
