"""``python -m distill --sweep KEY=VALUE,VALUE``: the whole run at every point of a grid; equal stages are made once."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from decode.commands.sweep import Point, each
from decode.core.errors import UserError
from decode.core.files import write_text
from decode.core.trace import FORMULAS
from decode.report.markup import Column
from decode.report.sweep_page import sweep_page
from distill.config.settings import Settings
from distill.core.files import fingerprint, only_one
from distill.core.run_dir import RunDir
from distill.pipeline.reuse import adopt
from distill.pipeline.stage_fingerprint import VERSION, stage_fingerprints
from distill.report.summary import final

Row = dict[str, Any]
MEASURES = [
    Column("offline_alpha", "α offline", FORMULAS["offline_alpha"], ".4f", "max"),
    Column("offline_alpha_greedy", "α greedy", "the same at temperature 0: agreement of the argmax", ".4f", "max"),
    Column("speedup", "greedy speedup", FORMULAS["speedup"], ".2f", "max"),
]
COLUMNS = [
    MEASURES[0],
    Column("offline_alpha_se", "± se", "its standard error, texts as the unit", ".4f"),
    *MEASURES[1:],
    Column("draft_length", "best k", "draft length with the largest measured greedy speedup", "d"),
    Column("block_efficiency", "block eff.", FORMULAS["block_efficiency"], ".2f"),
    Column("optimiser_steps", "steps", "optimiser steps", ","),
    Column("examples", "examples", "training examples seen, repeats included", ","),
    Column("seconds", "time (s)", "training time of the draft", ",.0f"),
]


def run_sweep(
    points: Sequence[Point], settings: Sequence[Settings], run: Callable[[Settings], object], base: RunDir
) -> Path:
    """Run all points that are not finished, and write the sweep's ``report.json`` and ``report.html`` after each.

    Every point is a run of its own in ``<output_dir>/<name>-sweep/``. Before it starts it takes over the stages that
    the base run or another point has already made from the same inputs, so a sweep over the draft's settings trains
    the target once. Files are linked, not copied; nothing is ever changed in place, so each run stays whole.

    Args:
        points: of the grid.
        settings: of each point; name and output_dir are set here.
        run: the pipeline.
        base: the run of the same name without a sweep, which need not exist.

    Returns:
        The sweep's report.json.

    Raises:
        UserError: settings that cannot be used, before anything is trained.
    """
    folder = base.folder.with_name(f"{base.folder.name}-sweep")
    if len({point.folder for point in points}) < len(points):
        raise UserError("two points of the sweep have the same name; give their values in other words")
    for point, one in zip(points, settings):
        one.name, one.output_dir = point.folder, str(folder)
        one.validate()
    runs = [_run_of(one) for one in settings]

    def measure(index: int) -> None:
        with only_one(runs[index].work / "lock"):
            taken = adopt(runs[index], settings[index], [base, *(r for i, r in enumerate(runs) if i != index)])
        if taken:
            print(f"  already made: {', '.join(taken)}", flush=True)
        run(settings[index])
        _write(points[: index + 1], runs, folder)

    each(points, [r.folder / "report.json" for r in runs], lambda index: _key(settings[index]), measure)
    path = _write(points, runs, folder)
    print(f"wrote {path} and {path.with_suffix('.html')}")
    return path


def _run_of(settings: Settings) -> RunDir:
    return RunDir(Path(settings.output_dir) / settings.name, [c.name for c in settings.comparisons])


def _key(settings: Settings) -> str:
    """Of everything that a point's report depends on."""
    keys = [key for key, _ in stage_fingerprints(settings).values()]
    return fingerprint(VERSION, keys, asdict(settings.evaluation), asdict(settings.export))


def _write(points: Sequence[Point], runs: Sequence[RunDir], folder: Path) -> Path:
    reports = [json.loads((r.folder / "report.json").read_text(encoding="utf-8")) for r in runs[: len(points)]]
    content = merged(points, reports)
    path = folder / "report.json"
    write_text(path, json.dumps(content, indent=1, ensure_ascii=False) + "\n")
    axes, rows = content["sweep"]["axes"], content["sweep"]["points"]
    best = max((r for r in rows if r.get("offline_alpha")), key=lambda r: r["offline_alpha"], default=None)
    lead = f"Largest α: {best['offline_alpha']:.4f} at {best['name']}." if best else ""
    title = f"{folder.name.removesuffix('-sweep')}: sweep over {' and '.join(axes)}"
    sections = {"The final draft at every point": [*rows, *content["sweep"]["others"]]}
    sweep_page(title, lead, axes, sections, MEASURES, COLUMNS).write(path.with_suffix(".html"))
    return path


def merged(points: Sequence[Point], reports: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """One report of all points: the final draft of each, its fastest greedy decoding, and the first one's other drafts.

    ``methods`` holds the timed rows in the form of ``decode bench``, so that the page of all runs shows them too.
    """
    rows, methods = [], []
    for i, (point, report) in enumerate(zip(points, reports)):
        name = final(report)
        draft = next(d for d in report["drafts"] if d["name"] == name)
        timed = [r for r in report["decoding"] if r["draft"] == name and r.get("speedup")]
        greedy = [r for r in timed if r["temperature"] == 0]
        best: Row = max(greedy, key=lambda r: r["speedup"], default={})
        decoded = {k: best.get(k) for k in ("speedup", "speedup_ci95", "draft_length", "block_efficiency")}
        rows.append({**draft, **decoded, "name": point.label, "method": name, "swept": point.typed})
        baselines = [r for r in report["decoding"] if r["draft"] in ("autoregressive", "generate")]
        methods += [dict(r) for r in baselines] if i == 0 else []
        for row in timed:
            methods.append({**row, "name": f"{name} {point.label}, length {row['draft_length']}", "swept": point.typed})
    axes = {key: list(dict.fromkeys(point.typed[key] for point in points)) for key in points[0].values}
    others = [{**d, "method": d["name"]} for d in reports[0]["drafts"] if d["name"] != final(reports[0])]
    return {
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "methods": methods,
        "machine": reports[-1].get("machine"),
        "sweep": {"axes": axes, "points": rows, "others": others},
    }
