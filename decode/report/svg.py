"""The common style of all figures, and their rendering as SVG that a page can take in.

Text and axes are drawn in `currentColor` and the background is transparent, so a figure follows the page into
the dark. The palette is of middle lightness, readable on both, and told apart by colour-blind readers.
"""

from __future__ import annotations

import html
import io
import math
import re
from collections.abc import Sequence
from typing import Any, Literal

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullFormatter

BLUE, ORANGE, GREEN, VIOLET, ROSE, GREY, OLIVE = (
    "#3d85c6", "#d07a1f", "#2a9d76", "#8d72cf", "#d0587c", "#868c94", "#97902d",
)  # fmt: skip
PALETTE = (BLUE, ORANGE, GREEN, VIOLET, ROSE, OLIVE, GREY)
MARKERS = "os^Dvph"
# Drawn in this colour, replaced by currentColor afterwards (matplotlib knows no such colour).
INK = "#010203"
WIDTH, HEIGHT = 5.0, 3.2

STYLE: Any = {
    "svg.fonttype": "none",
    "svg.hashsalt": "draftsmith",
    "font.family": "sans-serif",
    "font.size": 10,
    "axes.labelsize": 10,
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.titlepad": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "axes.linewidth": 0.7,
    "axes.axisbelow": True,
    "axes.facecolor": "none",
    "figure.facecolor": "none",
    "savefig.facecolor": "none",
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "xtick.major.size": 3,
    "ytick.major.size": 3,
    "axes.grid": True,
    "grid.color": INK,
    "grid.alpha": 0.13,
    "grid.linewidth": 0.7,
    "lines.linewidth": 1.8,
    "lines.markersize": 5,
    "legend.frameon": False,
    "legend.fontsize": 9.5,
    "legend.labelcolor": INK,
}


def draw(title: str, width: float = WIDTH, height: float = HEIGHT) -> tuple[Figure, Axes]:
    """An empty figure in the common style; inches."""
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(width, height), layout="constrained")
        axes = figure.add_subplot()
        axes.set_title(title)
    return figure, axes


def to_svg(figure: Figure, alt: str) -> str:
    """Renders a figure as an SVG element that scales with its container and takes the text colour of the page.

    Args:
        figure: made by `draw`.
        alt: what the figure shows, for those who do not see it.
    """
    buffer = io.StringIO()
    no_metadata = {"Date": None, "Creator": None, "Format": None, "Type": None}
    with mpl.rc_context(STYLE):
        figure.savefig(buffer, format="svg", transparent=True, metadata=no_metadata)
    svg = buffer.getvalue()
    svg = svg[svg.index("<svg") :].replace(INK, "currentColor")
    svg = re.sub(r'(<svg[^>]*?) width="[^"]*"', r"\1", svg, count=1)
    svg = re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", svg, count=1)
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.S)
    svg = re.sub(r"<!--.*?-->\s*", "", svg, flags=re.S)
    svg = re.sub(r"font(-family)?: ?([^;\"]*?)'DejaVu Sans'[^;\"]*", r"font\1: \2system-ui, sans-serif", svg)
    return svg.replace("<svg", f'<svg role="img" aria-label="{html.escape(alt)}"', 1).strip()


def colour(index: int) -> str:
    """The palette's colour for the series of that number."""
    return PALETTE[index % len(PALETTE)]


def finite(value: Any) -> bool:
    """Whether a value can be drawn."""
    return isinstance(value, int | float) and math.isfinite(value)


def legend(axes: Axes, wanted: bool = True) -> None:
    """The legend, where there is something to tell apart."""
    if wanted and axes.get_legend_handles_labels()[0]:
        with mpl.rc_context(STYLE):
            axes.legend(loc="best", handlelength=1.4)


def legend_below(figure: Figure, marks: Sequence[Any], columns: int) -> None:
    """A legend under the figure, for names that are too long to stand beside their points."""
    with mpl.rc_context(STYLE):
        figure.legend(handles=list(marks), loc="outside lower left", ncols=columns, handlelength=1.4)


def reference_line(axes: Axes, *, x: float | None = None, y: float | None = None) -> None:
    """A dashed line at a value that means neither gain nor loss."""
    style: dict[str, Any] = {"color": INK, "linewidth": 1, "linestyle": (0, (4, 3)), "alpha": 0.6}
    if x is not None:
        axes.axvline(x, **style)
    if y is not None:
        axes.axhline(y, **style)


def diagonal(axes: Axes, low: float, high: float) -> None:
    """The dashed line on which both axes agree."""
    axes.plot([low, high], [low, high], color=INK, linewidth=1, linestyle=(0, (4, 3)), alpha=0.6)


def whole_numbers(axes: Axes) -> None:
    """Ticks of the horizontal axis at whole numbers only."""
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))


def plain_log(axes: Axes) -> None:
    """A logarithmic vertical axis with plain numbers."""
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())


def annotate(
    axes: Axes,
    text: str,
    at: tuple[float, float],
    offset: tuple[float, float] = (5, 0),
    align: Literal["left", "right"] = "left",
) -> None:
    """Text beside a data point; the offset is in points."""
    axes.annotate(text, at, xytext=offset, textcoords="offset points", va="center", ha=align, color=INK, fontsize=9)


def label_points(axes: Axes, points: Sequence[tuple[float, float, str]]) -> None:
    """Names beside points, each at the first place where it covers neither a point nor another name.

    Call it last, when the limits of the axes are final.
    """
    axes.get_figure(root=True).draw_without_rendering()  # type: ignore[union-attr]  # lays out, so that pixels are known
    dots = [tuple(axes.transData.transform((x, y))) for x, y, _ in points]
    left, right = (axes.transAxes.transform((x, 0))[0] for x in (0, 1))
    taken = [(px - 4, px + 4, py - 4, py + 4) for px, py in dots]
    to_points = 72 / 100  # pixels at matplotlib's default resolution
    for (px, py), (x, y, name) in sorted(zip(dots, points), key=lambda item: item[0][1]):
        width = 7.0 * len(name)
        places = [(side, step) for step in (0, 7, -7, 13, -13, 20, -20, 27, -27, 40) for side in (8, -8)]
        for side, step in places:
            low = px + side if side > 0 else px + side - width
            box = (low, low + width, py + step - 6, py + step + 6)
            fits = left < low and low + width < right + 15
            if fits and not any(_overlap(box, other) for other in taken):
                break
        taken.append(box)
        annotate(axes, name, (x, y), (side * to_points, step * to_points), "left" if side > 0 else "right")


def _overlap(a: Sequence[float], b: Sequence[float]) -> bool:
    return a[0] < b[1] and b[0] < a[1] and a[2] < b[3] and b[2] < a[3]
