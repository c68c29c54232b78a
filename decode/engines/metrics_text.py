"""Drafts in the metrics that engines publish: Prometheus text of vLLM, SGLang and llama.cpp's server."""

import math
import re
from dataclasses import dataclass

from decode.core.errors import UserError
from decode.engines.counts import Drafts

LINE = re.compile(r"^([a-zA-Z_:][\w:]*)(?:\{(.*)\})?\s+(\S+)")
LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
PREFIXES = {"vllm": "vllm:", "sglang": "sglang:", "llama.cpp": "llamacpp:"}
"""What the names of each engine's metrics begin with."""


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
