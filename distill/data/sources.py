"""Rows of the three splits, from wherever the settings point, in one of three plain shapes.

A row is ``{"prompt", "response"}`` (pairs), ``{"messages", "tools"}`` (chat) or ``{"text"}`` (text), each with its
``number`` in the source, from 1. Rows that cannot be brought into this shape are left out and counted (`LeftOut`).
Splits that a source lacks are split off its training rows by a hash of the prompt: deterministic, independent of the
seed and of the order, and equal prompts stay together.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import tempfile
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from string import Formatter
from typing import Any, overload

import datasets
import numpy as np
import pyarrow as pa

from decode.bench.arithmetic import problems
from decode.bench.datasets import PRESETS, READERS, Preset, Row, held_out, iter_rows, load_hub
from decode.errors import UserError
from distill.config.data import DataSettings
from distill.data.chat import UnusableRow, clean_messages

TEMPLATES = (
    ("{prompt}", "{response}"),
    ("{prompt}", "{completion}"),
    ("{question}\n", "{answer}"),
    ("{input}\n", "{output}"),
)
"""Prompt and response of rows with these columns, where no other template is given."""


def columns_missing(preset: Preset, row: Row) -> list[str]:
    """The columns of a preset that a row lacks."""
    return [column for column in preset.columns if column not in row]


Shape = Callable[[Row], Row]  # brings a row of a source into its plain shape


def first_shape(settings: DataSettings, preset: Preset | None, rows: Sequence[Row]) -> tuple[str, Shape]:
    """`_shape` by the first of the leading rows whose columns say what they are; the first one's error otherwise."""
    for row in rows[1:100]:
        with contextlib.suppress(UserError):
            return _shape(settings, preset, rows[0])
        with contextlib.suppress(UserError):
            return _shape(settings, preset, row)
    return _shape(settings, preset, rows[0])


def _shape(settings: DataSettings, preset: Preset | None, row: Row) -> tuple[str, Shape]:
    """The kind of the rows, and the function that brings one into its plain shape."""
    if (own := settings.templates()) is not None:
        shape = _from_templates(*own)
        if missing := [column for column in _columns(own) if column not in row]:
            raise UserError(
                f"data: the templates {own[0]!r} and {own[1]!r} need {', '.join(missing)}, a row has the columns "
                f"{', '.join(row)}: correct data.prompt_template and data.response_template"
            )
        return "pairs", shape
    if preset is not None and settings.kind in ("auto", preset.kind):
        if missing := columns_missing(preset, row):
            raise UserError(
                f"data: rows for {settings.source!r} need the columns {', '.join(preset.columns)}, but "
                f"{', '.join(missing)} is missing from {', '.join(row)}: give data.prompt_template and "
                "data.response_template for other columns"
            )
        return ("chat", _from_chat(settings)) if preset.kind == "chat" else ("pairs", from_preset(preset))
    return _guess(settings, row)


def _guess(settings: DataSettings, row: Row) -> tuple[str, Shape]:
    """The shape of rows without a preset, as their columns show it, as far as ``kind`` leaves it open."""
    kind, messages, text = settings.kind, settings.messages_column, settings.text_column
    if kind in ("auto", "chat") and messages in row:
        return "chat", _from_chat(settings)
    if kind in ("auto", "pairs"):
        if {"instruction", "output"} <= row.keys():
            return "pairs", from_preset(PRESETS["alpaca"])
        for prompt, response in TEMPLATES:
            if {prompt.strip("{}\n"), response.strip("{}")} <= row.keys():
                return "pairs", _from_templates(prompt, response)
    if kind in ("auto", "text") and text in row:
        return "text", lambda r: {"text": _text(r.get(text))}
    raise UserError(
        f"data.kind {kind!r} does not fit the columns {', '.join(map(repr, row))}: name the right one with "
        f"data.messages_column (now {messages!r}) or data.text_column (now {text!r}), or give data.prompt_template "
        "and data.response_template"
    )


def _from_chat(settings: DataSettings) -> Shape:
    def shape(row: Row) -> Row:
        tools = row.get("tools")
        if isinstance(tools, str):
            try:
                tools = json.loads(tools)
            except ValueError:
                raise UnusableRow("whose tools are no JSON") from None
        return {"messages": clean_messages(row.get(settings.messages_column)), "tools": tools or None}

    return shape


def _text(value: Any) -> str:
    if not isinstance(value, str) or not value.strip():
        raise UnusableRow("without text")
    return value


def from_preset(preset: Preset) -> Shape:
    """Pairs in the preset's templates; with what a user says to a chat model, where that is another text."""
    shape, said = _pairs(preset.columns, preset.prompt, preset.response), preset.said
    return shape if said is None else lambda row: shape(row) | {"said": said(row)}


def _from_templates(prompt: str, response: str) -> Shape:
    return _pairs(_columns((prompt, response)), prompt.format_map, response.format_map)


def _columns(templates: Iterable[str]) -> list[str]:
    """The columns that format strings name as they are, not by an index or an attribute.

    Raises:
        UserError: braces that are no format string.
    """
    try:
        names = [name for template in templates for _, name, _, _ in Formatter().parse(template)]
    except ValueError as error:
        raise UserError(f"data: a template cannot be read: {error}; double braces that are meant as such") from error
    return [name for name in dict.fromkeys(names) if name and name.isidentifier()]


def _pairs(columns: Sequence[str], prompt: Callable[[Row], str], response: Callable[[Row], str]) -> Shape:
    """The shape of pairs whose texts are made of these columns, which have to hold texts or numbers."""

    def shape(row: Row) -> Row:
        for column in columns:
            if row.get(column) is None:
                raise UnusableRow(f"without the column {column}")
        try:
            pair = {"prompt": prompt(row), "response": response(row)}
        except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
            raise UnusableRow("that do not fit the template", f"{type(error).__name__} {error}") from error
        if not pair["response"].strip():
            raise UnusableRow("without a response")
        if not pair["prompt"].strip():
            raise UnusableRow("without a prompt")
        return pair

    return shape


BATCH = 1000
"""Rows written together."""


class RowFile(Sequence[Row]):
    """Rows as lines of JSON in a memory-mapped file, or a selection of them; the file ends with the last of these.

    Args:
        lines: The rows of the file.
        places: The numbers of those that this one has.
    """

    def __init__(self, lines: pa.ChunkedArray, places: Sequence[int]) -> None:
        self.lines, self.places = lines, places

    @classmethod
    def of(cls, rows: Iterable[Row]) -> RowFile:
        """Writes rows to a file in the folder where `datasets` caches."""
        schema, folder = pa.schema([("row", pa.large_string())]), Path(datasets.config.HF_DATASETS_CACHE)
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder, prefix="rows-") as file:  # once mapped it needs no name
            with pa.ipc.new_stream(file, schema) as writer:
                found = iter(rows)
                while lines := [json.dumps(row, default=str) for row in islice(found, BATCH)]:
                    writer.write_batch(pa.record_batch([pa.array(lines, pa.large_string())], schema))
            file.flush()
            mapped = pa.ipc.open_stream(pa.memory_map(file.name)).read_all()["row"]
        return cls(mapped, range(len(mapped)))

    def select(self, places: Sequence[int]) -> RowFile:
        """Some of the rows."""
        return RowFile(self.lines, array("q", (self.places[place] for place in places)))

    def __len__(self) -> int:
        return len(self.places)

    @overload
    def __getitem__(self, place: int) -> Row: ...

    @overload
    def __getitem__(self, place: slice) -> Sequence[Row]: ...

    def __getitem__(self, place: int | slice) -> Row | Sequence[Row]:
        if isinstance(place, slice):
            return RowFile(self.lines, self.places[place])
        row: Row = json.loads(self.lines[self.places[place]].as_py())
        return row


def select(rows: Sequence[Row], places: Sequence[int]) -> Sequence[Row]:
    """Some of the rows, in a file where they are in one."""
    return rows.select(places) if isinstance(rows, RowFile) else [rows[place] for place in places]


SPLITS = ("train", "validation", "test")
SPLIT_NAMES = {"train": ("train",), "validation": ("validation", "valid", "val", "dev"), "test": ("test",)}
PASSAGE = 2000  # characters of a plain text file that go to one split together, at least (whole paragraphs)


@dataclass
class LeftOut:
    """Rows of one split that were not used as they are, by reason: how many, and the first of them."""

    reasons: dict[str, tuple[int, tuple[int, str]]] = field(default_factory=dict)

    def add(self, reason: str, number: int, detail: str = "") -> None:
        """Count a row: what is wrong with it, its number, what is particular to it."""
        count, first = self.reasons.get(reason, (0, (number, detail)))
        self.reasons[reason] = count + 1, min(first, (number, detail))

    def sentences(self, split: str) -> list[str]:
        """A sentence a reason."""
        lines = []
        for reason, (count, (number, detail)) in self.reasons.items():
            first = f"row {number}{f': {detail}' if detail else ''}"
            lines.append(f"{split}: {count} row{'s' * (count > 1)} {reason} ({first})")
        return lines


@dataclass
class SourceRows:
    """What the source holds: rows of each split in one shape, and remarks on what was left out."""

    kind: str
    splits: dict[str, Sequence[Row]]
    notes: list[str] = field(default_factory=list)


def load_rows(settings: DataSettings, seed: int) -> SourceRows:
    """The rows of train, validation and test; none of a later split is in an earlier one.

    Raises:
        UserError: no such source, missing columns, or a split without rows.
    """
    if settings.source == "arithmetic" and not _files(settings):
        counts = (settings.train_limit or 0, settings.validation_examples, settings.test_examples)
        return SourceRows("pairs", {s: _arithmetic(seed, s, n, settings.difficulty) for s, n in zip(SPLITS, counts)})
    preset = PRESETS.get(settings.source)
    raw = _raw(settings, preset, seed)
    if not raw.get("train"):
        raise UserError(f"data.source {settings.source!r} has no training rows: give them with data.train_file")
    kind, shape = first_shape(settings, preset, raw["train"])
    rows, keep = SourceRows(kind, {}), _keeper(settings)
    for split in SPLITS:
        left_out = LeftOut()
        rows.splits[split] = keep(_shaped(raw.pop(split, []), shape, left_out))
        rows.notes += left_out.sentences(split)
    if not rows.splits["train"]:
        raise UserError(
            f"data: no training row of {settings.source!r} can be used ({'; '.join(rows.notes)}): check data.kind and "
            "the templates, or name other columns with data.prompt_template and data.response_template"
        )
    _split_off(rows, settings.validation_fraction)
    _remove_shared(rows)
    for split in SPLITS:
        if not rows.splits[split]:
            raise UserError(
                f"data.source {settings.source!r} leaves no {split} rows: give more rows, a larger "
                f"data.validation_fraction (now {settings.validation_fraction}), or a data.{split}_file"
            )
    return rows


def key_of(row: Row) -> str:
    """What makes two rows the same example for the splits: the prompt, the first user turn, or the text."""
    if "messages" in row:
        return next((str(m["content"]) for m in row["messages"] if m["role"] == "user"), json.dumps(row["messages"]))
    return str(row["text"] if "text" in row else row["prompt"] or row["response"])


def _shaped(raw: Iterable[Row], shape: Callable[[Row], Row], left_out: LeftOut) -> Iterator[Row]:
    """Rows in their plain shape, with their numbers; the others are counted."""
    for number, row in enumerate(raw, 1):
        try:
            plain = shape(row)
            if any("\ud800" <= character <= "\udfff" for character in "".join(_texts(plain))):
                raise UnusableRow("with half a character (a lone surrogate)")
        except UnusableRow as error:
            left_out.add(f"{error.reason} dropped", number, error.detail)
        else:
            yield plain | {"number": number}


def _texts(value: Any) -> Iterator[str]:
    """All texts in a row, however deep."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping | list):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from _texts(item)


def _arithmetic(seed: int, split: str, count: int, difficulty: int) -> list[Row]:
    made = ({"question": p.question, "answer": p.solution} for p in problems(seed, split, count, difficulty))
    shape = from_preset(PRESETS["arithmetic"])
    return [shape(row) | {"number": number} for number, row in enumerate(made, 1)]


def _files(settings: DataSettings) -> dict[str, str]:
    given = {split: getattr(settings, f"{split}_file") for split in SPLITS}
    return {split: path for split, path in given.items() if path is not None}


def _raw(settings: DataSettings, preset: Preset | None, seed: int) -> dict[str, Sequence[Row]]:
    """Rows as they are in the source, by split."""
    given = _files(settings)
    own = {} if preset is not None and "train" in given else _local(settings.source)
    files = own | given
    found: dict[str, Sequence[Row]] = {} if "train" in files else _hub(settings, preset, seed)
    for split, path in files.items():
        read = _read(path, settings)
        rows = _keeper(settings)(islice(read, _enough(settings)) if settings.streaming else read)
        if preset is None or not preset.last_keys or split != "train":
            found[split] = rows
            continue
        named = [(not columns_missing(preset, row) and preset.split_of(row)) or split for row in rows]
        found |= {name: select(rows, [i for i, own in enumerate(named) if own == name]) for name in {*named, split}}
    return found


def _keeper(settings: DataSettings) -> Callable[[Iterable[Row]], Sequence[Row]]:
    """What holds rows: a file where they are streamed."""
    return RowFile.of if settings.streaming else list


def _enough(settings: DataSettings) -> int | None:
    """Rows of which enough can be used, as far as can be told; None: all."""
    limit = settings.train_limit
    return None if limit is None else 4 * (limit + settings.validation_examples + settings.test_examples)


def _read(path: str, settings: DataSettings) -> Iterator[Row]:
    rows = iter_rows(path)
    if Path(path).suffix.lower() != ".txt":
        return rows
    next(rows)  # or the reason why there are none
    return ({settings.text_column: passage} for passage in _passages(Path(path).read_text(encoding="utf-8")))


def _passages(text: str) -> list[str]:
    """Whole paragraphs (or, in a text without empty lines, lines), joined to at least `PASSAGE` characters."""
    gap = "\n\n" if "\n\n" in text else "\n"
    passages: list[str] = []
    held = ""
    for paragraph in text.split(gap):
        held += paragraph + gap
        if len(held) >= PASSAGE:
            passages.append(held)
            held = ""
    return [*passages, held] if held.strip() else passages


def _local(source: str) -> dict[str, str]:
    """Files of a source that is a path: one file is the training split, a folder has a file a split."""
    path = Path(source)
    if path.is_file():
        return {"train": source}
    if not path.is_dir():
        if path.suffix.lower() in READERS or source.startswith((".", "/", "~")):
            raise UserError(
                f"data.source: there is no file or folder {source!r} (relative paths start at {Path.cwd()})"
            )
        return {}
    found = {
        split: str(file)
        for split, names in SPLIT_NAMES.items()
        for file in sorted(path.iterdir(), reverse=True)
        if file.stem in names and file.suffix.lower() in READERS
    }
    if "train" not in found:
        raise UserError(f"data.source: the folder {source!r} has no file named train{'|'.join(READERS)}")
    return found


def _hub(settings: DataSettings, preset: Preset | None, seed: int) -> dict[str, Sequence[Row]]:
    """A data set of the Hub; where it holds far more rows than are asked for, a sample, or of a stream the first."""
    name = preset.hub if preset else settings.source
    if name is None:
        raise UserError(f"data.source {settings.source!r} is not on the Hub: give local rows with data.train_file")
    try:
        config = settings.hub_config or (preset.config if preset else None)
        loaded = load_hub(name, config, revision=settings.revision, streaming=settings.streaming)
    except UserError as error:
        known = f"a preset ({', '.join(PRESETS)}), a file, a folder or a Hub name"
        raise UserError(f"data.source {settings.source!r}: {error} (data.train_file); a source is {known}") from error
    enough, found = _enough(settings), dict[str, Sequence[Row]]()
    for split, names in SPLIT_NAMES.items():
        wanted = preset.splits.get(split) if preset else next((n for n in names if n in loaded), None)
        if wanted in loaded:
            rows = loaded[wanted]
            if settings.streaming:
                found[split] = _streamed(name, rows, enough)
                continue
            found[split] = list(
                rows.shuffle(seed=seed).select(range(enough)) if enough and len(rows) > enough else rows
            )
    return found


def _streamed(name: str, rows: Iterable[Row], enough: int | None) -> RowFile:
    try:
        return RowFile.of(islice(rows, enough))
    except (OSError, ValueError, RuntimeError) as error:
        raise UserError(
            f"the data set {name!r} broke off while it was streamed ({error}): run the command again"
        ) from error


def _split_off(rows: SourceRows, fraction: float) -> None:
    """Gives train rows to the splits that have none, by the hash of their keys."""
    empty = [split for split in SPLITS if not rows.splits[split]]
    if not empty:
        return
    train, places = rows.splits["train"], {split: array("q") for split in ("train", *empty)}
    for place, row in enumerate(train):
        split = held_out(key_of(row), fraction)
        places[split if split in empty else "train"].append(place)
    rows.splits |= {split: select(train, some) for split, some in places.items()}


def _remove_shared(rows: SourceRows) -> None:
    """Takes from train what validation or test hold too, and from validation what test holds."""
    if rows.kind == "text":
        return
    seen = np.empty(0, dtype=np.int64)
    for split in reversed(SPLITS):  # their hashes alone are held: prompts may be long
        keys = np.fromiter((_hash(key_of(row)) for row in rows.splits[split]), np.int64, len(rows.splits[split]))
        kept = np.flatnonzero(~np.isin(keys, seen)).tolist()
        if lost := len(keys) - len(kept):
            rows.notes.append(f"{split}: {lost} rows dropped, because their prompts are in a later split too")
            rows.splits[split] = select(rows.splits[split], kept)
        seen = np.concatenate([seen, keys])


def _hash(key: str) -> int:
    return int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest(), "big", signed=True)
