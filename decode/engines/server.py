"""A running server: texts from token ids, and its drafts as its metrics count them."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import httpx

from decode.engines.acceptance import Drafts, ServedText
from decode.engines.settings import NO_CUTS
from decode.errors import UserError

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


SETTLED = 0.05
"""Seconds after which counts that have not changed are taken as final."""
LATE = 200
"""Readings without a change after which they are, although tokens are missing in them. Not seconds: this process may
have been stopped for a while, and the server with it."""


class Server:
    """Talks to one server, one request at a time.

    Args:
        url: its address.
        name: the engine, for messages.
        seconds: limit for each request.
    """

    def __init__(self, url: str, name: str, seconds: float = 120.0) -> None:
        self.url, self.name, self.seconds = url.rstrip("/"), name, seconds
        self.client = httpx.Client(base_url=self.url, timeout=seconds, trust_env=False)

    def ready(self) -> bool:
        """Whether it answers that it is healthy."""
        try:
            return self.client.get("/health", timeout=2.0).status_code == 200
        except httpx.HTTPError:
            return False

    def metrics(self) -> Metrics:
        """What it counts now.

        Raises:
            UserError: it does not answer, or publishes no metrics.
        """
        answer = self._call("GET", "/metrics")
        return parse_metrics(answer.text)

    def write(
        self,
        ids: Sequence[int],
        *,
        temperature: float,
        seed: int,
        max_new_tokens: int,
        stop_ids: Sequence[int] = (),
        ignore_eos: bool = False,
    ) -> ServedText:
        """One text, with the drafts that the server counted for it.

        Args:
            ids: the prompt.
            temperature: 0 is greedy; no other cut of the distribution.
            seed: of sampling.
            max_new_tokens: most tokens.
            stop_ids: tokens that end the text.
            ignore_eos: no token ends it.
        """
        before = self._settled()
        began = time.perf_counter()
        new = self._complete(list(ids), temperature, seed, max_new_tokens, list(stop_ids), ignore_eos)
        seconds = time.perf_counter() - began
        after = self._settled(before.tokens + len(new.ids))
        decoding = None
        if before.decode_seconds is not None and after.decode_seconds is not None:
            decoding = after.decode_seconds - before.decode_seconds
        return ServedText(new.ids, seconds, new.decode_seconds or decoding, after.drafts - before.drafts)

    def write_together(
        self, prompts: Sequence[Sequence[int]], size: int, *, max_new_tokens: int, stop_ids: Sequence[int] = ()
    ) -> tuple[list[list[int]], float, Drafts]:
        """Greedy texts with so many requests under way: the new tokens of each, the wall time, all their drafts."""

        def one(ids: Sequence[int]) -> list[int]:
            return self._complete(list(ids), 0.0, 0, max_new_tokens, list(stop_ids), False).ids

        before = self._settled()
        began = time.perf_counter()
        with ThreadPoolExecutor(size) as pool:
            texts = list(pool.map(one, prompts))
        seconds = time.perf_counter() - began
        after = self._settled(before.tokens + sum(map(len, texts)))
        return texts, seconds, after.drafts - before.drafts

    def split_otherwise(self, text: str, ids: Sequence[int]) -> str | None:
        """Where the server makes other ids of a text than these; None where they are the same."""
        body = {"content": text, "add_special": True} if self.name == "llama.cpp" else {"prompt": text}
        theirs = [int(i) for i in self._call("POST", "/tokenize", json=body).json()["tokens"]]
        if not theirs or theirs == list(ids):
            return None
        at = next((i for i, (a, b) in enumerate(zip(theirs, ids)) if a != b), min(len(theirs), len(ids)))
        return f"of {text[:40]!r}, token {at} is {theirs[at : at + 3]} there and {list(ids[at : at + 3])} here"

    def _settled(self, tokens: float = 0.0) -> Metrics:
        """Metrics that no longer change and count so many tokens: engines publish them a moment after the answer."""
        last, same = self.metrics(), 0
        for _ in range(round(self.seconds / SETTLED)):
            time.sleep(SETTLED)
            now = self.metrics()
            same = same + 1 if now == last else 0
            last = now
            if same and (now.tokens >= tokens or same >= LATE):
                break
        if same:
            return last
        raise UserError(
            f"the counters of {self.name} at {self.url} were still changing after {self.seconds:.0f} s, so other "
            "clients are sending requests; stop them and run the command again"
        )

    def _complete(
        self, ids: list[int], temperature: float, seed: int, max_new_tokens: int, stop_ids: list[int], ignore_eos: bool
    ) -> ServedText:
        if self.name == "llama.cpp":
            body: dict[str, Any] = {
                "prompt": ids, "n_predict": max_new_tokens, "temperature": temperature, "seed": seed, "top_k": 0,
                "top_p": 1.0, "min_p": 0.0, "samplers": ["temperature"], "return_tokens": True, "cache_prompt": False,
                "ignore_eos": ignore_eos,
            }  # fmt: skip
            answer = self._call("POST", "/completion", json=body).json()
            ids = [int(i) for i in answer["tokens"]]
            return ServedText(ids, 0.0, float(answer["timings"]["predicted_ms"]) / 1e3)
        body = {
            "prompt": ids, "max_tokens": max_new_tokens, "temperature": temperature, "seed": seed, "top_p": 1.0,
            "stop_token_ids": stop_ids, "return_token_ids": True, "model": self._model(), "ignore_eos": ignore_eos,
            **NO_CUTS,
        }  # fmt: skip
        choice = self._call("POST", "/v1/completions", json=body).json()["choices"][0]
        if "token_ids" not in choice:
            raise UserError(f"{self.name} at {self.url} gives no token ids; vLLM 0.10 or newer is wanted")
        return ServedText([int(i) for i in choice["token_ids"]], 0.0)

    def _model(self) -> str:
        if not hasattr(self, "_served"):
            self._served = str(self._call("GET", "/v1/models").json()["data"][0]["id"])
        return self._served

    def _call(self, method: str, path: str, **options: Any) -> httpx.Response:
        try:
            answer = self.client.request(method, path, **options)
        except httpx.TimeoutException as error:
            raise UserError(
                f"{self.name} did not answer {path} within {self.seconds:.0f} s; give it longer with --request-timeout "
                "or fewer tokens with --max-new-tokens"
            ) from error
        except httpx.HTTPError as error:
            raise UserError(f"{self.name} at {self.url} does not answer {path}: {error}; is it running?") from error
        if answer.status_code != 200:
            raise UserError(
                f"{self.name} answered {path} with status {answer.status_code}: {answer.text[:400].strip()}; check "
                "--url, --target and the server's log"
            )
        return answer
