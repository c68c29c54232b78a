"""The report of ``bench``: report.json, and its page, which begins with the fastest lossless method."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.box import Box
from rich.table import Table as RichTable

from decode.bench import machine, plots
from decode.bench.benchmark import Benchmark, ResultBlock
from decode.bench.page import (
    LOSSLESS,
    RELAXED,
    Badge,
    Block,
    Column,
    Facts,
    Figures,
    Group,
    Heading,
    Page,
    Sample,
    Samples,
    Table,
    Text,
    Tile,
    Tiles,
    Tone,
    present,
    read_columns,
)
from decode.bench.statistics import differing, fastest_lossless
from decode.errors import read_json, write_text
from decode.trace import FORMULAS

Row = Mapping[str, Any]

TABLES = read_columns(Path(__file__).with_name("columns.csv"))
COLUMNS = TABLES["bench"]
CATEGORY_COLUMNS = TABLES["category"]
"""Columns of the results by category; all intervals are 95 % bootstrap intervals over prompts."""
ALPHA_COLUMNS = TABLES["alpha"]  # of offline α
COLUMN = {column.key: column for column in COLUMNS}
MOST_LINES = 40  # longer tables by category are for the page
SHORT = {
    "name": "method", "mark": "", "draft_length": "k", "tokens_per_second": "tokens/s", "speedup": "speedup",
    "speedup_vs_generate": "/generate", "predicted_speedup": "predicted", "block_efficiency": "block", "alpha": "α",
    "tv_spent": "TV", "accuracy": "score", "identical_to_target": "same",
}  # fmt: skip
"""Columns of the terminal's table and their labels."""
NARROW = {"draft_length", "predicted_speedup", "block_efficiency", "tv_spent"}
"""What a terminal below 110 columns goes without; the intervals too."""
MARKS = {"lossless": ("=", ""), "relaxed": ("≈", "yellow"), "peer": ("·", "dim")}
"""Mark and colour of a method in the terminal's table."""


def mode(temperature: float) -> str:
    """``greedy``, or the temperature."""
    return "greedy" if temperature == 0 else f"T = {temperature:g}"


def by_block(rows: Iterable[Row]) -> dict[tuple[str, float], list[Row]]:
    """Rows by suite and temperature."""
    found: dict[tuple[str, float], list[Row]] = {}
    for row in rows:
        found.setdefault((row["suite"], row["temperature"]), []).append(row)
    return found


def speed(row: Row) -> float:
    """The speedup, 0 where there is none, for sorting."""
    return float(row.get("speedup") or 0.0)


def drafting(rows: Iterable[Row], lossless: bool | None = None) -> list[Row]:
    """Our own methods that draft and have a speedup, the fastest first; the lossless or the relaxed ones alone."""
    ours = [r for r in rows if r.get("speedup") and not r["peer"] and r["method"] != "autoregressive"]
    return sorted((r for r in ours if lossless in (None, bool(r["lossless"]))), key=speed, reverse=True)


def shown(row: Row) -> dict[str, Any]:
    """A row with what tables show besides the numbers."""
    kind = Badge("peer") if row.get("peer") else LOSSLESS if row.get("lossless") else RELAXED
    same = Badge("no", "bad") if row.get("identical_to_target") is False else row.get("identical_to_target")
    return {**row, "kind": kind, "identical_to_target": same}


def table(block: ResultBlock, width: int = 130) -> RichTable:
    """One block for a terminal of this width; lossless and relaxed methods and peers each have a mark."""
    rows = [shown(row) for row in block.rows]
    wide = width >= 110
    columns = [
        replace(
            COLUMN.get(key, Column(key, "")), label=label, error="speedup_ci95" if wide and key == "speedup" else ""
        )
        for key, label in SHORT.items()
        if wide or key not in NARROW
    ]
    title = f"{block.suite}, {mode(block.temperature)}" + ("" if block.complete else " (stopped early)")
    marked = [row | dict(zip(("mark", "style"), MARKS[row["kind"].text])) for row in rows]
    grid = console_table(title, columns, marked)
    grid.caption = "= lossless   [yellow]≈ relaxed: not the target's distribution[/]   · transformers' own"
    for row in rows:
        if row.get("note"):
            grid.add_row(f"{row['name']}: {row['note']}", style="red")
    return grid


def category_groups(rows: Iterable[Row]) -> dict[str, list[Row]]:
    """By category, the rows of one block with the category's numbers; empty where there is one category only."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        for part in row.get("categories") or ():
            found.setdefault(part["category"], []).append({**shown(row), **part})
    return found


def category_table(block: ResultBlock, width: int = 130, most: int = 3) -> RichTable | None:
    """The fastest lossless methods of a block in each category, for a terminal; None without categories."""
    chosen = [row["name"] for row in drafting(block.rows, lossless=True)[:most]]
    lines: list[Row] = []
    for category, rows in category_groups(block.rows).items():
        best = sorted((r for r in rows if r["name"] in chosen), key=lambda row: chosen.index(row["name"]))
        lines += [{**row, "category": category if i == 0 else " "} for i, row in enumerate(best)]
    if not lines or len(lines) > MOST_LINES:
        return None
    columns = [Column("category", "category"), *(c for c in CATEGORY_COLUMNS if c.key != "kind")]
    if width < 110:
        columns = [replace(c, error="" if c.key != "speedup" else c.error) for c in columns]
    title = f"{block.suite}, {mode(block.temperature)}, by category (95 % intervals over prompts)"
    return console_table(title, columns, lines)


def console_table(title: str, columns: Iterable[Column], rows: Sequence[Row]) -> RichTable:
    """Rows for a terminal, in the columns of the page that hold anything; ``style`` of a row is its style."""
    columns = [column for column in columns if any(present(row.get(column.key)) for row in rows)]
    grid = RichTable(title=title or None, title_justify="left", caption_justify="left", box=None, pad_edge=False)
    for column in columns:
        text = not column.numeric and all(isinstance(row.get(column.key), str | Badge | None) for row in rows)
        # where the table is too wide, words take several lines before a number is cut
        grid.add_column(column.label, justify="left" if text else "right", no_wrap=not text, min_width=1)
    for row in rows:
        cells = (" ".join(filter(None, (column.text(row), column.error_text(row)))) for column in columns)
        grid.add_row(*cells, style=row.get("style", ""))
    return grid


def plain_table(
    title: str, headings: Sequence[str], rows: Iterable[Sequence[str]], box: Box | None = None
) -> RichTable:
    """Cells that are text already, for a terminal; the first column is on the left, the others on the right."""
    grid = RichTable(title=title or None, title_justify="left", box=box, pad_edge=box is not None, header_style="bold")
    for place, heading in enumerate(headings):
        grid.add_column(heading, justify="right" if place else "left")
    for row in rows:
        grid.add_row(*row)
    return grid


def markdown_table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """The same as GitHub shows it."""
    rule = ["---", *["---:"] * (len(headings) - 1)]
    return "\n".join(f"| {' | '.join(line)} |" for line in (headings, rule, *rows))


def ratios(rows: Sequence[Row]) -> list[str]:
    """The ratios that matter, a sentence for each suite and temperature."""
    lines = []
    for (suite, temperature), block in by_block(rows).items():
        # sampled texts cannot be compared, so that greedy ones judge their methods
        best = fastest_lossless([row for row in rows if row["suite"] == suite], temperature)
        plain, wrong = next((r for r in block if r["method"] == "autoregressive"), {}), differing(block)
        parts = []
        if plain.get("speedup_vs_generate"):
            parts.append(f"without a draft {plain['speedup_vs_generate']:.2f} × model.generate")
        if best is not None:
            parts.append(f"fastest lossless method {best['name']}: {_against(best)}")
        if wrong:
            parts.append(f"not model.generate's texts, though lossless in exact arithmetic: {', '.join(wrong)}")
        if parts:
            lines.append(f"{suite}, {mode(temperature)}: " + "; ".join(parts))
    return lines


def _against(row: Row) -> str:
    interval = COLUMN["speedup"].error_text(row)
    facts = [f"{row['speedup']:.2f} × the loop without a draft" + (f" (95 %: {interval})" if interval else "")]
    if row.get("speedup_vs_generate"):
        facts.append(f"{row['speedup_vs_generate']:.2f} × model.generate")
    if row.get("speedup_vs_assistant"):
        facts.append(f"{row['speedup_vs_assistant']:.2f} × generate(assistant_model=…)")
    if row.get("predicted_speedup") and row.get("speedup_without_prefill"):
        share = row["speedup_without_prefill"] / row["predicted_speedup"]
        facts.append(f"{share:.2f} of the predicted speedup of decoding")
    if row.get("bookkeeping_share") is not None:
        facts.append(f"{row['bookkeeping_share']:.0%} of the time outside the models")
    return ", ".join(facts)


FAIRNESS = (
    "Every prompt is decoded by all methods one after another; the order rotates with each repeat. A ratio compares "
    "two methods on the same prompt in the same repeat; the median is taken over repeats, then over prompts. The "
    "baseline of `speedup` is the same loop without a drafter, on the same forward and cache. Time is wall time of a "
    "whole text, reading the prompt included. "
)
LENGTHS = {
    False: "Texts end where the model ends them. Under greedy decoding all lossless methods write the same tokens; "
    "where lengths may differ (sampling, relaxed rules) a shorter text carries more of its prompt's cost.",
    True: "The end-of-text token is ignored and all texts have the full length, so that speeds are comparable "
    "whatever was written; accuracy is then not a measure of anything.",
}
PREDICTED = (
    "predicted_speedup", "speedup_without_prefill", "Measured against predicted speedup",
    "predicted: tokens per round ÷ (c·drafted + v(drafted + 1)) (×)", "measured speedup (×)",
)  # fmt: skip
TESTED = 30  # rounds that must have reached a position for its acceptance rate to be drawn
QUALITIES = {
    "tv_spent": "TV spent: mean of a(x) − min(1, p(x)/q(x)), a(x): the rule's acceptance probability",
    "accuracy": "accuracy: mean score of the suite's own scorer",
}


def write_report(
    bench: Benchmark,
    settings: Mapping[str, Any],
    folder: Path,
    notes: Mapping[str, str] | None = None,
    alphas: Sequence[Row] = (),
) -> tuple[Path, Path]:
    """Write report.json and the page.

    What other commands wrote into report.json is kept; ``methods``, ``bench`` and ``machine`` are set. The page is
    report.html, or bench.html where another command's report.html already stands. `alphas` are the rows of
    `decode.bench.suite_acceptance`.
    """
    session = bench.session
    path = folder / "report.json"
    content = read_json(path)
    beside = bool(content.keys() - {"methods", "bench", "machine", "batches"})
    content |= {
        "methods": bench.rows,
        "machine": session.facts(),
        "bench": {
            "created": datetime.now(UTC).isoformat(timespec="seconds"),
            "settings": dict(settings),
            "costs": {name or "": cost.to_dict() for name, cost in session.costs.items()},
            "blocks": [
                {"suite": b.suite, "temperature": b.temperature, "complete": b.complete, "costs": b.costs}
                for b in bench.blocks
            ],
            "analysis": bench.analysis,
            "offline_alpha": list(alphas),
            "notes": dict(notes or {}),
            "parameters": {
                name: sum(weight.numel() for weight in model.parameters())
                for name, model in {"": session.model, **session.draft_models}.items()
            },
        },
    }
    write_text(path, json.dumps(content, indent=1, ensure_ascii=False) + "\n")
    html = folder / ("bench.html" if beside else "report.html")
    bench_page(content).write(html)
    return path, html


def bench_page(content: Mapping[str, Any]) -> Page:
    """The page of a benchmark, from the keys ``methods``, ``bench`` and ``machine`` of report.json."""
    bench, about, details = content["bench"], content["machine"], by_block(content["bench"]["analysis"])
    headline, *others = ratios(content["methods"]) or [""]
    blocks: list[Block] = [Tiles(list(_tiles(content["methods"]))), *map(Text, others)]
    for (suite, temperature), rows in by_block(content["methods"]).items():
        found = details.get((suite, temperature), [])
        repeats = rows[0]["repeats"]
        count = f"{max(row['prompts'] for row in rows)} prompts, {repeats} repeat{'s' * (repeats != 1)} each. "
        samples = [(d["name"], sample) for d in of_fastest(found, rows)[:2] for sample in d["samples"][:1]]
        blocks += [
            Heading(f"{suite}, {mode(temperature)}", (count + bench.get("notes", {}).get(suite, "")).strip()),
            Table(COLUMNS, [shown(row) for row in rows]),
            *_by_category(rows),
            Figures([(plots.speedup_bars(rows), ""), *method_figures(rows, found).values()]),
            Samples([Sample(s["tokens"], f"{name}: {s['prompt'].strip()[:160]}") for name, s in samples]),
        ]
    blocks += _offline(bench.get("offline_alpha", []))
    if costs := {name or "target alone": cost["verify_cost"] for name, cost in bench["costs"].items()}:
        blocks += [
            Heading("Costs", "In one-token target forwards: c of a draft forward, v(n) of an n-token target forward."),
            Figures([(plots.verify_cost(costs), "Medians of interleaved forwards in the middle of a typical text.")]),
            Facts({f"c of {name}": f"{cost['cost_ratio']:.3f}" for name, cost in bench["costs"].items() if name}),
        ]
    blocks += [
        Heading("How this was measured", FAIRNESS + LENGTHS[bool(bench["settings"]["ignore_eos"])]),
        Facts({"machine": machine.sentence(about), "threads": about.get("note")}),
        Facts({name: value for name, value in bench["settings"].items() if value != []}),
    ]
    return Page("Decoding methods compared", headline, "draftsmith bench", blocks)


def _by_category(rows: Sequence[Row]) -> list[Block]:
    """The results of one block in each category, where there are several."""
    groups = category_groups(rows)
    found = [
        Group(rows, name or "without a category", f"{rows[0]['prompts']} prompts") for name, rows in groups.items()
    ]
    lead = "Intervals are 95 % bootstrap intervals over the category's prompts."
    return [Heading("By category", lead, level=3), Table(CATEGORY_COLUMNS, found, legend=False)] if found else []


def _offline(alphas: Sequence[Row]) -> list[Block]:
    """Tables of offline α, one a suite and temperature."""
    if not alphas:
        return []
    lead = FORMULAS["offline_alpha"] + "; without top-k, top-p and min-p; with 95 % bootstrap intervals over prompts."
    tables = [
        Table(ALPHA_COLUMNS, rows, f"{suite}, {mode(temperature)}", legend=False)
        for (suite, temperature), rows in by_block(alphas).items()
    ]
    return [Heading("Offline α", lead[0].upper() + lead[1:]), *tables]


def _tiles(rows: Sequence[Row]) -> Iterable[Tile]:
    if (best := fastest_lossless(rows)) is not None:
        where = f"{best['name']}, {best['suite']}, {mode(best['temperature'])}"
        speedup = best["speedup"]
        yield Tile("best lossless speedup", f"{speedup:.2f} ×", where, "good" if speedup > 1 else "bad")
        names = {"speedup_vs_generate": "over model.generate", "speedup_vs_assistant": "over HF assistant"}
        yield from (Tile(name, f"{best[key]:.2f} ×", "the same method") for key, name in names.items() if best.get(key))
    checked = [r["identical_to_target"] for r in rows if r["lossless"] and r.get("identical_to_target") is not None]
    if checked:
        note = "lossless methods against model.generate"
        tone: Tone = "good" if all(checked) else "bad"
        yield Tile("greedy texts identical", f"{sum(checked)} of {len(checked)}", note, tone)


def of_fastest(details: Iterable[Row], rows: Iterable[Row], most: int = 5) -> list[Row]:
    """Details of the fastest methods that draft; more lines than five cannot be told apart."""
    known = {d["name"]: d for d in details if d.get("acceptance_by_position")}
    return [known[row["name"]] for row in drafting(rows) if row["name"] in known][:most]


def method_figures(rows: Sequence[Row], details: Sequence[Row]) -> dict[str, tuple[str, str]]:
    """The plots of one suite at one temperature: name to (SVG, caption); those that would show nothing are left out."""
    relaxed, found = drafting(rows, lossless=False)[:5], {}
    compared = relaxed + drafting(rows, lossless=True)[:2]  # as many as there are markers
    for key, label in QUALITIES.items():
        if relaxed and len({row.get(key) for row in compared} - {None}) > 1:
            nearer = (
                "left is closer to the target's distribution" if key == "tv_spent" else "right is more often correct"
            )
            caption = f"Further up is faster, further {nearer}."
            svg = plots.points(compared, key, "speedup", "Speed against quality", label, "speedup (×)")
            found[key] = svg, caption
    distinct: dict[str, Row] = {}  # the fastest method of each prediction, to a digit
    for row in drafting(rows):
        if row.get("predicted_speedup") and row.get("speedup_without_prefill"):
            distinct.setdefault(f"{row['predicted_speedup']:.1f}", row)
    if distinct:
        found["predicted"] = (
            plots.points(list(distinct.values())[:7], *PREDICTED, diagonal=True),
            "Points on the dashed line are as fast as predicted; without the time of reading prompts.",
        )
    chosen = of_fastest(details, rows)
    positions = {d["name"]: [p for p in d["acceptance_by_position"] if p["tested"] >= TESTED] for d in chosen}
    if positions := {name: rates for name, rates in positions.items() if len(rates) > 1}:
        caption = f"Positions reached at least {TESTED} times."
        found["positions"] = (plots.acceptance_by_position(positions), caption)
    if chosen:
        found["lengths"] = (plots.draft_lengths({d["name"]: d["draft_lengths"] for d in chosen[:3]}), "")
    return found
