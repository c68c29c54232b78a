"""Tables and the page of ``python -m probes``."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from rich.console import Group

from decode.bench import machine, plots
from decode.bench.page import Block, Column, Facts, Figures, Heading, Page, Table, Tile, Tiles, read_columns
from decode.bench.report import console_table

Row = Mapping[str, Any]
TITLES = {
    "autoregressive": "no draft",
    "generate": "transformers generate",
    "layerskip": "LayerSkip",
    "draft-verify": "Draft & Verify",
    "draft-verify-subset": "Draft & Verify, subset",
    "adaspeed": "AdaSPEED",
    "adaspeed-probe": "AdaSPEED, probe",
    "confidence-probe": "AdaSPEED, confidence probe",
}
"""Names of the methods in tables, in the order of the tables."""
BASELINES = ("autoregressive", "generate")
SCORES = {
    "probe": "",
    "confidence probe": "_confidence_probe",
    "token probability": "_token_probability",
    "entropy": "_entropy",
}
"""Names of the evaluated scores, and the suffixes of their columns."""
METRICS = {
    "auroc": ("AUROC", "probability that an accepted token scores above a rejected one"),
    "brier": ("Brier", "mean of (probability − accepted)²; lower is better"),
    "ece": ("ECE", "Σ over bins of share · |mean probability − share accepted|; lower is better"),
}
TABLES = read_columns(Path(__file__).with_name("columns.csv"))
SCORED = (
    *TABLES["scores"],
    *(
        Column(metric + suffix, f"{label} {name}", "" if suffix else formula, ".4f")
        for metric, (label, formula) in METRICS.items()
        for name, suffix in SCORES.items()
    ),
)


def modes_of(added: Row) -> list[str]:
    """The decoding modes that were measured."""
    return list(added["probe_settings"]["labels"])


def of_mode(added: Row, mode: str) -> list[Row]:
    """Rows of the target's probes in one mode."""
    return [row for row in added["probes"] if row["mode"] == mode and row["model"] == "target"]


def best_rows(added: Row, mode: str) -> list[dict[str, Any]]:
    """The fastest run of every method in one mode, in the order of the table."""
    rows = [row for row in added["self_speculation"] if (row["temperature"] == 0) == (mode == "greedy") and row["best"]]
    rows.sort(key=lambda row: list(TITLES).index(row["title"]))
    return [{**row, "method": TITLES[row["title"]]} for row in rows]


def mode_title(added: Row, mode: str) -> str:
    """The mode with its sampling settings and its label."""
    settings = added["probe_settings"]
    sampling = f", T = {settings['temperature']:g}, top-p {settings['top_p']:g}" if mode == "sampled" else ""
    return f"{mode}{sampling}; label {settings['labels'][mode]}"


def answer(added: Row, mode: str) -> str:
    """One sentence: the fastest method of a mode."""
    rows = [row for row in best_rows(added, mode) if row["title"] not in BASELINES and row["speedup"]]
    if not rows:
        return f"{mode}: no method was run."
    best = max(rows, key=lambda row: row["speedup"])
    place = f" with exit layer {best['exit_layer']}" if best["exit_layer"] else ""
    return f"{mode}: {best['method']}{place} is fastest, {best['speedup']:.2f} times decoding without a draft."


def console_tables(added: Row) -> Group:
    """The scores and the speeds of each mode, and the answers."""
    parts: list[Any] = []
    for mode in modes_of(added):
        title = mode_title(added, mode)
        columns = [c for c in SCORED if not c.key.startswith(("brier", "ece"))]  # the page has all of them
        parts.append(console_table(f"\nScores on test prompts: {title}", columns, of_mode(added, mode)))
        if added["self_speculation"]:
            title = f"\nSelf-speculation, {mode}, each method at its fastest setting"
            columns = [c for c in TABLES["speeds"] if c.key not in ("block_efficiency", "accepted_per_drafted")]
            parts.append(console_table(title, columns, best_rows(added, mode)))
    return Group(*parts, *(answer(added, mode) for mode in modes_of(added) if added["self_speculation"]))


def write_page(path: Path, name: str, added: Row) -> None:
    """Write the page of a run with the rows that `probes.pipeline` adds to report.json."""
    settings = added["probe_settings"]
    blocks: list[Block] = [Tiles(list(_tiles(added)))]
    if added["self_speculation"]:
        lead = "The target drafts with its first layers. Each method is shown at its fastest setting."
        blocks.append(Heading("Self-speculation", lead))
        for i, mode in enumerate(modes_of(added)):
            blocks.append(Table(TABLES["speeds"], best_rows(added, mode), mode_title(added, mode), legend=i == 0))
        every = [{**row, "method": TITLES[row["title"]]} for row in added["self_speculation"]]
        blocks += [Table(TABLES["speeds"], every, legend=False, folded="All runs"), Figures(list(_predicted(added)))]
    blocks.append(Heading("Probes", "Trained on texts that the target wrote, evaluated on prompts of the test split."))
    for i, mode in enumerate(modes_of(added)):
        blocks.append(Table(SCORED, of_mode(added, mode), mode_title(added, mode), legend=i == 0))
        blocks.append(Figures(list(_figures(added, mode))))
    if rest := [row for row in added["probes"] if row["model"] != "target"]:
        blocks.append(Table(SCORED, rest, legend=False, folded="Draft model"))
    facts = {
        "machine": machine.sentence(settings["machine"]),
        "tokens": ", ".join(f"{name} {count:,}" for name, count in settings["tokens"].items()),
        "seconds": ", ".join(f"{name} {spent:.1f}" for name, spent in settings["seconds"].items()),
    }
    blocks += [Heading("Provenance"), Facts(facts)]
    headline = " ".join(answer(added, mode) for mode in modes_of(added))
    Page("Acceptance probes and self-speculation", headline, f"draftsmith · {name}", blocks).write(path)


def _tiles(added: Row) -> Iterable[Tile]:
    for mode in modes_of(added):
        rows = [row for row in best_rows(added, mode) if row["speedup"] and row["title"] not in BASELINES]
        if rows:
            best = max(rows, key=lambda row: row["speedup"])
            tone = "good" if best["speedup"] > 1 else "warn"
            yield Tile(f"{mode}, over no draft", f"{best['speedup']:.2f}×", best["method"], tone)  # type: ignore[arg-type]
        scored = [row for row in of_mode(added, mode) if row["auroc_confidence_probe"] is not None]
        if scored:
            row = max(scored, key=lambda row: row["auroc_confidence_probe"])
            note = f"confidence probe, exit {row['layer']}; q(x): {row['auroc_token_probability']:.4f}"
            yield Tile(f"{mode}, AUROC", f"{row['auroc_confidence_probe']:.4f}", note)


def _figures(added: Row, mode: str) -> Iterable[tuple[str, str]]:
    rows = of_mode(added, mode)
    for metric in ("auroc", "brier"):
        label, formula = METRICS[metric]
        series = {name: [(row["layer"], row[metric + suffix]) for row in rows] for name, suffix in SCORES.items()}
        yield plots.lines(series, f"{label} by exit, {mode}", "layers before the exit", label, whole_x=True), formula
    exits = {row["exit_layer"] for row in best_rows(added, mode)} or {row["layer"] for row in rows[:1]}
    for row in [row for row in rows if row["layer"] in exits][:1]:
        bins = {name.replace("_", " ").replace("-", " "): cells for name, cells in row["bins"].items()}
        title = f"Reliability, {mode}, exit {row['layer']}"
        yield plots.calibration(bins, title), "The size of a point grows with the number of tokens."


def _predicted(added: Row) -> Iterable[tuple[str, str]]:
    for mode, choices in added["probe_settings"]["predicted"].items():
        series: dict[str, list[tuple[float, float]]] = {}
        for choice in choices:
            series.setdefault(TITLES[choice["method"]], []).append((choice["exit_layer"], choice["speedup"]))
        title = f"Predicted speedup by exit, {mode}"
        svg = plots.lines(series, title, "layers before the exit", "predicted speedup (×)", whole_x=True)
        yield svg, "tokens / (c·drafted + v(drafted + 1) + o), each method at its best setting for that exit"
