"""Settings of vLLM and llama.cpp, and the commands that start them."""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

from packaging.version import Version

from decode.errors import UserError

CHECKOUT = Path(__file__).resolve().parents[2]
"""Where `make engines` installs the engines, unless that is the working directory."""
VLLM_PYTHON = Path(".venv-vllm/bin/python")
LLAMA_SERVER = Path(".engines/llama.cpp/build/bin/llama-server")
OLDEST_VLLM = Version("0.32")


@dataclass
class EngineSettings:
    """Options that an engine is started with.

    Attributes:
        target: folder, Hub name or GGUF file.
        draft: likewise; empty if the engine runs without one.
        method: draft_model, eagle3 or eagle.
        context: tokens of the longest text, prompt and answer.
        dtype: number format of vLLM's weights.
        python: interpreter of vLLM's environment.
        binary: llama-server.
        url: address of a running server, which is used instead of starting one.
        port: port to listen on; None: a free one.
        threads: threads of the engine; None: the engine's default.
        seconds: time limit for loading.
        request_seconds: time limit for each text.
        draft_sampling: greedy or probabilistic, above temperature 0.
    """

    target: str
    draft: str
    method: str = "draft_model"
    context: int = 512
    dtype: str = "float32"
    python: str | None = None
    binary: str | None = None
    url: str | None = None
    port: int | None = None
    threads: int | None = None
    seconds: float = 300.0
    request_seconds: float = 120.0
    draft_sampling: str = "greedy"


def find(given: str | None, installed: Path, option: str, what: str) -> str:
    """The path of an engine's program: as given, or as `make engines` installs it.

    Raises:
        UserError: there is none.
    """
    if given is not None:
        if not Path(given).is_file() or not os.access(given, os.X_OK):
            raise UserError(f"{option} is {given!r}, which is no program that can be run; give the path of {what}")
        return given
    for folder in (Path.cwd(), CHECKOUT):
        if (folder / installed).is_file():
            return str(folder / installed)
    raise UserError(f"{what} is not installed here; run `make engines`, or give its path with {option}")


def output_of(*command: str) -> str:
    """Standard output and errors of a program that only prints.

    Raises:
        UserError: it cannot be run, or does not end within two minutes.
    """
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=120)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UserError(f"{command[0]} cannot be run: {error}") from error
    return done.stdout + done.stderr


def check_vllm(python: str) -> None:
    """Refuse an environment without vLLM, or with a version older than the tested one."""
    printed = output_of(python, "-c", "import importlib.metadata as m; print('version', m.version('vllm'))")
    found = next((line.split()[1] for line in printed.splitlines() if line.startswith("version ")), None)
    if found is None:
        raise UserError(
            f"{python} has no vLLM; give the interpreter of an environment that has it, or run `make engines`"
        )
    if Version(found) < OLDEST_VLLM:
        raise UserError(
            f"{python} has vLLM {found}; {OLDEST_VLLM} or newer can be started: run `make engines`, or start the "
            "server yourself and give its address"
        )


def vllm_command(settings: EngineSettings, draft_length: int | None, port: int) -> tuple[list[str], dict[str, str]]:
    """The command that starts vLLM's server, and its environment variables."""
    python = find(settings.python, VLLM_PYTHON, "--python", "vLLM's environment (.venv-vllm/bin/python)")
    command = [python, "-m", "vllm.entrypoints.cli.main", "serve", settings.target, "--dtype", settings.dtype]
    command += ["--host", "127.0.0.1", "--port", str(port), "--disable-uvicorn-access-log"]
    command += ["--max-num-seqs", "4", "--max-model-len", str(settings.context)]
    command += ["--enforce-eager", "--no-enable-prefix-caching"]  # so that texts can be compared
    if draft_length:
        config: dict[str, object] = {"method": settings.method, "model": settings.draft}
        config["num_speculative_tokens"] = draft_length
        if settings.draft_sampling != "greedy":
            config["draft_sample_method"] = settings.draft_sampling
        command += ["--speculative-config", json.dumps(config)]
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


def check_llama(binary: str) -> None:
    """Refuse a llama-server without the options of drafting."""
    if "--spec-draft-sampling" not in output_of(binary, "--help"):
        raise UserError(
            f"{binary} has no option --spec-draft-sampling: it is older than the llama.cpp of `make engines`, or "
            "another program; run `make engines`, or give another program with --binary"
        )


def llama_command(settings: EngineSettings, draft_length: int | None, port: int) -> tuple[list[str], dict[str, str]]:
    """The command that starts llama-server, and its environment variables."""
    binary = find(settings.binary, LLAMA_SERVER, "--binary", "llama-server")
    command = [binary, "-m", settings.target, "--host", "127.0.0.1", "--port", str(port), "--metrics", "--no-webui"]
    command += ["-np", "1", "-c", str(settings.context + 64)]
    # float32 throughout: float16 caches and flash attention decide near ties otherwise
    command += ["-ctk", "f32", "-ctv", "f32", "-fa", "off"]
    if settings.threads:
        command += ["-t", str(settings.threads), "-tb", str(settings.threads)]
    if draft_length:
        kind = "draft-eagle3" if settings.method == "eagle3" else "draft-simple"
        command += ["-md", settings.draft, "--spec-type", kind, "--spec-draft-n-max", str(draft_length)]
        command += ["--spec-draft-p-min", "0", "--spec-draft-sampling", settings.draft_sampling]
        command += ["-ctkd", "f32", "-ctvd", "f32"]
        command += ["--no-spec-draft-backend-sampling"]  # which mixes up the drafts of texts in one batch
    return command, {}
