"""What the probes and the real runs found: sentences, console tables, and the page ``probes.html``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from decode import machine
from decode.page import Column, Page, Tile, Tone
from decode.plots import calibration, lines
from probes.confirm import TITLES

Row = Mapping[str, Any]
SCORES = {
    "probe": "",
    "confidence probe": "_confidence_probe",
    "token probability": "_token_probability",
    "entropy": "_entropy",
}
"""Names of the judged scores, and the suffixes of their columns."""
FORMULAS = {
    "auroc": "chance that an accepted token scores above a rejected one",
    "brier": "mean of (probability − accepted)²; lower is better",
    "ece": "Σ over bins of share · |mean probability − share accepted|; lower is better",
    "base_rate": "share of the tokens that are accepted",
    "accuracy": "share of tokens told right by probability > 0.5",
}


def of_mode(added: Row, mode: str) -> list[Row]:
    """The rows of the target's probes whose label decoding uses in this mode."""
    label = added["probe_settings"]["labels"][mode]
    return [r for r in added["probes"] if r["mode"] == mode and r["label"] == label and r["model"] == "target"]


def best_rows(added: Row, mode: str) -> list[Row]:
    """The fastest run of every method in one mode, in the table's order."""
    rows = [r for r in added["self_speculation"] if (r["temperature"] == 0) == (mode == "greedy") and r["best"]]
    order = list(TITLES)
    return sorted(rows, key=lambda r: order.index(r["title"]) if r["title"] in order else 99)


def findings(added: Row) -> list[str]:
    """The answers in sentences: speed, exit, probes against the token probability, the check by scikit-learn."""
    found = []
    for mode in ("greedy", "sampled"):
        rows = {row["title"]: row for row in best_rows(added, mode)}
        ours = [r for t, r in rows.items() if t not in ("autoregressive", "generate") and r["speedup"]]
        if ours:
            best = max(ours, key=lambda r: r["speedup"])
            found.append(
                f"{mode}: fastest is {TITLES[best['title']]}{_where(best)}, {best['speedup']:.2f} times no drafting"
                + _over(best, "LayerSkip")
            )
        found += [_shared(mode, rows["layerskip-separate"])] if "layerskip-separate" in rows else []
        layer = next((rows[t]["exit_layer"] for t in ("adaspeed-probe", "layerskip") if t in rows), None)
        found += [sentence for row in of_mode(added, mode) if (sentence := _verdict(mode, row, layer))]
    check = added["probe_settings"]["scikit_learn"]
    if check:
        gaps = [abs(a - b) for a, b in zip(check["auroc"], check["auroc_ours"]) if a is not None and b is not None]
        ratio = check["seconds"] / max(1e-9, check["seconds_ours"])
        found.append(
            f"scikit-learn, {check['fits']} fits one by one: {check['seconds']:.1f} s; the same at once: "
            f"{check['seconds_ours']:.1f} s ({ratio:.1f} times as fast); largest difference in AUROC of a layer "
            f"{max(gaps, default=0.0):.4f}"
        )
    return found


def _where(row: Row) -> str:
    return f", exit after layer {row['exit_layer']}" if row["exit_layer"] else ""


def _over(row: Row, name: str) -> str:
    ratio = row.get("speedup_vs_layerskip")
    return f", {ratio:.2f} times {name} at its best" if ratio and row["title"] != "layerskip" else ""


def _shared(mode: str, row: Row) -> str:
    ratio, interval = row.get("speedup_vs_shared"), row.get("speedup_vs_shared_ci95")
    if not ratio or not interval:
        return f"{mode}: the gain of the shared cache was not measured"
    return (
        f"{mode}: LayerSkip with the shared cache is {1 / ratio:.2f} times as fast as with a separate one (95 %: "
        f"{1 / interval[1]:.2f} to {1 / interval[0]:.2f}; exit {row['exit_layer']}, {row['draft_length']} tokens)"
    )


def _verdict(mode: str, row: Row, layer: int | None) -> str:
    """Whether the probes of the chosen exit beat the token probability, and if not, why."""
    if row["layer"] != layer or row["auroc"] is None or row["auroc_token_probability"] is None:
        return ""
    parts = []
    for name, suffix in (("probe", ""), ("confidence probe", "_confidence_probe")):
        ranks = row["auroc" + suffix] - row["auroc_token_probability"]
        errs = row["brier" + suffix] - row["brier_token_probability"]
        interval = row.get("auroc_gain_ci95_" + name.replace(" ", "_"))
        sure = f" (95 %: {interval[0]:+.4f} to {interval[1]:+.4f})" if interval else ""
        parts.append(
            f"the {name} is {'better' if ranks > 0 else 'worse'} in AUROC by {abs(ranks):.4f}{sure} and "
            f"{'better' if errs < 0 else 'worse'} in Brier score by {abs(errs):.4f}"
        )
    why = ""
    if row["auroc"] < row["auroc_token_probability"]:
        why = (
            "; a linear map of the state cannot form the softmax's normaliser, of which the token probability is made, "
            "so the plain probe ranks worse where the exit is confident"
        )
    return f"{mode}, exit {layer}, against the token probability: " + ", ".join(parts) + why


# -- console ---------------------------------------------------------------------------------------------------------


def console_tables(added: Row) -> Group:
    """The paper's table, the probes of each mode, and the sentences."""
    parts: list[Any] = [_judged(added, mode) for mode in ("greedy", "sampled")]
    if added["self_speculation"]:
        parts += [_speeds(added, mode) for mode in ("greedy", "sampled")]
    return Group(*parts, *(Text(sentence) for sentence in added.get("probe_findings") or findings(added)))


def _table(title: str, *headings: str) -> Table:
    table = Table(title=title, title_justify="left", box=None, pad_edge=False, header_style="bold")
    for i, heading in enumerate(headings):
        table.add_column(heading, justify="right" if i else "left")
    return table


def _judged(added: Row, mode: str) -> Table:
    label = added["probe_settings"]["labels"][mode]
    headings = ["AUROC", "conf.", "q(x)", "H", "Brier", "conf.", "q(x)", "H", "ECE"]
    title = f"\nProbe, confidence probe, token probability, entropy on held-out prompts: {mode}, label {label}"
    table = _table(title, "exit", "accepted", *headings)
    for row in of_mode(added, mode):
        cells = [
            _number(row[metric + s], ".3f" if metric == "auroc" else ".4f")
            for metric in ("auroc", "brier")
            for s in SCORES.values()
        ]
        table.add_row(str(row["layer"]), _number(row["base_rate"], ".3f"), *cells, _number(row["ece"], ".4f"))
    return table


def _speeds(added: Row, mode: str) -> Table:
    headings = ["exit", "k", "γ", "tokens/s", "÷ LayerSkip", "÷ none", "predicted"]
    table = _table(f"\nSelf-speculation, {mode}, each method at its fastest setting", "method", *headings)
    for row in best_rows(added, mode):
        title = str(TITLES.get(row["title"], row["title"]))
        table.add_row(
            title + (" (differs!)" if row.get("identical_to_target") is False else ""),
            _number(row["exit_layer"], "d"), _number(row["draft_length"], "d"), _number(row["threshold"], "g"),
            _number(row["tokens_per_second"], ",.0f"), _number(row.get("speedup_vs_layerskip"), ".2f"),
            _number(row["speedup"], ".2f"), _number(row["predicted_speedup"], ".2f"),
        )  # fmt: skip
    return table


def _number(value: Any, spec: str) -> str:
    return format(value, spec) if isinstance(value, int | float) else "–"


# -- page ------------------------------------------------------------------------------------------------------------


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
        rows = [r for r in best_rows(added, mode) if r["speedup"] and r["title"] not in ("autoregressive", "generate")]
        if rows:
            best = max(rows, key=lambda r: r["speedup"])
            tone: Tone = "good" if best["speedup"] > 1 else "warn"
            tiles.append(Tile(f"{mode}, over no drafting", f"{best['speedup']:.2f}×", TITLES[best["title"]], tone))
        judged = [r for r in of_mode(added, mode) if r["auroc_confidence_probe"] is not None]
        if judged:
            row = max(judged, key=lambda r: r["auroc_confidence_probe"])
            note = f"confidence probe, exit {row['layer']}; q(x): {_number(row['auroc_token_probability'], '.4f')}"
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
