"""Where the results of a check are kept: speculation_profile.json, the model card, and a run's report.json."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from decode.core.files import read_json, write_section, write_text


def record(result: Mapping[str, Any], draft: Path, run: Path | None) -> list[Path]:
    """Write a check's rows where they are looked for; earlier ones of the same engine are replaced.

    Args:
        result: `decode.engines.check.Check.to_dict`, ready for JSON.
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
        "| engine | T | drafted | tokens a round | predicted | tokens/s | without | speedup | texts identical |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for check in served:
        for row in check["rows"]:
            same = row["identical_share"]
            lines.append(
                f"| {check['engine']} | {row['temperature']:g} | {row['draft_length']} "
                f"| {_number(row['served_length'])} ± {_number(row['served_length_se'])} "
                f"| {_number(row['predicted_length'])} | {_number(row['tokens_per_second'], 1)} "
                f"| {_number(row['plain_tokens_per_second'], 1)} | {_number(row['speedup'])} "
                f"| {'' if same is None else f'{same:.0%}'} |"
            )
    lines += ["", "One request at a time; tokens a round count the target's own token."]
    return "\n".join(lines)


def _number(value: float | None, digits: int = 2) -> str:
    return "" if value is None else f"{value:.{digits}f}"
