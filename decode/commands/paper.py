"""``python -m decode paper NAME``: the numbers that a paper published, with ours beside them."""

import csv
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rich.table import Table

from decode.commands.settings import PaperSettings, bench_settings
from decode.errors import UserError, choose
from decode.progress import output_console

Row = Mapping[str, Any]

PUBLISHED = Path(__file__).parent / "published"
"""One CSV a paper: setting, method (a name of `decode.methods.METHODS`, with options as in the benchmark's table), and
columns that are keys of `MEASURES`."""
TITLES = {
    "adaptix": "Adaptix: Adaptive Draft-Verification (AAAI 2025), tables 1 and 2",
    "adasd": "AdaSD: Adaptive Speculative Decoding (arXiv 2512.11280), tables 3 to 5",
    "adaspec": "AdaSPEC: Selective Knowledge Distillation (NeurIPS 2025), main results",
    "adaspeed": "AdaSPEED: Adaptive Self-Speculative Early-Exit Decoding, table I",
    "ears": "EARS: Efficient Adaptive Rejection Sampling, section 4.2",
}
BASELINES = {"adasd": "vanilla", "adaspeed": "layerskip", "ears": "vanilla"}
"""The method that each paper's column ``ratio`` divides by."""
MEASURES: dict[str, Callable[[Row, Row], float]] = {
    "tokens/s": lambda row, _: row["tokens_per_second"],
    "ms/token": lambda row, _: 1000 / row["tokens_per_second"],
    "ratio": lambda row, baseline: row["tokens_per_second"] / baseline["tokens_per_second"],
    "accepted length": lambda row, _: row["block_efficiency"],
    "drafted": lambda row, _: row["drafted_per_round"],
    "accepted": lambda row, _: row["block_efficiency"] - 1,
    "accepted/drafted": lambda row, _: row["accepted_per_drafted"],
    "threshold": lambda row, _: row["verification_threshold"],
    "accuracy": lambda row, _: row["accuracy"],
    "alpha, %": lambda row, _: 100 * row["offline_alpha"],
}
"""Published columns, computed from a row of our report and that of the baseline."""


def published(paper: str) -> dict[str, dict[str, dict[str, str]]]:
    """The published numbers as text, by setting, method and column."""
    found: dict[str, dict[str, dict[str, str]]] = {}
    with (PUBLISHED / f"{paper}.csv").open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            found.setdefault(row.pop("setting"), {})[row.pop("method")] = row
    return found


def run(settings: PaperSettings) -> None:
    """Measure a configuration of the paper, or read the report of a finished run, and print both side by side.

    Raises:
        UserError: an unknown paper, configuration or setting, or a run without a report.
    """
    choose("paper", str(settings.paper or ""), TITLES)
    name = str(settings.paper)
    console = output_console(width=160, highlight=False)
    path = Path(settings.run or "runs/quickstart") / "report.json"
    if settings.run is None and name != "adaspec":  # whose numbers are those of a training
        from decode.commands import bench

        files = {file.stem: file for file in sorted((Path(settings.configs) / name).glob("*.yaml"))}
        benchmark = bench_settings(["--config", str(choose("configuration", settings.scale, files))])
        benchmark.output = settings.output or f"runs/papers/{name}-{settings.scale}"
        bench.run(benchmark)
        path = Path(benchmark.output) / "report.json"
    if not path.is_file():
        raise UserError(f"there is no {path}; make it with python -m distill or bench, or give its folder with --run")
    console.print(f"\n{TITLES[name]}", style="bold")
    for table in tables(name, json.loads(path.read_text(encoding="utf-8")), settings.setting):
        console.print(table)
    if name in BASELINES:
        console.print(f"ratio: tokens/s over {BASELINES[name]}'s", style="dim")


def tables(paper: str, report: Row, setting: str) -> list[Table]:
    """A table for each suite and temperature of a report.

    Args:
        paper: a key of `TITLES`.
        report: content of report.json, of ``decode bench`` or ``distill``.
        setting: part of the name of the published setting to compare with; empty: the paper's first one.
    """
    blocks: dict[tuple[str, float], list[Row]] = {}
    for draft in report.get("drafts", []) if paper == "adaspec" else []:
        speeds = [r["tokens_per_second"] for r in report.get("decoding", []) if r["draft"] == draft["name"]]
        blocks.setdefault(("T = 1", 1.0), []).append(draft | {"tokens_per_second": max(speeds, default=None)})
    details = {(d["name"], d["suite"], d["temperature"]): d for d in report.get("bench", {}).get("analysis", [])}
    for row in report.get("methods", []) if paper != "adaspec" else []:
        block = row["suite"], row["temperature"]
        blocks.setdefault(block, []).append({**details.get((row["name"], *block), {}), **row})
    if not blocks:
        raise UserError(f"the report holds no {'drafts' if paper == 'adaspec' else 'methods'}; give another with --run")
    return [_table(paper, suite, temperature, rows, setting) for (suite, temperature), rows in blocks.items()]


def _table(paper: str, suite: str, temperature: float, rows: list[Row], setting: str) -> Table:
    every = published(paper)
    mode = "greedy" if temperature == 0 else "top-p"
    settings = [name for name in every if name.endswith(mode)] or list(every)
    chosen = next((name for name in settings if setting.lower() in name.lower()), None)
    if chosen is None:
        raise UserError(f"no published setting is named {setting!r}; these exist: {'; '.join(settings)}")
    theirs = every[chosen]
    columns = [column for column in next(iter(theirs.values())) if any(row[column] for row in theirs.values())]
    table = Table(title=f"ours: {suite}, T = {temperature:g}; paper: {chosen}", title_justify="left", box=None)
    table.add_column("method")
    for column in columns:
        table.add_column(column, justify="right")
        table.add_column("paper", justify="right", style="dim")
    ours = {str(row["name"]): row for row in rows}
    names = {name: _match(name, list(ours)) for name in theirs}
    baseline = ours.get(names.get(BASELINES.get(paper, ""), ""), {})
    for name in dict.fromkeys([*theirs, *(name for name in ours if name not in names.values())]):
        row = ours.get(names.get(name, name), {})
        cells = [
            (_number(MEASURES[column], row, baseline), theirs.get(name, {}).get(column) or "–") for column in columns
        ]
        table.add_row(name, *(text for pair in cells for text in pair))
    return table


def _match(name: str, ours: list[str]) -> str:
    """Our row of a published method: of the same name, or of that name with options; empty where there is none."""
    return name if name in ours else next((other for other in ours if other.startswith(f"{name} ")), "")


def _number(measure: Callable[[Row, Row], float], row: Row, baseline: Row) -> str:
    try:
        return f"{measure(row, baseline):.3f}"
    except (KeyError, TypeError, ZeroDivisionError):  # not measured here
        return "–"
