"""What an engine is started with, and where its program is."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from decode.core.errors import UserError
from decode.engines.acceptance_counts import ServedText

CHECKOUT = Path(__file__).resolve().parents[3]
"""Where `make engines` puts what it makes, besides the current folder."""


class Writer(Protocol):
    """Something that writes texts with a draft and counts its drafts."""

    def write(
        self, ids: Sequence[int], *, temperature: float, seed: int, max_new_tokens: int, stop_ids: Sequence[int] = ()
    ) -> ServedText:
        """One text (see `decode.engines.launch.server.Server.write`)."""
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
