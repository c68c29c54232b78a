"""Tables and the page of ``python -m probes``."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from rich.console import Group

from decode.bench import machine, plots
from decode.bench.page import COLUMNS, Figure, Section, Table, console_table, write_page

Row = Mapping[str, Any]
BASELINES = ("autoregressive", "generate")
SUFFIXES = {
    "probe": "",
    "confidence probe": "_confidence_probe",
    "token probability": "_token_probability",
    "entropy": "_entropy",
}
"""Names of the evaluated scores, and the suffixes of their columns."""
SCORES = (
    "layer",
    "alpha",
    "base_rate",
    *(m + suffix for m in ("auroc", "brier", "ece") for suffix in SUFFIXES.values()),
)
SPEEDS = (
    "title", "exit_layer", "draft_length", "threshold", "tokens_per_second", "speedup_vs_layerskip", "speedup",
    "predicted_speedup", "accepted_length", "alpha", "accepted_per_drafted", "identical_to_target",
)  # fmt: skip
"""Columns of the tables; the terminal goes without a few of them."""


def modes_of(added: Row) -> dict[str, str]:
    """The decoding modes that were measured, with their sampling settings and labels as a title."""
    settings, titles = added["probe_settings"], {}
    for mode, label in settings["labels"].items():
        sampling = f", T = {settings['temperature']:g}, top-p {settings['top_p']:g}" if mode == "sampled" else ""
        titles[mode] = f"{mode}{sampling}; label {label}"
    return titles


def scored(added: Row, mode: str) -> list[Row]:
    """Rows of the target's probes in one mode."""
    return [row for row in added["probes"] if row["mode"] == mode and row["model"] == "target"]


def speeds(added: Row, mode: str) -> list[Row]:
    """The fastest run of every method in one mode."""
    return [row for row in added["self_speculation"] if row["best"] and (row["temperature"] == 0) == (mode == "greedy")]


def answer(added: Row, mode: str) -> str:
    """One sentence: the fastest method of a mode."""
    rows = [row for row in speeds(added, mode) if row["title"] not in BASELINES and row["speedup"]]
    if not rows:
        return f"{mode}: no method was run."
    best = max(rows, key=lambda row: row["speedup"])
    place = f" with exit layer {best['exit_layer']}" if best["exit_layer"] else ""
    return f"{mode}: {best['title']}{place} is fastest, {best['speedup']:.2f} times decoding without a draft."


def console_tables(added: Row) -> Group:
    """The scores and the speeds of each mode, and the answers."""
    parts: list[Any] = []
    for mode, title in modes_of(added).items():
        keys = [key for key in SCORES if not key.startswith(("brier", "ece"))]
        parts.append(console_table(f"\nScores on test prompts: {title}", keys, scored(added, mode)))
        if added["self_speculation"]:
            title = f"\nSelf-speculation, {mode}, each method at its fastest setting"
            terminal = [key for key in SPEEDS if key != "accepted_per_drafted"]
            parts += [console_table(title, terminal, speeds(added, mode)), answer(added, mode)]
    return Group(*parts)


def write_report(path: Path, name: str, added: Row) -> None:
    """Write the page of a run with the rows that `probes.pipeline` adds to report.json."""
    settings, modes = added["probe_settings"], modes_of(added)
    tables = [Table(SPEEDS, speeds(added, mode), title) for mode, title in modes.items()]
    tables.append(Table(SPEEDS, added["self_speculation"], "All runs", folded=True))
    text = "The target drafts with its first layers. Each method is shown at its fastest setting."
    sections = [Section("Self-speculation", text, tables=tables, figures=list(_predicted(added)))]
    tables = [Table(SCORES, scored(added, mode), title) for mode, title in modes.items()]
    rest = [row for row in added["probes"] if row["model"] != "target"]
    tables.append(Table(SCORES, rest, "Draft model", folded=True))
    text = "Trained on texts that the target wrote, evaluated on prompts of the test split."
    sections.append(Section("Probes", text, tables=tables, figures=list(_figures(added))))
    facts = {
        "machine": machine.sentence(settings["machine"]),
        "tokens": [f"{name} {count:,}" for name, count in settings["tokens"].items()],
        "seconds": [f"{name} {spent:.1f}" for name, spent in settings["seconds"].items()],
    }
    sections.append(Section("Provenance", facts=facts, folded=True))
    headline = " ".join(answer(added, mode) for mode in modes)
    write_page(path, f"{name}: acceptance probes and self-speculation", headline, sections)


def _figures(added: Row) -> Iterable[Figure]:
    for mode in modes_of(added):
        rows = scored(added, mode)
        series = {
            name: [(row["layer"], value) for row in rows if (value := row["auroc" + suffix]) is not None]
            for name, suffix in SUFFIXES.items()
        }
        svg = plots.lines(series, f"AUROC by exit, {mode}", "layers before the exit", "AUROC")
        yield svg, COLUMNS["auroc"].formula
        exits = {row["exit_layer"] for row in speeds(added, mode)} or {row["layer"] for row in rows[:1]}
        for row in [row for row in rows if row["layer"] in exits][:1]:
            bins = {name.replace("_", " "): [b[:2] for b in cells] for name, cells in row["bins"].items()}
            title = f"Reliability, {mode}, exit {row['layer']}"
            axes = "predicted acceptance probability (mean of the bin)", "accepted ÷ tested"
            yield plots.lines(bins, title, *axes, diagonal=True), ""


def _predicted(added: Row) -> Iterable[Figure]:
    for mode, choices in added["probe_settings"]["predicted"].items():
        series: dict[str, list[tuple[float, float]]] = {}
        for choice in choices:
            series.setdefault(choice["method"], []).append((choice["exit_layer"], choice["speedup"]))
        svg = plots.lines(
            series, f"Predicted speedup by exit, {mode}", "layers before the exit", "predicted speedup (×)"
        )
        yield svg, "tokens / (c·drafted + v(drafted + 1) + o), each method at its best setting for that exit"
