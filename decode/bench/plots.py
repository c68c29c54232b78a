"""The plots of all reports: plain data in, an SVG that a page takes in out; axes carry their formulas.

Text and axes are drawn in `currentColor` on no background, so a plot follows its page into the dark. The colours are of
middle lightness, readable on both, and told apart by colour-blind readers.
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
NAME = 26  # characters of a bar's name in a line: longer ones leave the axis no room
INK = "#010203"
"""The colour of text and axes in ``plots.mplstyle``, replaced by currentColor in the SVG."""
DASHED: dict[str, Any] = {"color": INK, "linewidth": 1, "linestyle": (0, (4, 3)), "alpha": 0.6}
STYLE: Any = rc_params_from_file(Path(__file__).with_name("plots.mplstyle"), use_default_template=False)


def new_axes(title: str, xlabel: str, ylabel: str = "", height: float = 3.2) -> Axes:
    """Axes of a figure of their own; width is the same for all."""
    figure = Figure(figsize=(5.0, height), layout="constrained")
    # of the figure, not of the axes, which begin only behind the names of bars
    figure.suptitle(title, x=0.01, horizontalalignment="left")
    return figure.add_subplot(xlabel=xlabel, ylabel=ylabel)


def as_svg(axes: Axes, legend: bool = False) -> str:
    """The figure as an SVG that scales with its container; the legend stands below, where it covers nothing."""
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


def _whole_numbers(axes: Axes) -> None:
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))


def _logarithmic(axes: Axes) -> None:
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.yaxis.set_minor_formatter(NullFormatter())


@mpl.rc_context(STYLE)
def bars(rows: Sequence[Row], title: str, xlabel: str) -> str:
    """Horizontal bars, with a dashed line at 1.

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
        axes.annotate(
            str(row.get("note", "")), (max(row["value"], high), y), (5, 0), textcoords="offset points", va="center",
            fontsize=9,
        )  # fmt: skip
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
    """Speedups with their 95 % intervals: rows ``{name, speedup, speedup_ci95?, lossless?}``."""
    shown = [
        {**row, "value": row["speedup"], "interval": row.get("speedup_ci95"), "note": f"{row['speedup']:.2f}×"}
        for row in rows
        if finite(row.get("speedup"))
    ]
    return bars(shown, title, "tokens/s ÷ tokens/s without a draft (×)")


@mpl.rc_context(STYLE)
def points(rows: Sequence[Row], x: str, y: str, title: str, xlabel: str, ylabel: str, diagonal: bool = False) -> str:
    """One named point a method; relaxed methods are hollow.

    Args:
        rows: ``{name, lossless?: bool, <x>, <y>}``.
        x: key of the horizontal axis.
        y: key of the vertical axis.
        title: of the figure.
        xlabel: quantity and formula.
        ylabel: quantity and formula.
        diagonal: draw the line on which both agree instead of the one at 1.
    """
    axes = new_axes(title, xlabel, ylabel)
    rows = [row for row in rows if finite(row.get(x)) and finite(row.get(y))]
    for i, row in enumerate(rows):
        exact = row.get("lossless", True)
        axes.plot(
            row[x], row[y], MARKERS[i % len(MARKERS)], color=COLOURS[i % len(COLOURS)], markersize=7,
            fillstyle="full" if exact else "none", label=f"{row['name']}{'' if exact else ' (relaxed)'}",
        )  # fmt: skip
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
) -> str:
    """Lines through (x, y) points, one a name; those not finite are left out; ``whole_x`` marks each point."""
    axes, shades = new_axes(title, xlabel, ylabel), _colours(series, colours or {})
    for i, (name, values) in enumerate(series.items()):
        kept = [(v[0], v[1]) for v in values if finite(v[0]) and finite(v[1])]
        marker = MARKERS[i % len(MARKERS)] if whole_x or len(kept) == 1 else ""
        axes.plot([x for x, _ in kept], [y for _, y in kept], marker=marker, color=shades[name], label=name)
    if whole_x:
        _whole_numbers(axes)
    return as_svg(axes, legend=len(series) > 1)


def acceptance_by_position(series: Mapping[str, Sequence[Row]], colours: Mapping[str, str] | None = None) -> str:
    """Acceptance rate of the 1st, 2nd, … drafted token of a round: the rows of `Trace.acceptance_by_position`."""
    return lines(
        {name: [(i, row["conditional"]) for i, row in enumerate(rows, start=1)] for name, rows in series.items()},
        "Acceptance by position in the draft", "position in the draft (token)", "accepted ÷ reached (conditional)",
        colours, whole_x=True,
    )  # fmt: skip


def verify_cost(series: Mapping[str, Sequence[float] | Mapping[Any, float]]) -> str:
    """v(n) of each name: a list that begins at n = 1, or n to v(n)."""
    listed = {k: v if isinstance(v, Mapping) else dict(enumerate(v, start=1)) for k, v in series.items()}
    found = {name: sorted((int(n), v) for n, v in costs.items()) for name, costs in listed.items()}
    ylabel = "v(n) = time of n tokens ÷ of 1"
    return lines(found, "Cost of verification", "tokens in one target forward, n", ylabel, whole_x=True)


@mpl.rc_context(STYLE)
def draft_lengths(series: Mapping[str, Mapping[Any, int]]) -> str:
    """How long drafts were: for each name the rounds by number of drafted tokens, drawn as shares."""
    axes = new_axes("Draft lengths", "drafted tokens in a round (k)", "share of rounds (%)")
    width = 0.8 / max(1, len(series))
    for i, (name, counts) in enumerate(series.items()):
        total = sum(counts.values()) or 1
        x = [int(k) + (i + 0.5) * width - 0.4 for k in counts]
        axes.bar(x, [100 * n / total for n in counts.values()], width * 0.92, color=COLOURS[i], alpha=0.85, label=name)
    axes.grid(axis="x", visible=False)
    _whole_numbers(axes)
    return as_svg(axes, legend=len(series) > 1)


@mpl.rc_context(STYLE)
def speedup_by_length(predicted: Mapping[int, float], measured: Mapping[int, Row]) -> str:
    """Speedup by draft length: the prediction as a line, rows ``{speedup, speedup_ci95?}`` as points with intervals."""
    axes = new_axes("Speedup by draft length", "draft length k (tokens)", "speedup (×)")
    line = sorted((k, s) for k, s in predicted.items() if finite(s))
    axes.plot([k for k, _ in line], [s for _, s in line], color=BLUE, label="predicted")
    for i, (k, row) in enumerate(sorted(measured.items())):
        low, high = row.get("speedup_ci95") or (row["speedup"], row["speedup"])
        axes.plot([k, k], [low, high], color=ORANGE, linewidth=1.4)
        axes.plot(k, row["speedup"], "o", color=ORANGE, label="" if i else "measured, 95 % interval")
    axes.axhline(1, **DASHED)
    _whole_numbers(axes)
    return as_svg(axes, legend=True)


@mpl.rc_context(STYLE)
def calibration(series: Mapping[str, Sequence[Sequence[float]]], title: str) -> str:
    """Observed against predicted acceptance: for each name bins ``(mean probability, observed rate, count)``."""
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
    """Histograms ``{edges: [n + 1], counts: [n]}`` laid over each other, as shares, with the mean of each.

    ``log_y`` is for long tails.
    """
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


@mpl.rc_context(STYLE)
def by_batch(series: Mapping[str, Sequence[Row]], key: str, title: str, ylabel: str, *, log_y: bool = False) -> str:
    """A quantity by batch size: for each method rows ``{batch_size, <key>, <key>_ci95?}``, the intervals as bars."""
    axes = new_axes(title, "texts at once (batch size)", ylabel, 3.6)
    for i, (name, rows) in enumerate(series.items()):
        kept, colour = [row for row in rows if finite(row[key])], COLOURS[i % len(COLOURS)]
        x, y = [row["batch_size"] for row in kept], [row[key] for row in kept]
        axes.plot(x, y, marker=MARKERS[i % len(MARKERS)], color=colour, label=name)
        for row in kept if not log_y else ():
            low, high = row.get(f"{key}_ci95") or (row[key],) * 2
            axes.plot([row["batch_size"]] * 2, [low, high], color=colour, linewidth=1.1, alpha=0.6)
    if log_y:
        _logarithmic(axes)
    else:
        axes.axhline(1, **DASHED)
        axes.set_ylim(bottom=0)
    sizes = sorted({row["batch_size"] for rows in series.values() for row in rows})
    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes, [str(size) for size in sizes])
    axes.minorticks_off()
    return as_svg(axes, legend=True)
