"""How a command ends: an error that the user can correct, an interrupt or a full disk becomes one line and a status."""

import errno
import os
import re
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from decode.core.errors import UserError

NEXT = "Nothing half-written is kept; then run the same command again to continue"
WRITING = {
    errno.ENOSPC: "the disk is full; free some space (`df -h .` shows it)",
    errno.EDQUOT: "the disk quota is used up; free some space (`quota` shows it)",
    errno.EFBIG: "the file would be larger than allowed here; raise the limit (`ulimit -f` shows it)",
    errno.EROFS: "the file system is read-only; choose another output folder",
    errno.EACCES: "permission is denied; choose another output folder",
    errno.EPERM: "the operation is not permitted; choose another output folder",
    errno.ENOTDIR: "a file stands where a folder is needed; move it away, or choose another output folder",
    errno.EISDIR: "a folder stands where a file is needed; move it away, or choose another output folder",
    errno.EEXIST: "something stands where a folder is needed; move it away, or choose another output folder",
}
"""Reasons for which writing fails, and what to do."""


def run_main(function: Callable[[], object]) -> int:
    """Run a command; an error that the user can correct, an interrupt or a full disk is told in one line.

    Returns:
        0 on success, 2 after a `UserError` or where files cannot be written, 130 after Ctrl-C or SIGTERM. Other
        exceptions pass through.
    """
    try:
        with _sigterm_interrupts():
            function()
        sys.stdout.flush()
        return 0
    except UserError as error:
        return _fail(f"error: {error}", 2)
    except SystemExit as error:  # a help that was asked for
        return int(error.code or 0)
    except KeyboardInterrupt:
        return _fail("stopped; run the same command again to continue", 130)
    except BrokenPipeError:  # `... | head` closed the pipe: nothing is wrong
        _close_stdout()
        return 0
    except Exception as error:
        reason = writing_error(error)
        if reason is None:
            raise
        try:
            sys.stdout.flush()
        except OSError:  # it is standard output that cannot be written
            _close_stdout()
        return _fail(f"error: {reason}. {NEXT}", 2)


@contextmanager
def _sigterm_interrupts() -> Iterator[None]:
    """Within it, SIGTERM ends the main thread as Ctrl-C does, so that what is temporary is removed."""
    if threading.current_thread() is not threading.main_thread():  # only that one may
        yield
        return
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def writing_error(error: BaseException) -> str | None:
    """Why a file could not be written, if that is what an exception says; libraries wrap it in errors of their own."""
    if isinstance(error, OSError) and error.errno in WRITING:
        where = f"{error.filename2 or error.filename} cannot be written: " if error.filename else ""
        return where + WRITING[error.errno]
    if number := re.search(r"\(os error (\d+)\)", str(error)):  # safetensors and tokenizers, from Rust
        return WRITING.get(int(number[1]))
    if "PytorchStreamWriter failed" in str(error) or "inline_container" in str(error):  # torch.save loses the number
        return "a file cannot be written; `df -h .` and `ulimit -f` show whether the disk is full or files are limited"
    below = error.__cause__ or error.__context__
    return writing_error(below) if below is not None else None


def check_writable(folder: str | Path) -> Path:
    """Refuse a folder that results cannot be written to, before hours are spent on them.

    Raises:
        UserError: it cannot be made, or no file can be made in it.
    """
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return Path(folder)
    except OSError as error:
        raise UserError(f"output {str(folder)!r}: {WRITING.get(error.errno or 0, error.strerror)}") from error


def _close_stdout() -> None:
    """Let what is still buffered go nowhere, so that the interpreter does not fail on it at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _fail(line: str, status: int) -> int:
    print(line, file=sys.stderr, flush=True)
    return status
