"""Plots shared by the reports: plain data in, an SVG string out; axes carry their formulas."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from decode.report.svg import (
    BLUE,
    HEIGHT,
    INK,
    MARKERS,
    ORANGE,
    annotate,
    colour,
    diagonal,
    draw,
    finite,
    label_points,
    legend,
    legend_below,
    plain_log,
    reference_line,
    to_svg,
    whole_numbers,
)


def speedup_bars(rows: Sequence[Mapping[str, Any]], title: str = "Speedup over the same loop without a draft") -> str:
    """Horizontal bars with confidence whiskers.

    Args:
        rows: `{name, speedup, speedup_ci95?: [low, high], exact?: bool, text?}`; relaxed methods are hatched.
        title: figure title.
    """
    rows = [row for row in rows if finite(row.get("speedup"))]
    figure, axes = draw(title, height=max(0.85 * HEIGHT, 0.9 + 0.32 * len(rows)))
    relaxed = False
    for y, row in enumerate(rows):
        value, exact = row["speedup"], row.get("exact", True)
        relaxed |= not exact
        shade = BLUE if exact else ORANGE
        axes.barh(y, value, height=0.5, color=shade, alpha=0.85 if exact else 0.55, linewidth=0)
        low, high = row.get("speedup_ci95") or (value, value)
        axes.plot([low, high], [y, y], color=INK, linewidth=1.1, alpha=0.75)
        for end in (low, high) if high > low else ():
            axes.plot([end, end], [y - 0.13, y + 0.13], color=INK, linewidth=1.1, alpha=0.75)
        annotate(axes, f"{value:.2f}×", (max(value, high), y))
    reference_line(axes, x=1)
    axes.set_yticks(range(len(rows)), [str(row["name"]) for row in rows])
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    axes.tick_params(axis="y", length=0)
    axes.set_xlim(0, 1.14 * max([1.0, *(max((row.get("speedup_ci95") or [0])[-1], row["speedup"]) for row in rows)]))
    axes.set_xlabel("tokens/s ÷ tokens/s without a draft (×)")
    if relaxed:
        axes.plot([], [], "s", color=BLUE, label="lossless")
        axes.plot([], [], "s", color=ORANGE, alpha=0.6, label="relaxed")
        legend(axes)
    return to_svg(figure, f"{title}: " + ", ".join(f"{r['name']} {r['speedup']:.2f}" for r in rows))


def speed_quality(
    rows: Sequence[Mapping[str, Any]],
    quality: str = "tv_spent",
    label: str = "total variation spent per tested token (0 = exact)",
) -> str:
    """What a relaxed rule buys: speedup against quality, one labelled point a method.

    Args:
        rows: `{name, speedup, exact?: bool, <quality>}`.
        quality: key of the horizontal axis (`tv_spent`, `accuracy`, `js_distance`).
        label: its axis label, with the formula.
    """
    rows = [row for row in rows if finite(row.get("speedup")) and finite(row.get(quality))]
    figure, axes = draw("Speed against quality")
    for row in rows:
        exact = row.get("exact", True)
        axes.plot(row[quality], row["speedup"], "o" if exact else "D", color=BLUE if exact else ORANGE)
    reference_line(axes, y=1)
    axes.plot([], [], "o", color=BLUE, label="lossless")
    axes.plot([], [], "D", color=ORANGE, label="relaxed")
    legend(axes)
    axes.margins(x=0.12, y=0.15)
    axes.set_xlabel(label)
    axes.set_ylabel("speedup (×)")
    label_points(axes, [(row[quality], row["speedup"], str(row["name"])) for row in rows])
    return to_svg(figure, "Speedup against quality, one point per method")


def acceptance_by_position(
    series: Mapping[str, Sequence[Any]],
    label: str = "accepted ÷ reached (conditional)",
    colours: Mapping[str, str] | None = None,
) -> str:
    """Acceptance rate of the 1st, 2nd, … drafted token of a round; one line a method or draft.

    Args:
        series: name to rates, or to the rows of `Trace.acceptance_by_position`, whose `conditional` is drawn.
        label: vertical axis.
        colours: name to colour.
    """
    points = {
        name: [(i, v["conditional"] if isinstance(v, Mapping) else v) for i, v in enumerate(values, start=1)]
        for name, values in series.items()
    }
    return lines(
        points, "Acceptance by position in the draft", "position in the draft (token)", label,
        colours=colours, markers=True, whole_x=True,
    )  # fmt: skip


def draft_lengths(series: Mapping[str, Mapping[int, int]], title: str = "Draft lengths") -> str:
    """How long drafts were: share of rounds by number of drafted tokens, one step line a method.

    Args:
        series: method to `{drafted tokens: rounds}`.
        title: figure title.
    """
    figure, axes = draw(title)
    counts = {name: {int(k): n for k, n in rounds.items()} for name, rounds in series.items()}
    longest = max((max(c, default=0) for c in counts.values()), default=0)
    width = 0.8 / max(1, len(counts))
    for index, (name, rounds) in enumerate(counts.items()):
        total = sum(rounds.values()) or 1
        x = [k + (index + 0.5) * width - 0.4 for k in range(longest + 1)]
        share = [100 * rounds.get(k, 0) / total for k in range(longest + 1)]
        axes.bar(x, share, width=width * 0.92, color=colour(index), alpha=0.85, label=name, linewidth=0)
    axes.grid(axis="x", visible=False)
    whole_numbers(axes)
    axes.set_xlabel("drafted tokens in a round (k)")
    axes.set_ylabel("share of rounds (%)")
    legend(axes, len(counts) > 1)
    return to_svg(figure, title)


def measured_against_predicted(rows: Sequence[Mapping[str, Any]]) -> str:
    """Measured against predicted speedup; points on the diagonal lose nothing to bookkeeping.

    Args:
        rows: `{name, predicted_speedup, speedup, speedup_ci95?}`.
    """
    rows = [r for r in rows if finite(r.get("speedup")) and finite(r.get("predicted_speedup"))]
    figure, axes = draw("Measured against predicted speedup", height=HEIGHT + 0.1 * len(rows))
    for index, row in enumerate(rows):
        x, y = row["predicted_speedup"], row["speedup"]
        if interval := row.get("speedup_ci95"):
            axes.plot([x, x], list(interval), color=colour(index), linewidth=1.2, alpha=0.7)
        axes.plot(x, y, MARKERS[index % len(MARKERS)], color=colour(index))
    values = [r[key] for r in rows for key in ("speedup", "predicted_speedup")] or [1.0]
    low, high = min([0.9, *values]) * 0.95, max([1.1, *values]) * 1.08
    diagonal(axes, low, high)
    axes.set(xlim=(low, high), ylim=(low, high))
    axes.set_xlabel("predicted: tokens per round ÷ (c·drafted + v(drafted+1)) (×)")
    axes.set_ylabel("measured speedup (×)")
    names = [str(r["name"]) for r in rows]
    if sum(map(len, names)) > 60:  # beside the points, names of that length would cover each other
        marks = [axes.plot([], [], MARKERS[i % len(MARKERS)], color=colour(i), label=n)[0] for i, n in enumerate(names)]
        legend_below(figure, marks, columns=1 if max(map(len, names)) > 24 else 2)
    else:
        label_points(axes, [(r["predicted_speedup"], r["speedup"], str(r["name"])) for r in rows])
    return to_svg(figure, "Measured against predicted speedup, one point per method")


def speedup_by_length(predicted: Mapping[int, float], measured: Mapping[int, Sequence[float]] | None = None) -> str:
    """Speedup by draft length: the prediction as a line, measurements as points with intervals.

    Args:
        predicted: draft length to predicted speedup.
        measured: draft length to `(speedup, low, high)`, or `(speedup,)`.
    """
    figure, axes = draw("Speedup by draft length")
    points = sorted((int(k), s) for k, s in predicted.items() if finite(s))
    if points:
        axes.plot(*zip(*points), color=BLUE, label="predicted")
    for index, (k, values) in enumerate(sorted((int(k), v) for k, v in (measured or {}).items())):
        if len(values) == 3:
            axes.plot([k, k], values[1:], color=ORANGE, linewidth=1.4)
        axes.plot(k, values[0], "o", color=ORANGE, label="measured, 95 % interval" if index == 0 else None)
    reference_line(axes, y=1)
    whole_numbers(axes)
    axes.set_xlabel("draft length k (tokens)")
    axes.set_ylabel("speedup (×)")
    legend(axes, bool(measured))
    return to_svg(figure, "Predicted and measured speedup by draft length")


def calibration(series: Mapping[str, Sequence[Sequence[float]]], title: str = "Calibration") -> str:
    """Observed against predicted acceptance, in bins.

    Args:
        series: name to `(mean predicted probability, observed rate, count)` for each bin; points grow with
            the count.
        title: figure title.
    """
    figure, axes = draw(title)
    diagonal(axes, 0, 1)
    for index, (name, bins) in enumerate(series.items()):
        bins = [b for b in bins if finite(b[0]) and finite(b[1])]
        largest = max((b[2] for b in bins if len(b) > 2), default=1) or 1
        shade = colour(index)
        axes.plot([b[0] for b in bins], [b[1] for b in bins], color=shade, alpha=0.6, label=name)
        sizes = [8 + 60 * (b[2] / largest if len(b) > 2 else 0.3) for b in bins]
        axes.scatter([b[0] for b in bins], [b[1] for b in bins], s=sizes, color=shade, linewidth=0)
    axes.set(xlim=(-0.02, 1.02), ylim=(-0.02, 1.02))
    axes.set_xlabel("predicted acceptance probability (mean of the bin)")
    axes.set_ylabel("accepted ÷ tested")
    legend(axes, len(series) > 1)
    return to_svg(figure, f"{title}: observed against predicted acceptance")


def lines(
    series: Mapping[str, Iterable[Sequence[float]]],
    title: str,
    xlabel: str,
    ylabel: str,
    *,
    colours: Mapping[str, str] | None = None,
    markers: bool = False,
    whole_x: bool = False,
    log_y: bool = False,
) -> str:
    """Lines through (x, y) points, one a name; points that are not finite are left out."""
    below = len(series) > 3  # more names than that would cover lines
    figure, axes = draw(title, height=HEIGHT + (0.11 * len(series) if below else 0))
    for index, (name, points) in enumerate(series.items()):
        kept = [(p[0], p[1]) for p in points if finite(p[0]) and finite(p[1])]
        marker = MARKERS[index % len(MARKERS)] if markers or len(kept) == 1 else ""
        x, y = [p[0] for p in kept], [p[1] for p in kept]
        axes.plot(x, y, marker=marker, color=(colours or {}).get(name, colour(index)), label=name)
    if whole_x:
        whole_numbers(axes)
    if log_y:
        plain_log(axes)
    axes.set_xlabel(xlabel)
    axes.set_ylabel(ylabel)
    if below:
        legend_below(figure, axes.get_lines(), columns=2)
    else:
        legend(axes, len(series) > 1)
    return to_svg(figure, title)


def histograms(
    series: Mapping[str, Mapping[str, Sequence[float]]],
    title: str,
    xlabel: str,
    *,
    colours: Mapping[str, str] | None = None,
    log_y: bool = False,
    zero: bool = False,
) -> str:
    """Outlined histograms laid over each other, as shares, with the mean of each marked on the axis.

    Args:
        series: name to `{edges: [n + 1], counts: [n]}`.
        title: figure title.
        xlabel: quantity, unit, formula.
        colours: name to colour.
        log_y: logarithmic share, for long tails.
        zero: draw a line at 0.
    """
    figure, axes = draw(title)
    low, high = math.inf, -math.inf
    for index, (name, histogram) in enumerate(series.items()):
        edges, counts = list(histogram["edges"]), list(histogram["counts"])
        total = sum(counts) or 1
        share = [100 * n / total for n in counts]
        shade = (colours or {}).get(name, colour(index))
        mean = sum(n * (a + b) / 2 for n, a, b in zip(counts, edges, edges[1:])) / total
        axes.stairs(share, edges, color=shade, fill=True, alpha=0.1, linewidth=0)
        axes.stairs(share, edges, color=shade, linewidth=1.6, label=f"{name} (mean {mean:.3g})")
        axes.plot(mean, 0, "^", color=shade, clip_on=False, transform=axes.get_xaxis_transform())
        filled = [i for i, n in enumerate(counts) if n]
        if filled:
            low, high = min(low, edges[filled[0]]), max(high, edges[filled[-1] + 1])
    if low < high:
        axes.set_xlim(low - 0.02 * (high - low), high + 0.02 * (high - low))
    if zero:
        reference_line(axes, x=0)
    if log_y:
        plain_log(axes)
        axes.set_ylim(top=axes.get_ylim()[1] * 2 ** len(series))  # room for the legend
    else:
        axes.set_ylim(0, axes.get_ylim()[1] * (1 + 0.11 * len(series)))
    axes.set_xlabel(xlabel)
    axes.set_ylabel("share of tokens (%)")
    legend(axes)
    return to_svg(figure, title)
