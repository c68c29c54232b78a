"""``python -m decode report runs/*``: one page for all runs, to choose a method by."""

import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from decode.measure.bootstrap_statistics import fastest_lossless
from decode.report.bench_report import FAIRNESS, method_figures
from decode.report.bench_tables import COLUMN, drafting, mode, shown, speed
from decode.report.html_page import (
    Block,
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
)
from decode.report.read_runs import Comparison, find_reports, read_runs

Row = Mapping[str, Any]

FIGURE_BYTES, SAMPLE_BYTES = 400_000, 150_000
"""What plots and samples may take of the page; the rest stays on the runs' own pages, and the page says so."""
LEFT_OUT = "The {} of {} older comparisons are on the pages of their runs."
FIGURES = ("tv_spent", "accuracy", "predicted", "positions")
OPEN = 12  # answers that are open from the start
SAMPLED = 4  # methods whose texts are laid side by side
COLUMNS = [
    COLUMN[key]
    for key in (
        "name", "kind", "speedup", "predicted_speedup", "alpha", "block_efficiency", "tv_spent", "accuracy",
        "speedup_vs_generate", "tokens_per_second", "draft_length", "identical_to_target", "note",
    )
]  # fmt: skip


def write_all_runs(runs: Sequence[str] = (), output: str | None = None) -> None:
    """Write the page of all runs, and print where.

    Args:
        runs: folders; none: ``runs``.
        output: the page; None: index.html in the folder that holds the runs.
    """
    comparisons, notes = read_runs(find_reports(list(runs) or ["runs"]))
    first = Path((*runs, "runs")[0]).resolve()
    file = Path(output) if output else (first.parent if runs else first) / "index.html"
    all_runs_page(comparisons, notes, file.resolve().parent).write(file)
    found = len({c.run for c in comparisons})
    print(
        f"wrote {file}: {found} runs, {len(comparisons)} comparisons, {sum(len(c.rows) for c in comparisons)} results"
    )
    for note in notes:
        print(note)


def all_runs_page(comparisons: Sequence[Comparison], notes: Sequence[str], folder: Path) -> Page:
    """The page of these comparisons; links are relative to `folder`, where it will lie."""
    answers = [tile for c in comparisons if (tile := _answer(c)) is not None]
    more = [Tiles(answers[OPEN:], folded=f"{len(answers) - OPEN} more")] if answers[OPEN:] else []
    blocks: list[Block] = [
        *(Text(note, "warn") for note in notes),
        Tiles(answers[:OPEN]),
        *more,
        Heading("Methods side by side", "A click on a heading sorts the methods within each comparison."),
        Table(COLUMNS, [_group(c, folder) for c in comparisons], name="all-runs"),
        *_below(Heading("Plots"), _figures(comparisons)),
        *_below(Heading("Who wrote each token"), _samples(comparisons)),
        Heading("How this was measured", FAIRNESS + "Compare speedups only within one run: machines and texts differ."),
    ]
    filters = {
        "suite": {c.suite: c.suite for c in comparisons},
        "temperature": {f"{t:g}": mode(t) for t in sorted({c.temperature for c in comparisons})},
        "run": {c.run: f"{c.run} ({c.date[:10]})" for c in comparisons},
    }
    return Page("Which decoding method?", _headline(comparisons), "draftsmith · all runs", blocks, filters)


def _below(heading: Heading, blocks: Iterable[Block]) -> list[Block]:
    """The blocks with their heading; nothing where there are none."""
    found = list(blocks)
    return [heading, *found] if found else []


def _headline(comparisons: Sequence[Comparison]) -> str:
    best = [(row, c) for c in comparisons if (row := fastest_lossless(c.rows)) is not None]
    if not best:
        return "No lossless method that drafts was measured against the same loop without a draft."
    row, c = max(best, key=lambda item: speed(item[0]))
    return (
        f"Fastest without changing the output: {row['name']}, {row['speedup']:.2f}× the same loop without a draft"
        f"{_interval(row)}; {c.suite}, {mode(c.temperature)}, {c.run}."
    )


def _interval(row: Row) -> str:
    interval = COLUMN["speedup"].error_text(row)
    return f" (95 %: {interval})" if interval else ""


def _answer(c: Comparison) -> Tile | None:
    """The fastest lossless method of a comparison, and what a relaxed one would add at which cost."""
    exact, relaxed = fastest_lossless(c.rows), next(iter(drafting(c.rows, lossless=False)), None)
    best = exact or relaxed
    if best is None:
        return None
    low = (best.get("speedup_ci95") or [best["speedup"]])[0] or 0.0
    tone: Tone
    tone, word = ("good", "lossless") if low > 1 else ("warn", "lossless, but perhaps no faster than no draft")
    if best["speedup"] <= 1:
        tone, word = "bad", "slower than no draft: use none here"
    note = f"{best['name']}, {word if exact else 'relaxed'}{_interval(best)}"
    if present(best.get("speedup_vs_generate")):
        note += f"; {best['speedup_vs_generate']:.2f}× model.generate"
    if relaxed is not None and exact is not None and speed(relaxed) > speed(exact):
        plain = next((r for r in c.rows if r["method"] == "autoregressive"), {})
        costs = [f"TV spent {relaxed['tv_spent']:.3f}"] if present(relaxed.get("tv_spent")) else []
        if present(relaxed.get("accuracy")) and present(plain.get("accuracy")):
            costs.append(f"accuracy {relaxed['accuracy']:.2f}, the target's {plain['accuracy']:.2f}")
        note += f". Relaxed: {relaxed['name']} {relaxed['speedup']:.2f}×, {', '.join(costs)}"
    return Tile(f"{c.title} ({c.part})", f"{best['speedup']:.2f}×", note, tone, c.tags)


def _group(c: Comparison, folder: Path) -> Group:
    """The rows of a comparison, the fastest first, below its heading."""
    prompts = max((row.get("prompts") or 0 for row in c.rows), default=0)
    facts = [f"{prompts} prompts × {c.rows[0].get('repeats') or 1}" if prompts else "", c.machine, c.date, c.note]
    links = {page.name: quote(Path(os.path.relpath(page, folder)).as_posix()) for page in c.pages}
    rows = [shown(row) for row in sorted(c.rows, key=speed, reverse=True)]
    return Group(rows, c.title, f"({c.part}) " + " · ".join(filter(None, facts)), links, c.tags)


def _figures(comparisons: Sequence[Comparison]) -> Iterable[Block]:
    left, left_out = FIGURE_BYTES, 0
    for c in comparisons:
        if left <= 0:
            left_out += 1
        elif found := [figure for name, figure in method_figures(c.rows, c.details).items() if name in FIGURES]:
            left -= sum(len(svg) for svg, _ in found)
            yield Heading(c.title, level=3, tags=c.tags)
            yield Figures(found, tags=c.tags)
    if left_out:
        yield Text(LEFT_OUT.format("plots", left_out))


def _samples(comparisons: Sequence[Comparison]) -> Iterable[Block]:
    """For each comparison the texts of its fastest methods on one prompt."""
    left, left_out = SAMPLE_BYTES, 0
    for c in comparisons:
        order = [row["name"] for row in sorted(c.rows, key=speed, reverse=True)]
        details = [d for d in c.details if d.get("samples") and _drafted(d["samples"][0])]
        details.sort(key=lambda d: order.index(d["name"]) if d["name"] in order else len(order))
        if not details:
            continue
        if left <= 0:
            left_out += 1
            continue
        samples = [_sample(d["name"], d["samples"][0]) for d in details[:SAMPLED]]
        left -= 60 * sum(len(sample.tokens) for sample in samples)
        prompt = details[0]["samples"][0]["prompt"].strip()[:600]
        yield Heading(c.title, prompt, level=3, tags=c.tags)
        yield Samples(samples, folded=", ".join(d["name"] for d in details[:SAMPLED]), tags=c.tags)
    if left_out:
        yield Text(LEFT_OUT.format("texts", left_out))


def _drafted(sample: Row) -> bool:
    return any(token["who"] in ("accepted", "corrected", "bonus") for token in sample["tokens"])


def _sample(name: str, sample: Row) -> Sample:
    """One text, with the share of its tokens that each writer gave."""
    counts = Counter(token["who"] for token in sample["tokens"] if token["who"] != "rejected")
    total = sum(counts.values())
    shares = ", ".join(f"{count / total:.0%} {who}" for who, count in counts.most_common())
    return Sample(sample["tokens"], f"{name}: {total} tokens, {shares}")
