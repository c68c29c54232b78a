"""Servers of engines: starting and ending one, asking it for texts, and the drafts that it counts."""

from __future__ import annotations

import math
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

from decode.core.draft import Ids, until_end
from decode.engines.base import FOLLOWING, NEUTRAL, Engine, EngineKind, Failure, ask, connect, installed, model_name
from decode.engines.check import Drafts, ServedText
from decode.engines.llama_cpp import LlamaCpp
from decode.engines.vllm import Vllm
from decode.errors import UserError
from decode.files import Fields, scratch_folder

ENGINES: dict[str, EngineKind] = {"vllm": Vllm(), "llama.cpp": LlamaCpp()}
SPIN = {"GOMP_SPINCOUNT", "DRAFTSMITH_SPINCOUNT"}  # set by `decode` itself, the first only where the user did not
ANSWER = 120  # seconds in which a program has to print its version
LAST = 2000  # characters of a failed engine's log that are shown
CAUSE = re.compile(
    r"^(?!.* (?:INFO|WARNING) ).*(?:\b[A-Z]\w*(?:Error|Exception): |error loading |GGML_ASSERT).*\n?.*", re.MULTILINE
)
"""The first such line of a log, with the next, says why the engine ended; the last may only say that it did."""
SETTLED, READINGS = 0.05, 200  # seconds between two readings of the counters, and the largest number of readings
WATCHER = """
import os, signal, sys, time
sys.stdin.read()
try:
    for kind, seconds in (signal.SIGTERM, 15), (signal.SIGKILL, 15):
        os.killpg(int(sys.argv[1]), kind)
        for _ in range(10 * seconds):
            time.sleep(0.1)
            os.killpg(int(sys.argv[1]), 0)
except ProcessLookupError:
    pass
"""
"""Ends a process group once standard input is closed, which happens however the process at its other end exits."""


def check_engine(name: str, path: str | None = None, head: Any = None) -> str:
    """The path of an engine's program: this one, or as `make engines` installs it.

    `head` is the format of the draft, as `head_format` tells it.

    Raises:
        UserError: it is missing, does not answer, is older than what is tested, or does not run such a draft; with the
            next step.
    """
    kind = ENGINES[name]
    program = path or str(installed(kind.installed))
    if not (os.path.isfile(program) and os.access(program, os.X_OK)):
        raise UserError(f"there is no program {program} that can be run; {FOLLOWING}")
    asked = [program, *kind.version]
    try:
        done = subprocess.run(asked, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=ANSWER)
    except (subprocess.TimeoutExpired, OSError) as error:
        raise UserError(f"{program} printed no version ({error}); {FOLLOWING}") from error
    kind.check(program, done.stdout + done.stderr, head)
    return program


def free_port() -> int:
    """A port of this machine that nothing listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def inherited_environment() -> dict[str, str]:
    """This process's environment without what it has set for itself."""
    hidden = SPIN if "DRAFTSMITH_SPINCOUNT" in os.environ else set()
    return {name: value for name, value in os.environ.items() if name not in hidden}


@contextmanager
def running(
    command: Sequence[str],
    ready: Callable[[], bool],
    *,
    name: str,
    seconds: float,
    environment: Mapping[str, str] | None = None,
) -> Iterator[Path]:
    """Run a server until the block is left; yields its log once `ready`, asked twice a second, says that it answers.

    The server and everything it started end with the block, and with this process however that ends. Variables of
    `environment` are added to `inherited_environment`.

    Raises:
        UserError: it ends before it is ready, is not ready in time, or a request to it in the block fails; with the
            first error and the last lines of its log, and where that is kept.
    """
    with scratch_folder() as folder, (folder / "log").open("wb") as out:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT,
            env=inherited_environment() | dict(environment or {}), start_new_session=True,
        )  # fmt: skip
        watcher = subprocess.Popen(
            [sys.executable, "-ISc", WATCHER, str(process.pid)], stdin=subprocess.PIPE, start_new_session=True
        )
        try:
            end = time.monotonic() + seconds
            while not ready():
                if process.poll() is not None:
                    raise UserError(f"{name} ended with status {process.returncode} while loading")
                if time.monotonic() > end:
                    raise UserError(f"{name} was not ready after {seconds:.0f} s; give it longer with --timeout")
                time.sleep(0.5)
            yield folder / "log"
        except UserError as error:
            log = (folder / "log").read_text(encoding="utf-8", errors="replace")
            kept = shutil.copy(folder / "log", Path(tempfile.mkdtemp(prefix="draftsmith-")) / f"{name}.log")
            first = f" The first error:\n{found[0]}\n" if (found := CAUSE.search(log)) else ""
            last = f"Its last lines:\n{log[-LAST:]}\nIts whole log is {kept}. The command was: {shlex.join(command)}"
            raise UserError(f"{error}.{first} {last}") from error
        finally:
            assert watcher.stdin is not None
            watcher.stdin.close()
            process.wait()  # takes the exit status, so that the group can vanish
            watcher.wait()


@contextmanager
def opened(engine: Engine, draft_length: int | None) -> Iterator[Server]:
    """A server with a draft of this length or without one, until the block is left.

    Raises:
        UserError: it is not installed, does not start (see `running`), or at its address nothing or another model
            answers.
    """
    port = free_port()
    url = engine.url or f"http://127.0.0.1:{port}"
    server = Server(url, engine.name, engine.seconds, engine.target)
    with server.client:
        if engine.url is None:
            engine.program = engine.program or check_engine(engine.name)
            command, more = ENGINES[engine.name].command(engine, draft_length, port)
            with running(command, server.ready, name=engine.name, seconds=engine.seconds, environment=more):
                yield server
        elif server.ready():
            _ = server.model  # refuses other ones
            yield server
        else:
            raise UserError(f"nothing answers at {engine.url}/health; start the server first, or leave out --url")


@dataclass
class Metrics:
    """Counters of an engine since it started."""

    drafts: Drafts = field(default_factory=Drafts)
    decode_seconds: float = 0.0  # time after the first tokens of all requests; 0 where it is not published
    tokens: float = 0.0  # written tokens; infinite where they are not published


def parse_metrics(page: str) -> Metrics:
    """Counters of a ``/metrics`` page of vLLM or llama.cpp.

    Raises:
        UserError: the page is of another server.
    """
    values: defaultdict[str, float] = defaultdict(float)
    accepted: defaultdict[int, float] = defaultdict(float)
    try:
        for sample in (sample for family in text_string_to_metric_families(page) for sample in family.samples):
            prefix, _, name = sample.name.removesuffix("_total").partition(":")
            if prefix in ("vllm", "llamacpp"):
                values[name] += sample.value
                if name == "spec_decode_num_accepted_tokens_per_pos":
                    accepted[int(sample.labels["position"])] += sample.value
    except ValueError:
        values.clear()
    if not values:
        raise UserError("the metrics page is not vLLM's or llama.cpp's; start the server with metrics (--metrics)")
    tokens = values.get("generation_tokens", values.get("tokens_predicted", math.inf))
    drafts = Drafts(values["spec_decode_num_drafts"], [accepted[i] for i in sorted(accepted)])
    return Metrics(drafts, values["request_decode_time_seconds_sum"], tokens)


@dataclass
class Server:
    """Sends requests to one server."""

    url: str  # its address
    name: str  # a key of `ENGINES`
    seconds: float = 300.0  # time limit of each request
    target: str = ""  # folder or Hub name of the model to ask for, where it serves several

    def __post_init__(self) -> None:
        self.kind = ENGINES[self.name]
        self.client = connect(self.url, self.seconds)

    @cached_property
    def model(self) -> str:
        """The name by which it is asked for the target."""
        models = self._ask("/v1/models").json()["data"]
        return model_name(models, {self.target, Path(self.target).name}, self.url)

    def ready(self) -> bool:
        """Whether the server reports that it is healthy."""
        try:
            ask(self.client, "/health", timeout=2.0)
        except Failure:
            return False
        return True

    def write(
        self,
        ids: Ids,
        *,
        temperature: float,
        seed: int,
        max_new_tokens: int,
        stop_ids: Sequence[int] = (),
        alone: bool = True,
    ) -> ServedText:
        """Write one text after a prompt of token ids; the distribution is not cut.

        Its drafts are counted if it is `alone`; other requests may overlap, of several threads.
        """
        sampling = NEUTRAL | {"temperature": temperature, "seed": seed, "top_p": 1.0, "model": self.model}
        path, body = self.kind.request(self._ask, ids, max_new_tokens, stop_ids, sampling)
        before, began = self.settled() if alone else Metrics(), time.perf_counter()
        answer = self._ask(path, body).json()
        seconds = time.perf_counter() - began
        new, decode_seconds, ended = self.kind.answer(answer)
        if new is None:
            raise UserError(f"{self.name} at {self.url} returns no token ids; vLLM 0.10 or newer is required")
        after = self.settled(before.tokens + len(new)) if alone else before
        if decode_seconds is None:
            decode_seconds = after.decode_seconds - before.decode_seconds
        return ServedText(until_end(new, stop_ids), seconds, decode_seconds, after.drafts - before.drafts, ended)

    def differs_in_ids(self, text: str, ids: Ids) -> str | None:
        """The server's token ids of a text beside these; None where they do not differ."""
        theirs = self._ask("/tokenize", self.kind.tokenise(text)).json()["tokens"]
        if not theirs or theirs == ids:
            return None
        return f"of {text[:40]!r}: {theirs[:8]} there, {ids[:8]} here"

    def settled(self, tokens: float = 0.0) -> Metrics:
        """Counters that no longer change and have reached `tokens`; engines publish them after the answer."""
        now = None
        for _ in range(READINGS):
            time.sleep(SETTLED)
            before, now = now, parse_metrics(self._ask("/metrics").text)
            if now == before and now.tokens >= tokens:
                return now
        raise UserError(
            f"the counters of {self.name} at {self.url} do not come to rest at {tokens:.0f} written tokens or more "
            f"({now}): stop other clients that send requests, or restart the server with its statistics turned on"
        )

    def _ask(self, path: str, body: Fields | None = None) -> httpx.Response:
        try:
            return ask(self.client, path, body)
        except Failure as failure:
            raise UserError(
                f"{self.name} at {self.url} did not answer {path}: {failure.why}; check --url, --target and the "
                "server's log. If it is slow, raise --timeout or lower --max-new-tokens"
            ) from failure
