"""What the probes and the real runs found: sentences, and tables for the console."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.console import Group
from rich.text import Text

from decode.report.page import Column
from decode.report.tables import console_table
from probes.benchmark import TITLES
from probes.predict import HINDSIGHT

Row = Mapping[str, Any]
SCORES = {
    "probe": "",
    "confidence probe": "_confidence_probe",
    "token probability": "_token_probability",
    "entropy": "_entropy",
}
"""Names of the judged scores, and the suffixes of their columns."""
BASELINES = ("autoregressive", "generate", "layerskip-untuned", "layerskip-separate")
"""Titles of rows that are there to be compared with."""

ADASPEED = ("adaspeed", "adaspeed-probe", "confidence-probe")
"""Titles of AdaSPEED and its variants."""


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
        ours = [r for t, r in rows.items() if t not in BASELINES and r["speedup"]]
        if ours:
            best = max(ours, key=lambda r: r["speedup"])
            found.append(
                f"{mode}: fastest is {TITLES[best['title']]}{_where(best)}, {best['speedup']:.2f} times no drafting"
                + _over(best, "LayerSkip")
            )
        found += _bound(mode, added["probe_settings"]["predicted"].get(mode, []))
        found += _elsewhere(mode, added["probe_settings"].get("predicted_where_weights_decide", {}).get(mode, []))
        found += _untuned(mode, rows)
        found += [_shared(mode, rows["layerskip-separate"])] if "layerskip-separate" in rows else []
        layer = next((rows[t]["exit_layer"] for t in ("adaspeed-probe", "layerskip") if t in rows), None)
        found += [sentence for row in of_mode(added, mode) if (sentence := _probe_gain(mode, row, layer))]
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


def _bound(mode: str, predicted: Sequence[Row]) -> list[str]:
    """How much any stop rule could gain over the best constant length."""
    best = {
        method: max((choice["speedup"] for choice in predicted if choice["method"] == method), default=0.0)
        for method in ("layerskip", HINDSIGHT)
    }
    if not all(best.values()):
        return []
    fixed, known = best.values()
    return [
        f"{mode}: knowing of each drafted token whether it is rejected, drafting would be {known / fixed:.2f} times as "
        f"fast as LayerSkip's best constant length (predicted: {known:.2f} and {fixed:.2f} times no drafting), so no "
        "stop rule can gain more at these costs"
    ]


def _elsewhere(mode: str, predicted: Sequence[Row]) -> list[str]:
    """What stop rules would gain where reading a draft costs no more than reading a token."""
    best = {choice["method"]: choice["speedup"] for choice in predicted}
    if not best.get("layerskip"):
        return []
    ratios = "; ".join(
        f"{TITLES[method]} {speedup / best['layerskip']:.2f}"
        for method, speedup in best.items()
        if method in (*ADASPEED, HINDSIGHT)
    )
    return [
        f"{mode}: where the weights that are read decide the time (a large model at batch one on a GPU), predicted "
        f"over LayerSkip's best constant length: {ratios}"
    ]


def _untuned(mode: str, rows: Mapping[str, Row]) -> list[str]:
    """What AdaSPEED gains over a constant length that nobody tuned."""
    ours = [row for title, row in rows.items() if title in ADASPEED and row.get("speedup_vs_untuned")]
    if not ours or not rows["layerskip-untuned"].get("speedup_vs_layerskip"):
        return []
    best = max(ours, key=lambda row: row["speedup_vs_untuned"])
    low, high = best["speedup_vs_untuned_ci95"]
    six = rows["layerskip-untuned"]
    return [
        f"{mode}: {TITLES[best['title']]} is {best['speedup_vs_untuned']:.2f} times (95 %: {low:.2f} to {high:.2f}) as "
        f"fast as LayerSkip with the {six['draft_length']} tokens of its library's example, which is "
        f"{six['speedup_vs_layerskip']:.2f} times as fast as with its best length"
    ]


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


def _probe_gain(mode: str, row: Row, layer: int | None) -> str:
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


# -- tables -----------------------------------------------------------------------------------------------------------

MODES = ("greedy", "sampled")
FORMULAS = {
    "auroc": "probability that an accepted token scores above a rejected one",
    "brier": "mean of (probability − accepted)²; lower is better",
    "ece": "Σ over bins of share · |mean probability − share accepted|; lower is better",
    "base_rate": "share of the tokens that are accepted",
    "accuracy": "share of tokens predicted right by probability > 0.5",
}
PREDICTED = "tokens / (c·drafted + v(drafted + 1) + o) on held-out texts; o: bookkeeping"
SPEED_COLUMNS = (
    Column("method", "method"),
    Column("exit_layer", "exit", "layers that the draft runs", "d"),
    Column("draft_length", "k", "most tokens drafted a round", "d"),
    Column("threshold", "γ", "confidence threshold at the start", "g"),
    Column("tokens_per_second", "tokens/s", "Σ tokens / Σ seconds", ",.0f", "max"),
    Column("speedup_vs_layerskip", "÷ LayerSkip", "paired by prompt, median", ".2f", "max"),
    Column(
        "speedup", "÷ no drafting", "paired by prompt, median; 95 % interval", ".2f", "max", "speedup_ci95", bar=True
    ),
    Column(
        "predicted_speedup",
        "predicted",
        PREDICTED,
        ".2f",
    ),
    Column("block_efficiency", "tokens/round", "Σ(m + 1) / rounds", ".2f"),
    Column("accepted_per_drafted", "accepted", "Σm / Σk", ".3f"),
    Column("identical_to_target", "identical", "greedy text equals model.generate's"),
)
JUDGED_COLUMNS = (
    Column("layer", "exit", "layers that run before it", "d"),
    Column("base_rate", "accepted", FORMULAS["base_rate"], ".3f"),
    *(
        Column(metric + suffix, f"{label} {name}", "" if suffix else FORMULAS[metric], ".4f")
        for metric, label in (("auroc", "AUROC"), ("brier", "Brier"), ("ece", "ECE"), ("accuracy", "accuracy"))
        for name, suffix in SCORES.items()
    ),
)
CONSOLE_SPEEDS = tuple(c for c in SPEED_COLUMNS if c.key not in ("block_efficiency", "accepted_per_drafted"))
CONSOLE_JUDGED = (
    *JUDGED_COLUMNS[:2],
    *(
        Column(metric + suffix, f"{label} {name}", format=".4f")
        for metric, label in (("auroc", "AUROC"), ("brier", "Brier"))
        for name, suffix in zip(("probe", "conf.", "q(x)", "H"), SCORES.values())
    ),
    Column("ece", "ECE", format=".4f"),
)
"""As `JUDGED_COLUMNS`: probe, confidence probe, token probability, entropy."""


def named(rows: Iterable[Row]) -> list[dict[str, Any]]:
    """Rows with the names of their methods."""
    return [{**row, "method": TITLES.get(row["title"], row["title"])} for row in rows]


def mode_title(added: Row, mode: str) -> str:
    """What was sampled how, and which tokens count as accepted."""
    settings = added["probe_settings"]
    sampling = f", T = {settings['temperature']:g}, top-p {settings['top_p']:g}" if mode == "sampled" else ""
    return f"{mode}{sampling}; label {settings['labels'][mode]}"


def console_tables(added: Row) -> Group:
    """The probes of each mode, the paper's table, and the sentences."""
    tables = [
        console_table(f"\nScores on held-out prompts: {mode_title(added, mode)}", CONSOLE_JUDGED, of_mode(added, mode))
        for mode in MODES
    ]
    if added["self_speculation"]:
        title = "\nSelf-speculation, {}, each method at its fastest setting"
        tables += [console_table(title.format(m), CONSOLE_SPEEDS, named(best_rows(added, m))) for m in MODES]
    return Group(*tables, *(Text(sentence) for sentence in added.get("probe_findings") or findings(added)))
