"""A running vLLM or llama.cpp server: texts from token ids, and the drafts that its metrics count."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

from decode.engines.acceptance import Drafts, ServedText
from decode.errors import UserError

SETTLED = 0.05  # seconds after which counters that have not changed are taken as final
LATE = 200  # readings without a change after which they are final although tokens are missing in them


@dataclass
class Metrics:
    """Counters of an engine since it started."""

    drafts: Drafts
    decode_seconds: float | None  # time after the first tokens of all requests; None where it is not published
    tokens: float  # written tokens; infinite where they are not published


def parse_metrics(page: str) -> Metrics:
    """Counters of a ``/metrics`` page of vLLM or llama.cpp.

    Raises:
        UserError: the page is of another server.
    """
    values: dict[str, float] = {}
    positions: dict[int, float] = {}
    try:
        for sample in (sample for family in text_string_to_metric_families(page) for sample in family.samples):
            prefix, _, name = sample.name.removesuffix("_total").partition(":")
            if prefix not in ("vllm", "llamacpp"):
                continue
            values[name] = values.get(name, 0.0) + sample.value
            if name == "spec_decode_num_accepted_tokens_per_pos":
                place = int(sample.labels["position"])
                positions[place] = positions.get(place, 0.0) + sample.value
    except ValueError:
        values = {}
    if not values:
        raise UserError("the metrics page is not vLLM's or llama.cpp's; start the server with metrics (--metrics)")
    rounds, drafted = (values.get(f"spec_decode_num_{what}", 0.0) for what in ("drafts", "draft_tokens"))
    tokens = values.get("generation_tokens", values.get("tokens_predicted", math.inf))
    drafts = Drafts(rounds, drafted, [positions[i] for i in sorted(positions)])
    return Metrics(drafts, values.get("request_decode_time_seconds_sum"), tokens)


class Server:
    """Sends requests to one server, one at a time.

    Args:
        url: address of the server.
        name: vllm or llama.cpp.
        seconds: time limit of each request.
    """

    def __init__(self, url: str, name: str, seconds: float = 120.0) -> None:
        self.url, self.name, self.seconds = url.rstrip("/"), name, seconds
        self.client = httpx.Client(base_url=self.url, timeout=seconds, trust_env=False)
        self.model: str | None = None
        self.pieces: dict[int, str] = {}  # text of stop tokens

    def ready(self) -> bool:
        """Whether the server reports that it is healthy."""
        try:
            return self.client.get("/health", timeout=2.0).status_code == 200
        except httpx.HTTPError:
            return False

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
        """Write one text and count its drafts.

        Args:
            ids: the prompt.
            temperature: 0 is greedy; the distribution is not cut otherwise.
            seed: of sampling.
            max_new_tokens: most tokens.
            stop_ids: tokens that end the text.
            ignore_eos: continue after every stop token.
        """
        before = self._settled()
        began = time.perf_counter()
        text = self._complete(list(ids), temperature, seed, max_new_tokens, list(stop_ids), ignore_eos)
        text.seconds = time.perf_counter() - began
        after = self._settled(before.tokens + len(text.ids))
        text.drafts = after.drafts - before.drafts
        if text.decode_seconds is None and before.decode_seconds is not None and after.decode_seconds is not None:
            text.decode_seconds = after.decode_seconds - before.decode_seconds
        return text

    def differs_in_ids(self, text: str, ids: Sequence[int]) -> str | None:
        """Where the server's token ids of a text differ from these; None where they do not."""
        body = {"content": text, "add_special": True} if self.name == "llama.cpp" else {"prompt": text}
        theirs = [int(i) for i in self._call("POST", "/tokenize", json=body).json()["tokens"]]
        if not theirs or theirs == list(ids):
            return None
        at = next((i for i, (a, b) in enumerate(zip(theirs, ids)) if a != b), min(len(theirs), len(ids)))
        return f"of {text[:40]!r}, token {at} is {theirs[at : at + 3]} there and {list(ids[at : at + 3])} here"

    def _complete(
        self, ids: list[int], temperature: float, seed: int, max_new_tokens: int, stop_ids: list[int], ignore_eos: bool
    ) -> ServedText:
        if self.name == "llama.cpp":
            for i in stop_ids:
                if i not in self.pieces:
                    answer = self._call("POST", "/detokenize", json={"tokens": [i]})
                    self.pieces[i] = str(answer.json()["content"])
            # llama-server stops at strings, not at ids, and shows special tokens only where they are preserved
            stop = [self.pieces[i] for i in stop_ids if self.pieces[i]]
            body: dict[str, Any] = {
                "prompt": ids, "n_predict": max_new_tokens, "temperature": temperature, "seed": seed, "top_k": 0,
                "top_p": 1.0, "min_p": 0.0, "samplers": ["temperature"], "return_tokens": True, "cache_prompt": False,
                "ignore_eos": ignore_eos, "stop": stop, "preserved_tokens": stop,
            }  # fmt: skip
            found = self._call("POST", "/completion", json=body).json()
            new = [int(i) for i in found["tokens"]]
            end = next((n for n, i in enumerate(new, 1) if i in stop_ids), len(new))
            return ServedText(new[:end], 0.0, float(found["timings"]["predicted_ms"]) / 1e3)
        if self.model is None:
            self.model = str(self._call("GET", "/v1/models").json()["data"][0]["id"])
        body = {
            "prompt": ids, "max_tokens": max_new_tokens, "temperature": temperature, "seed": seed, "top_p": 1.0,
            "stop_token_ids": stop_ids, "return_token_ids": True, "model": self.model, "ignore_eos": ignore_eos,
            "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0,  # not as the model's generation_config has them
        }  # fmt: skip
        choice = self._call("POST", "/v1/completions", json=body).json()["choices"][0]
        if "token_ids" not in choice:
            raise UserError(f"{self.name} at {self.url} returns no token ids; vLLM 0.10 or newer is required")
        return ServedText([int(i) for i in choice["token_ids"]], 0.0)

    def _settled(self, tokens: float = 0.0) -> Metrics:
        """Metrics that count at least `tokens` and no longer change; engines publish them after the answer."""
        last, same = parse_metrics(self._call("GET", "/metrics").text), 0
        for _ in range(round(self.seconds / SETTLED)):
            time.sleep(SETTLED)
            now = parse_metrics(self._call("GET", "/metrics").text)
            same = same + 1 if now == last else 0
            last = now
            if same and (now.tokens >= tokens or same >= LATE):
                break
        if not same:
            raise UserError(
                f"the counters of {self.name} at {self.url} were still changing after {self.seconds:.0f} s, so other "
                "clients are sending requests; stop them and run the command again"
            )
        return last

    def _call(self, method: str, path: str, **options: Any) -> httpx.Response:
        try:
            answer = self.client.request(method, path, **options)
        except httpx.TimeoutException as error:
            raise UserError(
                f"{self.name} did not answer {path} within {self.seconds:.0f} s; raise --request-timeout or lower "
                "--max-new-tokens"
            ) from error
        except httpx.HTTPError as error:
            raise UserError(f"{self.name} at {self.url} does not answer {path}: {error}; is it running?") from error
        if answer.status_code != 200:
            raise UserError(
                f"{self.name} answered {path} with status {answer.status_code}: {answer.text[:400].strip()}; check "
                "--url, --target and the server's log"
            )
        return answer
