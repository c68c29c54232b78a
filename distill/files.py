"""Files that are either complete or absent, and fingerprints of what they were made from."""

import errno
import hashlib
import json
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
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


def sizes(folder: Path) -> dict[str, int]:
    """Bytes of every file below a folder, by its path in there; a truncated file is noticed by them."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path.relative_to(folder)): path.stat().st_size for path in sorted(files)}


def existing(path: Path) -> Path:
    """The path, or the nearest folder above it that exists."""
    return next(place for place in (path.absolute(), *path.absolute().parents) if place.exists())


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
        if out_dir.exists():
            out_dir.rename(old)
        try:
            partial.rename(out_dir)
        except OSError:
            if old.exists():
                old.rename(out_dir)
            raise


def fingerprint(*parts: object) -> str:
    """Hash of plain data: dicts, lists, strings, numbers."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()[:32]


@contextmanager
def only_one(path: Path) -> Iterator[None]:
    """Keep a second process out of a run's folder; the lock ends with the process.

    Raises:
        UserError: Another process holds the lock, or the folder cannot be written to.
    """
    try:
        import fcntl
    except ImportError:  # Windows has no such lock
        yield
        return
    folder = path.parent.parent
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = path.open("w")
    except OSError as error:
        raise UserError(
            f"nothing can be written to {folder} ({error.strerror}): choose another --output-dir or --name, or make "
            "room for a folder there"
        ) from error
    with lock as file:
        if ranks.is_first():  # further ranks belong to the first one's run
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:  # of another kind on a file system without flock
                if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                    raise UserError(
                        f"another process is working in {folder}: wait for it, stop it, or choose another --name"
                    ) from error
        yield
