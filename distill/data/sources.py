"""Rows of the three splits, from wherever the settings point, in one of three plain shapes.

A row is a pair (``prompt``, ``response``), a chat (``messages``) or a ``text``, each with its ``number`` in the source,
from 1. What other columns say of a pair or a chat is in ``messages`` and ``variables`` (see `decode.incoming`).
Rows that do not fit are left out, counted and named. Splits that a source lacks are taken from its training rows by a
hash of the prompt of a pair, of a whole chat or of a text, so they depend neither on the seed nor on the order, and
equal rows stay together.
"""

import hashlib
import json
import re
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from decimal import Decimal
from functools import partial
from glob import glob
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
from datasets import Dataset, Features, Value

from decode.errors import UserError
from decode.files import Fields
from decode.incoming import (
    ASKED,
    CHANGES,
    EXCLUDED,
    OTHER_TEXTS,
    LeftOut,
    Messages,
    UnusableRow,
    columnar_rows,
    is_learned,
    messages_of,
    row_chat,
    sentences,
    speaker,
    up_to_answer,
    usable,
)
from decode.measure.arithmetic import problems
from decode.measure.suites import PRESETS, Preset, Row, file_format, held_out, iter_rows, load_hub, split_key
from distill.config.data import DataSettings
from distill.data.tables import mapped_table

SPLITS = ("train", "validation", "test")
SPLIT_NAMES = {"train": ("train",), "validation": ("validation", "valid", "val", "dev"), "test": ("test",)}
"""Names of the splits on the Hub."""
QUESTIONS = "instruction", "prompt", "question", "input"
ANSWERS = "chosen", "completion", "preferred_output", "response", "output", "answer"
"""Columns in which an answer may stand, as messages or as a text, behind the chat or the text of `QUESTIONS`."""
COLUMN = re.compile(r"{{|}}|{([^{}]+)}")
"""What a template of the settings has in braces: a column, or a brace that is doubled."""
HELD_OUT = 0.05  # share of the training rows that goes to each split that the source lacks
KEYS = {"pairs": "prompt", "chat": "messages", "text": "text"}
"""Column by which rows of each kind are dealt to the splits."""
PLAIN = Features(
    {name: Value("string") for name in ("prompt", "response", "text", "messages", "variables", "note")}
    | {"number": Value("int64")}
)
"""Columns of plain rows, empty where a shape has none. ``messages``, and ``variables`` of the chat template such as
``tools``, are JSON in the order of the row, whose values need not agree in types from row to row."""
Shape = Callable[[Row], Row]  # brings a row of a source into its plain shape


@dataclass
class SourceRows:
    """Rows of each split in one shape (columns `PLAIN`), sentences about what was left out, and every dropped row."""

    kind: str
    splits: dict[str, Dataset]
    notes: list[str] = field(default_factory=list)
    dropped: list[Row] = field(default_factory=list)

    def tell(self, split: str, left_out: LeftOut) -> None:
        """Note rows of a split that are not used as they are."""
        self.notes += sentences(split, left_out)
        for reason, row, detail in left_out:
            if (why := reason.removesuffix(" dropped")) != reason:
                self.dropped.append({"split": split, "row": row, "reason": why, "detail": detail})


def plain_rows(rows: Sequence[Row]) -> Dataset:
    """A data set of plain rows."""
    return Dataset.from_dict({name: [row.get(name, "") for row in rows] for name in PLAIN}, features=PLAIN)


def load_rows(settings: DataSettings, seed: int, folder: Path) -> SourceRows:
    """The rows of train, validation and test; no row of a later split, nor the prompt of a pair, is in an earlier one.

    They are written to a folder as they are read, and mapped into memory. The seed chooses the sample of a data set of
    the Hub that has far more rows than needed.

    Raises:
        UserError: No such source, or missing columns.
    """
    raw = _raw_rows(settings, seed)
    first = list(islice(raw["train"], 100))
    kind, shape, columns = _shape(settings, first)
    rows = SourceRows(kind, {})
    if unread := [name for row in first[:1] for name in row if name not in {*columns, *CHANGES}]:
        rows.notes.append(f"columns that are not read: {', '.join(map(repr, unread[:30]))}")
    for split in SPLITS:
        left_out, empty = LeftOut(), dict.fromkeys(PLAIN, "")
        read = usable(chain(first if split == "train" else (), raw.pop(split, ())), left_out, shape)
        plain = (empty | row | {"number": number} for number, row in read)
        rows.splits[split] = mapped_table(folder / f"{split}.arrow", PLAIN, plain)
        rows.tell(split, left_out)
    _divide(rows)
    return rows


def _divide(rows: SourceRows) -> None:
    """Fills empty splits with their share of the training rows, and takes rows of later splits out of earlier ones.

    What keeps rows in one split is compared by hashes: see `KEYS`.
    """
    kept, kind = rows.splits, rows.kind
    if empty := [split for split in SPLITS if not len(kept[split])]:
        whole = kept["train"]
        names = np.array([held_out(key, HELD_OUT) for key in _keys(whole, kind)], "U10")
        names[~np.isin(names, empty)] = "train"
        kept |= {split: whole.select(np.flatnonzero(names == split)) for split in (*empty, "train")}
    later = np.zeros(0, np.uint64)
    for split in reversed(SPLITS) if kind != "text" else ():
        digests = (hashlib.blake2b(key.encode(), digest_size=8).digest() for key in _keys(kept[split], kind))
        keys = np.frombuffer(b"".join(digests), np.uint64)
        new = ~np.isin(keys, later)
        later = np.concatenate([later, keys])
        if not new.all():
            lost = kept[split].select(np.flatnonzero(~new))["number"]
            rows.tell(split, [("in a later split too dropped", row, "") for row in lost])
            kept[split] = kept[split].select(np.flatnonzero(new))


def _keys(rows: Dataset, kind: str) -> Iterator[str]:
    """The `split_key` of each row."""
    for row in rows:
        value = row[KEYS[kind]]
        yield split_key(json.loads(value) if kind == "chat" else value)


# -- shapes -----------------------------------------------------------------------------------------------------------


def _shape(settings: DataSettings, rows: Sequence[Row]) -> tuple[str, Shape, Sequence[str]]:
    """The kind of rows like these, the function that brings one into its plain shape, and the columns that it reads."""
    templates, columns = settings.templates(), list(dict.fromkeys(chain.from_iterable(rows)))
    preset = _formatted(*templates) if templates else PRESETS.get(settings.source)
    if preset is not None and not {*preset.columns} <= {*columns}:
        if templates:
            raise UserError(
                f"data: the templates {templates} need the columns {', '.join(preset.columns)}, and the rows have "
                f"{', '.join(columns)}: correct data.prompt_template and data.response_template"
            )
        preset = None  # files that are not like it
    chats = [
        name for name in columns
        if name in ASKED[:2] or (name != "history" and any(messages_of(row.get(name)) for row in rows))
    ]  # fmt: skip
    usual = [name for name in (*ASKED, *ANSWERS) if name in chats]
    if preset and preset.prompt_template:
        return "pairs", partial(_pair, preset, OTHER_TEXTS), preset.columns if templates else columns
    asked, answer = (next((n for n in names if n in columns), "") for names in (QUESTIONS, ANSWERS))
    if asked and answer and not usual:
        preset = _formatted(f"{{{asked}}}{'' if asked == 'prompt' else chr(10)}", f"{{{answer}}}")
        if asked == "instruction":
            alpaca = PRESETS["alpaca"]
            preset = replace(alpaca, columns=preset.columns, response_template=preset.response_template)
        return "pairs", partial(_pair, preset, ["input"] * (asked == "instruction")), preset.columns
    if usual or len(chats) == 1:
        column = (usual or chats)[0]
        return "chat", partial(_chat, column), [column, "prompt", *ANSWERS]
    if "text" in columns:
        return "text", _text, ["text"]
    raise UserError(
        f"data.source has the columns {', '.join(map(repr, columns[:30]))}: expected messages or conversations, text, "
        "or columns that templates name (--data.prompt_template '{COLUMN}' --data.response_template '{COLUMN}')"
    )


def _formatted(*templates: str) -> Preset:
    """Templates of the settings, in which columns stand in braces, as those of a preset."""
    columns = [name for name in dict.fromkeys(COLUMN.findall("".join(templates))) if name]
    prompt, response = (
        COLUMN.sub(lambda found: f"{{{{ columns[{found[1]!r}] if {bool(found[1])} else {found[0][0]!r} }}}}", text)
        for text in templates
    )
    return Preset(columns, prompt, response)


def _chat(column: str, row: Row) -> Row:
    """A chat whose answer may stand in another column, as in TRL's, LLaMA-Factory's and OpenAI's preferences."""
    if isinstance(request := row.get("input"), dict):  # OpenAI's
        row = {"prompt": request.get("messages")} | request | row
    place = column if column in ANSWERS else next((name for name in ANSWERS if row.get(name)), "")
    begun = next((row[name] for name in QUESTIONS if row.get(name)), None) if place == column else row.get(column)
    answer = turns_of(row.get(place), "assistant")
    turns: Any = turns_of(begun, "user") if answer else begun
    if answer and speaker(answer[0]) != "assistant":  # the whole chat
        turns = answer
    elif answer and (not turns or speaker(turns[-1]) != "assistant"):
        turns = turns + answer
    elif answer and (column == "prompt" or not isinstance(row[place], str)):
        raise UnusableRow(f"whose {place} follows an answer in their {column}")
    return _learned(row, turns, {column, place, *OTHER_TEXTS})


def turns_of(value: Any, role: str) -> list[Any]:
    """The turns in a value: messages, one message, or a text that this role says."""
    turns = messages_of([value] if isinstance(value, dict) else value)
    return turns or [{"role": role, "content": value}] * (isinstance(value, str) and value != "")


def _learned(row: Row, turns: Any, read: Collection[str]) -> Row:
    messages, variables, note = row_chat(row, turns, read)
    return plain_chat(up_to_answer(messages, note), variables, note)


def _number(value: Any) -> int | float | str:
    """A value of a table that JSON does not have: decimals are numbers, others text."""
    if not isinstance(value, Decimal):
        return str(value)
    return int(value) if value == value.to_integral_value() else float(value)


def plain_chat(messages: Messages, variables: Fields, note: str) -> Row:
    """A chat in the plain shape, see `decode.incoming.row_chat`."""
    write = partial(json.dumps, ensure_ascii=False, default=_number)
    return {"messages": write(messages), "variables": write(variables) if variables else "", "note": note}


def _text(row: Row) -> Row:
    if not isinstance(row.get("text"), str) or not row["text"].strip():
        raise UnusableRow("without text")
    if is_learned(row | {"label": None}) is False:
        raise UnusableRow(EXCLUDED)
    return {"text": row["text"]}


def _pair(preset: Preset, others: Sequence[str], row: Row) -> Row:
    """A prompt and its response, which templates write of a row that may have ``others`` of `CHANGES`."""
    for column in preset.columns:
        if (value := row.get(column)) is None or value != value:  # NaN, a missing value of pandas
            raise UnusableRow(f"without the column {column}")
    try:
        texts = {"prompt": preset.prompt(row), "response": preset.response(row)}
        said = preset.said(row) or texts["prompt"]
    except ValueError as error:
        raise UnusableRow("that do not fit the template", str(error)) from error
    for name in ("response", "prompt"):
        if not texts[name].strip():
            raise UnusableRow(f"without a {name}")
    said_by = {"user": said, "assistant": texts["response"]}
    turns = [{"role": role, "content": text.strip()} for role, text in said_by.items()]  # templates separate them
    return texts | _learned(row, turns, {*preset.columns, *others})


# -- files and the Hub ------------------------------------------------------------------------------------------------


def _raw_rows(settings: DataSettings, seed: int) -> dict[str, Iterator[Row]]:
    """Rows by split as they are in files, in a data set of the Hub, or made by the built-in task."""
    source, preset = settings.source, PRESETS.get(settings.source)
    if source == "arithmetic" and not settings.files:
        made = {split: problems(seed, split, count) for split, count in settings.limits.items()}
        return {name: ({"question": p.question, "answer": p.solution} for p in some) for name, some in made.items()}
    files: dict[str, list[str]] = {split: local_files(path) for split, path in settings.files.items()}
    files = ({"train": local} if (local := source_files(settings)) else {}) | files
    raw = {} if "train" in files else _from_hub(settings, preset, seed)
    raw |= {split: _of_files(paths) for split, paths in files.items()}
    if "train" in files and preset and preset.last_keys:  # a file that holds all splits
        for split in {*SPLITS} - (files.keys() - {"train"}):
            raw[split] = filter(partial(_is_of, preset, split), _of_files(files["train"]))
    return raw


def _of_files(paths: Sequence[str]) -> Iterator[Row]:
    """Rows of files, which are not read by `datasets`, since it guesses types of values."""
    return chain.from_iterable(map(iter_rows, paths))


def _is_of(preset: Preset, split: str, row: Row) -> bool:
    return (({*preset.columns} <= {*row} and preset.split_of(row)) or "train") == split


def data_files(settings: DataSettings) -> list[str]:
    """The files that rows are read from."""
    return [*source_files(settings), *chain.from_iterable(map(local_files, settings.files.values()))]


def source_files(settings: DataSettings) -> list[str]:
    """Local files that the source names; the name of a preset wins over a path."""
    return [] if settings.source in (*PRESETS, "arithmetic", "target") else local_files(settings.source)


def local_files(source: str) -> list[str]:
    """Files of a source that is a path: a file, or those that a pattern such as ``data/*.parquet`` names.

    Raises:
        UserError: A folder, which may hold files of several splits.
    """
    if Path(source).is_dir():
        raise UserError(
            f"data.source {source!r} is a folder: name its training files by a pattern ('{source}/*.jsonl'), or those "
            f"of each split with data.files ({{train: '{source}/train-*.parquet', test: '{source}/test-*.parquet'}})"
        )
    return sorted(glob(source)) or ([source] if file_format(source) else [])


def _from_hub(settings: DataSettings, preset: Preset | None, seed: int) -> dict[str, Iterator[Row]]:
    """A data set of the Hub; of one with far more rows than needed a sample."""
    name = preset.hub if preset else settings.source
    if name is None:
        raise UserError(f"data.source {settings.source!r} is not on the Hub: give local rows with data.files.train")
    splits: dict[str, Iterator[Row]] = {}
    enough = 4 * sum(settings.limits.values()) if settings.limits["train"] else sys.maxsize
    try:
        loaded = load_hub(name, preset.config if preset else None)
        for split, names in SPLIT_NAMES.items():
            wanted = preset.splits.get(split) if preset else next((n for n in names if n in loaded), None)
            if wanted in loaded:
                rows = loaded[wanted]
                rows = rows.shuffle(seed=seed).select(range(enough)) if len(rows) > enough else rows
                splits[split] = columnar_rows(rows.with_format("arrow").iter(1000))
        if "train" not in splits:
            raise ValueError(f"none of its splits {', '.join(loaded)} is named train")
    except ValueError as error:
        raise UserError(
            f"data.source {settings.source!r} cannot be read: {' '.join(str(error).split())} (data.files; `hf download "
            f"{name} --repo-type dataset --local-dir DIR` fetches its files). A source is a preset "
            f"({', '.join(PRESETS)}), a file, a pattern or a Hub name"
        ) from error
    return splits
