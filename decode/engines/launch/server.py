"""A running server: texts from token ids, and its drafts as its metrics count them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx

from decode.core.errors import UserError
from decode.engines.acceptance_counts import Drafts, ServedText
from decode.engines.launch.server_metrics import Metrics, parse_metrics
from decode.engines.launch.vllm_engine import NO_CUTS

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
