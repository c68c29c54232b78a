"""The engines: how each is found, started with a target and a draft, and how it arranges its rounds."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from decode.core.errors import UserError
from decode.engines.counts import ServedText
from decode.engines.predicted import Rounds
from decode.engines.process import check_port, free_port, running
from decode.engines.server import Server

VLLM_PYTHON = Path(".venv-vllm/bin/python")
LLAMA_SERVER = Path(".engines/llama.cpp/build/bin/llama-server")
CHECKOUT = Path(__file__).resolve().parents[2]
"""Where `make engines` puts what it makes, besides the current folder."""
OLDEST_VLLM = (0, 32)


class Writer(Protocol):
    """Something that writes texts with a draft and counts its drafts."""

    def write(
        self, ids: Sequence[int], *, temperature: float, seed: int, max_new_tokens: int, stop_ids: Sequence[int] = ()
    ) -> ServedText:
        """One text (see `decode.engines.server.Server.write`)."""
        ...


@dataclass
class EngineSettings:
    """What an engine is started with.

    Attributes:
        target: folder, Hub name or GGUF file.
        draft: the same.
        method: draft_model, eagle3 or eagle.
        context: tokens that the longest text needs, prompt and answer.
        batch: most requests under way at a time.
        python: interpreter of vLLM's environment.
        binary: llama-server.
        url: of a server that runs already.
        port: to listen on; None takes a free one.
        threads: of the engine; None leaves it to the engine.
        seconds: limit for loading.
        request_seconds: limit for each text.
        draft_sampling: greedy or probabilistic, above temperature 0.
        speculative: further keys of vLLM's speculative configuration.
    """

    target: str
    draft: str
    method: str = "draft_model"
    context: int = 512
    batch: int = 1
    python: str | None = None
    binary: str | None = None
    url: str | None = None
    port: int | None = None
    threads: int | None = None
    seconds: float = 300.0
    request_seconds: float = 120.0
    draft_sampling: str = "greedy"
    speculative: Mapping[str, object] = field(default_factory=dict)


def find(given: str | None, made: Path, option: str, what: str) -> str:
    """The path of an engine's program.

    Raises:
        UserError: there is none.
    """
    if given is not None:
        path = Path(given)
        if not path.is_file() or not os.access(path, os.X_OK):
            raise UserError(f"{option} is {given!r}, which is no program that can be run; give the path of {what}")
        return given
    for folder in (Path.cwd(), CHECKOUT):
        if (folder / made).is_file():
            return str(folder / made)
    raise UserError(f"{what} is not installed here; run `make engines`, or give its path with {option}")


def answer_of(*command: str) -> str:
    """What a program prints when it is asked about itself, errors included.

    Raises:
        UserError: it cannot be run, or is silent for two minutes.
    """
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=120)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UserError(f"{command[0]} cannot be run: {error}") from error
    return done.stdout + done.stderr


def check_vllm(python: str) -> None:
    """Refuse an environment without vLLM, or with an older one than was tested.

    Raises:
        UserError: naming the version that was found.
    """
    asked = "import importlib.metadata as m; print('vLLM', m.version('vllm'))"
    found = re.search(r"^vLLM (\d+)\.(\d+)\S*", answer_of(python, "-c", asked), re.MULTILINE)
    if found is None:
        raise UserError(f"{python} has no vLLM; give --python of an environment that has it, or run `make engines`")
    if (int(found[1]), int(found[2])) < OLDEST_VLLM:
        raise UserError(
            f"{python} has {found[0]}; serve-check starts {'.'.join(map(str, OLDEST_VLLM))} or newer: run `make "
            "engines`, or start the server yourself and give its --url"
        )


def check_llama(binary: str) -> None:
    """Refuse a llama-server that lacks the options of drafting.

    Raises:
        UserError: naming the option.
    """
    wanted = "--spec-draft-sampling"
    if wanted not in answer_of(binary, "--help"):
        raise UserError(
            f"{binary} has no option {wanted}: it is older than the llama.cpp of `make engines`, or another program"
        )


@contextmanager
def opened(name: str, settings: EngineSettings, draft_length: int | None) -> Iterator[Server]:
    """A server of this engine, with a draft of this length or without one, until the block is left.

    Raises:
        UserError: it is not installed, or does not start (see `decode.engines.process.running`).
    """
    if settings.url is not None:
        server = Server(settings.url, name, settings.request_seconds)
        if not server.ready():
            raise UserError(f"nothing answers at {settings.url}/health; start the server first, or leave out --url")
        yield server
        return
    if settings.port is not None:
        check_port(settings.port)
    port = settings.port or free_port()
    command, environment = COMMANDS[name](settings, draft_length, port)
    CHECKS[name](command[0])
    server = Server(f"http://127.0.0.1:{port}", name, settings.request_seconds)
    with running(command, server.ready, name=name, seconds=settings.seconds, environment=environment):
        yield server


def speculative_config(settings: EngineSettings, draft_length: int) -> str:
    """vLLM's --speculative-config, as the model card has it."""
    config: dict[str, object] = {"method": settings.method, "model": settings.draft}
    config["num_speculative_tokens"] = draft_length
    if settings.draft_sampling != "greedy":
        config["draft_sample_method"] = settings.draft_sampling
    return json.dumps(config | dict(settings.speculative))


def _vllm(settings: EngineSettings, draft_length: int | None, port: int) -> tuple[list[str], dict[str, str]]:
    python = find(settings.python, VLLM_PYTHON, "--python", "vLLM's environment (.venv-vllm/bin/python)")
    command = [python, "-m", "vllm.entrypoints.cli.main", "serve", settings.target, "--dtype", "float32"]
    command += ["--enforce-eager", "--host", "127.0.0.1", "--port", str(port)]
    command += ["--max-num-seqs", str(max(4, settings.batch))]
    command += ["--max-model-len", str(settings.context), "--disable-uvicorn-access-log", "--no-enable-prefix-caching"]
    if draft_length:
        command += ["--speculative-config", speculative_config(settings, draft_length)]
    environment = {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_ENGINE_READY_TIMEOUT_S": str(int(settings.seconds)),
        "TOKENIZERS_PARALLELISM": "false",
    }
    if settings.threads:
        environment |= {"OMP_NUM_THREADS": str(settings.threads), "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    if Path(settings.target).is_dir():
        environment["HF_HUB_OFFLINE"] = "1"
    return command, environment


def _llama(settings: EngineSettings, draft_length: int | None, port: int) -> tuple[list[str], dict[str, str]]:
    binary = find(settings.binary, LLAMA_SERVER, "--binary", "llama-server")
    command = [binary, "-m", settings.target, "--host", "127.0.0.1", "--port", str(port), "--metrics", "--no-webui"]
    command += ["-np", str(settings.batch), "-c", str(settings.batch * (settings.context + 64))]
    # float32 throughout, as vLLM is asked for; float16 in caches and flash attention decide close calls in another way
    command += ["-ctk", "f32", "-ctv", "f32", "-fa", "off"]
    if settings.threads:
        command += ["-t", str(settings.threads), "-tb", str(settings.threads)]
    if draft_length:
        kind = "draft-eagle3" if settings.method == "eagle3" else "draft-simple"
        command += ["-md", settings.draft, "--spec-type", kind, "--spec-draft-n-max", str(draft_length)]
        command += ["--spec-draft-p-min", "0", "--spec-draft-sampling", settings.draft_sampling]
        command += ["-ctkd", "f32", "-ctvd", "f32"]
        command += ["--no-spec-draft-backend-sampling"]  # which mixes up the drafts of texts that are decoded together
    return command, {}


COMMANDS = {"vllm": _vllm, "llama.cpp": _llama}
CHECKS = {"vllm": check_vllm, "llama.cpp": check_llama}
ROUNDS = {
    "transformers": Rounds(first=0, whole_only=True),
    "vllm": Rounds(),
    "llama.cpp": Rounds(to_budget=True),
}
"""How each engine arranges its rounds."""
ENGINES = tuple(ROUNDS)
GREEDY_DRAFT = {"transformers": False, "vllm": True, "llama.cpp": True}
"""Whether an engine drafts the most probable token at every temperature, unless told otherwise."""
