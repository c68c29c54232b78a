"""The plots of all reports: plain data in, SVG text out; axes carry their formulas.

Text and axes are drawn in `currentColor` without a background, so a plot follows its page's light or dark scheme. The
colours are readable on both and distinct for colour-blind readers.
"""

import html
import io
import math
import re
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib import rc_params_from_file
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

from decode.bench.page import finite

Row = Mapping[str, Any]

COLOURS = BLUE, ORANGE, GREEN, VIOLET, ROSE, OLIVE, GREY = (
    "#3d85c6", "#d07a1f", "#2a9d76", "#8d72cf", "#d0587c", "#97902d", "#868c94",
)  # fmt: skip
MARKERS = "os^Dvph"
NAME = 26  # most characters of a bar's name in one line
INK = "#010203"
"""The colour of text and axes in ``plots.mplstyle``, replaced by currentColor in the SVG."""
DASHED: dict[str, Any] = {"color": INK, "linewidth": 1, "linestyle": (0, (4, 3)), "alpha": 0.6}
STYLE: Any = rc_params_from_file(Path(__file__).with_name("plots.mplstyle"), use_default_template=False)


def new_axes(title: str, xlabel: str, ylabel: str = "", height: float = 3.2) -> Axes:
    """Axes in a figure of their own, 5 inches wide."""
    figure = Figure(figsize=(5.0, height), layout="constrained")
    figure.suptitle(title, x=0.01, horizontalalignment="left")  # a title of the axes would start right of bars' names
    return figure.add_subplot(xlabel=xlabel, ylabel=ylabel)


def as_svg(axes: Axes, legend: bool = False) -> str:
    """The figure as an SVG that scales with its container, with the legend below it."""
    figure = axes.get_figure(root=True)
    assert figure is not None
    handles, labels = axes.get_legend_handles_labels()
    if legend and handles:
        columns = max(1, 60 // (max(map(len, labels)) + 8))
        figure.set_figheight(figure.get_figheight() + 0.21 * math.ceil(len(labels) / columns))
        figure.legend(handles, labels, loc="outside lower left", ncols=columns)
    buffer = io.StringIO()
    no_metadata = dict.fromkeys(("Date", "Creator", "Format", "Type"))
    figure.savefig(buffer, format="svg", transparent=True, metadata=no_metadata)
    svg = buffer.getvalue().replace(INK, "currentColor")
    svg = re.sub(r"<metadata>.*?</metadata>|<!--.*?-->\s*", "", svg, flags=re.S)
    svg = re.sub(r"font(-family)?: ?([^;\"]*?)'DejaVu Sans'[^;\"]*", r"font\1: \2system-ui, sans-serif", svg)
    svg = re.sub(r'(<svg[^>]*?) width="[^"]*"|(<svg[^>]*?) height="[^"]*"', r"\1\2", svg[svg.index("<svg") :], count=2)
    alt = "; ".join(filter(None, (figure.get_suptitle(), axes.get_xlabel(), axes.get_ylabel())))
    return svg.replace("<svg", f'<svg role="img" aria-label="{html.escape(alt)}"', 1).strip()


def _colours(names: Iterable[str], fixed: Mapping[str, str]) -> dict[str, str]:
    """A colour for each name: its fixed one, or one that no other name has."""
    names = list(names)
    taken = {fixed[name] for name in names if name in fixed}
    free = cycle([colour for colour in COLOURS if colour not in taken] or COLOURS)
    return {name: fixed.get(name) or next(free) for name in names}


def _logarithmic(axes: Axes) -> None:
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.yaxis.set_minor_formatter(NullFormatter())


@mpl.rc_context(STYLE)
def bars(rows: Sequence[Row], title: str, xlabel: str) -> str:
    """Horizontal bars with a dashed line at 1.

    Args:
        rows: ``{name, value, interval?: [low, high], note?, lossless?: bool}``; the note stands beside the bar, and
            relaxed methods have a colour of their own.
        title: of the figure.
        xlabel: quantity and formula.
    """
    names = [textwrap.fill(str(row["name"]).replace("$", r"\$"), NAME) for row in rows]
    lines = max((name.count("\n") + 1 for name in names), default=1)
    axes = new_axes(title, xlabel, height=max(2.0, 0.95 + (0.11 + 0.16 * lines) * len(rows)))
    for y, row in enumerate(rows):
        low, high = row.get("interval") or (row["value"], row["value"])
        relaxed = not row.get("lossless", True)
        axes.barh(y, row["value"], height=0.6, color=ORANGE if relaxed else BLUE, alpha=0.6 if relaxed else 0.85)
        if high > low:
            axes.plot([low, high], [y, y], "|-", color=INK, linewidth=1.1, markersize=6, alpha=0.75)
        place, note = (max(row["value"], high), y), str(row.get("note", ""))
        axes.annotate(note, place, (5, 0), textcoords="offset points", va="center", fontsize=9)
    axes.axvline(1, **DASHED)
    axes.set_yticks(range(len(rows)), names)
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    axes.margins(x=0.14)
    axes.set_xlim(left=0)
    if not all(row.get("lossless", True) for row in rows):
        axes.plot([], [], "s", color=BLUE, label="lossless")
        axes.plot([], [], "s", color=ORANGE, alpha=0.6, label="relaxed")
    return as_svg(axes, legend=True)


def speedup_bars(rows: Iterable[Row], title: str = "Speedup over no draft") -> str:
    """`bars` of rows ``{name, speedup, speedup_ci95?, lossless?}``."""
    shown = [
        {**row, "value": row["speedup"], "interval": row.get("speedup_ci95"), "note": f"{row['speedup']:.2f}×"}
        for row in rows
        if finite(row.get("speedup"))
    ]
    return bars(shown, title, "tokens/s ÷ tokens/s without a draft (×)")


@mpl.rc_context(STYLE)
def points(rows: Sequence[Row], x: str, y: str, title: str, xlabel: str, ylabel: str, diagonal: bool = False) -> str:
    """One named point for each method; relaxed methods are hollow.

    Args:
        rows: ``{name, lossless?: bool, <x>, <y>}``.
        x: key of the horizontal axis.
        y: key of the vertical axis.
        title: of the figure.
        xlabel: quantity and formula.
        ylabel: quantity and formula.
        diagonal: draw the line x = y instead of the line y = 1.
    """
    axes = new_axes(title, xlabel, ylabel)
    rows = [row for row in rows if finite(row.get(x)) and finite(row.get(y))]
    for i, row in enumerate(rows):
        marker, colour, exact = MARKERS[i % len(MARKERS)], COLOURS[i % len(COLOURS)], row.get("lossless", True)
        label, fill = f"{row['name']}{'' if exact else ' (relaxed)'}", "full" if exact else "none"
        axes.plot(row[x], row[y], marker, color=colour, markersize=7, fillstyle=fill, label=label)
    if diagonal:
        axes.axline((1, 1), slope=1, **DASHED)
    else:
        axes.axhline(1, **DASHED)
    axes.margins(0.12)
    return as_svg(axes, legend=True)


@mpl.rc_context(STYLE)
def lines(
    series: Mapping[str, Iterable[Sequence[float]]],
    title: str,
    xlabel: str,
    ylabel: str,
    colours: Mapping[str, str] | None = None,
    *,
    whole_x: bool = False,
    log_x: bool = False,
    log_y: bool = False,
    at_one: bool = False,
) -> str:
    """Lines through points (x, y) or (x, y, low, high), the ends of an interval; points not finite are left out.

    Args:
        series: points by name.
        title: of the figure.
        xlabel: quantity and formula.
        ylabel: quantity and formula.
        colours: fixed colours of some names.
        whole_x: x are whole numbers; each point has a marker.
        log_x: x are sizes on a logarithmic axis, each with a tick and a marker.
        log_y: logarithmic y.
        at_one: draw a dashed line at y = 1.
    """
    axes, shades = new_axes(title, xlabel, ylabel, 3.6 if log_x else 3.2), _colours(series, colours or {})
    sizes = set()
    for i, (name, values) in enumerate(series.items()):
        kept = [v for v in values if finite(v[0]) and finite(v[1])]
        marker = MARKERS[i % len(MARKERS)] if whole_x or log_x or len(kept) == 1 else ""
        axes.plot([v[0] for v in kept], [v[1] for v in kept], marker=marker, color=shades[name], label=name)
        for x, _, *interval in kept:
            sizes.add(x)
            if len(interval) == 2 and all(map(finite, interval)):
                axes.plot([x, x], interval, color=shades[name], linewidth=1.1, alpha=0.6)
    if whole_x:
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    if log_x:
        axes.set_xscale("log", base=2)
        axes.set_xticks(sorted(sizes), [f"{size:g}" for size in sorted(sizes)])
        axes.minorticks_off()
    if log_y:
        _logarithmic(axes)
    if at_one:
        axes.axhline(1, **DASHED)
    return as_svg(axes, legend=len(series) > 1)


def acceptance_by_position(series: Mapping[str, Sequence[Row]], colours: Mapping[str, str] | None = None) -> str:
    """Acceptance rate of the 1st, 2nd, … drafted token of a round: the rows of `Trace.acceptance_by_position`."""
    found = {name: [(i, row["conditional"]) for i, row in enumerate(rows, start=1)] for name, rows in series.items()}
    xlabel, ylabel = "position in the draft (token)", "accepted ÷ reached (conditional)"
    return lines(found, "Acceptance by position in the draft", xlabel, ylabel, colours, whole_x=True)


def draft_lengths(series: Mapping[str, Mapping[Any, int]]) -> str:
    """Shares of the rounds by number of drafted tokens, from the number of rounds by length."""
    found = {
        name: [(int(k), 100 * n / (sum(counts.values()) or 1)) for k, n in counts.items()]
        for name, counts in series.items()
    }
    return lines(found, "Draft lengths", "drafted tokens in a round (k)", "share of rounds (%)", whole_x=True)


def verify_cost(series: Mapping[str, Sequence[float] | Mapping[Any, float]]) -> str:
    """v(n) by name: a list that begins at n = 1, or a mapping from n to v(n)."""
    listed = {k: v if isinstance(v, Mapping) else dict(enumerate(v, start=1)) for k, v in series.items()}
    found = {name: sorted((int(n), v) for n, v in costs.items()) for name, costs in listed.items()}
    ylabel = "v(n) = time of n tokens ÷ of 1"
    return lines(found, "Cost of verification", "tokens in one target forward, n", ylabel, whole_x=True)


def speedup_by_length(predicted: Mapping[int, float], measured: Mapping[int, Row]) -> str:
    """Predicted and measured speedups by draft length; measured rows ``{speedup, speedup_ci95?}``."""
    points = [(k, row["speedup"], *(row.get("speedup_ci95") or ())) for k, row in sorted(measured.items())]
    series: dict[str, list[tuple[float, ...]]] = {"predicted": sorted(predicted.items()), "measured": points}
    title, xlabel = "Speedup by draft length", "draft length k (tokens)"
    return lines(series, title, xlabel, "speedup (×)", whole_x=True, at_one=True)


@mpl.rc_context(STYLE)
def calibration(series: Mapping[str, Sequence[Sequence[float]]], title: str) -> str:
    """Observed against predicted acceptance: bins ``(mean probability, observed rate, count)`` by name."""
    axes = new_axes(title, "predicted acceptance probability (mean of the bin)", "accepted ÷ tested", height=3.6)
    axes.axline((0, 0), slope=1, **DASHED)
    for i, (name, bins) in enumerate(series.items()):
        bins = [b for b in bins if finite(b[0]) and finite(b[1])]
        x, y, largest = [b[0] for b in bins], [b[1] for b in bins], max((b[2] for b in bins), default=1)
        axes.plot(x, y, color=COLOURS[i], alpha=0.6, label=name)
        axes.scatter(x, y, s=[8 + 60 * b[2] / largest for b in bins], color=COLOURS[i], linewidth=0)
    axes.set(xlim=(-0.02, 1.02), ylim=(-0.02, 1.02))
    return as_svg(axes, legend=True)


@mpl.rc_context(STYLE)
def histograms(
    series: Mapping[str, Row], title: str, xlabel: str, colours: Mapping[str, str], *, log_y: bool = False
) -> str:
    """Overlaid histograms ``{edges: [n + 1], counts: [n]}`` as shares, with the mean of each."""
    axes, shades = new_axes(title, xlabel, "share of tokens (%)"), _colours(series, colours)
    for name, found in series.items():
        edges, counts = found["edges"], found["counts"]
        total = sum(counts) or 1
        mean = sum(n * (a + b) / 2 for n, a, b in zip(counts, edges, edges[1:])) / total
        share, colour = [100 * n / total for n in counts], shades[name]
        axes.stairs(share, edges, color=colour, fill=True, alpha=0.1, linewidth=0)
        axes.stairs(share, edges, color=colour, linewidth=1.6, label=f"{name} (mean {mean:.3g})")
        axes.plot(mean, 0, "^", color=colour, clip_on=False, transform=axes.get_xaxis_transform())
    if log_y:
        _logarithmic(axes)
    elif any(found["edges"][0] < 0 for found in series.values()):
        axes.axvline(0, **DASHED)
    return as_svg(axes, legend=True)
