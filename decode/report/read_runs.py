"""Reports of runs, read back: the comparisons of methods that ``bench``, ``distill`` and ``probes`` wrote."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from decode.core.errors import UserError
from decode.measure import machine

Row = dict[str, Any]
DEPTH = 3
"""How far below a given folder reports are looked for; `runs/papers/<paper>/<scale>` is found from `runs/*`."""
PARTS = {"methods": "bench", "decoding": "distill", "self_speculation": "probes"}
"""Keys of report.json that hold rows of methods, and which command put them there."""
PAGES = {"bench": ("bench.html", "report.html"), "distill": ("report.html",), "probes": ("probes.html",)}
FINAL = "adaspec"
"""What reports of ``distill`` call the draft that the run was made for, unless they say so themselves."""
NEEDED = {"name", "suite", "temperature"}
DEFAULTS: Row = {"method": "", "peer": False, "lossless": False}


@dataclass
class Comparison:
    """Methods that were measured side by side: one run, one suite, one temperature, one machine.

    Attributes:
        run: the run's name: its folder, seen from where all runs lie.
        part: the command that measured: bench, distill or probes.
        suite: of the prompts.
        temperature: 0 is greedy.
        rows: one a method, in the columns of `decode.measure.benchmark.COLUMNS`; keys may be absent.
        details: what a row has no room for, samples among it, by the row's ``name``.
        machine: in one line.
        date: when the report was written, ``YYYY-MM-DD HH:MM`` UTC.
        page: the run's own page, if there is one.
        note: what was left out, if anything.
    """

    run: str
    part: str
    suite: str
    temperature: float
    rows: list[Row]
    details: list[Row] = field(default_factory=list)
    machine: str = ""
    date: str = ""
    page: Path | None = None
    note: str = ""

    @property
    def mode(self) -> str:
        """``greedy``, or the temperature."""
        return "greedy" if self.temperature == 0 else f"T = {self.temperature:g}"


def find_reports(paths: Sequence[str]) -> list[Path]:
    """The report.json files at or below the given folders; files of other names are passed over.

    Raises:
        UserError: a path does not exist, or there is no report at all.
    """
    found: dict[Path, None] = {}
    for name in paths:
        path = Path(name)
        if not path.exists():
            raise UserError(f"there is no {name!r}; give folders of runs, such as runs/*")
        found |= dict.fromkeys(_below(path, DEPTH) if path.is_dir() else [path] if path.name == "report.json" else [])
    if not found:
        raise UserError(
            f"no report.json in {', '.join(paths)}; python -m distill, python -m decode bench and python -m probes "
            "write one into the run's folder"
        )
    return list(found)


def _below(folder: Path, depth: int) -> list[Path]:
    of_paper = (folder / "table.md").is_file()  # its report.json sums up those of the configurations below
    if (folder / "report.json").is_file() and not of_paper:
        return [folder / "report.json"]
    depth = 1 if of_paper else depth
    inner = sorted(p for p in folder.iterdir() if p.is_dir() and p.name != "work") if depth else []
    return [report for path in inner for report in _below(path, depth - 1)]


def read_runs(reports: Iterable[Path]) -> tuple[list[Comparison], list[str]]:
    """All comparisons of the reports, the newest report first, and a sentence for each report without any."""
    reports = list(reports)
    folders = [path.resolve().parent for path in reports]
    root = Path(os.path.commonpath([folder.parent for folder in folders]))
    found: list[tuple[str, list[Comparison]]] = []
    notes = []
    for path, folder in zip(reports, folders):
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            notes.append(f"{path} cannot be read and is left out: {error}")
            continue
        ours = list(_comparisons(content, path, folder.relative_to(root).as_posix())) if _mapping(content) else []
        if ours:
            found.append((max(c.date for c in ours), ours))
        else:
            notes.append(f"{path} holds no speeds of methods and is left out")
    found.sort(key=lambda item: item[0], reverse=True)
    return [comparison for _, ours in found for comparison in ours], notes


def _comparisons(content: Mapping[str, Any], path: Path, run: str) -> Iterable[Comparison]:
    written = datetime.fromtimestamp(path.stat().st_mtime, UTC).isoformat()
    for key, part in PARTS.items():
        rows = [dict(row) for row in _listed(content.get(key)) if row.keys() >= NEEDED]
        if part == "probes":
            rows = [row for row in rows if row.get("best") or row.get("peer")]
        about = _mapping(content.get("bench")) if part == "bench" else content
        facts = _mapping(content.get("probe_settings") if part == "probes" else content).get("machine")
        created = str((about.get("created") if part != "probes" else None) or written)
        page = next((file for name in PAGES[part] if (file := path.parent / name).is_file()), None)
        for suite, temperature in dict.fromkeys((row["suite"], row["temperature"]) for row in rows):
            ours = [row for row in rows if (row["suite"], row["temperature"]) == (suite, temperature)]
            if part == "distill":
                details = _distilled(content, ours) if temperature == 0 else []
            else:
                details = [dict(d) for d in _listed(about.get("analysis")) if _where(d) == (suite, temperature)]
            yield Comparison(
                run, part, str(suite), float(temperature),
                [DEFAULTS | row | {"name": _name(row, part)} for row in ours], details,
                _machine(facts), created[:16].replace("T", " "), page,
                str(_mapping(about.get("notes")).get(suite, "")),
            )  # fmt: skip


def _name(row: Row, part: str) -> str:
    """Reports of ``distill`` name rows by their draft."""
    if part != "distill" or row.get("method") != "vanilla":
        return str(row["name"])
    return f"vanilla k={row.get('draft_length')} ({row.get('draft')})"


def _distilled(content: Mapping[str, Any], rows: Sequence[Row]) -> list[Row]:
    """The samples of a ``distill`` report, which the final draft wrote greedily at its fastest length."""
    drafted = [r for r in rows if r.get("method") == "vanilla" and r.get("speedup")]
    final = _mapping(content.get("profile")).get("draft", FINAL)
    best = max(drafted, key=lambda r: (r.get("draft") == final, r["speedup"]), default=None)
    samples = _listed(content.get("samples"))
    return [{"name": _name(best, "distill"), "samples": samples}] if best and samples else []


def _where(detail: Mapping[str, Any]) -> tuple[Any, Any]:
    return detail.get("suite"), detail.get("temperature")


def _machine(facts: Any) -> str:
    try:
        return machine.sentence(dict(_mapping(facts)))
    except KeyError:
        return ""


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _listed(value: Any) -> list[Mapping[str, Any]]:
    return [item for item in value if isinstance(item, Mapping)] if isinstance(value, list) else []
