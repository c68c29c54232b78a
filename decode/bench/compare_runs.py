"""``python -m decode report runs/*``: one page for all runs, to choose a method by."""

import contextlib
import json
import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import quote

from decode.bench import machine
from decode.bench.page import (
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
from decode.bench.report import COLUMN, FAIRNESS, drafting, method_figures, mode, shown, speed
from decode.bench.statistics import fastest_lossless
from decode.errors import UserError

Row_read_runs = dict[str, Any]
DEPTH = 3  # how far below a given folder reports are looked for; `runs/papers/<paper>/<scale>` is found from `runs/*`
NEEDED = {"name", "suite", "temperature"}  # what every row about a method carries
DEFAULTS: Row_read_runs = {"method": "", "peer": False, "lossless": False}


@dataclass
class Comparison:
    """Methods that were measured side by side: one run, one suite, one temperature, one machine."""

    run: str  # the run's name: its folder, seen from where all runs lie
    part: str  # the list of report.json that holds the rows
    suite: str  # of the prompts
    temperature: float  # 0 is greedy
    rows: list[Row_read_runs]  # one a method, in the columns of `compare_methods.COLUMNS`; keys may be absent
    # what a row has no room for, samples among it, by the row's ``name``
    details: list[Row_read_runs] = field(default_factory=list)
    machine: str = ""  # in one line
    date: str = ""  # when the report was written, ``YYYY-MM-DD HH:MM`` UTC
    pages: list[Path] = field(default_factory=list)  # the run's own pages
    note: str = ""  # what was left out, if anything

    @property
    def title(self) -> str:
        """Suite, mode and run."""
        return f"{self.suite}, {mode(self.temperature)} · {self.run}"

    @property
    def tags(self) -> dict[str, str]:
        """What the page can be filtered by."""
        return {"suite": self.suite, "temperature": f"{self.temperature:g}", "run": self.run}


def find_reports(paths: Sequence[str]) -> list[Path]:
    """The report.json files at or below the given folders; files of other names are passed over.

    Raises:
        UserError: a path does not exist, or there is no report at all.
    """
    found: dict[Path, None] = {}
    for name in paths:
        path = Path(name)
        if not path.exists():
            raise UserError(f"there is no {name!r}; give folders of runs, such as runs/*")
        found |= dict.fromkeys(
            _read_runs_below(path, DEPTH) if path.is_dir() else [path] if path.name == "report.json" else []
        )
    if not found:
        raise UserError(
            f"no report.json in {', '.join(paths)}; python -m distill, python -m decode bench and python -m probes "
            "write one into the run's folder"
        )
    return list(found)


def _read_runs_below(folder: Path, depth: int) -> list[Path]:
    of_paper = (folder / "table.md").is_file()  # its report.json sums up those of the configurations below
    if (folder / "report.json").is_file() and not of_paper:
        return [folder / "report.json"]
    depth = 1 if of_paper else depth
    inner = sorted(p for p in folder.iterdir() if p.is_dir() and p.name != "work") if depth else []
    return [report for path in inner for report in _read_runs_below(path, depth - 1)]


def read_runs(reports: Iterable[Path]) -> tuple[list[Comparison], list[str]]:
    """All comparisons of the reports, the newest report first, and a sentence for each report without any."""
    reports = list(reports)
    folders = [path.resolve().parent for path in reports]
    root = Path(os.path.commonpath([folder.parent for folder in folders]))
    found: list[tuple[str, list[Comparison]]] = []
    notes = []
    for path, folder in zip(reports, folders):
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            notes.append(f"{path} cannot be read and is left out: {error}")
            continue
        ours = (
            list(_comparisons(content, path, folder.relative_to(root).as_posix())) if isinstance(content, dict) else []
        )
        if ours:
            found.append((max(c.date for c in ours), ours))
        else:
            notes.append(f"{path} holds no speeds of methods and is left out")
    found.sort(key=lambda item: item[0], reverse=True)
    return [comparison for _, ours in found for comparison in ours], notes


def _comparisons(content: Mapping[str, Any], path: Path, run: str) -> Iterable[Comparison]:
    """The comparisons of a report, whoever wrote it.

    Every list at the top of report.json whose items have the keys of `NEEDED` and ``speedup`` is one of results. What
    else there is to show stands at the top too, or one level below: ``machine``, ``created``, ``notes`` by suite,
    ``analysis`` (items with the keys of `NEEDED`), and ``samples`` of the report's own, greedy and without a name.
    """
    about = [content, *(value for value in content.values() if isinstance(value, Mapping))]
    details = [dict(d) for part in about for d in _items(part.get("analysis"), NEEDED)]
    samples = _items(content.get("samples"), {"tokens"})
    created = max((str(part["created"]) for part in about if part.get("created")), default=None)
    date = created or datetime.fromtimestamp(path.stat().st_mtime, UTC).isoformat()
    facts: Mapping[str, Any] = next((part["machine"] for part in about if isinstance(part.get("machine"), Mapping)), {})
    place = ""
    with contextlib.suppress(KeyError):  # a report of another program
        place = machine.sentence(dict(facts))
    notes: Mapping[str, Any] = next((part["notes"] for part in about if isinstance(part.get("notes"), Mapping)), {})
    pages = sorted(file for file in path.parent.glob("*.html") if file.name != "index.html")
    for part, value in content.items():
        rows = [DEFAULTS | dict(row) for row in _items(value, NEEDED | {"speedup"})]
        rows = [row for row in rows if row.get("best", True) or row["peer"]]  # of several settings the fastest
        for suite, temperature in dict.fromkeys((row["suite"], row["temperature"]) for row in rows):
            ours = [row for row in rows if (row["suite"], row["temperature"]) == (suite, temperature)]
            names = {row["name"] for row in ours}
            own = [d for d in details if d["name"] in names and (d["suite"], d["temperature"]) == (suite, temperature)]
            if samples and temperature == 0 and not own:
                own = [{"name": content.get("name", run), "samples": samples}]
            yield Comparison(
                run, part.replace("_", " "), str(suite), float(temperature), ours, own, place,
                date[:16].replace("T", " "), pages, str(notes.get(suite, "")),
            )  # fmt: skip


def _items(value: Any, keys: set[str]) -> list[Mapping[str, Any]]:
    listed = value if isinstance(value, list) else []
    return [item for item in listed if isinstance(item, Mapping) and item.keys() >= keys]


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
