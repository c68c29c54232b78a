"""Plots of the paper's analysis of two drafts: margins, divergences, learning curves, selected tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from decode.report.plots import histograms, lines
from decode.report.svg import BLUE, GREEN, GREY, ORANGE, annotate, draw, reference_line, to_svg

# A draft keeps its colour through the whole report.
COLOURS = {
    "undistilled": GREY,
    "distillspec": ORANGE,
    "reference": ORANGE,
    "adaspec": BLUE,
    "draft": BLUE,
    "target": GREEN,
}

Histograms = Mapping[str, Mapping[str, Sequence[float]]]


def margin_histograms(series: Histograms, colours: Mapping[str, str] = COLOURS) -> str:
    """Logit margins of two drafts on the target's text.

    The margin is the draft's logit of the target's token minus its largest other logit: positive means that the
    draft would propose this token greedily.
    """
    return histograms(
        series, "Logit margin of the target's token",
        "z(target's token) − largest other logit z (right of 0: proposed)", colours=colours, zero=True,
    )  # fmt: skip


def kl_histograms(series: Histograms, colours: Mapping[str, str] = COLOURS) -> str:
    """Divergence from the target at each response token; the share is logarithmic, since the tail matters."""
    return histograms(
        series, "Divergence per token", "KL(p‖q) = Σ p·log(p/q) (nats per token)", colours=colours, log_y=True
    )


def learning_curves(series: Mapping[str, Sequence[Sequence[float]]], colours: Mapping[str, str] = COLOURS) -> str:
    """α on the validation set while the drafts train: draft to [step, alpha] pairs."""
    return lines(series, "Learning curves", "optimiser step", "α = mean Σ min(p, q), validation", colours=colours)


def selected_tokens(rows: Sequence[Mapping[str, Any]], limit: int = 20) -> str:
    """Tokens that the selection prefers, as bars of how much more often than at random.

    Args:
        rows: `{token, count, share, lift}`: times selected, share of the selection, and that share over the token's
            share of all labels.
        limit: rows shown.
    """
    rows = [row for row in rows if row.get("lift") is not None][:limit]
    figure, axes = draw("Tokens selected most", height=max(1.6, 0.95 + 0.235 * len(rows)))
    positions = list(range(len(rows)))
    axes.barh(positions, [row["lift"] for row in rows], height=0.66, color=BLUE, alpha=0.85, linewidth=0)
    for y, row in zip(positions, rows):
        annotate(axes, f"{row['count']:,}" if row.get("count") is not None else "", (row["lift"], y))
    reference_line(axes, x=1)
    axes.set_yticks(positions, [shown(row["token"]) for row in rows])
    for tick in axes.get_yticklabels():
        tick.set_fontfamily("monospace")
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    axes.tick_params(axis="y", length=0)
    axes.set_xlim(0, 1.2 * max([1.0, *(row["lift"] for row in rows)]))
    axes.set_xlabel("lift = share of the selection ÷ share of all labels")
    return to_svg(figure, "Tokens that the selection prefers")


def shown(token: str) -> str:
    """A token as a visible label: spaces and line ends get signs, dollar signs are no formula."""
    visible = token.replace("\n", "⏎").replace("\t", "⇥").replace(" ", "␣").replace("$", r"\$")
    return visible if visible.strip() else "''"
