"""The error type for mistakes that a user can correct, and files that are written whole or not at all."""

import difflib
import json
import os
import tempfile
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

Entry = TypeVar("Entry")


class UserError(ValueError):
    """A foreseeable mistake; the message has the value seen, what was expected and the next step.

    The command-line front ends print it without a traceback and exit with status 2.
    """


def first_line(message: object) -> str:
    """The first line of a message that says something; empty if none does."""
    return next((line.strip() for line in str(message).splitlines() if line.strip()), "")


def unknown(kind: str, name: str, known: Collection[str]) -> str:
    """The message for a name that is not among the known ones: the nearest of them, then all."""
    near = "".join(f"did you mean {other!r}? " for other in difflib.get_close_matches(name, known, 1))
    return f"unknown {kind} {name!r}; {near}choose one of {', '.join(known)}"


def choose(kind: str, name: str, known: Mapping[str, Entry]) -> Entry:
    """The entry of a name; a `UserError` with the nearest one where there is none."""
    if name not in known:
        raise UserError(unknown(kind, name, known))
    return known[name]


def write_safely(path: str | Path, write: Callable[[Path], object]) -> None:
    """Let `write` fill a file next to `path`, then rename it into place; the folder is made where it is missing.

    Raises:
        UserError: a folder or a device stands at the path.
        OSError: the folder cannot be written to, or the disk is full; a file already there is unchanged.
    """
    path = Path(path)
    if path.exists() and not path.is_file():
        raise UserError(f"{str(path)!r} is not a file that can be replaced but a folder or a device; give another path")
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".tmp-{os.getpid()}-{threading.get_ident()}-{path.name}")
    try:
        write(temporary)
        with temporary.open("rb+") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def write_text(path: str | Path, content: str) -> None:
    """Write a UTF-8 text file; a file already there is replaced whole or not. Raises as `write_safely` does."""
    write_safely(path, lambda file: file.write_text(content, encoding="utf-8"))


Fields = dict[str, Any]  # values by name: an object of JSON or YAML, a row of a report, arguments by keyword


def read_json(path: Path) -> Fields:
    """A JSON file's object; empty if there is none, or none that can be read."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def write_json(path: str | Path, content: Fields, indent: int = 2) -> None:
    """Write an object as a JSON file; raises as `write_safely` does."""
    write_text(path, json.dumps(content, indent=indent, ensure_ascii=False) + "\n")


@contextmanager
def scratch_folder() -> Iterator[Path]:
    """A temporary folder, which is removed at the end of the block."""
    with tempfile.TemporaryDirectory(prefix="draftsmith-") as folder:
        yield Path(folder)
