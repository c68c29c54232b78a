"""The plots of all reports: plain data in, SVG text out; axes carry their formulas.

Text and axes are drawn in `currentColor` without a background, so a plot follows its page's light or dark scheme. The
colours are readable on both and distinct for colour-blind readers.
"""

import html
import io
import math
import re
import textwrap
import zlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib import rc_params_from_file
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from decode.files import Fields
from decode.measure.statistics import finite

Row = Mapping[str, Any]
COLOURS = BLUE, ORANGE, *_ = ("#3d85c6", "#d07a1f", "#2a9d76", "#8d72cf", "#d0587c", "#97902d", "#868c94")
MARKERS = "os^Dvph"
INK = "#010203"  # the colour of text and axes in ``plots.mplstyle``, replaced by currentColor in the SVG
DASHED: Fields = {"color": INK, "linewidth": 1, "linestyle": (0, (4, 3)), "alpha": 0.6}
STYLE: Any = rc_params_from_file(Path(__file__).with_name("plots.mplstyle"), use_default_template=False)


def new_axes(title: str, xlabel: str, ylabel: str, height: float) -> Axes:
    """Axes in a figure of their own, 4.6 inches wide: what is larger has smaller letters on a phone."""
    figure = Figure(figsize=(4.6, height), layout="constrained")
    figure.suptitle(title, x=0.01, horizontalalignment="left")  # a title of the axes would start right of bars' names
    return figure.add_subplot(xlabel=xlabel, ylabel=textwrap.fill(ylabel, 24))


def as_svg(axes: Axes) -> str:
    """The figure as an SVG that scales with its container, with a legend below it if it has several labels."""
    figure: Any = axes.get_figure(root=True)
    handles, labels = axes.get_legend_handles_labels()
    if len(labels) > 1:
        columns = max(1, 60 // (max(map(len, labels)) + 6))
        figure.set_figheight(figure.get_figheight() + 0.21 * math.ceil(len(labels) / columns))
        figure.legend(handles, labels, loc="outside lower left", ncols=columns)
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", transparent=True)
    svg = buffer.getvalue().replace(INK, "currentColor")
    svg = re.sub(r"<metadata>.*?</metadata>|<!--.*?-->\s*", "", svg[svg.index("<svg") :], flags=re.S)
    prefix = f"f{zlib.crc32(svg.encode()):x}-"  # ids must differ from those of other figures of a page
    svg = re.sub(r'( id="|url\(#|href="#)', rf"\g<1>{prefix}", svg)
    alt = html.escape(f"{figure.get_suptitle()}; {axes.get_xlabel()}; {axes.get_ylabel()}")
    return svg.replace("<svg", f'<svg role="img" aria-label="{alt}"', 1).strip()


@mpl.rc_context(STYLE)
def speedup_bars(rows: Iterable[Row]) -> str:
    """Horizontal bars with their intervals, and a dashed line at 1.

    A row is ``{name, speedup, speedup_ci95?: [low, high], lossless?: bool}``; relaxed methods are orange, and rows
    without a speedup are left out.
    """
    rows = [row for row in rows if finite(row.get("speedup"))]
    names = [textwrap.fill(row["name"], 26) for row in rows]
    height = max(2.4, 0.95 + 0.11 * len(rows) + 0.16 * len("\n".join(names).splitlines()))
    title = "Speedup over no draft" + " (orange: relaxed)" * any(row.get("lossless") is False for row in rows)
    axes = new_axes(title, "tokens/s ÷ tokens/s without a draft (×)", "", height)
    speeds = np.array([row["speedup"] for row in rows])
    ends = np.array([row.get("speedup_ci95") or [row["speedup"]] * 2 for row in rows]).reshape(-1, 2).T
    colours = [BLUE if row.get("lossless", True) else ORANGE for row in rows]
    drawn = {"ecolor": INK, "elinewidth": 1.1, "capsize": 3, "alpha": 0.75}
    bars = axes.barh(range(len(rows)), speeds, 0.6, xerr=abs(ends - speeds), color=colours, alpha=0.8, error_kw=drawn)
    axes.bar_label(bars, fmt="%.2f×", padding=5, fontsize=9)
    axes.axvline(1, **DASHED)
    axes.set_yticks(range(len(rows)), names)
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    axes.margins(x=0.18)
    axes.set_xlim(left=0)
    return as_svg(axes)


@mpl.rc_context(STYLE)
def lines(
    series: Mapping[str, Iterable[Sequence[float]]],
    title: str,
    xlabel: str,
    ylabel: str,
) -> str:
    """Lines through points (x, y) or (x, y, low, high), the ends of an interval; points not finite are left out.

    Axes are labelled with quantity and formula.
    """
    axes = new_axes(title, xlabel, ylabel, 2.4)
    for i, (name, values) in enumerate(series.items()):
        kept = [value for value in values if all(map(finite, value))]
        colour, marker = COLOURS[i % len(COLOURS)], MARKERS[i % len(MARKERS)] if len(kept) < 10 else ""
        axes.plot([v[0] for v in kept], [v[1] for v in kept], marker=marker, color=colour, label=name)
        for x, _, *interval in kept:
            axes.plot([x] * len(interval), interval, color=colour, linewidth=1.1, alpha=0.6)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    axes.margins(0.07)
    return as_svg(axes)


def acceptance_by_position(series: Mapping[str, Sequence[Row]]) -> str:
    """Survival: the share of the rounds that accept 1, 2, … drafted tokens or more, ``marginal`` of a report."""
    points = {name: [(row["position"], row["marginal"]) for row in rows] for name, rows in series.items()}
    xlabel, ylabel = "position in the draft (token)", "accepted ÷ rounds"
    return lines(points, "Survival of a draft's tokens by position", xlabel, ylabel)
