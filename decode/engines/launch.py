"""Starting an engine and ending it with everything that it started."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from decode.engines.server import Server
from decode.engines.settings import EngineSettings, check_llama, check_vllm, llama_command, vllm_command
from decode.errors import UserError, scratch_folder

LAUNCHER = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT"}
"""Environment variables by which torchrun's processes find each other; an engine must not see them."""
LAST_LINES = 15  # lines of a failed engine that are shown
WATCHER = """
import os, signal, sys, time
sys.stdin.read()
for kind, seconds in (signal.SIGTERM, 5), (signal.SIGKILL, 0):
    try:
        os.killpg(int(sys.argv[1]), kind)
    except ProcessLookupError:
        break
    time.sleep(seconds)
"""


def free_port() -> int:
    """A port of this machine that nothing listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def last_lines(log: Path) -> str:
    """The end of a log, indented."""
    lines = [line for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    return "\n".join(f"  | {line[:240]}" for line in lines[-LAST_LINES:]) or "  | (it wrote nothing)"


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

    Args:
        command: the program and its arguments.
        ready: called twice a second; whether the server answers.
        name: of the engine, for messages.
        seconds: time limit for becoming ready.
        environment: variables added to those of this process.

    Raises:
        UserError: it cannot be started, ends before it is ready, or is not ready in time; with its last lines.
    """
    with scratch_folder() as folder:
        log = folder / "log"
        with log.open("wb") as out:
            try:
                process = subprocess.Popen(
                    list(command),
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=subprocess.STDOUT,
                    env={name: os.environ[name] for name in os.environ.keys() - LAUNCHER} | dict(environment or {}),
                    start_new_session=True,
                )
            except OSError as error:
                raise UserError(f"{name} cannot be started: {command[0]}: {error.strerror}") from error
        watcher = subprocess.Popen(
            [sys.executable, "-ISc", WATCHER, str(process.pid)], stdin=subprocess.PIPE, start_new_session=True
        )
        try:
            end = time.monotonic() + seconds
            while not ready():
                if process.poll() is not None:
                    raise UserError(
                        f"{name} ended with status {process.returncode} while loading. Its last lines:\n"
                        f"{last_lines(log)}\nThe command was: {' '.join(command)}"
                    )
                if time.monotonic() > end:
                    raise UserError(
                        f"{name} was not ready after {seconds:.0f} s; give it longer with --timeout. Its last lines:\n"
                        f"{last_lines(log)}"
                    )
                time.sleep(0.5)
            yield log
        finally:
            stop(process)
            watcher.kill()
            watcher.communicate()


def stop(process: subprocess.Popen[bytes], seconds: float = 15.0) -> None:
    """End a process and everything it started: by SIGTERM, then by SIGKILL."""

    def alive() -> bool:
        process.poll()  # takes the exit status, so that the group can vanish
        try:
            os.killpg(process.pid, 0)
        except ProcessLookupError:
            return False
        return True

    for kind in (signal.SIGTERM, signal.SIGKILL):
        if not alive():
            break
        os.killpg(process.pid, kind)
        end = time.monotonic() + seconds
        while time.monotonic() < end and alive():
            time.sleep(0.1)
    process.wait()


def check_engine(name: str, settings: EngineSettings) -> None:
    """Refuse what is known before an engine starts.

    Raises:
        UserError: it is not installed, is too old, or its port is in use.
    """
    if settings.port is not None:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", settings.port)) == 0:
                raise UserError(f"port {settings.port} is in use; give another one with --port, or leave it out")
    command, _ = COMMANDS[name](settings, None, 0)
    CHECKS[name](command[0])


@contextmanager
def opened(name: str, settings: EngineSettings, draft_length: int | None) -> Iterator[Server]:
    """A server of an engine, with a draft of this length or without one, until the block is left.

    Raises:
        UserError: it is not installed, or does not start (see `running`).
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
