"""The target's responses from servers that speak OpenAI's protocol: many requests in flight, failures tried again."""

import asyncio
import json
import os
from collections.abc import AsyncGenerator, Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from transformers import PreTrainedTokenizerBase

from decode.engines.settings import NO_CUTS
from decode.errors import UserError
from distill.config.drafts import ResponseSettings
from distill.responses.store import Answer, Job, Response, encode_answer

AGAIN = {408, 409, 425, 429, 500, 502, 503, 504}  # answers that a later try may better
LONGEST_WAIT = 30.0  # seconds between two tries, at most


class Lost(UserError):
    """A server that answers no more."""


def answered_by_server(
    settings: ResponseSettings,
    seed: int,
    tokenizer: PreTrainedTokenizerBase,
    ends: Collection[int],
    target: Path,
    say: Callable[[str], None] = print,
) -> Answer:
    """Answers by the servers of ``settings.server``, each as soon as it comes.

    Args:
        settings: Sampling and server.
        seed: Sent with every request, different for each; what servers make of it differs.
        tokenizer: The target's; responses come as text.
        ends: End-of-text tokens.
        target: The target's folder, named in the advice where no server answers.
        say: Told of a server that is lost.
    """
    client = Client(settings, seed, tokenizer, ends, target, say)

    def answers(jobs: Sequence[Job], missing: Collection[int]) -> Iterator[Response]:
        wanted = [job for job in jobs if job.example in missing]
        with asyncio.Runner() as runner:
            stream = client.stream(wanted)

            async def following() -> Response | None:
                return await anext(stream, None)

            try:
                while (response := runner.run(following())) is not None:
                    yield response
            finally:
                runner.run(stream.aclose())

    return answers


@dataclass
class Client:
    """Asks one server, or several that share the work."""

    settings: ResponseSettings
    seed: int
    tokenizer: PreTrainedTokenizerBase
    ends: Collection[int]
    target: Path
    say: Callable[[str], None] = print
    first_wait: float = 1.0

    async def stream(self, jobs: Sequence[Job]) -> AsyncGenerator[Response, None]:
        """Responses in the order in which they come.

        Raises:
            UserError: no server, a refusal, or no server is left. What came before was yielded.
        """
        addresses = self.settings.server.addresses
        results: asyncio.Queue[Response | Exception] = asyncio.Queue()
        waiting: asyncio.Queue[Job] = asyncio.Queue()
        for job in jobs:
            waiting.put_nowait(job)
        servers = [asyncio.create_task(self._served(url, waiting, results)) for url in addresses]
        left, missing = len(servers), len(jobs)
        try:
            while missing:
                result = await results.get()
                if isinstance(result, Response):
                    missing -= 1
                    yield result
                    continue
                left -= 1
                if not left or not isinstance(result, Lost):
                    raise result
                self.say(f"  a server is lost, and {left} go on with its work: {result}")
        finally:
            for server in servers:
                server.cancel()
            await asyncio.gather(*servers, return_exceptions=True)

    async def _served(
        self, url: str, waiting: asyncio.Queue[Job], results: asyncio.Queue[Response | Exception]
    ) -> None:
        """Has one server answer what waits until it is cancelled; what it leaves behind waits again."""
        server = self.settings.server
        key = os.environ.get(server.key_variable)
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        limits = httpx.Limits(max_connections=server.concurrency)

        async def work(http: httpx.AsyncClient, model: str) -> None:
            while True:
                job = await waiting.get()
                try:
                    results.put_nowait(await self._ask(http, model, job))
                except BaseException:
                    waiting.put_nowait(job)
                    raise

        base = url.rstrip("/") + "/"
        try:
            async with httpx.AsyncClient(base_url=base, headers=headers, timeout=server.timeout, limits=limits) as http:
                model = await self._model(http, url)
                async with asyncio.TaskGroup() as group:
                    for _ in range(server.concurrency):
                        group.create_task(work(http, model))
        except UserError as error:
            results.put_nowait(error)
        except ExceptionGroup as errors:
            results.put_nowait(errors.exceptions[0])
        except (httpx.InvalidURL, UnicodeEncodeError) as error:
            results.put_nowait(UserError(f"{url}, or the key in {server.key_variable}, cannot be sent: {error}"))

    async def _model(self, http: httpx.AsyncClient, url: str) -> str:
        """The model's name on the server, and proof that a server is there."""
        try:
            answer = await http.get("models")
        except httpx.TransportError as error:
            raise Lost(
                f"no server answers at {url} ({type(error).__name__}: {error}). Start one with "
                f"the target, such as `vllm serve {self.target}` or `transformers serve {self.target}`, then run "
                "the same command again; or leave reference.responses.server.url out to have them written here"
            ) from error
        self._refused(answer)
        if self.settings.server.model is not None:
            return self.settings.server.model
        try:
            names = [str(entry["id"]) for entry in answer.json()["data"]]
        except (ValueError, KeyError, TypeError):
            names = []
        if len(names) != 1:
            listed = ", ".join(names[:8]) or "none"
            raise UserError(f"the server lists {listed}: name the target with reference.responses.server.model")
        return names[0]

    async def _ask(self, http: httpx.AsyncClient, model: str, job: Job) -> Response:
        if job.budget < 1:
            return Response(job.example, [])
        tries = self.settings.server.retries + 1
        for attempt in range(tries):
            wait = min(LONGEST_WAIT, self.first_wait * 2**attempt)
            try:
                answer = await http.post(self._path, json=self._body(model, job))
                if answer.status_code not in AGAIN:
                    self._refused(answer)
                    return self._response(job, answer.json())
                problem = f"status {answer.status_code}: {answer.text[:200]}"
                wait = _asked_wait(answer, wait)
            except UserError:
                raise
            except httpx.TransportError as error:
                problem = f"{type(error).__name__}: {error}"
            except (ValueError, KeyError, IndexError, TypeError) as error:
                problem = f"an answer that cannot be read ({type(error).__name__}: {error})"
            if attempt + 1 < tries:
                await asyncio.sleep(wait)
        raise Lost(
            f"{http.base_url} failed {tries} times on example {job.example}, at last with {problem}. What is finished "
            "is kept: see to the server, then run the same command again to continue"
        )

    @property
    def _path(self) -> str:
        return "chat/completions" if self.settings.server.endpoint == "chat" else "completions"

    def _body(self, model: str, job: Job) -> dict[str, Any]:
        body: dict[str, Any] = {
            "model": model,
            "max_tokens": job.budget,
            "temperature": self.settings.temperature,
            "top_p": self.settings.top_p,
            "seed": (self.seed * 1_000_003 + job.example) % (1 << 31),
        }
        if self.settings.server.engine:
            return body | NO_CUTS | {"prompt": job.ids, "stop_token_ids": sorted(self.ends), "return_token_ids": True}
        if self.settings.server.endpoint == "chat":
            return body | {"messages": json.loads(job.messages or "[]") or [{"role": "user", "content": job.text}]}
        start = self.tokenizer.bos_token  # servers put it before a prompt themselves
        return body | {"prompt": job.text.removeprefix(start) if start else job.text}

    def _response(self, job: Job, values: dict[str, Any]) -> Response:
        choice = values["choices"][0]
        if self.settings.server.engine:
            return Response(job.example, [int(token) for token in choice["token_ids"]])
        ended = choice.get("finish_reason") == "stop"
        text = choice["message"]["content"] if self.settings.server.endpoint == "chat" else choice["text"]
        return Response(
            job.example, encode_answer(self.tokenizer, text or "", ended=ended, ends=self.ends, budget=job.budget)
        )

    def _refused(self, answer: httpx.Response) -> None:
        """Stops at answers that no further try would better."""
        if answer.status_code in (401, 403):
            raise UserError(
                f"the server wants a key (status {answer.status_code}): put it into the environment variable "
                f"{self.settings.server.key_variable}, or name another with reference.responses.server.key_variable"
            )
        if answer.is_client_error:
            raise UserError(
                f"the server refuses {answer.request.url} (status {answer.status_code}): {answer.text[:300]}. Check "
                "reference.responses.server: url, model and endpoint"
            )


def check_servers(urls: Sequence[str]) -> None:
    """Refuses servers of which none answers; those that are lost later leave their work to the others.

    Raises:
        UserError: None answers.
    """
    reasons = []
    for url in urls:
        try:
            httpx.get(url.rstrip("/") + "/models", timeout=10)
        except (httpx.TransportError, httpx.InvalidURL) as error:
            reasons.append(f"{url} ({type(error).__name__}: {error})")
        else:
            return
    raise UserError(
        f"no server answers at {', '.join(reasons)}: start it, such as by `vllm serve` with target.model, or leave "
        "reference.responses.server out to have the answers written here"
    )


def _asked_wait(answer: httpx.Response, wait: float) -> float:
    """Seconds that the server asks for, if it does."""
    try:
        return min(LONGEST_WAIT, float(answer.headers["retry-after"]))
    except (KeyError, ValueError):
        return wait
