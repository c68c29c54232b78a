"""Fingerprints of files, which of them a model is read from, and locks."""

import errno
import fcntl
import hashlib
import json
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from uuid import uuid4

from decode.errors import UserError
from decode.models.sources import MODEL_FILES, weight_files
from distill import ranks

LARGE = 256_000_000
"""Input files of more bytes are known by their size and time instead of their content."""


def files_in(folder: Path, patterns: Iterable[str] = MODEL_FILES) -> list[Path]:
    """A folder's files of these names. Others, such as notes, logs and runs beside them, say nothing about a model."""
    found, weights = {file for pattern in patterns for file in folder.glob(pattern)}, weight_files(folder)
    found = {file for file in found if file.suffix != ".safetensors" or file in weights}
    return sorted(file for file in found if file.is_file() and not file.name.startswith("."))


def files_state(paths: Iterable[str | None]) -> dict[str, list[int | str]]:
    """Size and content's hash (of large files the time) of the paths that are files, and of a folder's model."""
    roots = [Path(path) for path in paths if path]
    files = [file for root in roots for file in ([root] if root.is_file() else files_in(root))]
    states = {file: file.stat() for file in files}
    return {
        str(file): [now.st_size, now.st_mtime_ns if now.st_size > LARGE else _hash(file, now.st_size, now.st_mtime_ns)]
        for file, now in states.items()
    }


@cache
def _hash(path: Path, *_: int) -> str:
    """Hash of a file's content; an unchanged file is read once in a process."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:32]


def sizes(folder: Path, patterns: Iterable[str] = MODEL_FILES) -> dict[str, int]:
    """Bytes of a folder's files of these names, by their path in there; a truncated one is noticed by them."""
    return {str(file.relative_to(folder)): file.stat().st_size for file in files_in(folder, patterns)}


def free_bytes(path: Path) -> int:
    """Bytes that are free at a path, or where it will be."""
    path = path.absolute()
    return shutil.disk_usage(next(place for place in (path, *path.parents) if place.exists())).free


def link(path: Path, folder: Path) -> None:
    """Make a path lead to a model's folder; on a file system without links, as on exFAT or some networks, a copy."""
    try:
        path.symlink_to(folder, target_is_directory=True)
    except OSError:
        for file in files_in(folder):
            copy = path / file.relative_to(folder)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, copy)


def remove(path: Path) -> None:
    """Remove a file, a folder with its content, or a link (but not what it points to); absent is fine."""
    if path.is_symlink() or path.is_file():
        path.unlink()
    elif path.exists():
        shutil.rmtree(path)


def fingerprint(*parts: object) -> str:
    """Hash of plain data: dicts, lists, strings, numbers."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()[:32]


@contextmanager
def only_one(path: Path) -> Iterator[None]:
    """Hold the lock of a run's folder, which ends with the process; further ranks belong to the first one's run.

    The file then holds a text that no other run has written.

    Raises:
        UserError: Another process holds it, or the file cannot be written.
    """
    if not ranks.is_first():
        yield
        return
    folder = path.parent.parent
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("a")
    except OSError as error:
        raise UserError(
            f"nothing can be written to {folder}: choose another --output-dir or --name, or make room for a folder "
            f"there ({error.strerror})"
        ) from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:  # of another kind on a file system without flock
            if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                taken = f"another process is working in {folder}: wait for it, stop it, or choose another --name"
                raise UserError(taken) from error
        file.truncate(0)
        file.write(uuid4().hex)
        file.flush()
        yield
