"""``probes.html``: the table of the paper, AUROC by layer, reliability diagrams and predicted speedups."""

from collections.abc import Iterable, Mapping
from pathlib import Path

from decode.measure.costs import machine
from decode.report import plots
from decode.report.html_page import Block, Column, Facts, Figures, Heading, Page, Table, Text, Tile, Tiles, Tone
from probes.probe_report import (
    BASELINES,
    JUDGED_COLUMNS,
    METRICS,
    PREDICTED,
    SCORES,
    SPEED_COLUMNS,
    TITLES,
    Row,
    best_rows,
    findings,
    mode_title,
    modes_of,
    named,
    of_mode,
    predicted_table,
)


def write_page(path: Path, name: str, added: Row) -> None:
    """Write the page of what `probes.pipeline` adds to report.json, for the run of that name."""
    headline, *others = findings(added) or [""]
    blocks: list[Block] = [Tiles(list(_tiles(added))), *map(Text, others)]
    if added["self_speculation"]:
        lead = (
            "The target drafts with its own first layers. Each method is shown at the fastest of the settings that "
            "were predicted best; every run below is in report.json."
        )
        tables = [(mode_title(added, mode), best_rows(added, mode)) for mode in modes_of(added)]
        blocks += [Heading("Self-speculation", lead)]
        blocks += [Table(SPEED_COLUMNS, named(rows), title, legend=i == 0) for i, (title, rows) in enumerate(tables)]
        blocks += [
            Table(SPEED_COLUMNS, named(added["self_speculation"]), legend=False, folded="All runs"),
            Figures(list(_predicted(added))),
            *(
                Table(*predicted_table(added, m), legend=False, folded=f"Predicted speedups by exit, {m}")
                for m in modes_of(added)
            ),
        ]
    judged = {mode: of_mode(added, mode) for mode in modes_of(added)}
    blocks += [
        Heading("Probes", "Trained on texts that the target wrote, judged on prompts that no probe has seen."),
        Figures(list(_by_layer(judged))),
        *(
            Table(JUDGED_COLUMNS, judged[mode], mode_title(added, mode), legend=mode == next(iter(judged)))
            for mode in judged
        ),
        Figures(list(_reliability(added, judged))),
    ]
    if rest := [row for row in added["probes"] if not any(row in rows for rows in judged.values())]:
        columns = [Column("model", "model"), Column("label", "label"), *JUDGED_COLUMNS]
        blocks += [Table(columns, rest, legend=False, folded="Other labels and models")]
    settings = added["probe_settings"]
    facts = {
        "machine": machine.sentence(settings["machine"]),
        "tokens": ", ".join(f"{name} {count:,}" for name, count in settings["tokens"].items()),
        "seconds": ", ".join(f"{name} {spent:.1f}" for name, spent in settings["seconds"].items()),
    }
    blocks += [Heading("Provenance"), Facts(facts)]
    Page("Acceptance probes and self-speculation", headline, f"draftsmith · {name}", blocks).write(path)


def _tiles(added: Row) -> Iterable[Tile]:
    for mode in modes_of(added):
        rows = [r for r in best_rows(added, mode) if r["speedup"] and r["title"] not in BASELINES]
        if rows:
            best = max(rows, key=lambda r: r["speedup"])
            tone: Tone = "good" if best["speedup"] > 1 else "warn"
            yield Tile(f"{mode}, over no drafting", f"{best['speedup']:.2f}×", TITLES[best["title"]], tone)
        judged = [r for r in of_mode(added, mode) if r["auroc_confidence_probe"] is not None]
        if judged:
            row = max(judged, key=lambda r: r["auroc_confidence_probe"])
            note = f"confidence probe, exit {row['layer']}; q(x): {row['auroc_token_probability']:.4f}"
            yield Tile(f"{mode}, AUROC", f"{row['auroc_confidence_probe']:.4f}", note)


def _by_layer(judged: Mapping[str, list[Row]]) -> Iterable[tuple[str, str]]:
    for mode, rows in judged.items():
        for metric, label in (("auroc", "AUROC"), ("brier", "Brier score")):
            series = {name: [(r["layer"], r[metric + suffix]) for r in rows] for name, suffix in SCORES.items()}
            svg = plots.lines(series, f"{label} by exit, {mode}", "layers before the exit", label, whole_x=True)
            yield svg, METRICS[metric][1]


def _reliability(added: Row, judged: Mapping[str, list[Row]]) -> Iterable[tuple[str, str]]:
    for mode, rows in judged.items():
        exits = {row["exit_layer"] for row in best_rows(added, mode)} or {row["layer"] for row in rows[:1]}
        for row in [row for row in rows if row["layer"] in exits][:2]:
            series = {name.replace("_", " ").replace("-", " "): bins for name, bins in row["bins"].items()}
            title = f"Reliability, {mode}, exit {row['layer']}"
            yield plots.calibration(series, title), "Points grow with the number of tokens."


def _predicted(added: Row) -> Iterable[tuple[str, str]]:
    for mode, choices in added["probe_settings"]["predicted"].items():
        series: dict[str, list[tuple[float, float]]] = {}
        for choice in choices:
            series.setdefault(TITLES[choice["method"]], []).append((choice["exit_layer"], choice["speedup"]))
        title = f"Predicted speedup by exit, {mode}"
        svg = plots.lines(series, title, "layers before the exit", "predicted speedup (×)", whole_x=True)
        yield svg, f"{PREDICTED}; each method at its best window or threshold for that exit."
