"""The HTML report of a distillation run: the answer first, then tables with formulas, plots, use, provenance."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from decode.core.trace import FORMULAS
from decode.report.page import LOSSLESS, Badge, Column, Page, Tile, Tone
from distill.export import card
from distill.export.eagle_card import head_commands
from distill.report import summary as verdict
from distill.report.figures import analysis_figures, decoding_figures

Row = Mapping[str, Any]

SELECTED = "tokens whose loss was used: all of them, or the ⌈k·n⌉ with the largest ΔL"
OUTPUT = "identical: token for token the target's greedy output; lossless: sampled by the exact rule"
DIFFERENCE = "mean over tokens of α(first) − α(second), on the same tokens of the same texts"
CHANCE = "chance of so large a difference, up or down, if there were none"

DRAFT_COLUMNS = (
    Column("label", "draft"),
    Column("parameters", "parameters", format=","),
    Column("offline_alpha", "α offline", FORMULAS["offline_alpha"], ".4f", "max"),
    Column("offline_alpha_se", "± se", "its standard error, texts as the unit", ".4f"),
    Column("offline_alpha_greedy", "α greedy", "the same at temperature 0: agreement of the argmax", ".4f", "max"),
    Column("offline_alpha_greedy_se", "± se", "", ".4f"),
    Column("optimiser_steps", "steps", "optimiser steps", ","),
    Column("epochs", "epochs", "passes over the training examples", ".3g"),
    Column("examples", "examples", "training examples seen, repeats included", ","),
    Column("teacher_tokens", "teacher tokens", "response tokens scored by the target during training", ","),
    Column("selected_tokens", "trained tokens", SELECTED, ","),
    Column("seconds", "time (s)", "training time", ",.0f"),
)  # fmt: skip

PAIRED_COLUMNS = (
    Column("pair", "difference of"),
    Column("label", "setting"),
    Column("shown", "Δα", DIFFERENCE, numeric=True),
    Column("se", "± se", "its standard error, texts as the unit", ".4f"),
    Column("p_value", "p", CHANCE, lambda p: verdict.chance(p).removeprefix("= "), numeric=True),
    Column("n", "texts", "texts compared", ","),
)  # fmt: skip

DECODING_COLUMNS = (
    Column("label", "draft"),
    Column("draft_length", "k", "draft length: tokens drafted per round", "d"),
    Column("tokens_per_second", "tokens/s", "generated tokens ÷ time", ",.0f", "max"),
    Column("speedup", "speedup", FORMULAS["speedup"], ".2f", "max"),
    Column("interval", "95 %", "bootstrap interval of the speedup over prompts", numeric=True),
    Column("speedup_vs_generate", "vs generate", FORMULAS["speedup_vs_generate"], ".2f", "max"),
    Column("predicted_speedup", "predicted", FORMULAS["predicted_speedup"], ".2f"),
    Column("block_efficiency", "block eff.", FORMULAS["block_efficiency"], ".2f", "max"),
    Column("alpha", "α", FORMULAS["alpha"], ".3f", "max"),
    Column("accepted_per_drafted", "acc./drafted", FORMULAS["accepted_per_drafted"], ".3f", "max"),
    Column("output", "output", OUTPUT),
)  # fmt: skip


def build_page(report: Row, run_dir: Path) -> Page:
    """The page for a checked report (`distill.report.write.check`); parts that are absent are left out."""
    answer = verdict.speed(report)
    page = Page(f"{report['name']}: draft model report", answer.text, "draftsmith · distill")
    page.tiles(_tiles(report))
    for sentence in (verdict.distillation(report), *verdict.comparisons(report)):
        if sentence is not None:
            page.note(sentence.text, sentence.tone)
    _drafts(page, report)
    _decoding(page, report)
    _analysis(page, report)
    _samples(page, report)
    _use(page, report, run_dir)
    _provenance(page, report)
    return page


PROFILE_COLUMNS = (
    Column(
        "cost_ratio",
        "c",
        FORMULAS["cost_ratio"],
        ".3f",
        numeric=True,
    ),
    Column("best_draft_length", "best k, predicted", "draft length with the largest predicted speedup", "d"),
    Column("measured_best_draft_length", "measured", "draft length with the largest measured greedy speedup", "d"),
    Column("alpha", "α", "acceptance rate that the prediction uses", ".3f"),
    Column("break_even_alpha", "break-even α", "acceptance rate below which nothing is gained at any length", ".3f"),
)

IDENTITY: dict[bool | None, tuple[str, Tone]] = {
    True: ("identical", "good"),
    False: ("differs", "bad"),
    None: ("unchecked", "warn"),
}


def _tiles(report: Row) -> Iterable[Tile]:
    row = verdict.best_row(report)
    if row is not None:
        interval = row.get("speedup_ci95")
        note = (
            f"95 %: {interval[0]:.2f} to {interval[1]:.2f}; same loop, no draft" if interval else "same loop, no draft"
        )
        tone: Tone = "good" if row["speedup"] > 1 else "bad"
        yield Tile("greedy speedup", f"{row['speedup']:.2f}×", note, tone)
        if row.get("speedup_vs_generate"):
            yield Tile(
                "over model.generate", f"{row['speedup_vs_generate']:.2f}×", f"{row['tokens_per_second']:,.0f} tokens/s"
            )
        value, mark = IDENTITY[row.get("identical_to_target")]
        yield Tile("greedy output", value, "to the target's, token for token", mark)
        yield Tile(
            "draft length",
            f"{row['draft_length']} tokens",
            f"{verdict.display(row['draft'])} draft; fastest of those measured",
        )
        if row.get("block_efficiency"):
            yield Tile("block efficiency", f"{row['block_efficiency']:.2f}", "tokens per target forward")
    draft = verdict.judged(report)
    if draft is not None:
        error = f" ± {draft['offline_alpha_se']:.4f}" if draft.get("offline_alpha_se") else ""
        yield Tile("α offline", f"{draft['offline_alpha']:.3f}", f"{verdict.display(draft['name'])}{error}")
    target = report["target"]
    if target.get("accuracy") is not None:
        count = f"{target['accuracy_n']:,} problems" if target.get("accuracy_n") else "exact answers"
        yield Tile("target accuracy", f"{100 * target['accuracy']:.0f} %", count)
    if target.get("parameters"):
        yield Tile("target", _size(target["parameters"]), "parameters")


def _drafts(page: Page, report: Row) -> None:
    page.section("Drafts", "All drafts are judged on the same texts, which the target wrote for held-out prompts.")
    page.table(DRAFT_COLUMNS, [{**row, "label": verdict.display(row["name"])} for row in report["drafts"]])
    pairs = [dict(pair) for pair in report.get("paired") or []]
    for pair in pairs:
        pair["pair"] = f"{verdict.display(pair['a'])} − {verdict.display(pair['b'])}"
        pair["shown"] = verdict.signed(pair["difference"])
    if pairs:
        page.table(PAIRED_COLUMNS, pairs, "Paired comparison")


def _decoding(page: Page, report: Row) -> None:
    if not report["decoding"]:
        return
    rows = [_decoding_row(row) for row in report["decoding"]]
    page.section("Decoding", "Each draft at its fastest draft length; the exact rule keeps the target's distribution.")
    fastest = verdict.fastest(rows)
    temperatures = sorted({row["temperature"] for row in rows})
    for temperature in temperatures:
        chosen = [row for row in fastest if row["temperature"] == temperature]
        caption = "Greedy" if temperature == 0 else f"Sampled at temperature {temperature:g}"
        page.table(DECODING_COLUMNS, chosen, caption, legend=temperature == temperatures[-1])
    if len(rows) > len(fastest):
        columns = [DECODING_COLUMNS[0], Column("temperature", "T", format="g"), *DECODING_COLUMNS[1:]]
        page.table(columns, rows, folded=f"All {len(rows)} measurements", legend=False)
    if profile := report.get("profile"):
        page.table(PROFILE_COLUMNS, [profile], "Cost model")
        if profile.get("verdict"):
            page.paragraph(profile["verdict"][:1].upper() + profile["verdict"][1:].rstrip(".") + ".")
    page.gallery(decoding_figures(report).values())


def _decoding_row(row: Row) -> dict[str, Any]:
    interval, same = row.get("speedup_ci95"), row.get("identical_to_target")
    output = Badge(*IDENTITY[same]) if row["temperature"] == 0 or same is False else LOSSLESS
    return {
        **row,
        "label": verdict.display(row["draft"]),
        "interval": f"{interval[0]:.2f} – {interval[1]:.2f}" if interval else None,
        "output": output,
    }


def _analysis(page: Page, report: Row) -> None:
    if found := analysis_figures(report):
        page.section("What the drafts learned")
        page.gallery(found.values())


def _samples(page: Page, report: Row) -> None:
    samples = report.get("samples") or []
    if samples:
        page.section("Samples", "Who wrote each token.")
    for index, sample in enumerate(samples):
        page.tokens(sample["tokens"], sample.get("prompt", ""), legend=index == len(samples) - 1)


def _use(page: Page, report: Row, run_dir: Path) -> None:
    row = verdict.best_row(report)
    export = report.get("export") or {}
    target = str(export.get("target") or run_dir / "target")
    draft = str(export.get("draft") or run_dir / "draft")
    length = export.get("draft_length") or (row["draft_length"] if row else 1)
    settings = report.get("settings") or {}
    kind = settings.get("eagle", {}).get("kind") if isinstance(settings, Mapping) else None
    version = {"eagle": 1, "eagle3": 3}.get(str(kind))
    if version:
        page.section("Use the exported head", f"The feature head is in `{draft}`, in the layout that engines read.")
        commands = head_commands(target, draft, length, version)
    else:
        page.section("Use the exported draft", f"The draft is in `{draft}`, a plain Hugging Face folder.")
        commands = card.commands(target, draft, length)
    for title, _, lines in commands:
        page.code(lines, title)


def _provenance(page: Page, report: Row) -> None:
    page.section("Provenance")
    facts: dict[str, Any] = {"created": report.get("created")}
    settings = report.get("settings") or {}
    if isinstance(settings, Mapping) and settings.get("seed") is not None:
        facts["seed"] = settings["seed"]
    page.facts({**facts, **{k.replace("_", " "): _fact(v) for k, v in (report.get("machine") or {}).items()}})
    if report.get("commands"):
        page.code("\n".join(report["commands"]), "Commands that reproduce this page")
    if settings:
        page.details(
            "All settings",
            settings if isinstance(settings, str) else json.dumps(settings, indent=2, ensure_ascii=False),
        )


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
