"""The target's responses from servers that speak OpenAI's protocol, or from vLLM in an environment of its own.

The package openai is imported where it is used: that takes two seconds, which most runs do not need.
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import PreTrainedTokenizerBase

from decode.engines.server import LAUNCHER, check_engine
from decode.errors import UserError
from decode.models.tokens import REASONING, continuation_ids, end_token
from distill.config.drafts import ResponseSettings, ServerSettings
from distill.data.chat import ChatFormat, served_ids
from distill.data.response_file import Response
from distill.responses import vllm_generate

if TYPE_CHECKING:
    import openai

KEPT = "What is finished is kept: run the same command again to continue"
WHERE = "teacher.responses.server"

TIMEOUT, RETRIES = 300.0, 6  # seconds of a request; the client waits 0.5, 1, 2, ... seconds between two of them


@dataclass(frozen=True)
class Job:
    """A prompt to be answered.

    Attributes:
        example: Its number in the split.
        ids: Its token ids.
        text: The same as text.
        budget: Longest response in tokens.
    """

    example: int
    ids: list[int]
    text: str
    budget: int


Answer = Callable[[Sequence[Job]], Iterator[Response]]
"""Answers jobs in any order, each as soon as it is finished."""


def open_client(server: ServerSettings, url: str, **options: Any) -> tuple[openai.OpenAI, str]:
    """A client that retries failed requests itself, and the target's name on the server.

    Raises:
        UserError: The server does not answer, or lists several models and none is named.
    """
    import openai

    key = os.environ.get("OPENAI_API_KEY") or "none"
    how: dict[str, Any] = {"timeout": TIMEOUT, "max_retries": RETRIES} | options
    client = openai.OpenAI(base_url=url, api_key=key, **how)
    try:
        names = [model.id for model in client.models.list().data]
    except openai.OpenAIError as error:
        raise refused(url, error) from error
    if server.model is None and len(names) != 1:
        raise UserError(f"{url} lists {', '.join(names[:8]) or 'none'}: name the target with {WHERE}.model")
    return client, server.model or names[0]


def refused(url: str, error: Exception) -> UserError:
    """The error of a request that failed after all retries."""
    import openai

    advice = f"check the server and {WHERE}"
    if isinstance(error, openai.AuthenticationError | openai.PermissionDeniedError):
        advice = "put its key into the environment variable OPENAI_API_KEY"
    elif isinstance(error, openai.APIConnectionError):
        advice = (
            f"start it with the target, such as by `vllm serve`, or leave {WHERE} out to have responses written here"
        )
    return UserError(f"{url} failed: {type(error).__name__}: {error.__cause__ or error}: {advice}. {KEPT}")


def check_servers(server: ServerSettings, *, started: bool = True) -> None:
    """Refuses a server that does not answer, and an engine that is not installed.

    Args:
        server: Addresses or engine.
        started: Whether the servers have to run already; a target that is trained first can be served only later.

    Raises:
        UserError: With the next step.
    """
    for url in server.urls if started else ():
        open_client(server, url, timeout=10, max_retries=0)[0].close()
    if server.engine is not None:
        check_engine("vllm")


def answered_by_servers(
    settings: ResponseSettings,
    seed: int,
    tokenizer: PreTrainedTokenizerBase,
    ends: Collection[int],
    chat: ChatFormat | None = None,
) -> Answer:
    """Answers by the servers of ``settings.server``, which share the prompts evenly; each as soon as it comes.

    Args:
        settings: Sampling and servers.
        seed: Sent with every request, different for each; its effect depends on the server.
        tokenizer: The target's; responses come as text.
        ends: End-of-text tokens.
        chat: How prompts were rendered, if they are chats: reasoning that the server has parsed out is put back.
    """
    import openai

    server = settings.server

    def ask(job: Job, url: str, client: openai.OpenAI, model: str) -> Response:
        how: dict[str, Any] = {"model": model, "max_tokens": job.budget, "seed": _seed_of(seed, job)}
        how |= {"temperature": settings.temperature, "top_p": settings.top_p}
        try:
            start = str(tokenizer.bos_token or "")  # servers put it before a prompt themselves
            choice = client.completions.create(prompt=job.text.removeprefix(start), **how).choices[0]
        except (openai.OpenAIError, IndexError, TypeError) as error:
            raise refused(url, error) from error
        said: dict[str, Any] = (choice.model_extra or {}).get("message") or choice.model_dump()
        text = said.get("text") or said.get("content") or ""
        thought = next((said[name] for name in REASONING if said.get(name)), "")
        if chat is not None:
            return job.example, served_ids(chat, thought, text, ended=choice.finish_reason == "stop")[: job.budget]
        ids = continuation_ids(tokenizer, [thought + text])[0] if thought + text else []
        if choice.finish_reason == "stop" and ids and not any(token in ends for token in ids):
            ids = [*ids, end_token(tokenizer)]  # servers leave it out
        return job.example, ids[: job.budget]

    def answers(jobs: Sequence[Job]) -> Iterator[Response]:
        clients = [(url, *open_client(server, url)) for url in server.urls]
        pool = ThreadPoolExecutor(server.concurrency * len(clients))
        try:
            futures = [pool.submit(ask, job, *clients[number % len(clients)]) for number, job in enumerate(jobs)]
            for future in as_completed(futures):
                yield future.result()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
            for _, client, _ in clients:
                client.close()

    return answers


def _seed_of(seed: int, job: Job) -> int:
    return (seed * 1_000_003 + job.example) % (1 << 31)


def answered_by_vllm(
    settings: ResponseSettings, seed: int, ends: Collection[int], target: Path, longest: int, dtype: str
) -> Answer:
    """Answers by vLLM's offline ``generate``, which exchanges token ids; see `distill.responses.vllm_generate`.

    Args:
        settings: Sampling, and the environment and arguments of vLLM.
        seed: With the example's number it decides the response.
        ends: End-of-text tokens.
        target: The target's folder.
        longest: Tokens of the longest prompt with its response.
        dtype: Number format of the weights in vLLM.
    """
    server = settings.server
    engine = ["--model", str(target), "--dtype", dtype, "--max-model-len", str(longest), "--generation-config", "vllm"]
    engine += ["--max-num-seqs", str(server.concurrency), *server.arguments]

    def answers(jobs: Sequence[Job]) -> Iterator[Response]:
        request = {
            "sampling": {
                "temperature": settings.temperature, "top_p": settings.top_p, "stop_token_ids": sorted(ends),
            },
            "batch": 16 * server.concurrency,
            "prompts": [[job.example, job.ids, job.budget, _seed_of(seed, job)] for job in jobs],
        }  # fmt: skip
        environment = {name: value for name, value in os.environ.items() if name not in LAUNCHER}
        said: list[str] = []
        with tempfile.TemporaryFile("w+") as file:
            json.dump(request, file)
            file.seek(0)
            process = subprocess.Popen(
                [check_engine("vllm"), vllm_generate.__file__, *engine], env=environment, text=True,
                stdin=file, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            )  # fmt: skip
        assert process.stdout is not None
        try:
            for line in process.stdout:
                if line.startswith(vllm_generate.MARK):
                    example, ids = json.loads(line.removeprefix(vllm_generate.MARK))
                    yield example, ids
                else:
                    said = [*said[-15:], line]
        except BaseException:  # the run is interrupted
            process.terminate()
            raise
        finally:
            status = process.wait()
        if status:
            raise UserError(f"vLLM ended with status {status}. {KEPT}. Its last lines:\n{''.join(said)}")

    return answers
