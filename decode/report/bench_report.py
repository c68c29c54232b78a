"""The report of ``bench``: report.json, and its page, which begins with the fastest lossless method."""

import json
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from decode.core.atomic_files import read_json, write_text
from decode.core.trace_metrics import FORMULAS
from decode.measure.bench.compare_methods import Benchmark
from decode.measure.bootstrap_statistics import fastest_lossless
from decode.measure.costs import machine
from decode.report import plots
from decode.report.bench_tables import (
    ALPHA_COLUMNS,
    CATEGORY_COLUMNS,
    COLUMNS,
    by_block,
    category_groups,
    drafting,
    mode,
    ratios,
    shown,
)
from decode.report.html_page import (
    Block,
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
)

Row = Mapping[str, Any]

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
    `decode.measure.suite_acceptance`.
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
