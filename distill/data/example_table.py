"""Rows of a split made into a table of examples: by `datasets.map`, in several processes where there are many rows."""

from __future__ import annotations

import json
import os
import tempfile
from array import array
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import islice
from random import Random
from typing import Any

import numpy as np
from datasets import Dataset, Features, List, Value, concatenate_datasets, config, load_from_disk
from transformers import PreTrainedTokenizerBase

from decode.bench.datasets import Row
from decode.errors import UserError
from decode.progress import current
from distill.config.data import DataSettings
from distill.data.chat import (
    IGNORE,
    ChatFormat,
    Example,
    UnusableRow,
    chat_examples,
    pair_examples,
    prompt_example,
    text_examples,
)
from distill.data.sources import LeftOut, SourceRows, select
from distill.files import fingerprint

COLUMNS = Features(
    {
        "input_ids": List(Value("int32")),
        "labels": List(Value("int32")),
        "prompt": Value("string"),
        "response": Value("string"),
        "messages": Value("string"),
    }
)
NOTED = Features(
    {
        "kept": Value("bool"),
        "number": Value("int64"),
        "reason": Value("string"),
        "detail": Value("string"),
        "several": Value("bool"),
    }
)
"""What became of the row that an entry is made of: whether it is an example, its number, why it was dropped or cut."""

SEVERAL = "made into an example for each assistant's turn, because the template rewrites earlier turns"
BATCH = 1000
"""Rows tokenised together."""
ROUND, STREAMED = 50_000, 20_000
"""Rows between two looks at whether there are enough examples; of a stream, so many are in memory."""
A_PROCESS = 5000
"""Rows for which a further process is worth its start."""


def example_table(
    rows: SourceRows,
    split: str,
    limit: int | None,
    settings: DataSettings,
    seed: int,
    tokenizer: PreTrainedTokenizerBase,
    chat: ChatFormat | None,
) -> Dataset:
    """The examples of one split in the seed's order, up to ``limit``, with `COLUMNS`; what was left out is noted.

    Raises:
        UserError: no example is left.
    """
    found = rows.splits[split]
    ordered = array("q", range(len(found)))
    Random(f"{seed}/{split}").shuffle(ordered)
    make, left_out, several = _Make(rows.kind, settings, tokenizer, chat), LeftOut(), LeftOut()
    current().update(name=f"tokenising {split}", total=min(limit or len(ordered), len(ordered)), done=0)
    parts: list[Dataset] = []
    have, start = 0, 0
    while start < len(ordered) and (limit is None or have < limit):
        wanted = len(ordered) if rows.kind == "text" else STREAMED if settings.streaming else ROUND
        if limit is not None and rows.kind != "text":  # some rows will be left out
            wanted = min(wanted, max(BATCH, round(1.1 * (limit - have))))
        made = _made(make, select(found, ordered[start : start + wanted]), settings.workers, limit)
        kept = _kept(made, None if limit is None else limit - have, left_out, several)
        part = made.select_columns(list(COLUMNS)).select(kept)
        parts.append(_in_a_file(part) if settings.streaming else part)
        have, start = have + len(kept), start + wanted
        current().update(done=have)
    rows.notes += left_out.sentences(split) + several.sentences(split)
    if not have:
        raise UserError(
            f"data: no {split} example is left ({'; '.join(rows.notes) or 'the texts are too short'}): raise "
            "data.max_length, set data.overlong to cut, or give more data"
        )
    return concatenate_datasets(parts)


def _made(make: _Make, rows: Sequence[Row], workers: int | None, limit: int | None) -> Dataset:
    """An entry for every example that the rows give, and for every row that gives none."""
    if make.kind == "text":  # blocks span rows
        return Dataset.from_dict(make.blocks(rows, limit), features=Features({**COLUMNS, **NOTED}))
    processes = min(workers or os.cpu_count() or 1, max(1, len(rows) // A_PROCESS if workers is None else len(rows)))
    source = Dataset.from_dict({"row": [json.dumps(row, default=str) for row in rows]})
    with _forked(processes):
        return source.map(
            make,
            batched=True,
            batch_size=BATCH,
            num_proc=processes if processes > 1 else None,
            remove_columns=["row"],
            features=Features({**COLUMNS, **NOTED}),
            new_fingerprint=fingerprint(os.urandom(8).hex()),  # never looked up: the corpus as a whole is kept
        )


def _in_a_file(part: Dataset) -> Dataset:
    """The same, memory-mapped; the file ends with it."""
    with tempfile.TemporaryDirectory(dir=config.HF_DATASETS_CACHE, prefix="examples-") as folder:
        part.save_to_disk(folder)
        return load_from_disk(folder)


@contextmanager
def _forked(processes: int) -> Iterator[None]:
    """Inside, processes that are started use one thread each, without a warning that they do."""
    before = os.environ.get("TOKENIZERS_PARALLELISM")
    if processes > 1:
        os.environ["TOKENIZERS_PARALLELISM"] = "false"
    try:
        yield
    finally:
        if before is None:
            os.environ.pop("TOKENIZERS_PARALLELISM", None)
        else:
            os.environ["TOKENIZERS_PARALLELISM"] = before


def _kept(made: Dataset, limit: int | None, left_out: LeftOut, several: LeftOut) -> list[int]:
    """Places of the examples, ``limit`` at most; what befell the rows up to the last of them is counted."""
    places: list[int] = []
    columns = made.select_columns(list(NOTED)).with_format("arrow")[:].to_pydict()
    for place, kept in enumerate(columns["kept"]):
        if limit is not None and len(places) == limit:
            break
        if columns["several"][place]:
            several.add(SEVERAL, columns["number"][place])
        if columns["reason"][place]:
            left_out.add(columns["reason"][place], columns["number"][place], columns["detail"][place])
        if kept:
            places.append(place)
    return places


@dataclass(frozen=True)
class _Make:
    """Makes examples of rows; called by `datasets.map`, so it goes to other processes as it is."""

    kind: str
    settings: DataSettings
    tokenizer: PreTrainedTokenizerBase
    chat: ChatFormat | None

    def __call__(self, batch: Mapping[str, list[str]]) -> dict[str, list[Any]]:
        rows = [json.loads(row) for row in batch["row"]]
        if self.chat is None:
            pairs = pair_examples(self.tokenizer, [(row["prompt"], row["response"]) for row in rows])
            return _table(self._fit(example, row["number"]) for row, example in zip(rows, pairs, strict=True))
        return _table(entry for row in rows for entry in self._of_chat(row))

    def blocks(self, rows: Sequence[Row], limit: int | None) -> dict[str, list[Any]]:
        """Blocks of plain text, counted as the first row's."""
        found = text_examples(self.tokenizer, (row["text"] for row in rows), self.settings.max_length)
        return _table(self._fit(block, 1) for block in islice(found, limit))

    def _of_chat(self, row: Row) -> Iterator[_Entry]:
        assert self.chat is not None
        number = row["number"]
        try:
            if self.settings.from_target:
                found = [prompt_example(self.chat, row["messages"])]
            else:
                # a pair is the chat that it stands for; what only separates the two is left to the template
                said = [] if "messages" in row else [row.get("said") or row["prompt"], row["response"]]
                pair = [{"role": role, "content": text.strip()} for role, text in zip(("user", "assistant"), said)]
                found = chat_examples(self.chat, row.get("messages") or pair, row.get("tools"))
        except UnusableRow as error:
            yield _Entry(None, number, f"{error.reason} dropped", error.detail)
            return
        for place, example in enumerate(found):
            yield replace(self._fit(example, number), several=len(found) > 1 and place == 0)

    def _fit(self, example: Example, number: int) -> _Entry:
        """The example within ``max_length``, or none, and what happened."""
        length = self.settings.max_length
        if len(example.input_ids) <= length:
            return _Entry(example, number)
        labels = example.labels[:length]
        reason = f"longer than data.max_length ({length} tokens)"
        if self.settings.overlong == "drop" or all(label == IGNORE for label in labels):
            return _Entry(None, number, f"{reason} dropped")
        return _Entry(
            replace(example, input_ids=example.input_ids[:length], labels=labels), number, f"{reason} cut at the end"
        )


@dataclass(frozen=True)
class _Entry:
    """An example, or a row that gave none."""

    example: Example | None
    number: int
    reason: str = ""
    detail: str = ""
    several: bool = False


NONE = Example([], [], "", "")


def _table(entries: Iterator[_Entry]) -> dict[str, list[Any]]:
    table: dict[str, list[Any]] = {name: [] for name in (*COLUMNS, *NOTED)}
    for entry in entries:
        example = entry.example or NONE
        table["input_ids"].append(np.asarray(example.input_ids, dtype=np.int32))
        table["labels"].append(np.asarray(example.labels, dtype=np.int32))
        table["prompt"].append(example.prompt)
        table["response"].append(example.response)
        table["messages"].append(json.dumps(example.messages, ensure_ascii=False) if example.messages else "")
        table["kept"].append(entry.example is not None)
        for name in ("number", "reason", "detail", "several"):
            table[name].append(getattr(entry, name))
    return table
