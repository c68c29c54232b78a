"""Engines as processes: none is left behind, and a failing one shows its last lines."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time

import pytest

from decode.engines.launch import check_engine, opened, running
from decode.engines.settings import EngineSettings
from decode.errors import UserError

FOREVER = "import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'], " \
    "stdout=open(sys.argv[1], 'w')); print('up', flush=True); time.sleep(600)"  # fmt: skip


def test_a_process_that_dies_shows_its_last_lines() -> None:
    code = "import sys; print('reading weights'); sys.exit('no kernel for this machine')"
    with (
        pytest.raises(UserError, match=r"status 1 while loading(.|\n)*no kernel for this machine"),
        running([sys.executable, "-c", code], lambda: False, name="engine", seconds=30),
    ):
        pass


def test_a_process_that_hangs_is_ended_with_its_children(tmp_path) -> None:
    marker = tmp_path / "child"
    with (
        pytest.raises(UserError, match="not ready after 2 s"),
        running([sys.executable, "-c", FOREVER, str(marker)], lambda: False, name="engine", seconds=2),
    ):
        pass
    assert not _holders(str(marker))


def test_leaving_the_block_ends_everything(tmp_path) -> None:
    marker = tmp_path / "child"
    with running([sys.executable, "-c", FOREVER, str(marker)], marker.exists, name="engine", seconds=60) as log:
        while not _holders(str(marker)):
            time.sleep(0.05)
    assert not _holders(str(marker))
    assert not log.exists()


@pytest.mark.parametrize("ended_by", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_a_check_that_is_ended_takes_its_engine_and_its_workers_with_it(
    tmp_path, monkeypatch, ended_by: signal.Signals
) -> None:
    """The worker does not end with the engine, as vLLM's may not. The folder goes at the next start at the latest."""
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setenv("TMPDIR", str(scratch))
    marker, ready = tmp_path / "worker", tmp_path / "ready"
    code = (
        "import pathlib, signal, sys, time\nfrom decode.engines.launch import running\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # a shell's background jobs ignore it
        f"ready = lambda: pathlib.Path({str(marker)!r}).exists()\n"
        f"with running([sys.executable, '-c', {FOREVER!r}, {str(marker)!r}], ready, name='engine', seconds=600):\n"
        f"    pathlib.Path({str(ready)!r}).touch()\n"
        "    time.sleep(600)"
    )
    check = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.DEVNULL)
    while not ready.exists() or not _holders(str(marker)):
        time.sleep(0.05)
    check.send_signal(ended_by)
    check.wait()
    end = time.monotonic() + 30
    while _holders(str(marker)) and time.monotonic() < end:
        time.sleep(0.05)
    assert not _holders(str(marker))
    assert any(scratch.iterdir()) == (ended_by != signal.SIGINT)


def _holders(path: str) -> list[str]:
    """Processes that have a file open."""
    found = []
    for process in filter(str.isdigit, os.listdir("/proc")):
        try:
            handles = os.listdir(f"/proc/{process}/fd")
            found += [process for handle in handles if os.readlink(f"/proc/{process}/fd/{handle}") == path]
        except OSError:
            continue
    return found


def test_a_port_in_use_is_refused() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(UserError, match=f"port {port} is in use"):
            check_engine("vllm", EngineSettings("t", "d", port=port))


def test_what_is_not_installed_is_said_with_the_next_step(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("decode.engines.settings.CHECKOUT", tmp_path)
    settings = EngineSettings("t", "d")
    with pytest.raises(UserError, match="make engines"), opened("vllm", settings, 3):
        pass
    with (
        pytest.raises(UserError, match="no program that can be run"),
        opened("llama.cpp", EngineSettings("t", "d", binary=str(tmp_path)), 3),
    ):
        pass
    with (
        pytest.raises(UserError, match="nothing answers"),
        opened("vllm", EngineSettings("t", "d", url="http://127.0.0.1:9"), 3),
    ):
        pass


def test_a_program_of_another_version_is_said(tmp_path, monkeypatch) -> None:
    def refused(name: str, sentence: str, **programs: str) -> None:
        with pytest.raises(UserError, match=sentence), opened(name, EngineSettings("t", "d", **programs), 3):
            pass

    refused("vllm", "has no vLLM; give the interpreter", python=sys.executable)
    (tmp_path / "vllm-0.11.0.dist-info").mkdir()
    (tmp_path / "vllm-0.11.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.11.0\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    refused("vllm", r"has vLLM 0\.11\.0; 0\.32 or newer can be started", python=sys.executable)
    (tmp_path / "llama-server").write_text("#!/bin/sh\necho usage: --model FILE\n")
    (tmp_path / "llama-server").chmod(0o755)
    refused("llama.cpp", "no option --spec-draft-sampling", binary=str(tmp_path / "llama-server"))
