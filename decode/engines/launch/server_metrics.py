"""Drafts in the metrics of vLLM, SGLang and llama.cpp's server (Prometheus text), and drift from a profile."""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from decode.core.errors import UserError
from decode.engines.acceptance_counts import Drafts

LINE = re.compile(r"^([a-zA-Z_:][\w:]*)(?:\{(.*)\})?\s+(\S+)")
LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
PREFIXES = {"vllm": "vllm:", "sglang": "sglang:", "llama.cpp": "llamacpp:"}
"""What the names of each engine's metrics begin with."""
FEW = 50  # rounds below which nothing is said of drift


@dataclass
class Metrics:
    """What one reading of an engine's metrics says of its drafts."""

    engine: str  # a key of `PREFIXES`
    drafts: Drafts  # counted since the engine started
    # time after the first tokens of all requests; None where the engine does not publish it
    decode_seconds: float | None = None
    # mean accepted length, the target's own token included, where the engine publishes only that: of its last rounds, 0
    # before the first ones
    mean_length: float | None = None
    steps: int = 0  # tokens drafted a round, where the engine publishes them; 0 where not
    tokens: float = math.inf  # written since the engine started; infinite where it does not publish them


def parse_metrics(text: str) -> Metrics:
    """Counts of drafts from a ``/metrics`` page.

    Raises:
        UserError: the page is of no known engine, or that engine counts no drafts.
    """
    values: dict[str, float] = {}
    gauges: dict[str, list[float]] = {}
    positions: dict[int, float] = {}
    for line in text.splitlines():
        if line.startswith("#") or (match := LINE.match(line)) is None:
            continue
        name, labels, value = match[1], dict(LABEL.findall(match[2] or "")), float(match[3])
        name = name.removesuffix("_total")
        if name.endswith("spec_decode_num_accepted_tokens_per_pos") and "position" in labels:
            place = int(labels["position"])
            positions[place] = positions.get(place, 0) + value
        else:
            values[name] = values.get(name, 0) + value
            gauges.setdefault(name, []).append(value)
    engine = next((e for e, prefix in PREFIXES.items() if any(name.startswith(prefix) for name in values)), None)
    if engine is None:
        raise UserError(
            "the metrics page is not vLLM's, SGLang's or llama.cpp's; give the server's address, such as "
            "http://127.0.0.1:8000 (SGLang wants --enable-metrics, llama-server --metrics)"
        )
    prefix = PREFIXES[engine]
    accepted = [positions[i] for i in sorted(positions)]
    seconds = values.get(f"{prefix}request_decode_time_seconds_sum")
    if engine == "sglang":
        steps = max(gauges.get("sglang:spec_num_steps", [0]))
        means = [mean for mean in gauges.get("sglang:spec_accept_length", []) if mean]  # of each replica
        if not means and not steps:
            raise UserError("SGLang's metrics hold no accepted length: it was started without a draft, or is unused")
        return Metrics(engine, Drafts(), seconds, sum(means) / max(1, len(means)), int(steps))
    rounds, drafted = (values.get(f"{prefix}spec_decode_num_{what}", 0) for what in ("drafts", "draft_tokens"))
    written = values.get(f"{prefix}{'generation_tokens' if engine == 'vllm' else 'tokens_predicted'}", math.inf)
    return Metrics(engine, Drafts(rounds, drafted, accepted), seconds, tokens=written)


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
