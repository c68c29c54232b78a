"""What drafters built from a corpus share: documents as one array, tokenizer fingerprints, mapped files."""

import hashlib
import json
import mmap
import zlib
from array import array
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file
from transformers import PreTrainedTokenizerBase

from decode.errors import UserError, write_safely
from decode.progress import Progress

FORMAT = "1"
BLOCK = 1 << 20  # characters of a plain text that make a document
BATCH = 1024  # lines of JSON Lines tokenised at once


def tokenizer_fingerprint(tokenizer: PreTrainedTokenizerBase | None) -> str:
    """A digest of every token with its id: equal fingerprints mean that ids stand for the same tokens.

    Raises:
        UserError: there is no tokenizer.
    """
    if tokenizer is None:
        raise UserError(
            "a method that drafts from a corpus needs the target's tokenizer: the target has none; save the tokenizer "
            "in the target's folder"
        )
    vocabulary = sorted(tokenizer.get_vocab().items())
    return hashlib.sha256(json.dumps(vocabulary).encode()).hexdigest()[:16]


def join_documents(documents: Iterable[Sequence[int] | np.ndarray]) -> np.ndarray:
    """All documents in one array of ``id + 1``, with a 0 after each, so that no match runs across documents.

    Returns:
        uint16 ``[n]``, or uint32 where an id does not fit.

    Raises:
        UserError: an id is negative, or there is no token at all.
    """
    flat, borders = array("i"), 0
    for document in documents:
        if len(document):
            flat.frombytes(np.asarray(document, dtype=np.int32).tobytes())
            flat.append(-1)
            borders += 1
    if not borders:
        raise UserError("the corpus holds no tokens: give at least one file or document with text in it")
    text = np.frombuffer(flat, dtype=np.int32)
    if text.min() < -1 or np.count_nonzero(text == -1) != borders:
        raise UserError("a document holds a negative token id: give ids as the tokenizer returns them")
    wide = text.max() + 1 > np.iinfo(np.uint16).max
    return (text + 1).astype(np.uint32 if wide else np.uint16)


def read_texts(path: Path) -> Iterator[str]:
    """The documents of a file.

    A line of JSON Lines is one document: its ``text``, or all its strings joined by newlines. Any other file
    is plain text and is cut at line ends every million characters.

    Raises:
        UserError: a line is not a JSON object.
    """
    with path.open(encoding="utf-8", errors="replace") as file:
        if path.suffix.lower() != ".jsonl":
            while lines := file.readlines(BLOCK):
                yield "".join(lines)
            return
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
                strings = {name: value for name, value in row.items() if isinstance(value, str)}
            except (json.JSONDecodeError, AttributeError) as error:
                raise UserError(
                    f"{path}, line {number} is not a JSON object ({error}): give one object a line"
                ) from None
            yield strings.get("text") or "\n".join(strings.values())


def tokenize_files(files: Sequence[str | Path], tokenizer: PreTrainedTokenizerBase) -> Iterator[list[int]]:
    """Token ids of every document in ``files``, with a progress bar over the files' bytes.

    Raises:
        UserError: a file is missing.
    """
    paths = [Path(file) for file in files]
    for path in paths:
        if not path.is_file():
            raise UserError(f"no file {path}: give text or .jsonl files")
    with Progress() as progress:
        for path in paths:
            work = progress.add(f"tokenising {path.name}, MB", path.stat().st_size / 1e6)
            texts = read_texts(path)
            while batch := list(islice(texts, BATCH if path.suffix.lower() == ".jsonl" else 1)):
                yield from tokenizer(batch, add_special_tokens=False, verbose=False)["input_ids"]
                work.advance(sum(len(text.encode()) for text in batch) / 1e6)
            work.update(done=work.total)


def save_arrays(path: Path, arrays: dict[str, np.ndarray], *, kind: str, fingerprint: str, **facts: int) -> None:
    """Write arrays and their manifest as one safetensors file, whole or not at all."""
    arrays = {name: np.ascontiguousarray(arrays[name]) for name in sorted(arrays)}
    checksum = _checksum(array.data for array in arrays.values())
    manifest = {"kind": kind, "format": FORMAT, "tokenizer": fingerprint, "crc32": str(checksum)}
    manifest |= {name: str(value) for name, value in facts.items()}
    # one entry, since safetensors writes several in random order and equal stores should be equal files
    write_safely(path, lambda file: save_file(arrays, file, metadata={"manifest": json.dumps(manifest)}))


def map_arrays(
    path: Path, *, kind: str, fingerprint: str, command: str
) -> tuple[dict[str, str], dict[str, memoryview]]:
    """Memory-map a file that `save_arrays` wrote, and compare its checksum (about a second for 1 GB).

    Args:
        path: the file.
        kind: what the file must be.
        fingerprint: of the tokenizer in use.
        command: of this program, that writes such a file.

    Returns:
        The manifest, and the bytes of each array.

    Raises:
        UserError: the file is missing, truncated, corrupt, of another kind, or of another tokenizer.
    """
    again = f"build it again with `python -m decode {command}`"
    try:
        with path.open("rb") as file:
            whole = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
        start = 8 + int.from_bytes(whole[:8], "little")
        header = json.loads(bytes(whole[8:start]))
        manifest = json.loads(header.pop("__metadata__")["manifest"])
        spans = {name: entry["data_offsets"] for name, entry in sorted(header.items())}
    except (FileNotFoundError, NotADirectoryError):
        raise UserError(f"no {kind} at {path}: build one with `python -m decode {command}`") from None
    except (ValueError, KeyError, TypeError, AttributeError):
        raise UserError(f"{path} is empty, no {kind}, or its header is damaged: {again}") from None
    if (manifest.get("kind"), manifest.get("format")) != (kind, FORMAT):
        seen = f"{manifest.get('kind')} of format {manifest.get('format')}"
        raise UserError(f"{path} holds a {seen}, expected a {kind} of format {FORMAT}: {again}")
    if manifest["tokenizer"] != fingerprint:
        raise UserError(
            f"{path} was built with another tokenizer ({manifest['tokenizer']}; this one is {fingerprint}): "
            f"{again} and the target's tokenizer"
        )
    complete = len(whole) == start + max(end for _, end in spans.values())
    arrays = {name: whole[start + begin : start + end] for name, (begin, end) in spans.items()}
    if not complete or str(_checksum(arrays.values())) != manifest["crc32"]:
        raise UserError(f"{path} is truncated or corrupt ({len(whole):,} bytes): {again}")
    return manifest, arrays


def _checksum(buffers: Iterable[memoryview]) -> int:
    checksum = 0
    for buffer in buffers:
        checksum = zlib.crc32(buffer, checksum)
    return checksum
