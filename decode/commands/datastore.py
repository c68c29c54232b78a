"""``python -m decode datastore build`` and ``trigrams build``: the stores of retrieval drafters, built from texts."""

import time
from collections.abc import Collection, Iterator, Sequence
from functools import partial
from pathlib import Path

import numpy as np
from rich.console import Console
from transformers import PreTrainedTokenizerBase

from decode.bench.datasets import FORMATS
from decode.bench.suites import load_suite
from decode.commands.settings import StoreSettings, required
from decode.drafters.adaptix import save_ngram_table
from decode.drafters.corpus_files import join_documents, tokenize_files, tokenizer_fingerprint
from decode.drafters.rest import save_datastore
from decode.errors import UserError
from decode.models.loading import load_tokenizer

SUFFIXES = {".txt", ".jsonl", ".md", ".py"}


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
    rows = set(FORMATS) - {".txt", ".jsonl"}
    files = [name for name in inputs if Path(name).is_file() and Path(name).suffix.lower() not in rows]
    suites = [name for name in inputs if name not in files]
    for name in suites:
        is_path = Path(name).suffix in SUFFIXES | set(FORMATS) or "/" in name
        if "=" not in name and is_path and not Path(name).is_file():
            raise UserError(f"there is no file {name!r}; give text or .jsonl files, or suites such as arithmetic")
    for name in suites:
        for prompt in load_suite(name, limit=texts, seed=seed, split="train").prompts:
            yield tokenizer(prompt.text + (prompt.reference or ""), add_special_tokens=False)["input_ids"]
    if files:
        yield from tokenize_files(files, tokenizer)


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
