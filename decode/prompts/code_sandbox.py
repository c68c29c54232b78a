"""Runs generated Python in a process of its own, with limits on time, memory, processes and files.

It guards against accidents (endless loops, memory, stray files), not against attackers: the program can still read
files and reach the network. Run untrusted models' code inside a container or virtual machine.
"""

import contextlib
import json
import os
import secrets
import signal
import subprocess
import sys
import tempfile

from decode.core.errors import UserError

HARNESS = """
import json, os, resource, sys
seconds, memory, secret, program = json.load(sys.stdin)
answer = os.dup(1)
nowhere = os.open(os.devnull, os.O_RDWR)
for stream in (0, 1, 2):
    os.dup2(nowhere, stream)
limits = {"CPU": seconds, "AS": memory, "FSIZE": 0, "CORE": 0, "NPROC": 0, "NOFILE": 64}
for name, value in limits.items():
    resource.setrlimit(getattr(resource, "RLIMIT_" + name), (value, value))
exec(compile(program, "<generated>", "exec"), {"__name__": "__main__"})
os.write(answer, secret.encode())
"""
"""The child: limits first, then the program; only a program that runs to its end gets the secret written."""


def runs_cleanly(program: str, seconds: int = 5, memory_mib: int = 512) -> bool:
    """Whether a program runs to its end without an error.

    It starts in an empty temporary folder, can write no byte to any file, and has no environment variables. Its own
    output is thrown away.

    Args:
        program: Python source; a failing test in it should raise.
        seconds: limit of CPU time, and of wall time with one second more.
        memory_mib: limit of the address space.

    Raises:
        UserError: the operating system has no such limits (Windows).
    """
    if os.name != "posix":
        raise UserError("generated code runs under POSIX resource limits only: use Linux, macOS or WSL")
    secret = secrets.token_hex(16)
    task = json.dumps([seconds, memory_mib * 2**20, secret, program])
    with tempfile.TemporaryDirectory() as folder:
        child = subprocess.Popen(
            [sys.executable, "-I", "-B", "-c", HARNESS],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd=folder,
            env={},
            text=True,
            start_new_session=True,
        )
        try:
            output, _ = child.communicate(task, timeout=seconds + 1)
        except subprocess.TimeoutExpired:
            return False
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()
            for pipe in (child.stdin, child.stdout):
                if pipe is not None:
                    with contextlib.suppress(OSError):
                        pipe.close()
    return output == secret
