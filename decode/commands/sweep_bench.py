"""``python -m decode bench --sweep KEY=VALUE,VALUE``: the benchmark at every point of a grid, in one report."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from decode.commands import bench as compare
from decode.commands.settings import BenchSettings, ModelSettings
from decode.commands.sweep import Point, each
from decode.core.errors import UserError
from decode.core.files import write_text
from decode.report.markup import Column
from decode.report.sweep_page import sweep_page
from decode.report.tables import COLUMNS, shown

Row = dict[str, Any]
REPORT = "report.json"
BASELINES = {"autoregressive", "generate"}
METHOD_OF = {
    "beta": "ears", "fuzzy_threshold": "fuzzy", "typical_epsilon": "typical", "typical_delta": "typical",
    "threshold": "product", "target_acceptance": "product", "exit_layer": "layerskip",
}  # fmt: skip
"""Which method is swept if none is given: one that has the option."""
KNOWN = {column.key: column for column in COLUMNS}
MEASURES = [KNOWN[key] for key in ("speedup", "block_efficiency", "alpha", "tv_spent", "accuracy")]
SHOWN = [c for c in COLUMNS if c.key not in ("name", "note")]


def run(points: Sequence[Point], settings: Sequence[BenchSettings], folder: Path) -> None:
    """Measure all points that are not finished, and write ``report.json`` and ``report.html`` after each of them.

    A point is a benchmark of its own under ``points/``, with its own baselines beside it, so that the load of the
    machine at that time meets both; peers are left out. The models stay open as long as they are the same.

    Raises:
        UserError: settings that cannot be used, before anything is measured.
    """
    homes = [folder / "points" / point.folder for point in points]
    if len(set(homes)) < len(homes):
        raise UserError("two points of the sweep have the same name; give their values in other words")
    for point, one, home in zip(points, settings, homes):
        one.output, one.peers = str(home), False
        one.methods = one.methods or [next((m for key, m in METHOD_OF.items() if key in point.values), "vanilla")]
        compare.check(one)
    opened: tuple[dict[str, Any], compare.Models] | None = None

    def measure(index: int) -> None:
        nonlocal opened
        one = settings[index]
        wanted = {f.name: getattr(one, f.name) for f in dataclasses.fields(ModelSettings)} | {"draft": one.draft}
        if opened is None or opened[0] != wanted:
            opened = wanted, compare.open_models(one)
        compare.run(one, opened[1])
        _write(points[: index + 1], homes, folder)

    each(points, [home / REPORT for home in homes], lambda index: compare.fingerprint(settings[index]), measure)
    path = _write(points, homes, folder)
    print(f"wrote {path} and {path.with_suffix('.html')}")


def _write(points: Sequence[Point], homes: Sequence[Path], folder: Path) -> Path:
    content = merged(
        points, [json.loads((home / "report.json").read_text(encoding="utf-8")) for home in homes[: len(points)]]
    )
    path = folder / "report.json"
    write_text(path, json.dumps(content, indent=1, ensure_ascii=False) + "\n")
    page(content).write(path.with_suffix(".html"))
    return path


def merged(points: Sequence[Point], reports: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """One report of all points; rows are named after their point and carry its values as ``swept``.

    The baselines in the table are those of the first point; every speedup is against its own point's.
    """
    rows: list[Row] = []
    details: list[Row] = []
    for i, (point, report) in enumerate(zip(points, reports)):
        for found, kept in ((report["methods"], rows), (report["bench"]["analysis"], details)):
            for entry in found:
                if entry["name"] in BASELINES:
                    kept += [dict(entry)] if i == 0 else []
                else:
                    kept.append({**entry, "name": f"{entry['name']} {point.label}", "swept": point.typed})
    last = reports[-1]
    axes = {key: list(dict.fromkeys(point.typed[key] for point in points)) for key in points[0].values}
    return {
        "methods": rows,
        "machine": last["machine"],
        "bench": {**last["bench"], "created": datetime.now(UTC).isoformat(timespec="seconds"), "analysis": details},
        "sweep": {"axes": axes, "points": len(points)},
    }


def page(content: Mapping[str, Any]) -> Any:
    """The page of a merged report."""
    rows, axes = content["methods"], content["sweep"]["axes"]
    sections: dict[str, list[Row]] = {}
    for row in rows:
        mode = "greedy" if row["temperature"] == 0 else f"temperature {row['temperature']:g}"
        sections.setdefault(f"{row['suite']}, {mode}", []).append(shown(row))
    points = [row for row in rows if row.get("swept") and row.get("speedup")]
    best = max(points, key=lambda row: row["speedup"], default=None)
    lead = "no point has a speedup yet"
    if best is not None:
        lead = f"Fastest: {best['name']}, {best['speedup']:.2f}× the same loop without a draft ({best['suite']}"
        lead += ", greedy)" if best["temperature"] == 0 else f", T = {best['temperature']:g})"
    columns: list[Column] = SHOWN
    return sweep_page(f"Sweep over {' and '.join(axes)}", lead, axes, sections, MEASURES, columns)
