"""The target in a serving engine, whose servers somebody has started (``draftsmith distill check-engine`` prints how).

Requests are in flight `EngineSettings.in_flight` at a time at each server, which bounds the memory of both sides. One
that fails is asked again, of another server where there is one; a server that fails is left alone for a while. What the
engine says is read in `distill.data.writing` (answers) and `distill.signal.engine` (hidden states).
"""

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from itertools import islice
from threading import Condition
from typing import Any, TypeVar

import httpx

from decode.engines.base import NEUTRAL, Failure, ask, connect, model_name, shown
from decode.errors import UserError
from distill.config.teacher import EngineSettings

Item = TypeVar("Item")
Result = TypeVar("Result")
Answer = dict[str, Any]
TRIES, PAUSE = 7, 0.5  # of a request or a server; seconds before the second try, doubled before each further one
MOST = {"busy": 20, "refused": 1, "denied": 1, "missing": 1, "wrong": 1}
"""Tries where a failure is of one of these kinds."""
AGAIN = 60.0  # seconds until a server that has failed too often in a row is tried again
ANSWER, LISTING = 600.0, 30.0  # seconds in which a prompt is answered, and models named
START = "start it with the target (docs/engines.md)"
SLOW = "it has too much to do: lower teacher.engine.in_flight"
ADVICE = {
    "late": SLOW,
    "busy": SLOW,
    "gone": f"{START}, or leave teacher.engine.urls out",
    "refused": "where its texts are too long, start it with a longer --max-model-len, or lower data.max_length",
    "denied": "put its key into OPENAI_API_KEY",
    "missing": "its address has to end with /v1 (teacher.engine.urls)",
    "wrong": START,
    "broken": "its log says why",
}
"""The next step after a failure of each kind."""


@dataclass
class Server:
    """A server, what is known of it, and what it has given."""

    client: httpx.Client
    url: str
    name: str = ""  # of its model; empty until it has answered once
    asked: int = 0  # requests in flight
    answers: int = 0  # requests that it has answered
    failures: int = 0  # in a row
    pause_ends: float = 0.0  # when it may be asked again, in seconds of `time.monotonic`
    last: Failure | None = None

    @property
    def lost(self) -> bool:
        """Whether it has failed too often in a row."""
        return self.last is not None and self.failures >= MOST.get(self.last.kind, TRIES)


class Engine:
    """Servers of the target.

    Args:
        urls: Their addresses, which end with ``/v1``.
        settings: Requests in flight.
        names: Under which the target may be served, where a server offers several models.
        length: Tokens of the longest text, which every server has to take.
        say: Is told of every failure.

    Attributes:
        workers: Requests that may be in flight at once, at all servers.

    Raises:
        UserError: One refuses every request, or offers other models or shorter texts.
    """

    def __init__(
        self,
        urls: Sequence[str],
        settings: EngineSettings,
        names: Collection[str] = (),
        length: int = 0,
        say: Callable[[str], None] = lambda line: None,
    ) -> None:
        self.most, self.workers = settings.in_flight, settings.in_flight * len(urls)
        self.names, self.length, self.say = names, length, say
        self.free, self.closed = Condition(), False
        self.servers = [Server(connect(url, ANSWER), url) for url in urls]
        for server in self.servers:
            try:
                self._enter(server)
            except Failure as failure:
                if MOST.get(failure.kind) == 1:
                    self.close()
                    raise _error(server, failure) from failure
                self._failed(server, failure, time.monotonic())

    def close(self) -> None:
        """Ask for nothing more, close what is open, and say what each of several servers gave."""
        with self.free:
            self.closed = True
            self.free.notify_all()
        for server in self.servers:
            server.client.close()
            if len(self.servers) > 1 and server.answers + server.failures:
                failed = f", then failed: {server.last.why}" if server.last else ""
                self.say(f"{server.url} gave {server.answers:,} answers{failed}")

    def complete(
        self, ids: Sequence[int], read: Callable[[Answer], Any] = lambda answer: answer, tries: int = TRIES, **how: Any
    ) -> Any:
        """What ``read`` makes of a server's answer: its ``choices[0]``, with what else stands in it, and its ``url``.

        Another answer is asked for where ``read`` raises a `Failure`.

        Raises:
            UserError: The request, or every server, fails after all tries; with what the server says and the next step.
        """
        body, failed = NEUTRAL | {"prompt": list(ids), "return_token_ids": True} | how, list[str]()
        while True:
            server = self._next(failed[-1:])
            began = time.monotonic()
            try:
                if not server.name:
                    self._enter(server)
                answer, choice = _first("choices", ask(server.client, "completions", body | {"model": server.name}))
                result = read(answer | choice | {"url": server.url})
                self._answered(server)
                return result
            except Failure as failure:
                self._failed(server, failure, began)
                failed += [server.url] * (failure.kind != "busy")
                everywhere = all(each.lost or each.url in failed for each in self.servers)
                if everywhere and len(failed) >= min(tries, MOST.get(failure.kind, tries)):
                    raise _error(server, failure) from failure
            finally:
                with self.free:
                    server.asked -= 1
                    self.free.notify_all()

    def _enter(self, server: Server) -> None:
        """Note the model of a server.

        Raises:
            Failure: It does not say, or the model is another one or takes shorter texts.
        """
        models = _first("data", ask(server.client, "models", timeout=LISTING))[0]["data"]
        try:
            name = model_name(models, self.names, server.url)
        except UserError as error:
            raise Failure(str(error), "wrong") from error
        context = next(model.get("max_model_len") for model in models if model.get("id") == name)
        if context is not None and context < self.length:
            raise Failure(
                f"it serves texts of {context} tokens and data.max_length is {self.length} (lower it, or start the "
                f"server with --max-model-len {self.length})",
                "wrong",
            )
        server.name = name

    def _next(self, avoided: Collection[str] = ()) -> Server:
        """A server that may be asked now, the one with the fewest requests in flight; waits for one.

        Those at the addresses ``avoided`` are asked if there is no other one.

        Raises:
            UserError: All have failed too often.
        """
        with self.free:
            while True:
                if self.closed or all(server.lost for server in self.servers):
                    server = max(self.servers, key=lambda server: server.pause_ends)
                    raise _error(server, server.last or Failure("it was closed", "wrong"))
                now, room = time.monotonic(), [server for server in self.servers if server.asked < self.most]
                if ready := [server for server in room if server.pause_ends <= now]:
                    server = min(ready, key=lambda server: (server.url in avoided, server.asked))
                    server.asked += 1
                    return server
                self.free.wait(min((server.pause_ends - now for server in room), default=None))

    def _answered(self, server: Server) -> None:
        with self.free:
            if server.lost:
                self.say(f"{server.url} answers again")
            server.failures, server.last = 0, None
            server.answers += 1

    def _failed(self, server: Server, failure: Failure, began: float) -> None:
        """Leave a server alone for a while; requests that were in flight together fail as one."""
        with self.free:
            if failure.kind == "refused" or began < server.pause_ends:
                return
            goes_on = server.last is not None and (server.last.kind == "busy") == (failure.kind == "busy")
            server.failures, server.last = server.failures * goes_on + 1, failure
            pause = AGAIN if server.lost else min(AGAIN, PAUSE * 2 ** (server.failures - 1))
            pause = min(ANSWER, max(pause, failure.pause))
            server.pause_ends = time.monotonic() + pause
            if not self.closed:
                again = f"asked again in {pause:.1f} s, failure {server.failures} in a row"
                self.say(f"{server.url}: {failure.why}; {again}")


def _error(server: Server, failure: Failure) -> UserError:
    return UserError(
        f"{server.url} failed: {failure.why}; {ADVICE[failure.kind]}. What is finished is kept: run the same command "
        "again to continue"
    )


def _first(key: str, answer: httpx.Response) -> tuple[Answer, Answer]:
    """An answer, and the first of the list that it has under a key.

    Raises:
        Failure: There is none.
    """
    try:
        values = answer.json()
        return values, values[key][0]
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise Failure(f"its answer has no {key}: {shown(answer)}", "wrong") from error


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
