"""The page of checks in real engines: ``served.html`` beside a run's report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from decode.report.page import Block, Column, Heading, Page, Table, Text

ROWS = (
    Column("temperature", "T", format="g"),
    Column("draft_length", "k", "tokens drafted a round", "d"),
    Column("served_length", "tokens a round", "1 + Σ accepted / Σ rounds, as the engine counts them", ".2f",
           error="served_length_se"),
    Column("predicted_length", "predicted", "the same, replayed over the engine's texts without a draft: a token y is "
           "accepted with probability min(1, q(y) / p(y))", ".2f", error="predicted_length_se"),
    Column("recorded_length", "recorded", "of speculation_profile.json", ".2f"),
    Column("tokens_per_second", "tokens/s", "Σ tokens / Σ seconds, prompts included", ".1f", "max"),
    Column("plain_tokens_per_second", "without", "the engine's own without a draft", ".1f"),
    Column("speedup", "speedup", "tokens/s over the engine's own without a draft, paired by prompt, median", ".2f",
           "max", "speedup_ci95"),
    Column("predicted_speedup", "predicted speedup", "from the costs of our own loop on this machine", ".2f"),
    Column("identical_share", "texts identical", "to the engine's own without a draft", ".0%"),
)  # fmt: skip
POSITIONS = (
    Column("position", "position", format="d"),
    Column("served_marginal", "served", "share of rounds that accept so many tokens or more", ".3f",
           error="served_marginal_se"),
    Column("predicted_marginal", "predicted", "", ".3f", error="predicted_marginal_se"),
    Column("served_conditional", "served, conditional", "of the rounds that accepted all before it", ".3f",
           error="served_conditional_se"),
    Column("predicted_conditional", "predicted, conditional", "", ".3f", error="predicted_conditional_se"),
    Column("within", "within two errors"),
)  # fmt: skip


def served_page(served: Sequence[Mapping[str, Any]], name: str) -> Page:
    """The page of a run's checks (`decode.engines.check.Check.to_dict`), one section an engine."""
    blocks: list[Block] = []
    for check in served:
        blocks.append(Heading(check["engine"], "One request at a time."))
        blocks += [Text(f"{c['name']}: {c['told_by']}. Next: {c['remedy']}.", "warn") for c in check["causes"]]
        blocks.append(Table(ROWS, check["rows"]))
        blocks += [
            Table(POSITIONS, row["positions"], legend=False,
                  folded=f"Acceptance by position, T = {row['temperature']:g}, {row['draft_length']} tokens drafted")
            for row in check["rows"]
        ]  # fmt: skip
    rows = [row for check in served for row in check["rows"]]
    fitting = sum(bool(row["fits"]) for row in rows)
    headline = f"{fitting} of {len(rows)} mean accepted lengths are within two standard errors of the predicted ones."
    return Page(f"{name}: served", headline, "draftsmith · serve-check", blocks)
