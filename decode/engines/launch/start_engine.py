"""Starting an engine with a target and a draft, and how each engine arranges its rounds."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from decode.core.errors import UserError
from decode.engines.launch.engine_process import check_port, free_port, running
from decode.engines.launch.engine_settings import EngineSettings
from decode.engines.launch.llama_cpp_engine import check_llama, llama_command
from decode.engines.launch.server import Server
from decode.engines.launch.vllm_engine import check_vllm, vllm_command
from decode.engines.predicted_acceptance import Rounds


def check_engine(name: str, settings: EngineSettings) -> None:
    """Refuse what can be told before an engine starts: it is not installed, is too old, or its port is in use.

    Raises:
        UserError: naming it and the next step.
    """
    if settings.port is not None:
        check_port(settings.port)
    command, _ = COMMANDS[name](settings, None, 0)
    CHECKS[name](command[0])


@contextmanager
def opened(name: str, settings: EngineSettings, draft_length: int | None) -> Iterator[Server]:
    """A server of this engine, with a draft of this length or without one, until the block is left.

    Raises:
        UserError: it is not installed, or does not start (see `decode.engines.launch.engine_process.running`).
    """
    if settings.url is not None:
        server = Server(settings.url, name, settings.request_seconds)
        if not server.ready():
            raise UserError(f"nothing answers at {settings.url}/health; start the server first, or leave out --url")
        yield server
        return
    check_engine(name, settings)
    port = settings.port or free_port()
    command, environment = COMMANDS[name](settings, draft_length, port)
    server = Server(f"http://127.0.0.1:{port}", name, settings.request_seconds)
    with running(command, server.ready, name=name, seconds=settings.seconds, environment=environment):
        yield server


COMMANDS = {"vllm": vllm_command, "llama.cpp": llama_command}
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
