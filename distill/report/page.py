"""The HTML report of a distillation run: the answer first, then tables with formulas, plots, use, provenance."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from decode.core.trace import FORMULAS
from decode.report.page import (
    LOSSLESS,
    Badge,
    Block,
    Code,
    Column,
    Facts,
    Figures,
    Heading,
    Page,
    Sample,
    Samples,
    Table,
    Text,
    Tile,
    Tiles,
    Tone,
)
from decode.report.tables import mode
from distill.export import card
from distill.export.eagle_card import head_commands
from distill.report import summary
from distill.report.figures import analysis_figures, decoding_figures

Row = Mapping[str, Any]

SELECTED = "tokens whose loss was used: all of them, or the ⌈k·n⌉ with the largest ΔL"
OUTPUT = "identical: token for token the target's greedy output; lossless: sampled by the exact rule"
DIFFERENCE = "mean over tokens of α(first) − α(second), on the same tokens of the same texts; ± its standard error"
P_VALUE = "probability of so large a difference, up or down, if there were none"
ERROR = "; ± its standard error, texts as the unit"
GREEDY = "the same at temperature 0: agreement of the argmax" + ERROR

DRAFT_COLUMNS = (
    Column("label", "draft"),
    Column("parameters", "parameters", format=","),
    Column("offline_alpha", "α offline", FORMULAS["offline_alpha"] + ERROR, ".4f", "max", "offline_alpha_se"),
    Column("offline_alpha_greedy", "α greedy", GREEDY, ".4f", "max", "offline_alpha_greedy_se"),
    Column("optimiser_steps", "steps", "optimiser steps", ","),
    Column("epochs", "epochs", "passes over the training examples", ".3g"),
    Column("examples", "examples", "training examples seen, repeats included", ","),
    Column("teacher_tokens", "teacher tokens", "response tokens scored by the target during training", ","),
    Column("selected_tokens", "trained tokens", SELECTED, ","),
    Column("seconds", "time (s)", "training time", ",.0f"),
)
PAIRED_COLUMNS = (
    Column("pair", "difference of"),
    Column("label", "setting"),
    Column("difference", "Δα", DIFFERENCE, "+.4f", error="se"),
    Column("p_value", "p", P_VALUE, lambda p: summary.p_value(p).removeprefix("p ").removeprefix("= "), numeric=True),
    Column("n", "texts", "texts compared", ","),
)
DECODING_COLUMNS = (
    Column("label", "draft"),
    Column("draft_length", "k", "draft length: tokens drafted per round", "d"),
    Column("tokens_per_second", "tokens/s", "generated tokens ÷ time", ",.0f", "max"),
    Column("speedup", "speedup", FORMULAS["speedup"] + "; beside it the 95 % bootstrap interval over prompts",
           ".2f", "max", "speedup_ci95", bar=True),
    Column("speedup_vs_generate", "vs generate", FORMULAS["speedup_vs_generate"], ".2f", "max"),
    Column("predicted_speedup", "predicted", FORMULAS["predicted_speedup"], ".2f"),
    Column("block_efficiency", "block eff.", FORMULAS["block_efficiency"], ".2f", "max"),
    Column("alpha", "α", FORMULAS["alpha"], ".3f", "max"),
    Column("accepted_per_drafted", "acc./drafted", FORMULAS["accepted_per_drafted"], ".3f", "max"),
    Column("output", "output", OUTPUT),
)  # fmt: skip
TEMPERATURE = Column("temperature", "T", format="g")
PROFILE_COLUMNS = (
    Column("cost_ratio", "c", FORMULAS["cost_ratio"], ".3f"),
    Column("best_draft_length", "best k, predicted", "draft length with the largest predicted speedup", "d"),
    Column("measured_best_draft_length", "measured", "draft length with the largest measured greedy speedup", "d"),
    Column("alpha", "α", "acceptance rate that the prediction uses", ".3f"),
    Column("break_even_alpha", "break-even α", "acceptance rate below which nothing is gained at any length", ".3f"),
)
IDENTITY = {True: Badge("identical", "good"), False: Badge("differs", "bad"), None: Badge("unchecked", "warn")}


def build_page(report: Row, run_dir: Path) -> Page:
    """The page of a report (`distill.report.write.write_report` says what is in it); absent parts are left out."""
    compared = summary.comparisons(report)
    headline = " ".join(finding.text for finding in [summary.speed(report), *compared[:1]])
    others = [*summary.choice(report), *summary.distillation(report), *compared[1:]]
    blocks: list[Block] = [
        Tiles(list(_tiles(report))),
        *(Text(finding.text, finding.tone) for finding in others),
        *_drafts(report),
        *_decoding(report),
    ]
    if learned := analysis_figures(report):
        blocks += [Heading("What the drafts learned"), Figures(list(learned.values()))]
    if samples := report.get("samples"):
        shown = [Sample(sample["tokens"], sample.get("prompt", "")) for sample in samples]
        blocks += [Heading("Samples", "Who wrote each token."), Samples(shown)]
    blocks += [*_use(report, run_dir), *_provenance(report)]
    return Page(f"{report['name']}: draft model report", headline, "draftsmith · distill", blocks)


def _tiles(report: Row) -> Iterable[Tile]:
    if (row := summary.exported_row(report)) is not None:
        interval = row.get("speedup_ci95")
        note = f"95 %: {interval[0]:.2f} to {interval[1]:.2f}; " if interval else ""
        tone: Tone = "good" if row["speedup"] > 1 else "bad"
        yield Tile("greedy speedup", f"{row['speedup']:.2f}×", f"{note}same loop, no draft", tone)
        if row.get("speedup_vs_generate"):
            speed = f"{row['tokens_per_second']:,.0f} tokens/s"
            yield Tile("over model.generate", f"{row['speedup_vs_generate']:.2f}×", speed)
        same = IDENTITY[row.get("identical_to_target")]
        yield Tile("greedy output", same.text, "to the target's, token for token", same.tone)
        name = f"{summary.display(row['draft'])} draft; the fastest length measured"
        yield Tile("draft length", f"{row['draft_length']} tokens", name)
        if row.get("block_efficiency"):
            yield Tile("block efficiency", f"{row['block_efficiency']:.2f}", "tokens per target forward")
    if (draft := summary.judged(report)) is not None:
        error = f" ± {draft['offline_alpha_se']:.4f}" if draft.get("offline_alpha_se") else ""
        yield Tile("α offline", f"{draft['offline_alpha']:.3f}", f"{summary.display(draft['name'])}{error}")
    target = report["target"]
    if target.get("accuracy") is not None:
        count = f"{target['accuracy_n']:,} problems" if target.get("accuracy_n") else "exact answers"
        yield Tile("target accuracy", f"{100 * target['accuracy']:.0f} %", count)
    if target.get("parameters"):
        yield Tile("target", _size(target["parameters"]), "parameters")


def _drafts(report: Row) -> Iterable[Block]:
    yield Heading("Drafts", "All drafts are judged on the same texts, which the target wrote for held-out prompts.")
    yield Table(DRAFT_COLUMNS, [draft_row(row) for row in report["drafts"]])
    if pairs := report.get("paired"):
        named = [{**p, "pair": f"{summary.display(p['a'])} − {summary.display(p['b'])}"} for p in pairs]
        yield Table(PAIRED_COLUMNS, named, "Paired comparison")


def _decoding(report: Row) -> Iterable[Block]:
    rows = [decoding_row(row) for row in report["decoding"]]
    if not rows:
        return
    yield Heading("Decoding", "Each draft at its fastest draft length; the exact rule keeps the target's distribution.")
    fastest = summary.fastest(rows)
    temperatures = sorted({row["temperature"] for row in rows})
    for temperature in temperatures:
        chosen = [row for row in fastest if row["temperature"] == temperature]
        caption = "Greedy" if temperature == 0 else f"Sampled at {mode(temperature)}"
        yield Table(DECODING_COLUMNS, chosen, caption, legend=temperature == temperatures[-1])
    if len(rows) > len(fastest):
        columns = [DECODING_COLUMNS[0], TEMPERATURE, *DECODING_COLUMNS[1:]]
        yield Table(columns, rows, legend=False, folded=f"All {len(rows)} measurements")
    if profile := report.get("profile"):
        yield Table(PROFILE_COLUMNS, [profile], "Cost model")
        if sentence := profile.get("verdict"):
            yield Text(sentence[:1].upper() + sentence[1:].rstrip(".") + ".")
    yield Figures(list(decoding_figures(report).values()))


def draft_row(row: Row) -> dict[str, Any]:
    """A draft with what tables show besides the numbers."""
    return {**row, "label": summary.display(row["name"])}


def decoding_row(row: Row) -> dict[str, Any]:
    """A measurement with what tables show besides the numbers."""
    same = row.get("identical_to_target")
    output = IDENTITY[same] if row["temperature"] == 0 or same is False else LOSSLESS
    return {**row, "label": summary.display(row["draft"]), "output": output}


def _use(report: Row, run_dir: Path) -> Iterable[Block]:
    row, export = summary.exported_row(report), report.get("export") or {}
    target, draft = str(export.get("target") or run_dir / "target"), str(export.get("draft") or run_dir / "draft")
    length = export.get("draft_length") or (row["draft_length"] if row else 1)
    kind = (report.get("settings") or {}).get("eagle", {}).get("kind")
    if version := {"eagle": 1, "eagle3": 3}.get(str(kind)):
        yield Heading("Use the exported head", f"The feature head is in `{draft}`, in the layout that engines read.")
        commands = head_commands(target, draft, length, version)
    else:
        yield Heading("Use the exported draft", f"The draft is in `{draft}`, a plain Hugging Face folder.")
        commands = card.commands(target, draft, length)
    yield from (Code(lines, title) for title, _, lines in commands)


def _provenance(report: Row) -> Iterable[Block]:
    settings = report.get("settings") or {}
    about = {k.replace("_", " "): _fact(v) for k, v in (report.get("machine") or {}).items()}
    yield Heading("Provenance")
    yield Facts({"created": report.get("created"), "seed": settings.get("seed"), **about})
    if commands := report.get("commands"):
        lines = commands.values() if isinstance(commands, Mapping) else commands
        yield Code("\n".join(lines), "Commands that reproduce this page")
    if settings:
        yield Code(json.dumps(settings, indent=2, ensure_ascii=False), folded="All settings")


def _fact(value: Any) -> Any:
    if isinstance(value, Mapping):
        return ", ".join(f"{k} {v}" for k, v in value.items())
    if isinstance(value, list):
        return ", ".join(map(str, value))
    return f"{value:.4g}" if isinstance(value, float) else value


def _size(parameters: int) -> str:
    for unit, name in ((1e9, " B"), (1e6, " M"), (1e3, " k")):
        if parameters >= unit:
            return f"{parameters / unit:.3g}{name}"
    return str(parameters)
