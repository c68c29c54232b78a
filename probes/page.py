"""``probes.html``: the table of the paper, AUROC by layer, reliability diagrams and predicted speedups."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from decode.measure import machine
from decode.report.page import Column, Page, Tile, Tone
from decode.report.plots import calibration, lines
from probes.benchmark import TITLES
from probes.report import BASELINES, SCORES, Row, best_rows, findings, number, of_mode

FORMULAS = {
    "auroc": "chance that an accepted token scores above a rejected one",
    "brier": "mean of (probability − accepted)²; lower is better",
    "ece": "Σ over bins of share · |mean probability − share accepted|; lower is better",
    "base_rate": "share of the tokens that are accepted",
    "accuracy": "share of tokens told right by probability > 0.5",
}


def write_page(path: Path, name: str, added: Row) -> None:
    """The page with the table of the paper, AUROC by layer, reliability diagrams and predicted speedups."""
    said = findings(added)
    page = Page("Acceptance probes and self-speculation", lead=said[0] if said else "", kicker=f"draftsmith · {name}")
    page.tiles(_tiles(added))
    for sentence in said[1:]:
        page.paragraph(sentence)
    if added["self_speculation"]:
        page.section(
            "Self-speculation",
            "The target drafts with its own first layers. Each method is shown at the fastest of the settings that "
            "were predicted best; every run below is in report.json.",
        )
        for mode in ("greedy", "sampled"):
            rows = [_shown(r) for r in best_rows(added, mode)]
            page.table(_speed_columns(), rows, _mode_title(added, mode), legend=mode == "greedy")
        page.table(_speed_columns(), [_shown(r) for r in added["self_speculation"]], folded="All runs", legend=False)
        page.gallery(_predicted(added))
    page.section("Probes", "Trained on texts that the target wrote, judged on prompts that no probe has seen.")
    page.gallery(_by_layer(added))
    for mode in ("greedy", "sampled"):
        page.table(_judged_columns(), of_mode(added, mode), _mode_title(added, mode), legend=mode == "greedy")
    page.gallery(_reliability(added))
    others = [r for r in added["probes"] if r not in of_mode(added, "greedy") and r not in of_mode(added, "sampled")]
    if others:
        columns = [Column("model", "model"), Column("label", "label"), *_judged_columns()]
        page.table(columns, others, folded="Other labels and models", legend=False)
    settings = added["probe_settings"]
    page.section("Provenance")
    page.facts(
        {
            "machine": machine.sentence(settings["machine"]),
            "tokens": ", ".join(f"{name} {count:,}" for name, count in settings["tokens"].items()),
            "seconds": ", ".join(f"{name} {spent:.1f}" for name, spent in settings["seconds"].items()),
        }
    )
    page.write(path)


def _mode_title(added: Row, mode: str) -> str:
    settings = added["probe_settings"]
    sampling = f", T = {settings['temperature']:g}, top-p {settings['top_p']:g}" if mode == "sampled" else ""
    return f"{mode}{sampling}; label {settings['labels'][mode]}"


def _tiles(added: Row) -> list[Tile]:
    tiles = []
    for mode in ("greedy", "sampled"):
        rows = [r for r in best_rows(added, mode) if r["speedup"] and r["title"] not in BASELINES]
        if rows:
            best = max(rows, key=lambda r: r["speedup"])
            tone: Tone = "good" if best["speedup"] > 1 else "warn"
            tiles.append(Tile(f"{mode}, over no drafting", f"{best['speedup']:.2f}×", TITLES[best["title"]], tone))
        judged = [r for r in of_mode(added, mode) if r["auroc_confidence_probe"] is not None]
        if judged:
            row = max(judged, key=lambda r: r["auroc_confidence_probe"])
            note = f"confidence probe, exit {row['layer']}; q(x): {number(row['auroc_token_probability'], '.4f')}"
            tiles.append(Tile(f"{mode}, AUROC", f"{row['auroc_confidence_probe']:.4f}", note))
    return tiles


def _speed_columns() -> list[Column]:
    return [
        Column("method", "method"),
        Column("exit_layer", "exit", "layers that the draft runs", "d"),
        Column("draft_length", "k", "most tokens drafted a round", "d"),
        Column("threshold", "γ", "confidence threshold at the start", "g"),
        Column("tokens_per_second", "tokens/s", "Σ tokens / Σ seconds", ",.0f", "max"),
        Column("speedup_vs_layerskip", "÷ LayerSkip", "paired by prompt, median", ".2f", "max"),
        Column("speedup", "÷ no drafting", "paired by prompt, median", ".2f", "max"),
        Column("interval", "95 %", numeric=True),
        Column(
            "predicted_speedup",
            "predicted",
            "tokens / (c·drafted + v(drafted + 1) + o) on held-out texts; o: bookkeeping",
            ".2f",
        ),
        Column("block_efficiency", "tokens/round", "Σ(m + 1) / rounds", ".2f"),
        Column("accepted_per_drafted", "accepted", "Σm / Σk", ".3f"),
        Column("identical_to_target", "identical", "greedy text equals model.generate's"),
    ]


def _shown(row: Row) -> dict[str, Any]:
    interval = row.get("speedup_ci95")
    told = f"{interval[0]:.2f}–{interval[1]:.2f}" if interval and None not in interval else None
    return {**row, "method": TITLES.get(row["title"], row["title"]), "interval": told}


def _judged_columns() -> list[Column]:
    columns = [
        Column("layer", "exit", "layers that run before it", "d"),
        Column("base_rate", "accepted", FORMULAS["base_rate"], ".3f"),
    ]
    for metric, label in (("auroc", "AUROC"), ("brier", "Brier"), ("ece", "ECE"), ("accuracy", "accuracy")):
        for i, (name, suffix) in enumerate(SCORES.items()):
            columns.append(Column(metric + suffix, f"{label} {name}", FORMULAS[metric] if not i else "", ".4f"))
    return columns


def _by_layer(added: Row) -> list[tuple[str, str]]:
    figures = []
    for mode in ("greedy", "sampled"):
        rows = of_mode(added, mode)
        for metric, label in (("auroc", "AUROC"), ("brier", "Brier score")):
            series = {
                name: [(r["layer"], r[metric + suffix]) for r in rows if r[metric + suffix] is not None]
                for name, suffix in SCORES.items()
            }
            svg = lines(series, f"{label} by exit, {mode}", "layers before the exit", label, markers=True, whole_x=True)
            figures.append((svg, FORMULAS[metric]))
    return figures


def _reliability(added: Row) -> list[tuple[str, str]]:
    figures = []
    for mode in ("greedy", "sampled"):
        rows = of_mode(added, mode)
        chosen = {r["exit_layer"] for r in best_rows(added, mode)} or {rows[0]["layer"]} if rows else set()
        for row in [r for r in rows if r["layer"] in chosen][:2]:
            series: dict[str, Sequence[Sequence[float]]] = {
                name.replace("_", " ").replace("-", " "): bins for name, bins in row["bins"].items()
            }
            title = f"Reliability, {mode}, exit {row['layer']}"
            figures.append((calibration(series, title), "points grow with the number of tokens"))
    return figures


def _predicted(added: Row) -> list[tuple[str, str]]:
    figures = []
    for mode, choices in added["probe_settings"]["predicted"].items():
        series: dict[str, list[tuple[float, float]]] = {}
        for choice in choices:
            series.setdefault(TITLES[choice["method"]], []).append((choice["exit_layer"], choice["speedup"]))
        title = f"Predicted speedup by exit, {mode}"
        svg = lines(series, title, "layers before the exit", "speedup (×)", markers=True, whole_x=True)
        figures.append((svg, "each method at its best window or threshold for that exit"))
    return figures
