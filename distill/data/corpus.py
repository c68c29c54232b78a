"""The corpus: three splits of token ids with label masks, and how a batch is made of them."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import islice
from random import Random
from typing import Any

import numpy as np
import torch
from datasets import Dataset, Features, List, Value
from rich.console import Console
from rich.progress import track
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from decode.core.errors import UserError
from decode.prompts.files import Row, quiet_datasets
from distill.config.data import DataSettings
from distill.data.label_masks import check_masks, show
from distill.data.sources import SPLITS, SourceRows, load_rows
from distill.data.tokenize import IGNORE, Example, chat_examples, pair_examples, text_examples
from distill.data.train_tokenizer import train_tokenizer

PROGRESS_FROM = 2000
"""Examples of a split from which a progress bar is shown."""

COLUMNS = Features(
    {
        "input_ids": List(Value("int32")),
        "labels": List(Value("int32")),
        "prompt": Value("string"),
        "response": Value("string"),
    }
)


@dataclass
class Corpus:
    """Examples of the three splits.

    Each split has the columns ``input_ids`` and ``labels`` (lists of equal length, not shifted, -100 where no loss
    is taken), ``prompt`` and ``response`` (the texts). For plain text every token is a label, and ``prompt`` is the
    first quarter of a block.
    """

    tokenizer: PreTrainedTokenizerBase
    train: Dataset
    validation: Dataset
    test: Dataset
    fingerprint: str
    """Hash of the settings, the tokenizer and every token id and label."""
    kind: str = "pairs"
    """pairs, chat or text."""
    notes: list[str] = field(default_factory=list)
    """What was left out and why, a sentence each."""


def load_corpus(settings: DataSettings, *, seed: int, tokenizer: PreTrainedTokenizerBase | None = None) -> Corpus:
    """Reads, splits, tokenises and masks the corpus.

    Args:
        settings: see `DataSettings`.
        seed: chooses the sample and the order where the source has more rows than asked for; for arithmetic, the
            problems themselves. Which split a row is in does not depend on it.
        tokenizer: the target's. None: ``settings.tokenizer``, or else a small one trained on the training texts.

    Raises:
        UserError: settings, files or masks that cannot be used.
    """
    settings.validate()
    quiet_datasets()
    rows = load_rows(settings, seed)
    tokenizer = tokenizer or _tokenizer(settings, rows.splits["train"], seed)
    if settings.chat_template is not None:
        tokenizer.chat_template = settings.chat_template
    limits = (settings.train_examples, settings.validation_examples, settings.test_examples)
    splits = {}
    for split, limit in zip(SPLITS, limits, strict=True):
        splits[split] = _dataset(rows, split, limit, settings, seed, tokenizer)
        check_masks(splits[split], tokenizer, rows.kind)
    fingerprint = _fingerprint(settings, tokenizer, splits)
    return Corpus(tokenizer, **splits, fingerprint=fingerprint, kind=rows.kind, notes=rows.notes)


def collate(rows: Sequence[Mapping[str, Any]], pad_id: int) -> dict[str, Tensor]:
    """A batch, padded on the right to its longest row.

    Returns:
        ``input_ids``, ``labels`` (padding: -100) and ``attention_mask`` (padding: 0), each long ``[batch, time]``.
    """
    time = max(len(row["input_ids"]) for row in rows)
    fills = {"input_ids": pad_id, "labels": IGNORE}
    batch = {key: torch.full((len(rows), time), fill, dtype=torch.long) for key, fill in fills.items()}
    batch["attention_mask"] = torch.zeros(len(rows), time, dtype=torch.long)
    for place, row in enumerate(rows):
        length = len(row["input_ids"])
        for key in fills:
            batch[key][place, :length] = torch.as_tensor(row[key], dtype=torch.long)
        batch["attention_mask"][place, :length] = 1
    return batch


def show_example(corpus: Corpus, index: int = 0, split: str = "train", console: Console | None = None) -> None:
    """Prints one example in colour: what is masked dim, what is learned green in [[ ]], special tokens reversed."""
    show(getattr(corpus, split)[index], corpus.tokenizer, console)


def _tokenizer(settings: DataSettings, train: list[Row], seed: int) -> PreTrainedTokenizerBase:
    if settings.tokenizer is None:
        sample = Random(seed).sample(train, min(len(train), settings.train_examples))
        return train_tokenizer(map(_all_text, sample), settings.tokenizer_vocab_size)
    try:
        loaded: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            settings.tokenizer, trust_remote_code=settings.trust_remote_code
        )
    except (OSError, ValueError) as error:
        raise UserError(
            f"data.tokenizer: no tokenizer can be loaded from {settings.tokenizer!r}: {error}. Give a folder with a "
            "tokenizer.json, or a Hub name"
        ) from error
    return loaded


def _all_text(row: Row) -> str:
    if "messages" in row:
        return "\n".join(message["content"] for message in row["messages"])
    return str(row["text"]) if "text" in row else row["prompt"] + row["response"]


def _dataset(
    rows: SourceRows, split: str, limit: int, settings: DataSettings, seed: int, tokenizer: PreTrainedTokenizerBase
) -> Dataset:
    """The examples of one split in the seed's order, up to ``limit``."""
    ordered = list(rows.splits[split])
    Random(f"{seed}/{split}").shuffle(ordered)
    lost = {"dropped": 0, "cut": 0, "empty": 0}
    made = _examples(rows.kind, ordered, settings, tokenizer)
    fitting = (short for example in made if (short := _fit(example, settings, lost)) is not None)
    kept = track(
        islice(fitting, limit),
        f"tokenising {split}",
        total=min(limit, len(ordered)),
        console=Console(stderr=True),
        transient=True,
        disable=limit < PROGRESS_FROM or not sys.stderr.isatty(),
    )
    columns: dict[str, list[Any]] = {name: [] for name in COLUMNS}
    for example in kept:
        columns["input_ids"].append(np.asarray(example.input_ids, dtype=np.int32))
        columns["labels"].append(np.asarray(example.labels, dtype=np.int32))
        columns["prompt"].append(example.prompt)
        columns["response"].append(example.response)
    reasons = {
        "dropped": f"longer than data.max_length ({settings.max_length} tokens) dropped",
        "cut": f"longer than data.max_length ({settings.max_length} tokens) cut at the end",
        "empty": "without a response dropped",
    }
    rows.notes += [
        f"{split}: {count} example{'s' * (count > 1)} {reasons[how]}" for how, count in lost.items() if count
    ]
    if not columns["input_ids"]:
        raise UserError(
            f"data: no {split} example is left ({'; '.join(rows.notes) or 'the texts are too short'}): raise "
            "data.max_length, set data.overlong to cut, or give more data"
        )
    return Dataset.from_dict(columns, features=COLUMNS)


def _examples(
    kind: str, rows: list[Row], settings: DataSettings, tokenizer: PreTrainedTokenizerBase
) -> Iterator[Example]:
    if kind == "text":
        return text_examples(tokenizer, (row["text"] for row in rows), settings.max_length)
    if kind == "chat":
        return (example for row in rows for example in chat_examples(tokenizer, row["messages"]))
    return pair_examples(tokenizer, [(row["prompt"], row["response"]) for row in rows])


def _fit(example: Example, settings: DataSettings, lost: dict[str, int]) -> Example | None:
    """The example within ``max_length``, or None; ``lost`` counts what happened."""
    if not example.response.strip():
        lost["empty"] += 1
        return None
    length = settings.max_length
    if len(example.input_ids) <= length:
        return example
    labels = example.labels[:length]
    if settings.overlong == "drop" or all(label == IGNORE for label in labels):
        lost["dropped"] += 1
        return None
    lost["cut"] += 1
    return Example(example.input_ids[:length], labels, example.prompt, example.response)


def _fingerprint(settings: DataSettings, tokenizer: PreTrainedTokenizerBase, splits: dict[str, Dataset]) -> str:
    digest = hashlib.sha256(json.dumps(asdict(settings), sort_keys=True).encode())
    digest.update(json.dumps(sorted(tokenizer.get_vocab().items())).encode())
    for split in SPLITS:
        for batch in splits[split].select_columns(["input_ids", "labels"]).with_format("numpy").iter(1000):
            for row in (*batch["input_ids"], *batch["labels"]):
                digest.update(np.asarray(row, dtype=np.int32).tobytes() + b"|")
    return digest.hexdigest()
