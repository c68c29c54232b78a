"""``python -m decode paper NAME``: the numbers that a paper published, with ours beside them."""

import csv
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.table import Table

from decode.bench.page import plain_table
from decode.commands.settings import PaperSettings, bench_settings
from decode.errors import UserError, choose
from decode.progress import output_console

Row = Mapping[str, Any]

PUBLISHED = Path(__file__).parent / "published"
"""One CSV a paper: setting, method (a name of `decode.methods.METHODS`, with options as in the benchmark's table), and
columns that `measured` knows."""
TITLES = {
    "adaptix": "Adaptix: Adaptive Draft-Verification (AAAI 2025), tables 1 and 2",
    "adasd": "AdaSD: Adaptive Speculative Decoding (arXiv 2512.11280), tables 3 to 5",
    "adaspec": "AdaSPEC: Selective Knowledge Distillation (NeurIPS 2025), main results",
    "adaspeed": "AdaSPEED: Adaptive Self-Speculative Early-Exit Decoding, table I",
    "ears": "EARS: Efficient Adaptive Rejection Sampling, section 4.2",
}
BASELINES = {"adasd": "vanilla", "adaspeed": "layerskip", "ears": "vanilla"}
"""The method that each paper's column ``ratio`` divides by."""


def measured(row: Row, baseline: Row) -> dict[str, float | None]:
    """The published columns from a row of our report, of a draft or a method, and that of the baseline."""
    speed, length, alpha = (row.get(key) for key in ("tokens_per_second", "block_efficiency", "offline_alpha"))
    other = baseline.get("tokens_per_second")
    return {
        "tokens/s": speed,
        "ms/token": 1000 / speed if speed else None,
        "ratio": speed / other if speed and other else None,
        "accepted length": length,
        "drafted": row.get("drafted_per_round"),
        "accepted": length - 1 if length else None,
        "accepted/drafted": row.get("accepted_per_drafted"),
        "threshold": row.get("verification_threshold"),
        "accuracy": row.get("accuracy"),
        "alpha, %": 100 * alpha if alpha else None,
    }


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
        if not files:
            raise UserError(
                f"there is no configuration in {settings.configs}/{name}: copy the repository's folder configs/papers "
                f"to {Path.cwd()}, name another one with --configs, or give a finished run with --run"
            )
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
    if paper == "adaspec":
        by_speed = sorted(report.get("decoding", []), key=lambda row: row["tokens_per_second"])
        fastest = {row["draft"]: row for row in by_speed}  # at the fastest length of each
        for draft in report.get("drafts", []):
            decoded = fastest.get(draft["name"], {})
            row = draft | {key: decoded.get(key) for key in ("tokens_per_second", "block_efficiency")}
            blocks.setdefault(("texts of the target", 1.0), []).append(row)
    else:
        details = {(d["name"], d["suite"], d["temperature"]): d for d in report.get("bench", {}).get("analysis", [])}
        for row in report.get("methods", []):
            block = row["suite"], row["temperature"]
            blocks.setdefault(block, []).append({**details.get((row["name"], *block), {}), **row})
    if not blocks:
        raise UserError(f"the report holds no {'drafts' if paper == 'adaspec' else 'methods'}; give another with --run")
    found, every = [], published(paper)
    for (suite, temperature), rows in blocks.items():
        settings = [name for name in every if name.endswith("greedy" if temperature == 0 else "top-p")] or list(every)
        chosen = next((name for name in settings if setting.lower() in name.lower()), None)
        if chosen is None:
            raise UserError(f"no published setting is named {setting!r}; these exist: {'; '.join(settings)}")
        theirs = every[chosen]
        columns = [column for column in next(iter(theirs.values())) if any(row[column] for row in theirs.values())]
        if "accepted length" not in columns and any(row.get("block_efficiency") for row in rows):
            columns.append("accepted length")
        ours: dict[str, Row] = {}  # by the published name, which may stand without the options of ours
        for row in sorted(rows, key=lambda row: len(row["name"])):
            name = max((n for n in theirs if f"{row['name']} ".startswith(f"{n} ")), key=len, default=row["name"])
            ours.setdefault(name, row)
        baseline, lines = ours.get(BASELINES.get(paper, ""), {}), []
        for name in dict.fromkeys([*theirs, *ours]):
            known, cells = measured(ours.get(name, {}), baseline), [name]
            for column in columns:
                number, published_one = known[column], theirs.get(name, {}).get(column)
                cells += ["–" if number is None else f"{number:.3f}", published_one or "–"]
            lines.append(cells)
        headings = ["method", *(heading for column in columns for heading in (column, "paper"))]
        found.append(plain_table(f"ours: {suite}, T = {temperature:g}; paper: {chosen}", headings, lines))
    return found
