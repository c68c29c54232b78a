"""Files that are written whole or not at all, why one cannot be written, and JSON."""

import errno
import json
import os
import stat
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

from decode.errors import UserError

FULL = errno.ENOSPC, errno.EDQUOT, errno.EFBIG
WRITING = (
    *FULL, errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.EOPNOTSUPP,
    errno.EIO, errno.ENAMETOOLONG,
)  # fmt: skip
"""Errors of the system by which writing a file fails."""


def writing_error(error: BaseException | None) -> OSError | None:
    """Why a file could not be written, if that is the cause of an exception; libraries wrap it in their own errors."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in WRITING:
            return error
        # safetensors and tokenizers, which are written in Rust, name the number; torch.save does not
        number = next((number for number in WRITING if f"(os error {number})" in str(error)), None)
        if number or "PytorchStreamWriter failed" in str(error) or "inline_container" in str(error):
            return OSError(number, os.strerror(number)) if number else OSError()
        error = error.__cause__ or error.__context__
    return None


def unused(path: Path) -> Path:
    """The first of PATH.old-1, PATH.old-2, … that is not there."""
    names = (path.with_name(f"{path.name}.old-{number}") for number in count(1))
    return next(name for name in names if not os.path.lexists(name))


@contextmanager
def replaced(path: Path, keep: Callable[[Path], object] | None = None) -> Iterator[Path]:
    """Yield a path in a temporary folder beside `path`, where a file, folder or link is made that then takes its place.

    A folder that was there is given to `keep`, which renames it, or is removed. After a failure it stays. Files get the
    permissions of any new file: safetensors gives its maker's alone.

    Raises:
        OSError: Nothing can be written there, or the disk is full; it names `path`.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".tmp-", dir=path.parent) as scratch:
            (plain := Path(scratch, ".plain")).touch()
            yield (new := Path(scratch, path.name))
            for file in [] if new.is_symlink() else filter(Path.is_file, [new, *new.rglob("*")]):
                file.chmod(stat.S_IMODE(plain.stat().st_mode))
            old = Path(scratch, ".old")
            if new.is_dir() and os.path.lexists(path):  # a link may lead nowhere
                if keep is not None:
                    keep(path)
                else:
                    path.rename(old)
            try:
                new.replace(path)
            except OSError:
                if os.path.lexists(old):
                    old.rename(path)
                raise
    except Exception as error:
        why = None if isinstance(error, UserError) else writing_error(error)
        if why is None or path.parent.absolute() not in Path(str(why.filename or path)).absolute().parents:
            raise
        raise OSError(why.errno, why.strerror, str(path)) from error


def write_safely(path: str | Path, write: Callable[[Path], object]) -> None:
    """Let `write` fill a file next to `path`, then rename it into place; the folder is made where it is missing.

    Raises:
        UserError: a folder or a device stands at the path.
        OSError: the folder cannot be written to, or the disk is full; a file already there is unchanged.
    """
    path = Path(path)
    if path.exists() and not path.is_file():
        raise UserError(f"{str(path)!r} is not a file that can be replaced but a folder or a device; give another path")
    with replaced(path) as new:
        write(new)
        with new.open("rb+") as file:
            os.fsync(file.fileno())


def write_text(path: str | Path, content: str) -> None:
    """Write a UTF-8 text file; a file already there is replaced whole or not. Raises as `write_safely` does."""
    write_safely(path, lambda file: file.write_text(content, encoding="utf-8"))


Fields = dict[str, Any]  # values by name: an object of JSON or YAML, a row of a report, arguments by keyword


def read_json(path: Path) -> Fields:
    """A JSON file's object; empty if there is none, or none that can be read."""
    try:
        return read_model_json(path)
    except UserError:
        return {}


def read_model_json(path: Path) -> Fields:
    """The object in a JSON file of a model; empty if there is no such file.

    Raises:
        UserError: It cannot be read, with its line.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(content, dict):
            raise ValueError(f"line 1: a {type(content).__name__} instead of an object")
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path} cannot be read as JSON: {error}; correct it or download it again") from error
    return content


def write_json(path: str | Path, content: Fields) -> None:
    """Write an object as a JSON file; raises as `write_safely` does."""
    write_text(path, json.dumps(content, indent=2, ensure_ascii=False) + "\n")


@contextmanager
def scratch_folder() -> Iterator[Path]:
    """A temporary folder, which is removed at the end of the block."""
    with tempfile.TemporaryDirectory(prefix="draftsmith-") as folder:
        yield Path(folder)
