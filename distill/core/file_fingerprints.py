"""Files that are either complete or not there, and fingerprints of what they were made from."""

import hashlib
import json
import shutil
import tempfile
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from decode.core.atomic_files import write_text
from decode.core.errors import UserError
from distill.core import ranks

BLOCK = 1 << 24


def write_json(path: Path, value: object) -> None:
    """Writes JSON safely."""
    write_text(path, json.dumps(value, indent=2) + "\n")


def save_tokenizer(tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Writes a tokenizer's files under the class name that transformers 4, and engines built on it, know too."""
    tokenizer.save_pretrained(folder)
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    if config.get("tokenizer_class") == "TokenizersBackend":  # transformers 5's name for the same class
        config["tokenizer_class"] = "PreTrainedTokenizerFast"
        for name in ("backend", "is_local", "local_files_only"):
            config.pop(name, None)
        path.write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def checksum(path: Path) -> int:
    """CRC-32 of a file."""
    value = 0
    with path.open("rb") as file:
        while block := file.read(BLOCK):
            value = zlib.crc32(block, value)
    return value


_CHECKSUMS: dict[tuple[str, int, int, int], int] = {}


def checksum_once(path: Path) -> int:
    """CRC-32 of a file, computed again in this process only if the file was replaced or written to."""
    state = path.stat()
    key = (str(path), state.st_ino, state.st_size, state.st_mtime_ns)
    if key not in _CHECKSUMS:
        _CHECKSUMS[key] = checksum(path)
    return _CHECKSUMS[key]


LARGE = 256_000_000
"""Files of more bytes than this are not read to tell whether they changed; checking 256 MB takes a quarter second."""


def files_state(paths: Iterable[str]) -> dict[str, list[int]]:
    """Size and content (of large files the time) of every file at, or directly below, those of the paths that exist."""
    found = [Path(path) for path in paths if Path(path).exists()]
    files = [file for path in found for file in ([path] if path.is_file() else sorted(path.iterdir()))]
    return {str(file): _content(file) for file in files if file.is_file()}


def _content(file: Path) -> list[int]:
    """A copy that only got a new time, by a checkout or a download, is the same file."""
    size = file.stat().st_size
    return [size, checksum_once(file) if size <= LARGE else file.stat().st_mtime_ns]


def sealed(value: Mapping[str, Any]) -> dict[str, Any]:
    """Plain data with a hash of itself, for a file that is not used once it was altered."""
    return {**value, "seal": fingerprint(dict(value))}


def read_sealed(path: Path) -> dict[str, Any] | None:
    """What was `sealed` and written as JSON; None if it is not there or was altered. Without a seal it passes."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        seal = content.pop("seal", None)
    except (OSError, ValueError, AttributeError, TypeError):
        return None
    return content if seal in (None, fingerprint(content)) else None


def remove(path: Path) -> None:
    """Removes a file, a folder with all that is in it, or a link (but not what it points to); absent is fine."""
    if path.is_symlink() or path.is_file():
        path.unlink()
    elif path.exists():
        shutil.rmtree(path)


@contextmanager
def replaced(out_dir: Path) -> Iterator[Path]:
    """An empty folder to write to, which takes the place of `out_dir` at the end; whatever fails, the old one stays."""
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
    """A hash of plain data: dicts, lists, strings, numbers."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()[:32]


@contextmanager
def only_one(path: Path) -> Iterator[None]:
    """Keeps a second process out of a run's folder. The lock ends with the process, however it ends.

    Raises:
        UserError: Another process holds it.
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
            except OSError as error:
                raise UserError(
                    f"another process is working in {folder}: wait for it, stop it, or choose another --name"
                ) from error
        yield
