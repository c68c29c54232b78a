"""What an engine is started with, and where its program is."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from decode.engines.acceptance import ServedText
from decode.errors import UserError

CHECKOUT = Path(__file__).resolve().parents[2]
"""Where `make engines` puts what it makes, besides the current folder."""


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
        dtype: number format of vLLM's weights.
        exact: vLLM without compiled kernels and prefix cache, which serve-check's comparison of texts wants.
        arguments: further ones of `vllm serve`.
        python: interpreter of vLLM's environment.
        python_option: what that is called where it is set.
        binary: llama-server.
        url: of a server that runs already.
        port: to listen on; None takes a free one.
        threads: of the engine; None leaves it to the engine.
        seconds: limit for loading.
        request_seconds: limit for each text.
        draft_sampling: greedy or probabilistic, above temperature 0.
        draft_p_min: llama.cpp drafts no token that the draft finds less probable.
        speculative: further keys of vLLM's speculative configuration.
    """

    target: str
    draft: str
    method: str = "draft_model"
    context: int = 512
    batch: int = 1
    dtype: str = "float32"
    exact: bool = True
    arguments: Sequence[str] = ()
    python: str | None = None
    python_option: str = "--python"
    binary: str | None = None
    url: str | None = None
    port: int | None = None
    threads: int | None = None
    seconds: float = 300.0
    request_seconds: float = 120.0
    draft_sampling: str = "greedy"
    draft_p_min: float = 0.0
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


VLLM_PYTHON = Path(".venv-vllm/bin/python")
OLDEST_VLLM = (0, 32)
NO_CUTS: dict[str, float] = {"top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}
"""Part of a request that keeps vLLM from following the model's generation_config."""


def check_vllm(python: str) -> None:
    """Refuse an environment without vLLM, or with an older one than was tested."""
    asked = "import importlib.metadata as m; print('vLLM', m.version('vllm'))"
    found = re.search(r"^vLLM (\d+)\.(\d+)\S*", answer_of(python, "-c", asked), re.MULTILINE)
    if found is None:
        raise UserError(
            f"{python} has no vLLM; give the interpreter of an environment that has it, or run `make engines`"
        )
    if (int(found[1]), int(found[2])) < OLDEST_VLLM:
        raise UserError(
            f"{python} has {found[0]}; {'.'.join(map(str, OLDEST_VLLM))} or newer can be started: run `make engines`, "
            "or start the server yourself and give its address"
        )


def speculative_config(settings: EngineSettings, draft_length: int) -> str:
    """vLLM's --speculative-config, as the model card has it."""
    config: dict[str, object] = {"method": settings.method, "model": settings.draft}
    config["num_speculative_tokens"] = draft_length
    if settings.draft_sampling != "greedy":
        config["draft_sample_method"] = settings.draft_sampling
    return json.dumps(config | dict(settings.speculative))


def vllm_command(settings: EngineSettings, draft_length: int | None, port: int) -> tuple[list[str], dict[str, str]]:
    """The command that starts vLLM's server, and environment variables for it."""
    python = find(settings.python, VLLM_PYTHON, settings.python_option, "vLLM's environment (.venv-vllm/bin/python)")
    command = [python, "-m", "vllm.entrypoints.cli.main", "serve", settings.target, "--dtype", settings.dtype]
    command += ["--host", "127.0.0.1", "--port", str(port), "--disable-uvicorn-access-log"]
    command += ["--max-num-seqs", str(max(4, settings.batch))]
    command += ["--max-model-len", str(settings.context), *settings.arguments]
    if settings.exact:
        command += ["--enforce-eager", "--no-enable-prefix-caching"]
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


LLAMA_SERVER = Path(".engines/llama.cpp/build/bin/llama-server")


def check_llama(binary: str) -> None:
    """Refuse a llama-server that lacks the options of drafting."""
    wanted = "--spec-draft-sampling"
    if wanted not in answer_of(binary, "--help"):
        raise UserError(
            f"{binary} has no option {wanted}: it is older than the llama.cpp of `make engines`, or another program; "
            "run `make engines`, or give another program with --binary"
        )


def llama_command(settings: EngineSettings, draft_length: int | None, port: int) -> tuple[list[str], dict[str, str]]:
    """The command that starts llama-server, and environment variables for it."""
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
        command += ["--spec-draft-p-min", f"{settings.draft_p_min:g}", "--spec-draft-sampling", settings.draft_sampling]
        command += ["-ctkd", "f32", "-ctvd", "f32"]
        command += ["--no-spec-draft-backend-sampling"]  # which mixes up the drafts of texts that are decoded together
    return command, {}
