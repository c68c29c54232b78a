"""The page of checks in real engines: ``served.html`` beside a run's report."""

from collections.abc import Mapping, Sequence
from typing import Any

from decode.report.page import Block, Heading, Page, Table, Text
from decode.report.tables import TABLES


def shown(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row with what tables show besides the numbers."""
    apart = row["served_length"] - row["predicted_length"]
    return {**row, "apart": apart, "style": "" if row["fits"] else "yellow"}


def served_page(served: Sequence[Mapping[str, Any]], name: str) -> Page:
    """The page of a run's checks (`decode.engines.check.Check.to_dict`), one section an engine."""
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
    headline = f"{fitting} of {len(rows)} mean accepted lengths are within two standard errors of the predicted ones."
    return Page(f"{name}: served", headline, "draftsmith · serve-check", blocks)
