"""``python -m decode datastore build`` and ``trigrams build``: the stores of retrieval drafters, built from texts."""

import time
from collections.abc import Collection, Iterator, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from transformers import PreTrainedTokenizerBase

from decode.bench.datasets import file_format, iter_rows, text_lines
from decode.bench.suites import load_suite
from decode.commands.settings import StoreSettings, required
from decode.drafters.adaptix import save_ngram_table
from decode.drafters.corpus_files import join_documents, tokenizer_fingerprint
from decode.drafters.rest import save_datastore
from decode.errors import UserError
from decode.models.loading import load_tokenizer
from decode.progress import Progress

BLOCK = 1 << 14  # lines of a plain text that make a document
TOGETHER = 1 << 20  # characters of short documents that are tokenised in one call


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

    if file_format(path) in (".jsonl", ".ndjson"):
        for row in iter_rows(path):
            yield row["text"] if isinstance(row.get("text"), str) else "\n".join(strings(row))
    else:
        lines = text_lines(path)
        while block := "".join(islice(lines, BLOCK)):
            yield block


def read_corpus(
    inputs: Sequence[str], tokenizer: PreTrainedTokenizerBase, texts: int, seed: int = 0
) -> Iterator[list[int]]:
    """Token ids of every document.

    Args:
        inputs: text or .jsonl files; suites, by name or as files of other kinds, give prompt and answer of their
            training split.
        tokenizer: of the target.
        texts: most texts of each suite.
        seed: of the choice of texts.

    Raises:
        UserError: an input is neither a file nor a suite.
    """
    texts_in = ("", ".txt", ".jsonl", ".ndjson")
    files = [name for name in inputs if Path(name).is_file() and file_format(name) in texts_in]
    suites = [name for name in inputs if name not in files]
    for name in suites:
        if "=" not in name and Path(name).suffix and not Path(name).is_file():
            raise UserError(f"there is no file {name!r}; give text or .jsonl files, or suites such as arithmetic")
    for name in suites:
        for prompt in load_suite(name, limit=texts, seed=seed, split="train").prompts:
            yield tokenizer(prompt.text + (prompt.reference or ""), add_special_tokens=False)["input_ids"]
    for path in map(Path, files):
        documents = read_texts(path)
        with Progress(transient=True) as progress:
            work = progress.add(f"tokenising {path.name}, documents")
            for first in documents:
                batch, room = [first], TOGETHER - len(first)
                while room > 0 and (text := next(documents, None)) is not None:
                    batch.append(text)
                    room -= len(text)
                yield from tokenizer(batch, add_special_tokens=False, verbose=False)["input_ids"]
                work.advance(len(batch))


def build_datastore(settings: StoreSettings, datastore: bool = True) -> None:
    """Build the n-gram table and, unless `datastore` is false, the datastore from the same texts."""
    required(settings, "tokenizer", "input", "output")
    tokenizer = load_tokenizer(str(settings.tokenizer), trust_remote_code=settings.trust_remote_code)
    folder, began = Path(str(settings.output)), time.perf_counter()
    text = join_documents(read_corpus(settings.input, tokenizer, settings.texts))
    files = write_stores(text, folder, tokenizer, datastore=datastore, orders=[settings.order])
    documents = int(np.count_nonzero(text == 0))
    print(f"{documents:,} documents, {len(text) - documents:,} tokens, {time.perf_counter() - began:.1f} s")
    for file in files:
        print(f"wrote {file} ({file.stat().st_size / 1e6:.1f} MB)")


build_trigrams = partial(build_datastore, datastore=False)


def write_stores(
    text: np.ndarray,
    folder: Path,
    tokenizer: PreTrainedTokenizerBase,
    *,
    datastore: bool = True,
    orders: Collection[int] = (3,),
) -> list[Path]:
    """Write an n-gram table of each order, and the datastore.

    Args:
        text: as `decode.drafters.corpus_files.join_documents` returns it.
        folder: to write to.
        tokenizer: of the ids.
        datastore: whether to sort all suffixes into a datastore.
        orders: n of the n-grams of each table.
    """
    fingerprint = tokenizer_fingerprint(tokenizer)
    files = []
    with Console(stderr=True).status(f"sorting {len(text):,} tokens"):
        if datastore:
            files.append(save_datastore(text, folder, fingerprint))
        files += [save_ngram_table(text, folder, fingerprint, order=order) for order in sorted(orders)]
    return files
