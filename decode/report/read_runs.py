"""Reports of runs, read back: the comparisons of methods that any report.json holds."""

import contextlib
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from decode.core.errors import UserError
from decode.measure.costs import machine
from decode.report.bench_tables import mode

Row = dict[str, Any]
DEPTH = 3  # how far below a given folder reports are looked for; `runs/papers/<paper>/<scale>` is found from `runs/*`
NEEDED = {"name", "suite", "temperature"}  # what every row about a method carries
DEFAULTS: Row = {"method": "", "peer": False, "lossless": False}


@dataclass
class Comparison:
    """Methods that were measured side by side: one run, one suite, one temperature, one machine."""

    run: str  # the run's name: its folder, seen from where all runs lie
    part: str  # the list of report.json that holds the rows
    suite: str  # of the prompts
    temperature: float  # 0 is greedy
    rows: list[Row]  # one a method, in the columns of `compare_methods.COLUMNS`; keys may be absent
    # what a row has no room for, samples among it, by the row's ``name``
    details: list[Row] = field(default_factory=list)
    machine: str = ""  # in one line
    date: str = ""  # when the report was written, ``YYYY-MM-DD HH:MM`` UTC
    pages: list[Path] = field(default_factory=list)  # the run's own pages
    note: str = ""  # what was left out, if anything

    @property
    def title(self) -> str:
        """Suite, mode and run."""
        return f"{self.suite}, {mode(self.temperature)} · {self.run}"

    @property
    def tags(self) -> dict[str, str]:
        """What the page can be filtered by."""
        return {"suite": self.suite, "temperature": f"{self.temperature:g}", "run": self.run}


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
        ours = (
            list(_comparisons(content, path, folder.relative_to(root).as_posix())) if isinstance(content, dict) else []
        )
        if ours:
            found.append((max(c.date for c in ours), ours))
        else:
            notes.append(f"{path} holds no speeds of methods and is left out")
    found.sort(key=lambda item: item[0], reverse=True)
    return [comparison for _, ours in found for comparison in ours], notes


def _comparisons(content: Mapping[str, Any], path: Path, run: str) -> Iterable[Comparison]:
    """The comparisons of a report, whoever wrote it.

    Every list at the top of report.json whose items have the keys of `NEEDED` and ``speedup`` is one of results. What
    else there is to show stands at the top too, or one level below: ``machine``, ``created``, ``notes`` by suite,
    ``analysis`` (items with the keys of `NEEDED`), and ``samples`` of the report's own, greedy and without a name.
    """
    about = [content, *(value for value in content.values() if isinstance(value, Mapping))]
    details = [dict(d) for part in about for d in _items(part.get("analysis"), NEEDED)]
    samples = _items(content.get("samples"), {"tokens"})
    created = max((str(part["created"]) for part in about if part.get("created")), default=None)
    date = created or datetime.fromtimestamp(path.stat().st_mtime, UTC).isoformat()
    facts: Mapping[str, Any] = next((part["machine"] for part in about if isinstance(part.get("machine"), Mapping)), {})
    place = ""
    with contextlib.suppress(KeyError):  # a report of another program
        place = machine.sentence(dict(facts))
    notes: Mapping[str, Any] = next((part["notes"] for part in about if isinstance(part.get("notes"), Mapping)), {})
    pages = sorted(file for file in path.parent.glob("*.html") if file.name != "index.html")
    for part, value in content.items():
        rows = [DEFAULTS | dict(row) for row in _items(value, NEEDED | {"speedup"})]
        rows = [row for row in rows if row.get("best", True) or row["peer"]]  # of several settings the fastest
        for suite, temperature in dict.fromkeys((row["suite"], row["temperature"]) for row in rows):
            ours = [row for row in rows if (row["suite"], row["temperature"]) == (suite, temperature)]
            names = {row["name"] for row in ours}
            own = [d for d in details if d["name"] in names and (d["suite"], d["temperature"]) == (suite, temperature)]
            if samples and temperature == 0 and not own:
                own = [{"name": content.get("name", run), "samples": samples}]
            yield Comparison(
                run, part.replace("_", " "), str(suite), float(temperature), ours, own, place,
                date[:16].replace("T", " "), pages, str(notes.get(suite, "")),
            )  # fmt: skip


def _items(value: Any, keys: set[str]) -> list[Mapping[str, Any]]:
    listed = value if isinstance(value, list) else []
    return [item for item in listed if isinstance(item, Mapping) and item.keys() >= keys]
