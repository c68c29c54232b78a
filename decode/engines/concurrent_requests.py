"""Several requests under way at a time in an engine: tokens/s with a draft and without, beside what is predicted."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from decode.core.stopping.batch_draft_length import RoundCosts
from decode.engines.acceptance_counts import Drafts, mean_length
from decode.engines.launch.server import Server
from decode.engines.predicted_acceptance import Acceptance, Rounds, predicted_drafts
from decode.measure.bench.session import Item

FILLED = 2
"""Prompts for each place of a batch, so that it is full for most of the time."""


@dataclass
class Together:
    """Greedy texts that were written so many at a time.

    Attributes:
        texts: new tokens of each.
        seconds: wall time of all.
        drafts: counted for all.
    """

    texts: list[list[int]]
    seconds: float
    drafts: Drafts

    @property
    def tokens_per_second(self) -> float:
        """Σ tokens / wall time, prompts included."""
        return sum(map(len, self.texts)) / self.seconds


def places(count: int, size: int) -> list[int]:
    """Which prompts are written at a batch size: all, again from the start until every place had `FILLED`."""
    return [i % count for i in range(max(count, FILLED * size))]


def written_together(
    server: Server, items: Sequence[Item], size: int, max_new_tokens: int, stop_ids: Sequence[int]
) -> Together:
    """Greedy texts, `size` requests under way at a time."""
    prompts = [items[i].ids for i in places(len(items), size)]
    server.write_together(prompts[:size], size, max_new_tokens=8, stop_ids=stop_ids)
    return Together(*server.write_together(prompts, size, max_new_tokens=max_new_tokens, stop_ids=stop_ids))


def together_row(
    size: int,
    length: int,
    served: Together,
    plain: Together,
    told: Acceptance,
    budget: int,
    rounds: Rounds,
    costs: RoundCosts | None,
) -> dict[str, Any]:
    """Served beside predicted at one batch size and draft length.

    The predicted speedup is of rounds in which every place of the batch is taken, without the reading of prompts:
    tokens a round and text · plain(B) / (k · drafting(B) + verifying(B, k + 1)).
    """
    chosen = places(len(told.texts), size)
    expected = [predicted_drafts(told.texts[i], told.lengths[i], budget, length, rounds) for i in chosen]
    forecast = None
    if costs is not None and (count := sum(drafts.rounds for drafts in expected)):
        drafted = sum(drafts.drafted for drafts in expected) / count
        tokens = sum(told.lengths[i] - rounds.first for i in chosen) / count
        spent = costs.drafting(size) * drafted + costs.verifying(size, drafted + 1)
        forecast = tokens * costs.plain(size) / spent
    return {
        "batch_size": size,
        "draft_length": length,
        "served_length": mean_length([served.drafts])[0],
        "predicted_length": mean_length(expected)[0],
        "tokens_per_second": served.tokens_per_second,
        "plain_tokens_per_second": plain.tokens_per_second,
        "speedup": served.tokens_per_second / plain.tokens_per_second,
        "predicted_speedup": forecast if forecast is None or math.isfinite(forecast) else None,
        "identical_share": sum(a == b for a, b in zip(served.texts, plain.texts)) / len(chosen),
        "texts": len(chosen),
    }
