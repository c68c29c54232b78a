"""What drafters built from a corpus share: documents as one array, tokenizer fingerprints, mapped files."""

import hashlib
import json
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file
from transformers import PreTrainedTokenizerBase

from decode.errors import UserError
from decode.files import Fields, write_safely

FORMAT = "2"


def tokenizer_fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    """A digest of every token with its id: equal fingerprints mean that ids stand for the same tokens."""
    return hashlib.sha256(json.dumps(sorted(tokenizer.get_vocab().items())).encode()).hexdigest()[:16]


def join_documents(documents: Iterable[Sequence[int] | np.ndarray]) -> np.ndarray:
    """Join all documents to one array of ``id + 1`` with a 0 after each, so that no match runs across documents.

    Returns:
        uint16 ``[n]``, or uint32 where an id does not fit.

    Raises:
        UserError: there is no token at all.
    """
    parts = [
        np.append(np.asarray(document, dtype=np.int32) + 1, np.int32(0)) for document in documents if len(document)
    ]
    if not parts:
        raise UserError("the corpus holds no tokens: give at least one file or document with text in it")
    text = np.concatenate(parts)
    return text.astype(np.uint32 if text.max() > np.iinfo(np.uint16).max else np.uint16)


def save_arrays(path: Path, arrays: dict[str, np.ndarray], *, kind: str, fingerprint: str, **facts: int) -> Path:
    """Write arrays and their manifest as one safetensors file, whole or not at all, and return its path."""
    arrays = {name: np.ascontiguousarray(array) for name, array in arrays.items()}
    # one entry, since safetensors writes several in random order and equal stores should be equal files
    manifest = json.dumps({"kind": kind, "format": FORMAT, "tokenizer": fingerprint} | facts)
    write_safely(path, lambda file: save_file(arrays, file, metadata={"manifest": manifest}))
    return path


def map_arrays(path: Path, *, kind: str, fingerprint: str) -> tuple[Fields, dict[str, np.ndarray]]:
    """The manifest and the memory-mapped arrays of a file that `save_arrays` wrote.

    Raises:
        UserError: the file is missing, truncated, of another kind, or of another tokenizer.
    """
    again = "build it again with `draftsmith decode datastore build`"
    try:
        with safe_open(path, "pt") as file:
            manifest = json.loads((file.metadata() or {}).get("manifest", "{}"))
            arrays = {name: file.get_tensor(name).numpy() for name in file.keys()}  # noqa: SIM118
    except FileNotFoundError:
        raise UserError(f"no {kind} at {path}: build one with `draftsmith decode datastore build`") from None
    except SafetensorError as error:
        raise UserError(f"{path} is no {kind}, truncated or damaged ({error}): {again}") from None
    if (manifest.get("kind"), manifest.get("format")) != (kind, FORMAT):
        seen = f"{manifest.get('kind')} of format {manifest.get('format')}"
        raise UserError(f"{path} holds a {seen}, expected a {kind} of format {FORMAT}: {again}")
    if manifest["tokenizer"] != fingerprint:
        raise UserError(
            f"{path} was built with another tokenizer ({manifest['tokenizer']}; this one is {fingerprint}): "
            f"{again} and the target's tokenizer"
        )
    return manifest, arrays
