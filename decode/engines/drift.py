"""What a running server accepts beside what a draft's profile says that it should."""

import math
from collections.abc import Mapping
from typing import Any

from decode.core.errors import UserError
from decode.engines.counts import Drafts
from decode.engines.metrics_text import Metrics

FEW = 50  # rounds below which nothing is said


def drift(now: Metrics, before: Metrics | None, profile: Mapping[str, Any]) -> dict[str, Any]:
    """One line of telemetry: acceptance by position since the last reading beside the profile's.

    Args:
        now: a reading of the server's metrics.
        before: the one before it; None counts from the server's start.
        profile: content of speculation_profile.json.

    Returns:
        Rounds, mean accepted length and marginal rates of server and profile, the differences with their standard
        errors (rounds taken as independent, so that they are lower bounds), and `drifted`: whether a position is more
        than three of them below the profile.

    Raises:
        UserError: the profile holds no rates.
    """
    expected = profile.get("marginal_accept_rates")
    if not expected:
        raise UserError(
            "the profile holds no acceptance rates (measured is false); measure the draft with python -m distill or "
            "python -m decode serve-check first"
        )
    if now.mean_length is not None:  # SGLang
        wanted = 1 + sum(expected[: now.steps or None])
        gap = now.mean_length - wanted
        return {
            "engine": now.engine,
            "mean_accept_length": now.mean_length or math.nan,
            "profile_mean_accept_length": wanted,
            "difference": gap if now.mean_length else math.nan,
            "enough": now.mean_length > 0,
            "drifted": now.mean_length > 0 and gap < -0.1 * wanted,
        }
    drafts = now.drafts - before.drafts if before is not None else now.drafts
    if drafts.rounds < 0:  # the server was started anew
        drafts = now.drafts
    return {"engine": now.engine, **compared(drafts, profile)}


def compared(drafts: Drafts, profile: Mapping[str, Any]) -> dict[str, Any]:
    """Counted drafts beside the profile's rates, over the positions that both have."""
    expected = list(profile["marginal_accept_rates"])
    errors = list(profile.get("marginal_accept_rates_se") or [])
    rows, drifted = [], False
    n = drafts.rounds
    for i, (accepted, rate) in enumerate(zip(drafts.accepted, expected)):
        served = accepted / n if n else math.nan
        known = errors[i] if i < len(errors) and errors[i] is not None else 0.0
        error = math.sqrt(max(rate * (1 - rate), 1 / (n + 2)) / n + known**2) if n else math.nan
        rows.append({"position": i + 1, "served": served, "profile": rate, "difference": served - rate, "se": error})
        drifted = drifted or (n >= FEW and served - rate < -3 * error)
    length = len(rows)
    return {
        "rounds": n,
        "mean_accept_length": 1 + sum(drafts.accepted[:length]) / n if n else math.nan,
        "profile_mean_accept_length": 1 + sum(expected[:length]),
        "positions": rows,
        "enough": n >= FEW,
        "drifted": drifted,
    }
