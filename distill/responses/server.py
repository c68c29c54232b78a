"""The target's responses from servers that speak OpenAI's protocol, or from vLLM in an environment of its own."""

import json
import os
import subprocess
import tempfile
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import openai
from transformers import PreTrainedTokenizerBase

from decode.engines.server import LAUNCHER, VLLM_PYTHON, check_vllm, find
from decode.errors import UserError
from decode.models.tokens import continuation_ids, end_token
from distill.config.drafts import ResponseSettings, ServerSettings
from distill.responses import vllm_generate
from distill.responses.store import Answer, Job, Response

KEPT = "What is finished is kept: run the same command again to continue"
WHERE = "teacher.responses.server"
TIMEOUT, RETRIES = 300.0, 6  # seconds of a request; the client waits 0.5, 1, 2, ... seconds between two of them


def client_of(server: ServerSettings, url: str, **options: Any) -> openai.OpenAI:
    """A client that sends OPENAI_API_KEY and retries failed requests itself."""
    key = os.environ.get("OPENAI_API_KEY") or "none"
    return openai.OpenAI(base_url=url, api_key=key, timeout=TIMEOUT, max_retries=RETRIES, **options)


def model_of(server: ServerSettings, url: str, **options: Any) -> str:
    """The target's name on a server that answers.

    Raises:
        UserError: The server does not answer, or lists several models and none is named.
    """
    try:
        with client_of(server, url) as client:
            names = [model.id for model in client.with_options(**options).models.list().data]
    except openai.APIConnectionError as error:
        raise UserError(
            f"no server answers at {url} ({type(error).__name__}: {error.__cause__ or error}): start one with the "
            f"target, such as by `vllm serve`, or leave {WHERE} out to have the responses written here"
        ) from error
    except openai.OpenAIError as error:
        raise refused(server, url, error) from error
    if server.model is None and len(names) != 1:
        raise UserError(f"{url} lists {', '.join(names[:8]) or 'none'}: name the target with {WHERE}.model")
    return server.model or names[0]


def refused(server: ServerSettings, url: str, error: Exception) -> UserError:
    """The error of a request that failed after all retries."""
    if isinstance(error, openai.AuthenticationError | openai.PermissionDeniedError):
        return UserError(f"{url} wants a key ({error}): put it into the environment variable OPENAI_API_KEY")
    return UserError(f"{url} failed: {type(error).__name__}: {error}. Check the server and {WHERE}. {KEPT}")


def check_servers(server: ServerSettings, *, started: bool = True) -> None:
    """Refuses a server that does not answer, and an engine that is not installed.

    Args:
        server: Addresses or engine.
        started: Whether the servers have to run already; a target that is trained first can be served only later.

    Raises:
        UserError: With the next step.
    """
    for url in server.urls if started else ():
        model_of(server, url, timeout=10, max_retries=0)
    if server.engine is not None:
        check_vllm(vllm_python(server))


def answered_by_servers(
    settings: ResponseSettings, seed: int, tokenizer: PreTrainedTokenizerBase, ends: Collection[int]
) -> Answer:
    """Answers by the servers of ``settings.server``, which share the prompts evenly; each as soon as it comes.

    Args:
        settings: Sampling and servers.
        seed: Sent with every request, different for each; its effect depends on the server.
        tokenizer: The target's; responses come as text.
        ends: End-of-text tokens.
    """
    server = settings.server

    def ask(client: openai.OpenAI, model: str, job: Job) -> tuple[Job, str, bool]:
        how: dict[str, Any] = {"model": model, "max_tokens": job.budget}
        how |= {"temperature": settings.temperature, "top_p": settings.top_p}
        how["seed"] = (seed * 1_000_003 + job.example) % (1 << 31)
        start = str(tokenizer.bos_token or "")  # servers put it before a prompt themselves
        choice = client.completions.create(prompt=job.text.removeprefix(start), **how).choices[0]
        return job, choice.text or "", choice.finish_reason == "stop"

    def encoded(job: Job, text: str, ended: bool) -> Response:
        ids = continuation_ids(tokenizer, [text])[0] if text else []
        if ended and not any(token in ends for token in ids):
            ids = [*ids, end_token(tokenizer)]  # servers leave it out
        return Response(job.example, ids[: job.budget])

    def answers(jobs: Sequence[Job], missing: Collection[int]) -> Iterator[Response]:
        urls = server.urls
        clients = [(client_of(server, url), model_of(server, url)) for url in urls]
        yield from (Response(job.example, []) for job in jobs if job.example in missing and not job.budget)
        wanted = [job for job in jobs if job.example in missing and job.budget]
        failed: UserError | None = None
        with ThreadPoolExecutor(server.concurrency * len(urls)) as pool:
            asked: dict[Future[Any], str] = {
                pool.submit(ask, *clients[number % len(urls)], job): urls[number % len(urls)]
                for number, job in enumerate(wanted)
            }
            try:
                for future in as_completed(asked):
                    if future.cancelled():
                        continue
                    try:
                        yield encoded(*future.result())
                    except (openai.OpenAIError, AttributeError, IndexError, TypeError, ValueError) as error:
                        failed = failed or refused(server, asked[future], error)
                        for one in asked:  # requests in flight are still kept
                            one.cancel()
            finally:
                pool.shutdown(wait=False, cancel_futures=True)
        for client, _ in clients:
            client.close()
        if failed is not None:
            raise failed

    return answers


def vllm_python(server: ServerSettings) -> str:
    """The interpreter of vLLM's environment."""
    return find(None, VLLM_PYTHON, f"{WHERE}.engine", "vLLM's environment (.venv-vllm/bin/python)")


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

    def answers(jobs: Sequence[Job], missing: Collection[int]) -> Iterator[Response]:
        wanted = [job for job in jobs if job.example in missing]
        prompts = [
            [job.example, job.ids, job.budget, (seed * 1_000_003 + job.example) % (1 << 31)]
            for job in wanted
            if job.budget
        ]
        yield from (Response(job.example, []) for job in wanted if not job.budget)
        how = {"temperature": settings.temperature, "top_p": settings.top_p, "stop_token_ids": sorted(ends)}
        environment = {name: value for name, value in os.environ.items() if name not in LAUNCHER}
        said: list[str] = []
        with tempfile.TemporaryFile("w+") as request:
            json.dump({"sampling": how, "batch": 16 * server.concurrency, "prompts": prompts}, request)
            request.seek(0)
            process = subprocess.Popen(
                [vllm_python(server), vllm_generate.__file__, *engine], env=environment, text=True,
                stdin=request, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            )  # fmt: skip
        assert process.stdout is not None
        try:
            for line in process.stdout:
                if line.startswith(vllm_generate.MARK):
                    yield Response(*json.loads(line.removeprefix(vllm_generate.MARK)))
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
