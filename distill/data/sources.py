"""Rows of the three splits, from wherever the settings point, in one of three plain shapes.

A row is ``{"prompt", "response"}`` (pairs), ``{"messages", "tools"}`` (chat) or ``{"text"}`` (text), each with its
``number`` in the source, from 1. Rows that cannot be brought into this shape are left out and counted (`LeftOut`).
Splits that a source lacks are split off its training rows by a hash of the prompt: deterministic, independent of the
seed and of the order, and equal prompts stay together.
"""

import contextlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from string import Formatter
from typing import Any

from decode.core.errors import UserError
from decode.prompts.arithmetic import problems
from decode.prompts.files import READERS, Row, load_hub, read_rows
from decode.prompts.presets import PRESETS, Preset, held_out
from distill.config.data import DataSettings
from distill.data.chats import clean_messages
from distill.data.tokenize import UnusableRow

SPLITS = ("train", "validation", "test")
SPLIT_NAMES = {"train": ("train",), "validation": ("validation", "valid", "val", "dev"), "test": ("test",)}
TEMPLATES = (
    ("{prompt}", "{response}"),
    ("{prompt}", "{completion}"),
    ("{question}\n", "{answer}"),
    ("{input}\n", "{output}"),
)
"""Prompt and response of rows with these columns, where no other template is given."""
PASSAGE = 2000  # characters of a plain text file that go to one split together, at least (whole paragraphs)


@dataclass
class LeftOut:
    """Rows of one split that were not used as they are, by reason: how many, and the first of them."""

    reasons: dict[str, list[tuple[int, str]]] = field(default_factory=dict)

    def add(self, reason: str, number: int, detail: str = "") -> None:
        """Count a row: what is wrong with it, its number, what is particular to it."""
        self.reasons.setdefault(reason, []).append((number, detail))

    def sentences(self, split: str) -> list[str]:
        """A sentence a reason."""
        lines = []
        for reason, rows in self.reasons.items():
            number, detail = min(rows)
            first = f"row {number}{f': {detail}' if detail else ''}"
            lines.append(f"{split}: {len(rows)} row{'s' * (len(rows) > 1)} {reason} ({first})")
        return lines


@dataclass
class SourceRows:
    """What the source holds: rows of each split in one shape, and remarks on what was left out."""

    kind: str
    splits: dict[str, list[Row]]
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
    kind, shape = _first_shape(settings, preset, raw["train"])
    rows = SourceRows(kind, {})
    for split in SPLITS:
        left_out = LeftOut()
        rows.splits[split] = list(_shaped(raw.get(split, []), shape, left_out))
        rows.notes += left_out.sentences(split)
    if not rows.splits["train"]:
        raise UserError(f"data: no training row of {settings.source!r} can be used ({'; '.join(rows.notes)})")
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
    shape = _from_preset(PRESETS["arithmetic"])
    return [shape(row) | {"number": number} for number, row in enumerate(made, 1)]


def _files(settings: DataSettings) -> dict[str, str]:
    given = {split: getattr(settings, f"{split}_file") for split in SPLITS}
    return {split: path for split, path in given.items() if path is not None}


def _raw(settings: DataSettings, preset: Preset | None, seed: int) -> dict[str, list[Row]]:
    """SourceRows as they are in the source, by split."""
    given = _files(settings)
    own = {} if preset is not None and "train" in given else _local(settings.source)
    files = own | given
    found: dict[str, list[Row]] = {} if "train" in files else _hub(settings, preset, seed)
    found |= {split: [] for split in files}
    for split, path in files.items():
        for row in _read(path, settings):
            official = (
                preset.split_of(row) if preset and split == "train" and not _has_columns_missing(preset, row) else None
            )
            found.setdefault(official or split, []).append(row)
    return found


def _read(path: str, settings: DataSettings) -> list[Row]:
    rows = read_rows(path)
    if Path(path).suffix.lower() == ".txt":
        return [{settings.text_column: passage} for passage in _passages(Path(path).read_text(encoding="utf-8"))]
    return rows


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


def _hub(settings: DataSettings, preset: Preset | None, seed: int) -> dict[str, list[Row]]:
    """A data set of the Hub, sampled where it holds far more rows than are asked for."""
    name = preset.hub if preset else settings.source
    if name is None:
        raise UserError(f"data.source {settings.source!r} is not on the Hub: give local rows with data.train_file")
    try:
        loaded = load_hub(name, settings.hub_config or (preset.config if preset else None))
    except UserError as error:
        known = f"a preset ({', '.join(PRESETS)}), a file, a folder or a Hub name"
        raise UserError(f"data.source {settings.source!r}: {error} (data.train_file); a source is {known}") from error
    limit = settings.train_limit
    enough = None if limit is None else 4 * (limit + settings.validation_examples + settings.test_examples)
    found = {}
    for split, names in SPLIT_NAMES.items():
        wanted = preset.splits.get(split) if preset else next((n for n in names if n in loaded), None)
        if wanted in loaded:
            rows = loaded[wanted]
            chosen = rows.shuffle(seed=seed).select(range(enough)) if enough and len(rows) > enough else rows
            found[split] = list(chosen)
    return found


def _has_columns_missing(preset: Preset, row: Row) -> list[str]:
    return [column for column in preset.columns if column not in row]


Shape = Callable[[Row], Row]  # brings a row of a source into its plain shape


def _first_shape(settings: DataSettings, preset: Preset | None, rows: Sequence[Row]) -> tuple[str, Shape]:
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
                f"{', '.join(row)}"
            )
        return "pairs", shape
    if preset is not None and settings.kind in ("auto", preset.kind):
        if missing := _has_columns_missing(preset, row):
            raise UserError(
                f"data: rows for {settings.source!r} need the columns {', '.join(preset.columns)}, but "
                f"{', '.join(missing)} is missing from {', '.join(row)}: give data.prompt_template and "
                "data.response_template for other columns"
            )
        return ("chat", _from_chat(settings)) if preset.kind == "chat" else ("pairs", _from_preset(preset))
    return _guess(settings, row)


def _guess(settings: DataSettings, row: Row) -> tuple[str, Shape]:
    """The shape of rows without a preset, as their columns show it, as far as ``kind`` leaves it open."""
    kind, messages, text = settings.kind, settings.messages_column, settings.text_column
    if kind in ("auto", "chat") and messages in row:
        return "chat", _from_chat(settings)
    if kind in ("auto", "pairs"):
        if {"instruction", "output"} <= row.keys():
            return "pairs", _from_preset(PRESETS["alpaca"])
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


def _from_preset(preset: Preset) -> Shape:
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


def _split_off(rows: SourceRows, fraction: float) -> None:
    """Gives train rows to the splits that have none, by the hash of their keys."""
    empty = [split for split in SPLITS if not rows.splits[split]]
    train, rows.splits["train"] = rows.splits["train"], []
    for row in train:
        split = held_out(key_of(row), fraction)
        rows.splits[split if split in empty else "train"].append(row)


def _remove_shared(rows: SourceRows) -> None:
    """Takes from train what validation or test hold too, and from validation what test holds."""
    if rows.kind == "text":
        return
    seen = {key_of(row) for row in rows.splits["test"]}
    for split in ("validation", "train"):
        kept = [row for row in rows.splits[split] if key_of(row) not in seen]
        if lost := len(rows.splits[split]) - len(kept):
            rows.notes.append(f"{split}: {lost} rows dropped, because their prompts are in a later split too")
        rows.splits[split] = kept
        seen |= {key_of(row) for row in kept}
