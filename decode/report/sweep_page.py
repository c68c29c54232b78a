"""The page of a sweep: each measure over the swept value with its interval, and the table of all points."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from decode.report.markup import Column
from decode.report.page import Page
from decode.report.svg import MARKERS, colour, draw, finite, legend, reference_line, to_svg

Row = Mapping[str, Any]


def bounds(row: Row, key: str) -> tuple[float, float] | None:
    """The 95 % interval of a value: its own, or ± 1.96 standard errors."""
    interval, error = row.get(f"{key}_ci95"), row.get(f"{key}_se")
    if interval and None not in interval:
        return float(interval[0]), float(interval[1])
    if finite(error) and finite(row.get(key)):  # of shares and probabilities, which end at 0 and 1
        return max(0.0, row[key] - 1.96 * error), min(1.0, row[key] + 1.96 * error)  # type: ignore[operator]
    return None


def horizontal(axes: Mapping[str, Sequence[Any]]) -> str:
    """The swept key that plots are drawn over: of the numeric ones that with most values."""
    numeric = [key for key, values in axes.items() if all(finite(v) for v in values)]
    return max(numeric or list(axes), key=lambda key: len(axes[key]))


def swept(rows: Sequence[Row], axes: Mapping[str, Sequence[Any]], measure: Column, even: float | None = None) -> str:
    """One measure over one swept key with 95 % intervals, a line for each method and value of the other keys.

    Args:
        rows: `{method, swept: {key: value}, <measure>, <measure>_ci95 or <measure>_se}`.
        axes: swept key to its values.
        measure: what is drawn; its formula labels the axis.
        even: a value that means neither gain nor loss, drawn as a dashed line.
    """
    key = horizontal(axes)
    places = {value: value if finite(value) else i for i, value in enumerate(axes[key])}
    numeric = all(finite(v) for v in axes[key])
    lines: dict[str, list[tuple[float, Row]]] = {}
    methods = {row["method"] for row in rows}
    for row in rows:
        others = [f"{k.rsplit('.', 1)[-1]}={v}" for k, v in row["swept"].items() if k != key]
        name = " ".join([row["method"]] * (len(methods) > 1) + others)
        if finite(row.get(measure.key)):
            lines.setdefault(name, []).append((places[row["swept"][key]], row))
    figure, plot = draw(f"{measure.label} by {key}")
    spread = (max(places.values()) - min(places.values())) / 60 if numeric else 0.05
    for index, (name, points) in enumerate(lines.items()):
        aside = spread * (index - (len(lines) - 1) / 2)  # intervals of several lines would hide each other
        points.sort(key=lambda point: point[0])
        x, y = [place + aside for place, _ in points], [row[measure.key] for _, row in points]
        plot.plot(x, y, MARKERS[index % len(MARKERS)] + "-", color=colour(index), label=name or None)
        for place, row in zip(x, (row for _, row in points)):
            if interval := bounds(row, measure.key):
                plot.plot([place, place], list(interval), color=colour(index), linewidth=1.2, alpha=0.7)
    if even is not None:
        reference_line(plot, y=even)
    if len(places) <= 12:
        plot.set_xticks(list(places.values()), [f"{v:g}" if finite(v) else str(v) for v in places])
    plot.set_xlabel(key)
    plot.set_ylabel(measure.label)
    legend(plot, len(lines) > 1)
    return to_svg(figure, f"{measure.label} by {key}")


def sweep_page(
    title: str,
    lead: str,
    axes: Mapping[str, Sequence[Any]],
    sections: Mapping[str, Sequence[Row]],
    measures: Sequence[Column],
    columns: Sequence[Column],
) -> Page:
    """The page.

    Args:
        title: heading.
        lead: the sentence that gives the answer.
        axes: swept key to its values.
        sections: heading to rows; rows without ``swept`` (baselines) stand in the table only.
        measures: drawn over the swept values where they vary.
        columns: of the table, after the method and the swept keys.
    """
    page = Page(title, lead, "draftsmith · sweep")
    first = [Column("name", "method"), *(Column(f"swept {key}", key, numeric=True) for key in axes)]
    for heading, rows in sections.items():
        page.section(heading)
        points = [row for row in rows if row.get("swept")]
        page.gallery(
            (swept(points, axes, measure, 1.0 if measure.key.startswith("speedup") else None), measure.formula)
            for measure in measures
            if len({row.get(measure.key) for row in points} - {None}) > 1
        )
        shown = [{**row, **{f"swept {k}": v for k, v in (row.get("swept") or {}).items()}} for row in rows]
        page.table([*first, *columns], shown)
    return page
