"""Under ``wandb agent``: the numbers of a benchmark go to the W&B run that the agent started for it."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

LOGGED = (
    "speedup", "speedup_vs_generate", "predicted_speedup", "tokens_per_second", "block_efficiency", "alpha",
    "accepted_per_drafted", "tv_spent", "accuracy", "draft_length",
)  # fmt: skip


def summary(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """The measured columns of the fastest method that drafts, by which W&B compares the points of a sweep."""
    drafting = [r for r in rows if not r["peer"] and r["method"] != "autoregressive" and r.get("speedup")]
    best = max(drafting, key=lambda row: row["speedup"], default=None)
    return {key: float(best[key]) for key in LOGGED if best and isinstance(best.get(key), int | float)}


def tell_agent(rows: Sequence[Mapping[str, Any]]) -> None:
    """Log the summary where an agent is at work; otherwise nothing happens, and W&B is not even imported."""
    if not os.environ.get("WANDB_SWEEP_ID"):
        return
    import wandb

    run = wandb.init(settings=wandb.Settings(console="off", disable_git=True, disable_code=True))
    run.summary.update(summary(rows))
    run.finish()
