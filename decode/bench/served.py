"""Where checks in real engines are kept: the draft's profile and card, a run's report.json and its page served.html."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from decode.bench.page import Block, Heading, Page, Table, Text
from decode.bench.report import TABLES
from decode.errors import read_json, write_section, write_text


def shown(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row with what tables show besides the numbers."""
    served, predicted = row["served_length"], row["predicted_length"]  # None where no round was whole
    apart = None if served is None or predicted is None else served - predicted
    return {**row, "apart": apart, "style": "" if row["fits"] else "yellow"}


def served_page(served: Sequence[Mapping[str, Any]], name: str) -> Page:
    """The page of a run's checks (`decode.engines.serve_check.Check` as dictionaries), one section an engine."""
    blocks: list[Block] = []
    for check in served:
        blocks.append(Heading(check["engine"], "One request at a time."))
        blocks += [Text(f"{c['name']}: {c['told_by']}. Next: {c['remedy']}.", "warn") for c in check["causes"]]
        blocks.append(Table(TABLES["served"], list(map(shown, check["rows"]))))
        blocks += [
            Table(TABLES["served positions"], row["positions"], legend=False,
                  folded=f"Acceptance by position, T = {row['temperature']:g}, {row['draft_length']} tokens drafted")
            for row in check["rows"]
        ]  # fmt: skip
        if check.get("together"):
            blocks += [Heading("Several texts at a time", level=3), Table(TABLES["together"], check["together"])]
    rows = [row for check in served for row in check["rows"]]
    fitting = sum(bool(row["fits"]) for row in rows)
    headline = (
        f"{fitting} of {len(rows)} block efficiencies agree with the predicted ones within two standard errors, or "
        "within 0.02."
    )
    return Page(f"{name}: served", headline, "draftsmith · serve-check", blocks)


def record(result: Mapping[str, Any], draft: Path, run: Path | None) -> list[Path]:
    """Write a check's rows where they are looked for; earlier ones of the same engine are replaced.

    Args:
        result: a `decode.engines.serve_check.Check` as a dictionary, ready for JSON.
        draft: the draft's folder.
        run: a run's folder, whose report.json gets them.

    Returns:
        The files written.
    """
    written = []
    profile = draft / "speculation_profile.json"
    for path in (profile, *([run / "report.json"] if run else [])):
        if content := read_json(path):
            kept = [other for other in content.get("served") or [] if other.get("engine") != result["engine"]]
            content["served"] = [*kept, dict(result)]
            write_text(path, json.dumps(content, indent=2, ensure_ascii=False) + "\n")
            written.append(path)
    card = draft / "README.md"
    if card.is_file() and profile in written:
        write_section(card, "served", served_section(read_json(profile)["served"]))
        written.append(card)
    return written


def served_section(served: Sequence[Mapping[str, Any]]) -> str:
    """The card's section of measurements in engines, as Markdown."""
    lines = [
        "## Served",
        "",
        "| engine | T | drafted | tokens a round | predicted | tokens/s | without | speedup | predicted | identical |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for check in served:
        for row in check["rows"]:
            same = row["identical_share"]
            lines.append(
                f"| {check['engine']} | {row['temperature']:g} | {row['draft_length']}{_sure(row)} "
                f"| {_number(row['served_length'])} ± {_number(row['served_length_se'])} "
                f"| {_number(row['predicted_length'])} | {_number(row['tokens_per_second'], 1)} "
                f"| {_number(row['plain_tokens_per_second'], 1)} | {_number(row['speedup'])} "
                f"| {_number(row.get('engine_predicted_speedup'))} "
                f"| {'' if same is None else f'{same:.0%}'} |"
            )
    lines += [
        "",
        "One request at a time; tokens a round count the target's own token; predicted from the acceptance expected "
        "and the engine's own time of a round, taken on other texts.",
    ]
    return "\n".join(lines)


def _sure(row: Mapping[str, Any]) -> str:
    return f" if p ≥ {row['draft_p_min']:g}" if row.get("draft_p_min") else ""


def _number(value: float | None, digits: int = 2) -> str:
    return "" if value is None else f"{value:.{digits}f}"
