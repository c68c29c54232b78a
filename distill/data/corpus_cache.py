"""The tokenised corpus on disk: made once by the first process, read without copying by all, and by later runs."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import transformers
from datasets import Dataset, load_from_disk
from transformers import PreTrainedTokenizerBase

from decode.errors import UserError
from decode.models.loading import load_tokenizer
from distill import ranks
from distill.config.data import DataSettings
from distill.data.corpus import Corpus
from distill.data.sources import SPLITS
from distill.files import checksum, files_state, fingerprint, read_sealed, remove, sealed, write_json

VERSION = 1
"""Raised when a change of the code changes what examples are made of the same rows."""

PATIENCE = 60.0
"""Seconds after which data of the first process that are not this one's will not be replaced any more."""

NOTED = ("fingerprint", "kind", "answered", "chat", "notes")


def kept_corpus(
    settings: DataSettings,
    tokenizer: PreTrainedTokenizerBase | None,
    folder: Path | None,
    made_from: Any,
    load: Callable[..., Corpus],
) -> Corpus:
    """The corpus from ``folder`` if what is there was made from the same and is sound; else it is made and put there.

    Args:
        settings: Of the data.
        tokenizer: The target's; None: the settings', or one trained on the texts.
        folder: Where it is kept; None: nowhere.
        made_from: What it depends on beside settings, tokenizer and files.
        load: Makes it from the settings and ``tokenizer=``.
    """
    settings.validate()
    if folder is None:
        return load(settings, tokenizer=tokenizer)
    paths = (settings.source, settings.train_file, settings.validation_file, settings.test_file, settings.prompts.file)
    files = files_state(path for path in (*paths, settings.tokenizer) if path)
    own = None if tokenizer is None else _identity(tokenizer)
    key = fingerprint(VERSION, transformers.__version__, settings.key(), files, own, made_from)

    def there() -> Corpus | None:
        return _read(folder, key, settings, tokenizer)

    if (found := there()) is not None:
        return found
    if not ranks.is_first():
        return ranks.wait_for(_or_other_data(there, folder, key), "the tokenised data")
    (folder / "corpus.json").unlink(missing_ok=True)
    corpus = load(settings, tokenizer=tokenizer)
    _write(folder, key, corpus)
    return there() or corpus


def _or_other_data(there: Callable[[], Corpus | None], folder: Path, key: str) -> Callable[[], Corpus | None]:
    """``there``, which fails where the first process has stayed for a while with data made from something else."""
    seen: list[float] = []

    def look() -> Corpus | None:
        found = there()
        if found is None and (read_sealed(folder / "corpus.json") or {}).get("key", key) != key:
            seen.append(time.monotonic())
            if seen[-1] - seen[0] > PATIENCE:
                raise UserError(
                    f"process {ranks.rank()} has other data than process 0, which made {folder}: give both the same "
                    "configuration, data files and tokenizer, and the same versions of packages"
                )
        else:
            seen.clear()
        return found

    return look


def _identity(tokenizer: PreTrainedTokenizerBase) -> str:
    """A hash of what a tokenizer makes of texts and chats."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    rules = json.dumps(sorted(tokenizer.get_vocab().items())) if backend is None else backend.to_str()
    special = json.dumps(tokenizer.special_tokens_map, default=str, sort_keys=True)
    return hashlib.sha256(f"{type(tokenizer)}{rules}{special}{tokenizer.chat_template}".encode()).hexdigest()


def _read(folder: Path, key: str, settings: DataSettings, tokenizer: PreTrainedTokenizerBase | None) -> Corpus | None:
    note = read_sealed(folder / "corpus.json") or {}
    if note.get("key") != key or note["files"] != _checksums(folder):
        return None
    splits = {split: load_from_disk(str(folder / split)) for split in SPLITS}
    assert all(isinstance(rows, Dataset) for rows in splits.values())
    if tokenizer is None:
        path = settings.tokenizer or folder / "tokenizer"
        tokenizer = load_tokenizer(path, trust_remote_code=settings.trust_remote_code)
    if settings.chat_template is not None:
        tokenizer.chat_template = settings.chat_template
    return Corpus(tokenizer, **splits, **{name: note[name] for name in NOTED})


def _write(folder: Path, key: str, corpus: Corpus) -> None:
    """Puts it there whole or not at all: the note, which is written last, says what files belong to it."""
    temporary = folder.with_name(f".tmp-{folder.name}")
    remove(temporary)
    temporary.mkdir(parents=True)
    for split in SPLITS:
        getattr(corpus, split).save_to_disk(str(temporary / split))
    corpus.tokenizer.save_pretrained(temporary / "tokenizer")
    note = {"key": key, "files": _checksums(temporary), **{name: getattr(corpus, name) for name in NOTED}}
    write_json(temporary / "corpus.json", sealed(note))
    remove(folder)
    temporary.rename(folder)


def _checksums(folder: Path) -> dict[str, int]:
    files = (path for split in SPLITS for path in sorted((folder / split).glob("*")))
    return {str(path.relative_to(folder)): checksum(path) for path in files}
