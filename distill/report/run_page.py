"""The HTML report of a distillation run: the answer first, then tables with formulas, plots, use, provenance."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from decode.report.bench_tables import mode
from decode.report.html_page import (
    LOSSLESS,
    Badge,
    Block,
    Code,
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
    read_columns,
)
from distill.export import model_card as card
from distill.report import run_summary as summary
from distill.report.run_figures import analysis_figures, decoding_figures

Row = Mapping[str, Any]

TABLES = read_columns(Path(__file__).with_name("columns.csv"))
IDENTITY = {True: Badge("identical", "good"), False: Badge("differs", "bad"), None: Badge("unchecked", "warn")}


def build_page(report: Row, run_dir: Path) -> Page:
    """The page of a report (`write_report.write_report` says what is in it); absent parts are left out."""
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
    yield Table(TABLES["drafts"], [draft_row(row) for row in report["drafts"]])
    if pairs := report.get("paired"):
        named = [{**p, "pair": f"{summary.display(p['a'])} − {summary.display(p['b'])}"} for p in pairs]
        for pair in [pair for pair in named if pair.get("p_value") is not None]:
            pair["p"] = summary.p_value(pair["p_value"]).removeprefix("p ").removeprefix("= ")
        yield Table(TABLES["paired"], named, "Paired comparison")


def _decoding(report: Row) -> Iterable[Block]:
    rows = [decoding_row(row) for row in report["decoding"]]
    if not rows:
        return
    yield Heading("Decoding", "Each draft at its fastest draft length; the exact rule keeps the target's distribution.")
    fastest, columns = summary.fastest(rows), TABLES["decoding"]
    temperatures = sorted({row["temperature"] for row in rows})
    for temperature in temperatures:
        chosen = [row for row in fastest if row["temperature"] == temperature]
        caption = "Greedy" if temperature == 0 else f"Sampled at {mode(temperature)}"
        yield Table(
            [c for c in columns if c.key != "temperature"], chosen, caption, legend=temperature == temperatures[-1]
        )
    if len(rows) > len(fastest):
        yield Table(columns, rows, legend=False, folded=f"All {len(rows)} measurements")
    if profile := report.get("profile"):
        yield Table(TABLES["profile"], [profile], "Cost model")
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
    export = report.get("exported")
    if not export:
        return
    target, draft = str(run_dir / "target"), str(run_dir / "export")
    kind = (report.get("settings") or {}).get("eagle", {}).get("kind")
    if kind in card.KINDS.values():
        yield Heading("Use the exported head", f"The feature head is in `{draft}`, in the layout that engines read.")
    else:
        kind = "draft"
        yield Heading("Use the exported draft", f"The draft is in `{draft}`, a plain Hugging Face folder.")
    yield from (Code(lines, title) for title, _, lines in card.commands(target, draft, kind=kind, **export))


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
