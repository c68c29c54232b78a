"""The plots of a distillation report, the AdaSPEC paper's analysis among them; what was not measured is left out."""

from collections.abc import Mapping
from typing import Any

from decode.report import plots
from distill.report.run_summary import display, drafted, exported, fastest

Row = Mapping[str, Any]
Plot = tuple[str, str]  # SVG and caption

COLOURS = {
    display(name): colour
    for name, colour in {
        "undistilled": plots.GREY, "distillspec": plots.ORANGE, "reference": plots.ORANGE, "adaspec": plots.BLUE,
        "draft": plots.BLUE, "target": plots.GREEN,
    }.items()
}  # fmt: skip
"""A draft keeps its colour through the whole report."""


def figures(report: Row) -> dict[str, str]:
    """All plots of the report, name to SVG, for the tracker."""
    return {name: svg for name, (svg, _) in {**decoding_figures(report), **analysis_figures(report)}.items()}


def decoding_figures(report: Row) -> dict[str, Plot]:
    """Speed and acceptance, name to plot."""
    greedy = [row for row in drafted(report) if row["temperature"] == 0 and row.get("speedup")]
    profile, found = report.get("profile") or {}, {}
    best = [{**row, "name": f"{display(row['draft'])}, k = {row['draft_length']}"} for row in fastest(greedy)]
    if len(best) > 1:
        found["speedup"] = (plots.speedup_bars(best[::-1], "Greedy speedup at the best draft length"), "")
    measured = {row["draft_length"]: row for row in greedy if row["draft"] == exported(report)}
    predicted = {k: row["predicted_speedup"] for k, row in measured.items() if row.get("predicted_speedup")}
    predicted = {int(k): speedup for k, speedup in (profile.get("predicted_speedup") or predicted).items()}
    if len(measured.keys() | predicted.keys()) > 1:
        caption = f"{display(exported(report))}, greedy. Predicted: tokens per round ÷ (c·k + v(k + 1))."
        found["speedup_by_length"] = (plots.speedup_by_length(predicted, measured), caption)
    if len(costs := profile.get("verify_cost") or []) > 1:
        found["verify_cost"] = (plots.verify_cost({"v(n)": costs}), "Drafting pays as long as this stays flat.")
    if positions := _named(report, "acceptance_by_position"):
        svg = plots.acceptance_by_position(positions, COLOURS)
        found["acceptance_by_position"] = (svg, "How the acceptance rate falls along a draft.")
    return found


def analysis_figures(report: Row) -> dict[str, Plot]:
    """What the drafts learned, as in the AdaSPEC paper's analysis, name to plot."""
    found: dict[str, Plot] = {}
    if curves := _named(report, "curves"):
        xlabel, ylabel = "optimiser step", "α = mean Σ min(p, q), validation"
        found["curves"] = (plots.lines(curves, "Learning curves", xlabel, ylabel, COLOURS), "")
    if margins := _named(report, "margins"):
        title, xlabel = "Logit margin of the target's token", "z(target's token) − largest other z, z: draft's logits"
        caption = "Tokens left of 0 would not be proposed greedily."
        found["margins"] = (plots.histograms(margins, title, xlabel, COLOURS), caption)
    if kl := _named(report, "kl"):
        xlabel = "KL(p‖q) = Σ p·log(p/q) (nats per token)"
        caption = "The long tail holds the tokens that a small draft cannot learn."
        found["kl"] = (plots.histograms(kl, "Divergence per token", xlabel, COLOURS, log_y=True), caption)
    if tokens := (report.get("analysis") or {}).get("selected_tokens"):
        bars = [
            {"name": visible(row["token"]), "value": row["lift"], "note": f"{row['count']:,}"} for row in tokens[:20]
        ]
        svg = plots.bars(bars, "Tokens selected most", "lift = share of the selection ÷ share of all labels")
        caption = "Lift 2: twice as often as at random. Beside the bars: how often it was selected."
        found["selected_tokens"] = (svg, caption)
    return found


def _named(report: Row, part: str) -> dict[str, Any]:
    series = (report.get("analysis") or {}).get(part) or {}
    return {display(name): values for name, values in series.items() if values}


def visible(token: str) -> str:
    """A token as a visible label: spaces and line ends get signs."""
    shown = token.replace("\n", "⏎").replace("\t", "⇥").replace(" ", "␣")
    return shown if shown.strip() else "''"
