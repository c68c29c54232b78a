"""What a serving engine is, and how one is started; every engine is a file here and a line of `ENGINES` in `server`."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx

from decode.core.draft import Ids
from decode.errors import UserError
from decode.files import Fields

CHECKOUT = Path(__file__).resolve().parents[2]
"""Where `make engines` installs the engines, unless that is the working directory."""
NEUTRAL: Fields = {
    "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0
}  # fmt: skip
"""With top_p 1, the fields of a request that leave a distribution as it is, whatever a server's own defaults are."""
CONNECT = 10.0  # seconds in which a connection is made
STATUS = {
    429: "busy", 503: "busy", 400: "refused", 413: "refused", 422: "refused", 401: "denied", 403: "denied",
    404: "missing", 408: "late",
}  # fmt: skip
"""What an answer's status means: see `Failure.kind`."""
FOLLOWING = "run `make engines` (serve-check takes another one by --program)"


@dataclass
class Engine:
    """Options that an engine is started with, or the address of a running server."""

    name: str  # a key of `decode.engines.server.ENGINES`
    target: str = ""  # folder, Hub name or GGUF file
    draft: str = ""  # the same of the draft
    method: str = "draft_model"  # draft_model, eagle, eagle3, dflash or dspark
    context: int = 512  # tokens of the longest text, prompt and answer
    dtype: str = "float32"  # number format of vLLM's weights
    program: str | None = None  # vLLM's interpreter or llama-server; None: as `make engines` installs it
    url: str | None = None  # address of a running server, which is used instead of starting one
    threads: int | None = None  # None: the engine's default
    requests: int = 1  # most requests at a time
    seconds: float = 300.0  # time limit for loading, and for each text
    arguments: Sequence[str] = ()  # further ones of vLLM


@dataclass
class Failure(Exception):
    """A request that failed."""

    why: str  # what happened
    # late, gone: no answer came in time, or at all; busy: the server has too much to do; refused: it does not take this
    # request; denied: nor this key; missing: it has no such path; wrong: it serves something else; broken: it failed
    kind: str = "broken"
    pause: float = 0.0  # seconds after which the server wants to be asked again


def connect(url: str, seconds: float) -> httpx.Client:
    """A client of a server, whose key is in OPENAI_API_KEY; its requests time out after ``seconds``.

    Proxies of the environment are used for other machines alone.
    """
    headers = {"Authorization": f"Bearer {os.environ.get('OPENAI_API_KEY') or 'none'}"}
    remote = urlsplit(url).hostname not in ("127.0.0.1", "localhost")
    times = httpx.Timeout(seconds, connect=CONNECT)
    return httpx.Client(base_url=url, timeout=times, headers=headers, limits=httpx.Limits(), trust_env=remote)


def ask(client: httpx.Client, path: str, body: Fields | None = None, **options: Any) -> httpx.Response:
    """The answer to a request, which is a POST if it has a body; its status is 200.

    Raises:
        Failure: none came, or one with another status.
    """
    try:
        answer = client.request("GET" if body is None else "POST", path, json=body, **options)
    except httpx.TimeoutException as error:
        raise Failure(f"no answer in time ({type(error).__name__})", "late") from error
    except (httpx.HTTPError, RuntimeError) as error:  # the second: the client was closed
        raise Failure(f"{type(error).__name__}: {error}", "gone") from error
    if (status := answer.status_code) != 200:
        kind, pause = STATUS.get(status, "broken" if status >= 500 else "wrong"), answer.headers.get("retry-after", "")
        raise Failure(f"status {status}: {shown(answer)}", kind, float(pause) if pause.isdigit() else 0.0)
    return answer


def shown(answer: httpx.Response) -> str:
    """The beginning of an answer, in one line."""
    return " ".join(answer.text.split())[:300]


def model_name(models: Sequence[Fields], names: Collection[str], url: str) -> str:
    """The name by which a server is asked for a model: the only one there, or the one that has such a name.

    Args:
        models: what the server lists at /v1/models; adapters do not count.
        names: the model's, each of which may be its id there, the folder it is loaded from, or the last part of one.
        url: of the server.

    Raises:
        UserError: none of several models has such a name, or there is none.
    """
    bases = {str(model["id"]): str(model.get("root") or model["id"]) for model in models if not model.get("parent")}
    found = [name for name, root in bases.items() if {name, root} & {*names}]
    found += [name for name, root in bases.items() if {Path(name).name, Path(root).name} & {*names}]
    found += bases if len({*bases.values()}) == 1 else []
    if not found:
        raise UserError(
            f"{url} serves {', '.join(bases) or 'no model'}, expected {' or '.join(sorted(names))}: serve it under "
            "this name (--served-model-name)"
        )
    return found[0]


def installed(file: Path) -> Path:
    """Where `make engines` puts a file: in the working directory if it is there, else in the checkout."""
    return file.absolute() if file.is_file() else CHECKOUT / file


def room_for(draft_length: int) -> int:
    """The tokens that a server's context has to hold behind the longest text, so that it is drafted to its end.

    vLLM 0.32 drafts while the text, the n drafted tokens that are verified and the next n (of DFlash n + 1) fit; where
    it schedules ahead, it takes the n of the round before for accepted (v1/worker/gpu_model_runner.py:2041, 4288).
    """
    return 3 * draft_length + 2


class EngineKind(ABC):
    """How one engine is found, started, asked and counted.

    Attributes:
        installed: its program as `make engines` installs it.
        version: arguments by which the program prints what `check` reads.
        drafts_past_end: whether a draft may be longer than the rest of the text's budget, and is counted behind the
            text's end. Otherwise a token that ends the text is not counted, unless it is the last one of its draft.
    """

    installed: Path
    version: Sequence[str]
    drafts_past_end = True

    @abstractmethod
    def check(self, program: str, printed: str, head: Any) -> None:
        """Refuse a program by what it prints; `head` is the format of the draft (`head_format`).

        Raises:
            UserError: it is older than what is tested, or does not run such a draft; with the next step.
        """

    def prepare(self, engine: Engine, folder: Path, scratch: Path, numbers: str, *, head: bool) -> str:
        """Convert what the engine does not read as it is; returns the number format that it computes in."""
        return engine.dtype

    @abstractmethod
    def command(self, engine: Engine, draft_length: int | None, port: int) -> tuple[list[str], dict[str, str]]:
        """The command that starts a server, without the draft if `draft_length` is None, and added variables."""

    @abstractmethod
    def request(
        self, call: Callable[..., Any], ids: Ids, budget: int, stop_ids: Sequence[int], sampling: Fields
    ) -> tuple[str, Fields]:
        """Path and body of the request for one text of at most `budget` tokens; `call` asks the server."""

    @abstractmethod
    def answer(self, content: Fields) -> tuple[Ids | None, float | None, bool]:
        """New tokens of an answer, seconds after the first if told, and whether the engine's own end token ended it."""

    @abstractmethod
    def tokenise(self, text: str) -> Fields:
        """The body of a request for the token ids of a text."""
