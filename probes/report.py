"""Tables and the page of ``python -m probes``."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console

from decode.measure import machine, plots
from decode.measure.report import Figure, Section, Table, console_table, write_page

Row = Mapping[str, Any]
SCORED = ("", "_confidence_head", "_confidence_probe", "_token_probability", "_entropy")
"""Ends of the names of metrics: of the probe, and of what it is compared with."""
METRICS = tuple(metric + end for metric in ("auroc", "brier", "ece") for end in SCORED)
SPEEDS = (
    "title", "exit_layer", "draft_length", "threshold", "tokens_per_second", "speedup_vs_layerskip", "speedup",
    "predicted_speedup", "accepted_length", "alpha", "accepted_per_drafted", "identical_to_target",
)  # fmt: skip
SLOTS = ("mode", "slot", "tokens", "base_rate", *(name for name in METRICS if not name.endswith("_entropy")))
STOPS = ("name", "temperature", "speedup", "accepted_length", "draft_length", "alpha", "predicted_speedup")
WIDE = ("brier", "ece", "accepted_per_drafted")  # beginnings of columns for which a terminal has no room
PRODUCTS = ("mode", "estimate", "auroc", "brier", "ece", "worst_slot_ece")


def titles(added: Row) -> dict[str, str]:
    """Return the decoding modes that were measured, with their sampling settings and labels as a title."""
    settings = added["probe_settings"]
    sampling = {"sampled": f", T = {settings['temperature']:g}, top-p {settings['top_p']:g}"}
    return {mode: f"{mode}{sampling.get(mode, '')}; label {label}" for mode, label in settings["labels"].items()}


def fastest(added: Row, mode: str) -> list[Row]:
    """Return the fastest run of every method in a mode."""
    return [row for row in added["self_speculation"] if row["best"] and (row["temperature"] == 0) == (mode == "greedy")]


def answer(added: Row, mode: str) -> str:
    """Return a sentence: the fastest method of a mode."""
    rows = [row for row in fastest(added, mode) if row["exit_layer"] and row["speedup"]]
    if not rows:
        return f"{mode}: no method was run."
    best = max(rows, key=lambda row: row["speedup"])
    place = f"{mode}: {best['title']} with exit layer {best['exit_layer']}"
    return f"{place} is fastest, {best['speedup']:.2f} times decoding without a draft."


def tables(added: Row) -> list[Table]:
    """Return the tables of scores and of speeds: of exits, or of a block head."""
    if "probes" not in added:
        return [
            Table(SLOTS, added["block_slots"], "Each slot of blocks that were right before it"),
            Table(PRODUCTS, added["block_products"], "The product up to a slot: whether the block is right that far"),
            Table(STOPS, added["block_stop_rules"], "How much of a block is verified"),
        ]
    scores, speeds = list[Table](), list[Table]()
    for mode, title in titles(added).items():
        rows = [row for row in added["probes"] if row["mode"] == mode]
        scores.append(Table(("layer", "alpha", "base_rate", *METRICS), rows, f"Scores on test prompts, {title}"))
        speeds.append(Table(SPEEDS, fastest(added, mode), f"Each method at its fastest setting, {title}"))
    return scores + speeds


def show(console: Console, added: Row, page: Path) -> None:
    """Print the tables, with fewer columns than the page, the answers, and where the page is."""
    for table in tables(added) if added else ():
        if table.rows:
            keys = [key for key in table.keys if table.keys is PRODUCTS or not key.startswith(WIDE)]
            console.print(console_table(f"\n{table.title}", keys, table.rows))
    console.print("\n".join([*added.get("probe_findings", []), f"  {page}"]), highlight=False, soft_wrap=True)


def write_report(path: Path, name: str, added: Row) -> None:
    """Write the page of a run with what `probes.pipeline` adds to report.json."""
    sections = [Section("Results", tables=tables(added))]
    if "probes" in added:
        settings, every = added["probe_settings"], Table(SPEEDS, added["self_speculation"], "All runs", folded=True)
        sections.append(Section("The choice of the exit", tables=[every], figures=list(predictions(added))))
        tokens = [f"{split} {count:,}" for split, count in settings["tokens"].items()]
        facts = {"machine": machine.sentence(settings["machine"]), "tokens": tokens}
        sections.append(Section("Provenance", facts=facts, folded=True))
    title = "acceptance probes and self-speculation" if "probes" in added else "acceptance probes inside a block head"
    write_page(path, f"{name}: {title}", " ".join(added.get("probe_findings", [])), sections)


def predictions(added: Row) -> Iterator[Figure]:
    """Yield a plot for each mode: the speedups that were expected, by exit."""
    for mode, choices in added["probe_settings"]["predicted"].items():
        series: dict[str, list[tuple[float, float]]] = {}
        for choice in choices:
            series.setdefault(choice["method"], []).append((choice["exit_layer"], choice["speedup"]))
        axes = "layers before the exit", "predicted speedup (×)"
        svg = plots.lines(series, f"Predicted speedup by exit, {mode}", *axes)
        yield svg, "tokens over the seconds of real rounds, each method at its best setting for that exit"
