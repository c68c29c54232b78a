"""Files that are either complete or absent, and fingerprints of what they were made from."""

import errno
import fcntl
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from decode.errors import UserError, write_text
from distill import ranks

LARGE = 256_000_000
"""Input files of more bytes are known by their size and time instead of their content."""


def write_json(path: Path, value: object) -> None:
    """Write a JSON file atomically."""
    write_text(path, json.dumps(value, indent=2) + "\n")


def save_tokenizer(tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Write a tokenizer's files under the class name that transformers 4, and engines built on it, know too."""
    tokenizer.save_pretrained(folder)
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    if config.get("tokenizer_class") == "TokenizersBackend":  # transformers 5's name for the same class
        config["tokenizer_class"] = "PreTrainedTokenizerFast"
        for name in ("backend", "is_local", "local_files_only"):
            config.pop(name, None)
        path.write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def files_state(paths: Iterable[str | None]) -> dict[str, list[int | str]]:
    """Size and content's hash (of large files the time) of every file at or below the paths that exist."""
    roots = [Path(path) for path in paths if path and Path(path).exists()]
    files = [file for root in roots for file in ([root] if root.is_file() else sorted(root.rglob("*")))]
    states = {file: file.stat() for file in files if file.is_file()}
    return {
        str(file): [now.st_size, now.st_mtime_ns if now.st_size > LARGE else _hash(file, now.st_size, now.st_mtime_ns)]
        for file, now in states.items()
    }


@cache
def _hash(path: Path, *_: int) -> str:
    """Hash of a file's content; an unchanged file is read once in a process."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:32]


def sizes(folder: Path, *but: str) -> dict[str, int]:
    """Bytes of every file below a folder, by its path in there, but of some; a truncated file is noticed by them."""
    files = [path for path in folder.rglob("*") if path.is_file() and path.name not in but]
    return {str(path.relative_to(folder)): path.stat().st_size for path in sorted(files)}


def free_bytes(path: Path) -> int:
    """Bytes that are free at a path, or where it will be."""
    path = path.absolute()
    return shutil.disk_usage(next(place for place in (path, *path.parents) if place.exists())).free


def remove(path: Path) -> None:
    """Remove a file, a folder with its content, or a link (but not what it points to); absent is fine."""
    if path.is_symlink() or path.is_file():
        path.unlink()
    elif path.exists():
        shutil.rmtree(path)


@contextmanager
def replaced(out_dir: Path) -> Iterator[Path]:
    """Yield an empty folder that takes the place of `out_dir` at the end; after a failure the old one stays."""
    out_dir.parent.mkdir(parents=True, exist_ok=True)
    for stale in out_dir.parent.glob(f".{out_dir.name}.partial-*"):
        shutil.rmtree(stale)
    with tempfile.TemporaryDirectory(prefix=f".{out_dir.name}.partial-", dir=out_dir.parent) as scratch:
        partial, old = Path(scratch) / "new", Path(scratch) / "old"
        partial.mkdir()
        yield partial
        if os.path.lexists(out_dir):  # a link may lead nowhere
            out_dir.rename(old)
        try:
            partial.rename(out_dir)
        except OSError:
            if os.path.lexists(old):
                old.rename(out_dir)
            raise


def fingerprint(*parts: object) -> str:
    """Hash of plain data: dicts, lists, strings, numbers."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()[:32]


@contextmanager
def locked(path: Path, unwritable: str, taken: str = "") -> Iterator[None]:
    """Hold the lock of a file, which ends with the process. Another holder is waited for, or refused as ``taken``.

    Raises:
        UserError: Another process holds it, or the file cannot be written, which is told as ``unwritable``.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("w")
    except OSError as error:
        raise UserError(f"{unwritable} ({error.strerror})") from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | (fcntl.LOCK_NB if taken else 0))
        except OSError as error:  # of another kind on a file system without flock
            if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                raise UserError(taken) from error
        yield


def only_one(path: Path) -> AbstractContextManager[None]:
    """Keep a second process out of a run's folder; further ranks belong to the first one's run."""
    if not ranks.is_first():
        return nullcontext()
    folder, instead = path.parent.parent, "choose another --output-dir or --name, or make room for a folder there"
    taken = f"another process is working in {folder}: wait for it, stop it, or choose another --name"
    return locked(path, f"nothing can be written to {folder}: {instead}", taken)
