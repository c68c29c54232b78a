"""The target in a serving engine: servers that are given, or vLLM that a run starts once on each machine.

Requests are in flight `EngineSettings.in_flight` at a time at each server, which bounds the memory of both sides, and
are asked again after a failure. What the engine says of them is in `distill.responses.target` (answers) and
`distill.signal.vllm` (hidden states).
"""

import json
import os
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import torch

from decode.core.draft import Ids
from decode.engines import server
from decode.errors import UserError
from decode.files import read_json, write_json
from distill.config.models import TargetSettings
from distill.config.teacher import EngineSettings
from distill.files import fingerprint, locked

Answer = dict[str, Any]
TRIES, PAUSE = 7, 0.5  # of one request; seconds before the second one, doubled before each further one
ANSWER, READ = 600.0, 120.0  # seconds in which a prompt is answered, and read
START = 3600.0  # seconds in which an engine has loaded its model
TRANSIENT = {408, 409, 425, 429}  # and from 500 on: statuses that another try may change
KEPT = "What is finished is kept: run the same command again to continue"
CONNECTOR = Path(__file__).with_name("connector")
CLASS = {"kv_connector": "DraftsmithConnector", "kv_connector_module_path": "draftsmith_connector"}


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
        log: Of the engine that this process started. None: another one did.

    Attributes:
        workers: Requests that may be in flight at once, at all servers.
    """

    def __init__(self, urls: Sequence[str], settings: EngineSettings, log: Path | None = None) -> None:
        self.log, self.workers = log, settings.in_flight * len(urls)
        self.models = list(map(self._served, urls))

    def close(self) -> None:
        """Close the connections."""
        for model in self.models:
            model.client.close()

    def complete(self, number: int, ids: Sequence[int], tries: int = TRIES, **how: Any) -> Answer:
        """The answer of a server to the request of this number: its ``choices[0]``, with ``kv_transfer_params``.

        Raises:
            UserError: It fails, after all tries; with what the server says and the next step.
        """
        model = self.models[number % len(self.models)]
        body = {"model": model.name, "prompt": list(ids), "return_token_ids": True} | how
        seconds = ANSWER if how.get("max_tokens") != 1 else READ
        request = {"json": body, "timeout": seconds}
        answer, choice = self._call(model.client, model.url, tries, "choices", "POST", "completions", **request)
        return {"kv_transfer_params": answer.get("kv_transfer_params")} | choice

    def _served(self, url: str) -> Served:
        headers = {"Authorization": f"Bearer {os.environ.get('OPENAI_API_KEY') or 'none'}"}
        abroad = urlsplit(url).hostname not in ("127.0.0.1", "localhost")
        limits = httpx.Limits(max_connections=None)
        client = httpx.Client(base_url=url, timeout=ANSWER, headers=headers, limits=limits, trust_env=abroad)
        _, model = self._call(client, url, TRIES if self.log else 2, "data", "GET", "models")
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
                if isinstance(error, httpx.ReadTimeout) and not _answers(url, 10.0):  # nor will it to another try
                    break
            if self.log is not None and not _answers(url, 10.0, slow=True):
                words = self.log.read_text(encoding="utf-8", errors="replace")[-server.LAST :]
                raise UserError(f"the engine of the target ended ({why}). {KEPT}. Its last lines:\n{words}")
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


# -- an engine of one's own --------------------------------------------------------------------------------------------


def arguments(layers: Sequence[int], folder: str | Path) -> list[str]:
    """The arguments with which vLLM gives the states that enter these layers away, through a folder.

    Layer i is transformers' ``hidden_states[i]``, and the number of layers the last one's output before the norm.
    """
    aux = {"eagle_aux_hidden_state_layer_ids": list(layers)}
    how = {"method": "extract_hidden_states", "num_speculative_tokens": 1, "draft_model_config": {"hf_config": aux}}
    where = CLASS | {"kv_role": "kv_producer", "kv_connector_extra_config": {"shared_storage_path": str(folder)}}
    return ["--speculative-config", json.dumps(how), "--kv-transfer-config", json.dumps(where)]


@contextmanager
def opened(
    settings: EngineSettings, target: TargetSettings, model: Path, layers: Sequence[int], length: int, work: Path,
    threads: int | None = None,
) -> Iterator[Engine]:  # fmt: skip
    """The engine of a target until the block is left: the given servers, or this machine's vLLM.

    The first process that needs it starts it, the others find its address in the folder of the states. It gives the
    states that enter ``layers`` away; ``length`` is the longest text in tokens, ``threads`` are of a CPU. By the run's
    folder ``work`` its processes know each other.

    Raises:
        UserError: No vLLM, an engine that does not start, a folder that is too small; with the next step.
    """
    with ExitStack() as stack:
        urls, log = settings.urls, None
        if not urls:
            folder = Path(settings.folder) / f"draftsmith-{fingerprint(str(work.resolve()), os.getuid())[:12]}"
            made_from = {"model": str(model.resolve()), "layers": list(layers), "arguments": settings.arguments}
            unwritable = (
                f"teacher.engine.folder is {settings.folder!r}, where nothing can be written: give a folder in memory "
                "or on a fast disk that the engine sees too"
            )
            with locked(folder / "lock", unwritable):
                known = read_json(folder / "engine.json")
                url = str(known.get("url"))
                if known.get("made_from") != made_from or not _answers(url):
                    for left in folder.glob("*.safetensors*"):
                        left.unlink()
                    url, log = _started(stack, settings, target, model, layers, length, folder, threads)
                    stack.callback(shutil.rmtree, folder, ignore_errors=True)
                    write_json(folder / "engine.json", {"url": url, "made_from": made_from})
                urls = [url]
        engine = Engine(urls, settings, log)
        stack.callback(engine.close)
        yield engine


def _answers(url: str, seconds: float = 2.0, *, slow: bool = False) -> bool:
    """Whether an engine on this machine is ready; ``slow`` if it takes longer to say so."""
    try:
        return httpx.get(f"{url.removesuffix('/v1')}/health", trust_env=False, timeout=seconds).status_code == 200
    except httpx.TimeoutException:
        return slow
    except (httpx.HTTPError, httpx.InvalidURL):
        return False


def _started(
    stack: ExitStack, settings: EngineSettings, target: TargetSettings, model: Path, layers: Sequence[int],
    length: int, folder: Path, threads: int | None,
) -> tuple[str, Path]:  # fmt: skip
    """Start vLLM; returns its address and its log."""
    port, program = server.free_port(), server.check_engine("vllm")
    engine = server.Engine(
        "vllm", str(model.resolve()), context=length, dtype=target.dtype, program=program, threads=threads,
        seconds=START,
    )  # fmt: skip
    command, environment = server.start_command(engine, None, port)
    command += ["--max-num-seqs", str(settings.in_flight), "--generation-config", "vllm", *arguments(layers, folder)]
    if torch.cuda.is_available():
        command.remove("--enforce-eager")
    if target.trust_remote_code:
        command.append("--trust-remote-code")
    paths = [str(CONNECTOR), os.environ.get("PYTHONPATH")]
    environment |= {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
    environment |= {name: os.environ[name] for name in ("VLLM_CPU_KVCACHE_SPACE",) if name in os.environ}
    url, command = f"http://127.0.0.1:{port}/v1", [*command, *settings.arguments]
    try:
        starting = server.running(command, lambda: _answers(url), name="vLLM", seconds=START, environment=environment)
        log = stack.enter_context(starting)
    except UserError as error:
        if "EAGLE3" in str(error) or "Eagle3" in str(error):
            raise UserError(
                f"vLLM's class of {model} gives no hidden states away: set teacher.engine.arguments to "
                f"[--model-impl=transformers], or teacher.signal to hidden\n{error}"
            ) from error
        raise
    return url, log
