"""vLLM's and llama.cpp's servers: starting and ending one, asking it for texts, and the drafts that it counts."""

from __future__ import annotations

import json
import math
import os
import socket
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from packaging.version import Version
from prometheus_client.parser import text_string_to_metric_families

from decode.engines.acceptance import Drafts, ServedText
from decode.errors import UserError, scratch_folder

CHECKOUT = Path(__file__).resolve().parents[2]
"""Where `make engines` installs the engines, unless that is the working directory."""
VLLM_PYTHON = Path(".venv-vllm/bin/python")
LLAMA_SERVER = Path(".engines/llama.cpp/build/bin/llama-server")
ENGINES = {"vllm": ("--python", VLLM_PYTHON), "llama.cpp": ("--binary", LLAMA_SERVER)}
"""The engines, each with the option of serve-check that names its program, and its place as `make engines` installs it.
"""
OLDEST_VLLM = Version("0.32")
COMMANDS = {
    "vllm": "-m vllm.entrypoints.cli.main serve {target} --host 127.0.0.1 --port {port} --dtype {dtype} "
    "--max-num-seqs 4 --max-model-len {context} --disable-uvicorn-access-log "
    "--enforce-eager --no-enable-prefix-caching",  # so that texts can be compared
    # float32 throughout: float16 caches and flash attention decide near ties otherwise
    "llama.cpp": "-m {target} --host 127.0.0.1 --port {port} --metrics --no-webui -np 1 -c {room} "
    "-ctk f32 -ctv f32 -fa off",
    # sampling in the backend mixes up the drafts of texts in one batch
    "drafting": " -md {draft} --spec-type {kind} --spec-draft-n-max {length} --spec-draft-p-min 0 "
    "--spec-draft-sampling greedy -ctkd f32 -ctvd f32 --no-spec-draft-backend-sampling",
}
"""Options of the engines' servers, and those of llama.cpp's with a draft."""
LAUNCHER = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT"}
"""Environment variables by which torchrun's processes find each other; an engine must not see them."""
LAST_LINES = 15  # lines of a failed engine that are shown
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


@dataclass
class Engine:
    """Options that an engine is started with, or the address of a running server."""

    name: str  # a key of `ENGINES`
    target: str = ""  # folder, Hub name or GGUF file
    draft: str = ""  # the same of the draft
    method: str = "draft_model"  # draft_model, eagle, eagle3, dflash or dspark
    context: int = 512  # tokens of the longest text, prompt and answer
    dtype: str = "float32"  # number format of vLLM's weights
    program: str | None = None  # vLLM's interpreter or llama-server; None: as `make engines` installs it
    url: str | None = None  # address of a running server, which is used instead of starting one
    threads: int | None = None  # None: the engine's default
    seconds: float = 300.0  # time limit for loading, and for each text


def check_engine(name: str, given: str | None = None) -> str:
    """The path of an engine's program: the one given, or as `make engines` installs it.

    Raises:
        UserError: it is missing or older than the one that is tested; with the next step.
    """
    option, installed = ENGINES[name]
    places = [Path(given)] if given else [folder / installed for folder in (Path.cwd(), CHECKOUT)]
    program = next((str(path) for path in places if path.is_file() and os.access(path, os.X_OK)), None)
    if program is None:
        raise UserError(
            f"there is no program {given or installed} that can be run; run `make engines`, or give serve-check its "
            f"path with {option}"
        )
    asked = ("-c", "import importlib.metadata as m; print('version', m.version('vllm'))")
    done = subprocess.run(
        [program, *(asked if name == "vllm" else ("--help",))],
        stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    if name == "llama.cpp":
        if "--spec-draft-sampling" not in done.stdout + done.stderr:
            raise UserError(
                f"{program} has no option --spec-draft-sampling: it is older than the llama.cpp of `make engines`, or "
                "another program; run `make engines`, or give another program with --binary"
            )
        return program
    found = next((line.split()[1] for line in done.stdout.splitlines() if line.startswith("version ")), None)
    if found is None or Version(found) < OLDEST_VLLM:
        raise UserError(
            f"{program} has {f'vLLM {found}' if found else 'no vLLM'}; {OLDEST_VLLM} or newer can be started: run "
            "`make engines`, or start the server yourself and give its address"
        )
    return program


def start_command(engine: Engine, draft_length: int | None, port: int) -> tuple[list[str], dict[str, str]]:
    """The command that starts an engine's server, and the environment variables that it adds.

    Args:
        engine: what to start.
        draft_length: tokens drafted per round; None starts it without the draft.
        port: to listen on.
    """
    llama, options = engine.name == "llama.cpp", COMMANDS[engine.name]
    if llama and engine.threads:
        options += " -t {threads} -tb {threads}"
    if llama and draft_length:
        options += COMMANDS["drafting"]
    kind = "draft-simple" if engine.method == "draft_model" else f"draft-{engine.method}"
    values = vars(engine) | {"port": port, "length": draft_length, "kind": kind, "room": engine.context + 64}
    command = [str(engine.program), *(option.format_map(values) for option in options.split())]
    if llama:
        return command, {}
    if draft_length:
        drafting = {"method": engine.method, "model": engine.draft, "num_speculative_tokens": draft_length}
        command += ["--speculative-config", json.dumps(drafting)]
    environment = {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_ENGINE_READY_TIMEOUT_S": str(int(engine.seconds)),
        "TOKENIZERS_PARALLELISM": "false",
    }
    if engine.threads:
        environment |= {"OMP_NUM_THREADS": str(engine.threads), "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    if Path(engine.target).is_dir():
        environment["HF_HUB_OFFLINE"] = "1"
    return command, environment


def free_port() -> int:
    """A port of this machine that nothing listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def running(
    command: Sequence[str],
    ready: Callable[[], bool],
    *,
    name: str,
    seconds: float,
    environment: Mapping[str, str] | None = None,
) -> Iterator[Path]:
    """Run a server until the block is left; yields its log once it is ready.

    The server and everything it started end with the block, and with this process however that ends.

    Args:
        command: the program and its arguments.
        ready: called twice a second; whether the server answers.
        name: of the engine, for messages.
        seconds: time limit for becoming ready.
        environment: variables added to those of this process.

    Raises:
        UserError: it ends before it is ready, or is not ready in time; with its last lines.
    """
    kept = {name: value for name, value in os.environ.items() if name not in LAUNCHER}
    with scratch_folder() as folder, (folder / "log").open("wb") as out:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT,
            env={**kept, **(environment or {})}, start_new_session=True,
        )  # fmt: skip
        watcher = subprocess.Popen(
            [sys.executable, "-ISc", WATCHER, str(process.pid)], stdin=subprocess.PIPE, start_new_session=True
        )
        try:
            end = time.monotonic() + seconds
            while not ready():
                ended = process.poll() is not None
                if ended or time.monotonic() > end:
                    what = f"was not ready after {seconds:.0f} s; give it longer with --timeout"
                    if ended:
                        what = f"ended with status {process.returncode} while loading"
                    lines = (folder / "log").read_text(encoding="utf-8", errors="replace").splitlines()
                    last = "\n".join(f"  | {line[:240]}" for line in list(filter(str.strip, lines))[-LAST_LINES:])
                    raise UserError(f"{name} {what}. Its last lines:\n{last}\nThe command was: {' '.join(command)}")
                time.sleep(0.5)
            yield folder / "log"
        finally:
            assert watcher.stdin is not None
            watcher.stdin.close()
            process.wait()  # takes the exit status, so that the group can vanish
            watcher.wait()


@contextmanager
def opened(engine: Engine, draft_length: int | None) -> Iterator[Server]:
    """A server with a draft of this length or without one, until the block is left.

    Raises:
        UserError: it is not installed, does not start (see `running`), or does not answer at its address.
    """
    if engine.url is not None:
        server = Server(engine.url, engine.name, engine.seconds)
        if not server.ready():
            raise UserError(f"nothing answers at {engine.url}/health; start the server first, or leave out --url")
        yield server
        return
    engine.program = engine.program or check_engine(engine.name)
    port = free_port()
    command, environment = start_command(engine, draft_length, port)
    server = Server(f"http://127.0.0.1:{port}", engine.name, engine.seconds)
    with running(command, server.ready, name=engine.name, seconds=engine.seconds, environment=environment):
        yield server


@dataclass
class Metrics:
    """Counters of an engine since it started."""

    drafts: Drafts
    decode_seconds: float  # time after the first tokens of all requests; 0 where it is not published
    tokens: float  # written tokens; infinite where they are not published


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


class Server:
    """Sends requests to one server, one at a time.

    Args:
        url: address of the server.
        name: vllm or llama.cpp.
        seconds: time limit of each request.
    """

    def __init__(self, url: str, name: str, seconds: float = 300.0) -> None:
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
        body: dict[str, Any] = {"prompt": list(ids), "temperature": temperature, "seed": seed, "ignore_eos": ignore_eos}
        body |= {"top_p": 1.0, "min_p": 0.0}  # not as the model's generation_config has them
        if self.name == "llama.cpp":
            for i in stop_ids:
                if i not in self.pieces:
                    self.pieces[i] = str(self._call("POST", "/detokenize", json={"tokens": [i]}).json()["content"])
            # llama-server stops at strings, not at ids, and shows special tokens only where they are preserved
            stop = [self.pieces[i] for i in stop_ids if self.pieces[i]]
            path, body = "/completion", body | {
                "n_predict": max_new_tokens, "top_k": 0, "samplers": ["temperature"], "return_tokens": True,
                "cache_prompt": False, "stop": stop, "preserved_tokens": stop,
            }  # fmt: skip
        else:
            if self.model is None:
                self.model = str(self._call("GET", "/v1/models").json()["data"][0]["id"])
            path, body = "/v1/completions", body | {
                "max_tokens": max_new_tokens, "top_k": -1, "repetition_penalty": 1.0, "stop_token_ids": list(stop_ids),
                "return_token_ids": True, "model": self.model,
            }  # fmt: skip
        before, began = self._settled(), time.perf_counter()
        answer = self._call("POST", path, json=body).json()
        seconds = time.perf_counter() - began
        new = answer["tokens"] if self.name == "llama.cpp" else answer["choices"][0].get("token_ids")
        if new is None:
            raise UserError(f"{self.name} at {self.url} returns no token ids; vLLM 0.10 or newer is required")
        after = self._settled(before.tokens + len(new))
        decode_seconds = after.decode_seconds - before.decode_seconds
        if self.name == "llama.cpp":
            decode_seconds = answer["timings"]["predicted_ms"] / 1e3
        end = next((n for n, i in enumerate(new, 1) if i in stop_ids), len(new))
        return ServedText(list(new[:end]), seconds, decode_seconds, after.drafts - before.drafts)

    def differs_in_ids(self, text: str, ids: Sequence[int]) -> str | None:
        """Where the server's token ids of a text differ from these; None where they do not."""
        body = {"content": text, "add_special": True} if self.name == "llama.cpp" else {"prompt": text}
        theirs = [int(i) for i in self._call("POST", "/tokenize", json=body).json()["tokens"]]
        if not theirs or theirs == list(ids):
            return None
        at = next((i for i, (a, b) in enumerate(zip(theirs, ids)) if a != b), min(len(theirs), len(ids)))
        return f"of {text[:40]!r}, token {at} is {theirs[at : at + 3]} there and {list(ids[at : at + 3])} here"

    def _settled(self, tokens: float = 0.0) -> Metrics:
        """Metrics that count at least `tokens` and no longer change; engines publish them after the answer."""
        now, before = parse_metrics(self._call("GET", "/metrics").text), None
        for _ in range(READINGS):
            time.sleep(SETTLED)
            now, before = parse_metrics(self._call("GET", "/metrics").text), now
            if now == before and now.tokens >= tokens:
                return now
        if now != before:
            raise UserError(
                f"the counters of {self.name} at {self.url} do not stop changing, so other clients are sending "
                "requests; stop them and run the command again"
            )
        return now

    def _call(self, method: str, path: str, **options: Any) -> httpx.Response:
        try:
            answer = self.client.request(method, path, **options)
        except httpx.HTTPError as error:
            raise UserError(
                f"{self.name} at {self.url} did not answer {path} within {self.seconds:.0f} s ({error}); is it running?"
                " If it is slow, raise --timeout or lower --max-new-tokens"
            ) from error
        if answer.status_code != 200:
            raise UserError(
                f"{self.name} answered {path} with status {answer.status_code}: {answer.text[:400].strip()}; check "
                "--url, --target and the server's log"
            )
        return answer
