"""``draftsmith decode datastore build``: the stores of retrieval drafters, built from texts."""

import sys
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from decode.commands.settings import StoreSettings, required
from decode.core.draft import Ids
from decode.drafters.adaptix import save_ngram_table
from decode.drafters.corpus import join_documents, tokenizer_fingerprint
from decode.drafters.rest import save_datastore
from decode.incoming import LeftOut, sentences, text_lines, usable
from decode.measure.suites import file_format, iter_rows, load_suite
from decode.models.open import load_tokenizer
from decode.progress import working

BLOCK = 1 << 14  # lines of a plain text that make a document
TOGETHER = 256  # documents of JSON Lines that are tokenised in one call


def read_texts(path: Path) -> Iterator[str]:
    """Yield the documents of a file.

    A row of JSON Lines is one document: its ``text``, or all its strings joined by newlines, of a chat what is said.
    Any other file is plain text, which is cut every 16,384 lines.

    Raises:
        UserError: a line is not a JSON object, or a byte is not UTF-8.
    """

    def strings(value: Any) -> list[str]:
        if isinstance(value, dict):
            value = [item for name, item in value.items() if name not in ("role", "from")]
        parts = map(strings, value) if isinstance(value, list) else [[value] if isinstance(value, str) else []]
        return [text for part in parts for text in part]

    if file_format(path) == ".jsonl":
        left_out = LeftOut()
        for _, row in usable(iter_rows(path), left_out):
            yield row["text"] if isinstance(row.get("text"), str) else "\n".join(strings(row))
        for note in sentences(str(path), left_out):
            print(note, file=sys.stderr)
    else:
        lines = text_lines(path)
        while block := "".join(islice(lines, BLOCK)):
            yield block


def read_corpus(inputs: Sequence[str], tokenizer: PreTrainedTokenizerBase, texts: int, seed: int = 0) -> Iterator[Ids]:
    """Token ids of every document of text or .jsonl files and of suites, by name or as files of other kinds.

    Suites give prompt and answer of their training split, of at most `texts` rows that the seed chooses.

    Raises:
        UserError: an input is neither a file nor a suite.
    """
    files = [name for name in inputs if Path(name).is_file() and file_format(name) in ("", ".txt", ".jsonl")]
    for name in inputs:
        for prompt in () if name in files else load_suite(name, limit=texts, seed=seed, split="train").prompts:
            yield tokenizer(prompt.text + (prompt.reference or ""), add_special_tokens=False)["input_ids"]
    for path in map(Path, files):
        documents, together = read_texts(path), TOGETHER if file_format(path) == ".jsonl" else 1
        with working(None, f"tokenising {path.name}, documents") as work:
            while batch := list(islice(documents, together)):
                yield from tokenizer(batch, add_special_tokens=False, verbose=False)["input_ids"]
                work.advance(len(batch))


def build_datastore(settings: StoreSettings) -> None:
    """Build the datastore and the n-gram table from the same texts."""
    required(settings, "tokenizer", "input", "output")
    tokenizer = load_tokenizer(str(settings.tokenizer), trust_remote_code=settings.trust_remote_code)
    text = join_documents(read_corpus(settings.input, tokenizer, settings.texts))
    files = write_stores(text, Path(str(settings.output)), tokenizer)
    documents = int(np.count_nonzero(text == 0))
    print(f"{documents:,} documents, {len(text) - documents:,} tokens")
    print(*(f"wrote {file} ({file.stat().st_size / 1e6:.1f} MB)" for file in files), sep="\n")


def write_stores(text: np.ndarray, folder: Path, tokenizer: PreTrainedTokenizerBase) -> list[Path]:
    """Write the datastore and the n-gram table of a text (see `join_documents`)."""
    fingerprint = tokenizer_fingerprint(tokenizer)
    with working(None, f"sorting {len(text):,} tokens"):
        return [save_datastore(text, folder, fingerprint), save_ngram_table(text, folder, fingerprint)]
