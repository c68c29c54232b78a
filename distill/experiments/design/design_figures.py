"""The figures of a design: speedup against training time, and cost against acceptance with lines of equal speedup."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullLocator

from decode.bench.plots import BLUE, DASHED, GREEN, GREY, INK, OLIVE, ORANGE, ROSE, STYLE, VIOLET, as_svg, new_axes
from distill.experiments.design.draft_shapes import Shape
from distill.experiments.design.shape_costs import Price
from distill.experiments.design.shape_table import Entry

FAMILIES = {
    "model": ("draft models", BLUE, "o"),
    "cut": ("cut from the target", ORANGE, "s"),
    "eagle": ("EAGLE-1", GREEN, "^"),
    "eagle3": ("EAGLE-3", OLIVE, "v"),
    "given": ("the draft given", ROSE, "p"),
    "exit": ("early exits", VIOLET, "D"),
    "lookup": ("prompt lookup", ROSE, "P"),
    "rest": ("REST", GREY, "X"),
}
"""By family: name, colour, marker."""
ALPHAS = (0.0, 0.3, 0.5, 0.7, 0.8, 0.9, 0.95, 0.98, 0.99, 0.995)
"""Ticks of the axis of acceptance, on which 1 − α is logarithmic."""


def front(entries: Sequence[Entry], full_steps: int) -> list[Entry]:
    """The entries that no other beats in both training time and speedup, by training time."""
    best, found = -math.inf, []
    for entry in sorted(entries, key=lambda e: (training_seconds(e, full_steps), -e.forecast)):
        if entry.forecast > best:
            best = entry.forecast
            found.append(entry)
    return found


def training_seconds(entry: Entry, full_steps: int) -> float:
    """Of the full training."""
    return (entry.step_seconds or 0.0) * full_steps


@mpl.rc_context(STYLE)
def pareto(entries: Sequence[Entry], full_steps: int, winner: Entry | None) -> str:
    """Predicted speedup after a full training against the time it takes; methods without training stand at 0."""
    known = [entry for entry in entries if entry.forecast > 0]
    axes = new_axes("Speedup against training time", "full training (s)", "predicted speedup (×)", 3.8)
    best = front(known, full_steps)
    x = [training_seconds(entry, full_steps) for entry in best]
    axes.step(
        x, [entry.forecast for entry in best], where="post", color=INK, linewidth=1, alpha=0.6, label="Pareto front"
    )
    _points(axes, known, [(training_seconds(e, full_steps), e.forecast, _interval(e)) for e in known], winner)
    axes.axhline(1, **DASHED)
    axes.margins(0.08)
    return as_svg(axes, legend=True)


@mpl.rc_context(STYLE)
def cost_against_acceptance(
    entries: Sequence[Entry], price: Price, longest: int, winner: Entry | None, default: Shape
) -> str:
    """Every shape's c and effective α, with lines of equal speedup.

    Args:
        entries: all shapes.
        price: whose v and bookkeeping the lines are drawn for.
        longest: longest draft.
        winner: named in the figure.
        default: named too.
    """
    axes = new_axes("Cost against acceptance", "c: a drafted token, in plain steps of the target", "effective α", 4.4)
    shown = [e for e in entries if e.price is not None and e.price.cost.cost_ratio and e.forecast > 0]
    places = [(e.price.c, _effective(e, e.forecast, longest), None) for e in shown if e.price is not None]
    bounds = [
        (c, alpha, (_effective(e, e.full.speedup_low, longest), _effective(e, e.full.speedup_high, longest)))
        if e.full is not None else (c, alpha, None)
        for e, (c, alpha, _) in zip(shown, places)
    ]  # fmt: skip
    pruned = [e.price.c for e in entries if e.status == "pruned" and not e.history and e.price is not None]
    right = 1.12 * max([c for c, _, _ in places] + pruned + [0.1])
    low = min([0.5, *(alpha for _, alpha, _ in places)])
    _lines(axes, price, longest, right, low, max((e.forecast for e in shown), default=2.0))
    axes.set_yscale("function", functions=(lambda a: -np.log10(np.maximum(1 - a, 1e-4)), lambda y: 1 - 10.0**-y))
    axes.set_ylim(max(0.0, low - 0.1), 0.997)
    axes.set_xlim(0, right)
    axes.yaxis.set_major_locator(FixedLocator(list(ALPHAS)))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    _points(axes, shown, bounds, winner)
    for c in pruned:
        axes.plot(c, 0.02, "|", color=GREY, markersize=9, transform=axes.get_xaxis_transform())
    if pruned:
        axes.plot([], [], "|", color=GREY, markersize=9, label="pruned before training (c alone)")
    for entry, (c, alpha, _) in zip(shown, bounds):
        if entry is winner or entry.shape == default:
            note = entry.shape.name + (" (as configured)" if entry.shape == default else "")
            axes.annotate(note, (c, alpha), (8, 5 if entry is winner else -11), textcoords="offset points", fontsize=8)
    return as_svg(axes, legend=True)


@mpl.rc_context(STYLE)
def trials(entries: Sequence[Entry], full_steps: int) -> str:
    """Rejections after each trial, both axes logarithmic: the law is a straight line, dashed to the full training."""
    axes = new_axes("Trials, extrapolated", "training steps n", "1 − α", 4.4)
    axes.set_xscale("log")
    axes.set_yscale("log")
    for entry in sorted(entries, key=lambda entry: len(entry.history)):
        _, colour, marker = FAMILIES[entry.shape.family]
        x, y = [n for n, _, _ in entry.history], [max(1e-4, 1 - alpha) for _, alpha, _ in entry.history]
        strong = entry.status in ("winner", "left")
        axes.plot(x, y, marker, linestyle="-", color=colour, markersize=3.5, linewidth=1, alpha=0.9 if strong else 0.25)
        if strong and entry.full is not None and x[-1] < full_steps:
            axes.plot([x[-1], full_steps], [y[-1], max(1e-4, 1 - entry.full.alpha)], **DASHED | {"color": colour})
            ends = max(1e-4, 1 - entry.full.low), max(1e-4, 1 - entry.full.high)
            axes.plot([full_steps] * 2, ends, color=colour, linewidth=1, alpha=0.7)
    ticks = sorted({n for entry in entries for n, _, _ in entry.history} | {full_steps})
    axes.xaxis.set_major_locator(FixedLocator(ticks))
    axes.xaxis.set_minor_locator(NullLocator())
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.yaxis.set_minor_locator(NullLocator())
    for family in dict.fromkeys(entry.shape.family for entry in entries):
        name, colour, marker = FAMILIES[family]
        axes.plot([], [], marker, color=colour, label=name, linestyle="-")
    return as_svg(axes, legend=True)


def _effective(entry: Entry, speedup: float, longest: int) -> float:
    """The acceptance rate that would give this speedup if it were the same at every position."""
    assert entry.price is not None
    found = entry.price.needed(speedup, longest)
    return 0.996 if found is None else min(found, 0.996)


def _lines(axes: Axes, price: Price, longest: int, right: float, low: float, most: float) -> None:
    step = 0.25 if most < 2 else 0.5 if most < 4 else 1.0
    levels = [1.0 + step * i for i in range(int((most - 1) / step) + 3)]
    at = np.linspace(0.005, right, 60)
    for speedup in levels:
        points = []
        for c in at:
            own = replace(price.cost, cost_ratio=c * price.unit - price.cost.draft_overhead)
            alpha = Price(own).needed(speedup, longest)
            if alpha is not None and low - 0.1 <= alpha < 0.9965:
                points.append((c, alpha))
        if len(points) < 2:
            continue
        axes.plot(*zip(*points), **DASHED | {"alpha": 0.9 if speedup == 1 else 0.45})
        axes.annotate(f"{speedup:g}×", points[-1], (2, 0), textcoords="offset points", fontsize=8, va="center")


def _points(
    axes: Axes,
    entries: Sequence[Entry],
    places: Sequence[tuple[float, float, tuple[float, float] | None]],
    winner: Entry | None,
) -> None:
    """A point for each entry, with its interval."""
    named: set[str] = set()
    for entry, (x, y, interval) in zip(entries, places):
        name, colour, marker = FAMILIES[entry.shape.family]
        faded = entry.status in ("out", "pruned")
        if interval is not None:
            axes.plot([x, x], interval, color=colour, linewidth=1, alpha=0.25 if faded else 0.7)
        label = "" if name in named else name
        axes.plot(x, y, marker, color=colour, markersize=6, alpha=0.55 if faded else 1.0, label=label, linestyle="")
        named.add(name)
        if entry is winner:
            axes.plot(x, y, "o", color=INK, fillstyle="none", markersize=12, linestyle="", label="winner")


def _interval(entry: Entry) -> tuple[float, float] | None:
    return None if entry.full is None else (entry.full.speedup_low, entry.full.speedup_high)
