"""What the probes and the real runs found: sentences, and tables for the console."""

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Group
from rich.text import Text as RichText

from decode.bench import machine, plots
from decode.bench.page import Block, Column, Facts, Figures, Heading, Page, Table, Text, Tile, Tiles, Tone, read_columns
from decode.bench.report import console_table
from probes.exit_search import HINDSIGHT, PRODUCT

Row = Mapping[str, Any]
TITLES = {
    "autoregressive": "no drafting",
    "generate": "transformers generate",
    "layerskip": "LayerSkip",
    "layerskip-untuned": "LayerSkip, 6 tokens",
    "layerskip-separate": "LayerSkip, separate cache",
    "draft-verify": "Draft & Verify",
    "draft-verify-subset": "Draft & Verify, subset",
    "adaspeed": "AdaSPEED",
    "adaspeed-probe": "AdaSPEED, probe",
    "confidence-probe": "AdaSPEED, confidence probe",
    HINDSIGHT: "any stop rule, with hindsight",
}
"""How tables call the methods, in their order."""
SCORES = {
    "probe": "",
    "confidence probe": "_confidence_probe",
    "token probability": "_token_probability",
    "entropy": "_entropy",
}
"""Names of the judged scores, and the suffixes of their columns."""
BASELINES = ("autoregressive", "generate", "layerskip-untuned", "layerskip-separate")
"""Titles of rows that are there to be compared with."""
LINEAR = (
    "; a linear map of the state cannot form the softmax's normaliser, of which the token probability is made, so the "
    "plain probe ranks worse where the exit is confident"
)
METRICS = {
    "auroc": ("AUROC", "probability that an accepted token scores above a rejected one"),
    "brier": ("Brier", "mean of (probability − accepted)²; lower is better"),
    "ece": ("ECE", "Σ over bins of share · |mean probability − share accepted|; lower is better"),
    "accuracy": ("accuracy", "share of tokens predicted right by probability > 0.5"),
}
PREDICTED = "tokens / (c·drafted + v(drafted + 1) + o) on held-out texts; o: bookkeeping"
TABLES = read_columns(Path(__file__).with_name("columns.csv"))
SPEED_COLUMNS = TABLES["speeds"]
JUDGED_COLUMNS = (
    *TABLES["judged"],
    *(
        Column(metric + suffix, f"{label} {name}", "" if suffix else formula, ".4f")
        for metric, (label, formula) in METRICS.items()
        for name, suffix in SCORES.items()
    ),
)
CONSOLE_SPEEDS = tuple(c for c in SPEED_COLUMNS if c.key not in ("block_efficiency", "accepted_per_drafted"))
CONSOLE_JUDGED = (
    *JUDGED_COLUMNS[:3],
    *(
        Column(metric + suffix, f"{METRICS[metric][0]} {name}", format=".4f")
        for metric in ("auroc", "brier")
        for name, suffix in zip(("probe", "conf.", "q(x)", "H"), SCORES.values())
    ),
    Column("ece", "ECE", format=".4f"),
)
"""As `JUDGED_COLUMNS`: probe, confidence probe, token probability, entropy."""


def predicted_table(added: Row, mode: str) -> tuple[list[Column], list[Row]]:
    """The best predicted setting of each method at every exit."""
    rows: dict[int, dict[str, Any]] = {}
    columns = [Column("exit", "exit", "layers that the draft runs", "d"), *JUDGED_COLUMNS[1:2]]
    alpha = {row["layer"]: row for row in of_mode(added, mode)}
    for choice in added["probe_settings"]["predicted"].get(mode, []):
        method, layer = choice["method"], choice["exit_layer"]
        row = rows.setdefault(layer, {"exit": layer} | {k: alpha[layer].get(k) for k in ("alpha", "alpha_se")})
        row |= {method: choice["speedup"], f"{method}/at": choice["threshold"] or choice["window"]}
    for method in dict.fromkeys(c["method"] for c in added["probe_settings"]["predicted"].get(mode, [])):
        if method != HINDSIGHT:
            columns.append(Column(f"{method}/at", "k" if method == "layerskip" else "γ", format="g"))
        columns.append(Column(method, TITLES[method], PREDICTED, ".2f", "max"))
    return columns, list(rows.values())


def modes_of(added: Row) -> list[str]:
    """The decoding modes that were measured."""
    return list(added["probe_settings"]["labels"])


def of_mode(added: Row, mode: str) -> list[Row]:
    """The rows of the target's probes whose label decoding uses in this mode."""
    label = added["probe_settings"]["labels"][mode]
    return [r for r in added["probes"] if r["mode"] == mode and r["label"] == label and r["model"] == "target"]


def best_rows(added: Row, mode: str) -> list[Row]:
    """The fastest run of every method in one mode, in the table's order."""
    rows = [r for r in added["self_speculation"] if (r["temperature"] == 0) == (mode == "greedy") and r["best"]]
    return sorted(rows, key=lambda r: list(TITLES).index(r["title"]))


def named(rows: Iterable[Row]) -> list[dict[str, Any]]:
    """Rows with the names of their methods."""
    return [{**row, "method": TITLES[row["title"]]} for row in rows]


def mode_title(added: Row, mode: str) -> str:
    """What was sampled how, and which tokens count as accepted."""
    settings = added["probe_settings"]
    sampling = f", T = {settings['temperature']:g}, top-p {settings['top_p']:g}" if mode == "sampled" else ""
    return f"{mode}{sampling}; label {settings['labels'][mode]}"


def console_tables(added: Row) -> Group:
    """The probes of each mode, the paper's table, and the sentences."""
    tables = [
        console_table(f"\nScores on held-out prompts: {mode_title(added, mode)}", CONSOLE_JUDGED, of_mode(added, mode))
        for mode in modes_of(added)
    ]
    if added["self_speculation"]:
        title = "\nSelf-speculation, {}, each method at its fastest setting"
        tables += [console_table(title.format(m), CONSOLE_SPEEDS, named(best_rows(added, m))) for m in modes_of(added)]
    return Group(*tables, *(RichText(sentence) for sentence in added.get("probe_findings") or findings(added)))


def findings(added: Row) -> list[str]:
    """The answers in sentences: speed, exit, probes against the token probability, the check by scikit-learn."""
    found, settings = [], added["probe_settings"]
    for mode in modes_of(added):
        rows = {row["title"]: row for row in best_rows(added, mode)}
        layer = next((rows[t]["exit_layer"] for t in ("adaspeed-probe", "layerskip") if t in rows), None)
        sentences = [
            _fastest(rows),
            _bound(settings["predicted"].get(mode, [])),
            _elsewhere(settings["predicted_where_weights_decide"].get(mode, [])),
            _untuned(rows),
            _shared(rows.get("layerskip-separate")),
            *(_probe_gain(row) for row in of_mode(added, mode) if row["layer"] == layer),
        ]
        found += [f"{mode}{sentence}" for sentence in sentences if sentence]
    found += change_of_target(settings["target_training"])
    return found + [_check(check) for check in (settings["scikit_learn"],) if check]


def change_of_target(history: Sequence[Row]) -> list[str]:
    """What LayerSkip's training cost a target that was given."""
    if not history or "recipe_loss" not in history[0]:
        return []
    before, after = history[0], min(history[1:], key=lambda row: row["recipe_loss"])
    return [
        "the training with LayerSkip changed the target: on the validation answers its perplexity went from "
        f"{math.exp(before['loss']):.3f} to {math.exp(after['loss']):.3f}, and the share of tokens that it predicts "
        f"from {before['accuracy']:.3f} to {after['accuracy']:.3f} ({after['step']} steps)"
    ]


def _fastest(rows: Mapping[str, Row]) -> str:
    ours = [row for title, row in rows.items() if title not in BASELINES and row["speedup"]]
    if not ours:
        return ""
    best = max(ours, key=lambda row: row["speedup"])
    exit_layer = f", exit after layer {best['exit_layer']}" if best["exit_layer"] else ""
    ratio = best.get("speedup_vs_layerskip")
    over = f", {ratio:.2f} times LayerSkip at its best" if ratio and best["title"] != "layerskip" else ""
    return f": fastest is {TITLES[best['title']]}{exit_layer}, {best['speedup']:.2f} times no drafting{over}"


def _best_predicted(choices: Iterable[Row]) -> dict[str, float]:
    best: dict[str, float] = {}
    for choice in choices:
        best[choice["method"]] = max(best.get(choice["method"], 0.0), choice["speedup"])
    return best


def _bound(choices: Iterable[Row]) -> str:
    """How much stopping at every rejection, and nowhere else, would gain over the best constant length."""
    best = _best_predicted(choices)
    fixed, known = best.get("layerskip"), best.get(HINDSIGHT)
    if not fixed or not known:
        return ""
    return (
        f": knowing of each drafted token whether it is rejected, drafting would be {known / fixed:.2f} times as fast "
        f"as LayerSkip's best constant length (predicted: {known:.2f} and {fixed:.2f} times no drafting), the most "
        "that stopping at rejections gains at these costs"
    )


def _elsewhere(choices: Iterable[Row]) -> str:
    """What stop rules would gain where reading a draft costs no more than reading a token."""
    best = _best_predicted(choices)
    if not best.get("layerskip"):
        return ""
    over = {TITLES[m]: s / best["layerskip"] for m, s in best.items() if m in PRODUCT or m == HINDSIGHT}
    return (
        ": where the weights that are read decide the time (a large model at batch one on a GPU), predicted over "
        "LayerSkip's best constant length: " + "; ".join(f"{title} {ratio:.2f}" for title, ratio in over.items())
    )


def _untuned(rows: Mapping[str, Row]) -> str:
    """What AdaSPEED gains over a constant length that was not tuned."""
    ours = [row for title, row in rows.items() if title in PRODUCT and row.get("speedup_vs_untuned")]
    if not ours or not rows["layerskip-untuned"].get("speedup_vs_layerskip"):
        return ""
    best, six = max(ours, key=lambda row: row["speedup_vs_untuned"]), rows["layerskip-untuned"]
    low, high = best["speedup_vs_untuned_ci95"]
    return (
        f": {TITLES[best['title']]} is {best['speedup_vs_untuned']:.2f} times (95 %: {low:.2f} to {high:.2f}) as fast "
        f"as LayerSkip with the {six['draft_length']} tokens of its library's example, which is "
        f"{six['speedup_vs_layerskip']:.2f} times as fast as with its best length"
    )


def _shared(row: Row | None) -> str:
    if row is None:
        return ""
    ratio, interval = row.get("speedup_vs_shared"), row.get("speedup_vs_shared_ci95")
    if not ratio or not interval:
        return ": the gain of the shared cache was not measured"
    return (
        f": LayerSkip with the shared cache is {1 / ratio:.2f} times as fast as with a separate one (95 %: "
        f"{1 / interval[1]:.2f} to {1 / interval[0]:.2f}; exit {row['exit_layer']}, {row['draft_length']} tokens)"
    )


def _probe_gain(row: Row) -> str:
    """Whether the probes of an exit beat the token probability, and if not, why."""
    if row["auroc"] is None or row["auroc_token_probability"] is None:
        return ""
    parts = []
    for name in ("probe", "confidence probe"):
        ranks = row["auroc" + SCORES[name]] - row["auroc_token_probability"]
        errs = row["brier" + SCORES[name]] - row["brier_token_probability"]
        interval = row.get("auroc_gain_ci95_" + name.replace(" ", "_"))
        sure = f" (95 %: {interval[0]:+.4f} to {interval[1]:+.4f})" if interval else ""
        parts.append(
            f"the {name} is {'better' if ranks > 0 else 'worse'} in AUROC by {abs(ranks):.4f}{sure} and "
            f"{'better' if errs < 0 else 'worse'} in Brier score by {abs(errs):.4f}"
        )
    why = LINEAR if row["auroc"] < row["auroc_token_probability"] else ""
    return f", exit {row['layer']}, against the token probability: " + ", ".join(parts) + why


def _check(check: Row) -> str:
    gaps = [abs(a - b) for a, b in zip(check["auroc"], check["auroc_ours"]) if a is not None and b is not None]
    return (
        f"scikit-learn, {check['fits']} fits one by one: {check['seconds']:.1f} s; the same at once: "
        f"{check['seconds_ours']:.1f} s ({check['seconds'] / max(1e-9, check['seconds_ours']):.1f} times as fast); "
        f"largest difference in AUROC of a layer {max(gaps, default=0.0):.4f}"
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
