"""The target in a serving engine, whose servers somebody has started (``python -m distill check-engine`` prints how).

Requests are in flight `EngineSettings.in_flight` at a time at each server, which bounds the memory of both sides, and
are asked again after a failure. What the engine says of them is in `distill.data.writing` (answers) and
`distill.signal.engine` (hidden states).
"""

import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from itertools import islice
from typing import Any, TypeVar
from urllib.parse import urlsplit

import httpx

from decode.core.draft import Ids
from decode.errors import UserError
from distill.config.teacher import EngineSettings

Item = TypeVar("Item")
Result = TypeVar("Result")
Answer = dict[str, Any]
TRIES, PAUSE = 7, 0.5  # of one request; seconds before the second one, doubled before each further one
ANSWER = 600.0  # seconds in which a prompt is answered
TRANSIENT = {408, 409, 425, 429}  # and from 500 on: statuses that another try may change
KEPT = "What is finished is kept: run the same command again to continue"


class Retry(Exception):
    """What an answer lacks that another try may bring."""


def attempts(tries: int = TRIES) -> Iterator[int]:
    """The numbers of tries, with a pause before each further one that is twice as long as the one before."""
    for number in range(tries):
        if number:
            time.sleep(PAUSE * 2 ** (number - 1))
        yield number


@dataclass(frozen=True)
class Served:
    """A model on a server."""

    client: httpx.Client
    url: str
    name: str
    context: int | None  # longest text and answer in tokens, where the server says so


class Engine:
    """Servers of the target.

    Args:
        urls: Their addresses, which end with ``/v1``.
        settings: Requests in flight.

    Attributes:
        workers: Requests that may be in flight at once, at all servers.
    """

    def __init__(self, urls: Sequence[str], settings: EngineSettings) -> None:
        self.workers = settings.in_flight * len(urls)
        self.models = list(map(self._served, urls))

    def close(self) -> None:
        """Close the connections."""
        for model in self.models:
            model.client.close()

    def complete(self, number: int, ids: Sequence[int], tries: int = TRIES, **how: Any) -> Answer:
        """The answer of a server to the request of this number: its ``choices[0]``, with what else stands in it.

        Raises:
            UserError: It fails, after all tries; with what the server says and the next step.
        """
        model = self.models[number % len(self.models)]
        body = {"model": model.name, "prompt": list(ids), "return_token_ids": True} | how
        answer, choice = self._call(model.client, model.url, tries, "choices", "POST", "completions", json=body)
        return answer | choice

    def _served(self, url: str) -> Served:
        headers = {"Authorization": f"Bearer {os.environ.get('OPENAI_API_KEY') or 'none'}"}
        abroad = urlsplit(url).hostname not in ("127.0.0.1", "localhost")
        limits = httpx.Limits(max_connections=None)
        client = httpx.Client(base_url=url, timeout=ANSWER, headers=headers, limits=limits, trust_env=abroad)
        _, model = self._call(client, url, 2, "data", "GET", "models")
        return Served(client, url, str(model.get("id")), model.get("max_model_len"))

    def _call(self, client: httpx.Client, url: str, tries: int, key: str, *request: str, **options: Any) -> Any:
        """An answer, and the first of the list that it has under a key."""
        why = ""
        for _ in attempts(tries):
            try:
                answer = client.request(*request, **options)
                if answer.status_code == 200:
                    values = answer.json()
                    return values, values[key][0]
                why = f"status {answer.status_code}: {_short(answer)}"
                if answer.status_code not in TRANSIENT and answer.status_code < 500:
                    break
            except (KeyError, IndexError, TypeError):
                why = f"its answer has no {key}: {_short(answer)}"
                break
            except (httpx.HTTPError, ValueError) as error:
                why = f"{type(error).__name__}: {error}"
        raise UserError(
            f"{url} failed: {why}: start it with the target (docs/engines.md), put its key into OPENAI_API_KEY, or "
            f"leave teacher.engine.urls out. {KEPT}"
        )


def _short(answer: httpx.Response) -> str:
    return " ".join(answer.text.split())[:300]


def answer_ids(answer: Answer) -> Ids:
    """The token ids of an answer.

    Raises:
        UserError: There are none.
    """
    if not isinstance(ids := answer.get("token_ids"), list):
        raise UserError(
            "the engine returned no token ids, which are what is learned: serve the target by a vLLM (0.10.2 or later) "
            "or SGLang (of August 2026 or later) that knows return_token_ids, or leave teacher.engine.urls out"
        )
    return ids


def request_seed(seed: int, number: int) -> int:
    """The seed of the request of a number."""
    return (seed * 1_000_003 + number) % (1 << 31)


def in_flight(answer: Callable[[Item], Result], items: Iterable[Item], most: int) -> Iterator[Result]:
    """The answers to items as they come, so many asked for at once; an item is taken when there is room for it."""
    pool, waiting, coming = ThreadPoolExecutor(most), set[Future[Result]](), iter(items)
    try:
        while True:
            waiting |= {pool.submit(answer, item) for item in islice(coming, most - len(waiting))}
            if not waiting:
                return
            done, waiting = wait(waiting, return_when=FIRST_COMPLETED)
            for future in done:
                yield future.result()
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
