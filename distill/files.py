"""Fingerprints of files, which of them a model is read from, and locks."""

import errno
import fcntl
import hashlib
import json
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from uuid import uuid4

from huggingface_hub.constants import HF_HOME

from decode.errors import UserError
from decode.files import read_json, write_json
from decode.models.sources import MODEL_FILES, weight_files
from distill import ranks

LARGE = 256_000_000
"""The hashes of input files of more bytes are kept in `HASHES`, so that their content is read once."""
HASHES = Path(HF_HOME) / "draftsmith-hashes.json"
"""Hashes of large files, by path, size and time."""
FILES = (*MODEL_FILES, "*.gguf", "gguf/*.gguf")
"""Files of a folder that a model is read from, besides the weights that its index names."""


def files_in(folder: Path, patterns: Iterable[str] = FILES) -> list[Path]:
    """A folder's files of these names. Others, such as notes, logs and runs beside them, say nothing about a model."""
    found = {file for pattern in patterns for file in folder.glob(pattern)}.union(weight_files(folder))
    return sorted(file for file in found if file.is_file() and not file.name.startswith("."))


def files_state(paths: Iterable[str | None]) -> list[tuple[str, str]]:
    """Name and content's hash of the paths that are files, and of the files of a folder's model, wherever it is."""
    states = list[tuple[str, str]]()
    for root in map(Path, filter(None, paths)):
        for file in [root] if root.is_file() else files_in(root):
            name, now = file.name if file == root else str(file.relative_to(root)), file.stat()
            states.append((name, _hash(file, now.st_size, now.st_mtime_ns)))
    return states


@cache
def _hash(path: Path, *state: int) -> str:
    """Hash of a file's content; a file with the size and time ``state`` is read once, a large one by one process."""
    key, large = f"{path.absolute()} {state}", state[0] > LARGE
    if large and (found := read_json(HASHES).get(key)):
        return str(found)
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()[:32]
    if large:
        with suppress(OSError):
            write_json(HASHES, read_json(HASHES) | {key: digest})
    return digest


def sizes(folder: Path, patterns: Iterable[str] = FILES) -> dict[str, int]:
    """Bytes of a folder's files of these names, by their path in there; a truncated one is noticed by them."""
    return {str(file.relative_to(folder)): file.stat().st_size for file in files_in(folder, patterns)}


def saved_step(checkpoint: Path) -> int:
    """The step of a training at which it was saved."""
    return int(checkpoint.stem.split("=")[1])


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
