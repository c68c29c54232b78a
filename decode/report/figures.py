"""The plots of a benchmark: what one suite at one temperature shows, each with the caption that says how to read it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from decode.report import plots

Row = Mapping[str, Any]

FEW = 7
"""Points of one figure: as many as there are markers."""


def speed(row: Row) -> float:
    """The speedup, 0 where there is none, for sorting."""
    return float(row.get("speedup") or 0.0)


def figures(rows: Sequence[Row], details: Sequence[Row]) -> dict[str, tuple[str, str]]:
    """The plots of one suite at one temperature, name to (SVG, caption); those that would tell nothing are left out."""
    ours = [dict(row) | {"exact": row["lossless"]} for row in rows if row.get("speedup")]
    drafting = sorted((r for r in ours if not r["peer"] and r["method"] != "autoregressive"), key=speed, reverse=True)
    relaxed, exact = [r for r in drafting if not r["exact"]], [r for r in drafting if r["exact"]]
    found = {}
    few = relaxed[: FEW - 2] + exact[:2]  # labels of more points than these cannot be read
    if relaxed and _differ(few, "tv_spent"):
        told = "Further up is faster, further left is closer to the target's distribution."
        found["tv_spent"] = (plots.speed_quality(few), told)
    if relaxed and _differ(few, "accuracy"):
        svg = plots.speed_quality(few, "accuracy", "accuracy (the suite's scorer)")
        found["accuracy"] = (svg, "Further up is faster, further right is more often correct.")
    predicted = [r | {"speedup": r["speedup_without_prefill"], "speedup_ci95": None} for r in _unlike(drafting)]
    if predicted:
        told = "Points on the dashed line are as fast as predicted; without the time of reading prompts."
        found["predicted"] = (plots.measured_against_predicted(predicted), told)
    chosen = spread(details, drafting)
    positions = {
        d["name"]: [p["conditional"] for p in d["acceptance_by_position"] if p["tested"] >= 30] for d in chosen
    }
    if lines := {name: rates for name, rates in positions.items() if len(rates) > 1}:
        found["positions"] = (
            plots.acceptance_by_position(lines),
            f"{', '.join(lines)}; positions reached at least 30 times.",
        )
    if chosen:
        found["lengths"] = (plots.draft_lengths({d["name"]: d["draft_lengths"] for d in chosen[:3]}), "")
    return found


def _differ(rows: Sequence[Row], key: str) -> bool:
    return len({row[key] for row in rows if row.get(key) is not None}) > 1


def _unlike(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """The fastest row of each distinct prediction, to two digits, and at most a few."""
    kept: dict[str, dict[str, Any]] = {}
    for row in rows:
        if row.get("predicted_speedup") and row.get("speedup_without_prefill"):
            kept.setdefault(f"{row['predicted_speedup']:.1f}", dict(row))
    return list(kept.values())[:FEW]


def spread(details: Sequence[Row], rows: Sequence[Row], most: int = 5) -> list[Row]:
    """Details of the fastest methods, at most so many: more lines than that cannot be told apart."""
    drafting = [row for row in rows if not row["peer"] and row["method"] != "autoregressive"]
    order = [row["name"] for row in sorted(drafting, key=speed, reverse=True)]
    known = {d["name"]: d for d in details if d.get("acceptance_by_position")}
    return [known[name] for name in order if name in known][:most]
