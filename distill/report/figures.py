"""The plots of a distillation report; what was not measured is left out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from decode.report import plots as shared
from distill.report import analysis_plots as plots
from distill.report import summary as verdict

Row = Mapping[str, Any]


def figures(report: Row) -> dict[str, str]:
    """All plots of the report, name to SVG, for the page and for the tracker."""
    return {name: svg for name, (svg, _) in {**decoding_figures(report), **analysis_figures(report)}.items()}


def decoding_figures(report: Row) -> dict[str, tuple[str, str]]:
    """Speed and acceptance: name to (SVG, caption)."""
    greedy = [row for row in verdict.drafted(report) if row["temperature"] == 0 and row.get("speedup")]
    found: dict[str, tuple[str, str]] = {}
    best: dict[str, Row] = {}
    for row in greedy:
        if row["draft"] not in best or row["speedup"] > best[row["draft"]]["speedup"]:
            best[row["draft"]] = row
    if len(best) > 1:
        bars = [
            {**row, "name": f"{verdict.display(drafted)}, k = {row['draft_length']}"} for drafted, row in best.items()
        ]
        found["speedup"] = (shared.speedup_bars(bars, "Greedy speedup at the best draft length"), "")
    profile = report.get("profile") or {}
    fastest = verdict.best_row(report)
    name = profile.get("draft") or (fastest["draft"] if fastest else None)
    if name is not None:
        rows = [row for row in greedy if row["draft"] == name]
        measured = {row["draft_length"]: (row["speedup"], *(row.get("speedup_ci95") or ())) for row in rows}
        predicted = _by_length(profile.get("predicted_speedup")) or {
            row["draft_length"]: row["predicted_speedup"] for row in rows if row.get("predicted_speedup")
        }
        if len(set(measured) | set(predicted)) > 1:
            caption = f"{verdict.display(name)}, greedy. Predicted: tokens per round ÷ (c·k + v(k + 1))."
            found["speedup_by_length"] = (shared.speedup_by_length(predicted, measured), caption)
    costs = profile.get("verify_cost") or []
    if len(costs) > 1:
        points = {"v(n)": list(enumerate(costs, start=1))}
        svg = shared.lines(
            points,
            "Cost of checking several tokens at once",
            "tokens in one target forward (n)",
            "v(n) = time of n tokens ÷ time of 1",
            markers=True,
            whole_x=True,
        )
        found["verify_cost"] = (svg, "Drafting pays as long as this stays flat.")
    colours = {verdict.display(name): colour for name, colour in plots.COLOURS.items()}
    if positions := _named((report.get("analysis") or {}).get("acceptance_by_position")):
        svg = shared.acceptance_by_position(positions, colours=colours)
        found["acceptance_by_position"] = (svg, "How the acceptance rate falls along a draft.")
    return found


def _by_length(value: Any) -> dict[int, float]:
    """Speedups by draft length, given as a mapping or as a list that starts at length 1."""
    if isinstance(value, Mapping):
        return {int(k): v for k, v in value.items()}
    return dict(enumerate(value, start=1)) if isinstance(value, list) else {}


def analysis_figures(report: Row) -> dict[str, tuple[str, str]]:
    """What the drafts learned, as in the AdaSPEC paper's analysis: name to (SVG, caption)."""
    analysis = report.get("analysis") or {}
    colours = {verdict.display(name): colour for name, colour in plots.COLOURS.items()}
    found: dict[str, tuple[str, str]] = {}
    if curves := _named(analysis.get("curves")):
        found["curves"] = (plots.learning_curves(curves, colours), "")
    if margins := _named(analysis.get("margins")):
        found["margins"] = (
            plots.margin_histograms(margins, colours),
            "Tokens left of 0 would not be proposed greedily.",
        )
    if kl := _named(analysis.get("kl")):
        found["kl"] = (
            plots.kl_histograms(kl, colours),
            "The long tail holds the tokens that a small draft cannot learn.",
        )
    if tokens := analysis.get("selected_tokens"):
        caption = "Lift 2: twice as often as by chance. Beside the bars: how often it was selected."
        found["selected_tokens"] = (plots.selected_tokens(tokens), caption)
    return found


def _named(series: Any) -> dict[str, Any]:
    return {verdict.display(name): values for name, values in (series or {}).items() if values}
