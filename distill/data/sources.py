"""Rows of the three splits, from wherever the settings point, in one of three plain shapes.

A row is ``{"prompt", "response"}`` (pairs), ``{"messages", "tools"}`` (chat) or ``{"text"}`` (text), each with its
``number`` in the source, from 1. Rows that do not fit are left out and counted (`LeftOut`). Splits that a source lacks
are taken from its training rows by a hash of the prompt, so they depend neither on the seed nor on the order, and equal
prompts stay together.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from string import Formatter

from decode.bench.arithmetic import problems
from decode.bench.datasets import PRESETS, READERS, Preset, Row, held_out, iter_rows, load_hub
from decode.errors import UserError
from decode.models.loading import pinned
from distill.config.data import DataSettings
from distill.data.chat import UnusableRow, clean_messages

SPLITS = ("train", "validation", "test")
SPLIT_NAMES = {"train": ("train",), "validation": ("validation", "valid", "val", "dev"), "test": ("test",)}
TEMPLATES = (
    ("{prompt}", "{response}"),
    ("{prompt}", "{completion}"),
    ("{question}\n", "{answer}"),
    ("{input}\n", "{output}"),
)
"""Prompt and response of rows with these columns, where no other template is given."""
CHAT_COLUMNS = "messages", "conversations"
HELD_OUT = 0.05  # share of the training rows that goes to each split that the source lacks
PASSAGE = 2000  # least characters of a plain text file that go to one split together (whole paragraphs)
Shape = Callable[[Row], Row]  # brings a row of a source into its plain shape


@dataclass
class LeftOut:
    """Rows of one split that were not used as they are: by reason their number, and the first one."""

    reasons: dict[str, tuple[int, tuple[int, str]]] = field(default_factory=dict)

    def add(self, reason: str, number: int, detail: str = "") -> None:
        """Counts a row, given by its number and what is particular to it."""
        count, first = self.reasons.get(reason, (0, (number, detail)))
        self.reasons[reason] = count + 1, min(first, (number, detail))

    def sentences(self, split: str) -> list[str]:
        """One sentence for each reason."""
        return [
            f"{split}: {count} row{'s' * (count > 1)} {reason} (row {number}{f': {detail}' if detail else ''})"
            for reason, (count, (number, detail)) in self.reasons.items()
        ]


@dataclass
class SourceRows:
    """Rows of each split in one shape, and sentences about what was left out."""

    kind: str
    splits: dict[str, list[Row]]
    notes: list[str] = field(default_factory=list)


def load_rows(settings: DataSettings, seed: int) -> SourceRows:
    """The rows of train, validation and test; no prompt of a later split is in an earlier one.

    Raises:
        UserError: No such source, missing columns, or a split without rows.
    """
    files = {split: path for split in SPLITS if (path := getattr(settings, f"{split}_file")) is not None}
    if settings.source == "arithmetic" and not files:
        counts = (settings.train_limit or 0, settings.validation_examples, settings.test_examples)
        shape, rows = _from_preset(PRESETS["arithmetic"]), SourceRows("pairs", {})
        for split, count in zip(SPLITS, counts):
            made = problems(seed, split, count, settings.difficulty)
            rows.splits[split] = [
                shape({"question": p.question, "answer": p.solution}) | {"number": i} for i, p in enumerate(made, 1)
            ]
        return rows
    preset = PRESETS.get(settings.source)
    if preset is None or "train" not in files:
        files = _local(settings.source) | files
    raw = _from_files(files, settings, preset)
    if "train" not in files:
        raw = _from_hub(settings, preset, seed) | raw
    if not raw.get("train"):
        raise UserError(f"data.source {settings.source!r} has no training rows: give them with data.train_file")
    kind, shape = _shape(settings, preset, list(dict.fromkeys(name for row in raw["train"][:100] for name in row)))
    rows = SourceRows(kind, {})
    for split in SPLITS:
        left_out, kept = LeftOut(), list[Row]()
        for number, row in enumerate(raw.pop(split, []), 1):
            try:
                kept.append(shape(row) | {"number": number})
                json.dumps(kept[-1], ensure_ascii=False, default=str).encode()
            except UnusableRow as error:
                left_out.add(f"{error.reason} dropped", number, error.detail)
            except UnicodeEncodeError:
                kept.pop()
                left_out.add("with half a character (a lone surrogate) dropped", number)
        rows.splits[split], rows.notes = kept, rows.notes + left_out.sentences(split)
    if not rows.splits["train"]:
        raise UserError(
            f"data: no training row of {settings.source!r} can be used ({'; '.join(rows.notes)}): check data.kind and "
            "the templates, or name other columns with data.prompt_template and data.response_template"
        )
    _complete_splits(rows)
    for split in SPLITS:
        if not rows.splits[split]:
            raise UserError(
                f"data.source {settings.source!r} leaves no {split} rows: give more rows, or a data.{split}_file"
            )
    return rows


def _key_of(row: Row) -> str:
    """What makes two rows the same example for the splits: the prompt, the first user turn, or the text."""
    if "messages" in row:
        return next((str(m["content"]) for m in row["messages"] if m["role"] == "user"), json.dumps(row["messages"]))
    return str(row["text"] if "text" in row else row["prompt"] or row["response"])


def _complete_splits(rows: SourceRows) -> None:
    """Gives training rows to empty splits, and drops rows whose prompt is in a later split too."""
    empty = [split for split in SPLITS if not rows.splits[split]]
    for row in rows.splits.pop("train") if empty else ():
        split = held_out(_key_of(row), HELD_OUT)
        rows.splits.setdefault(split if split in empty else "train", []).append(row)
    rows.splits = {split: rows.splits.get(split, []) for split in SPLITS}
    seen: set[str] = set()
    for split in reversed(SPLITS) if rows.kind != "text" else ():
        keys = [_key_of(row) for row in rows.splits[split]]
        kept = [row for row, key in zip(rows.splits[split], keys) if key not in seen]
        if lost := len(keys) - len(kept):
            rows.notes.append(f"{split}: {lost} rows dropped, because their prompts are in a later split too")
        rows.splits[split] = kept
        seen.update(keys)


# -- shapes -----------------------------------------------------------------------------------------------------------


def _shape(settings: DataSettings, preset: Preset | None, columns: Sequence[str]) -> tuple[str, Shape]:
    """The kind of rows with these columns, and the function that brings one into its plain shape."""
    kind, listed = settings.kind, ", ".join(columns)
    messages = next((name for name in CHAT_COLUMNS if name in columns), CHAT_COLUMNS[0])
    if (own := settings.templates()) is not None:
        shape, needed = _from_templates(*own)
        if missing := [column for column in needed if column not in columns]:
            raise UserError(
                f"data: the templates {own[0]!r} and {own[1]!r} need {', '.join(missing)}, a row has the columns "
                f"{listed}: correct data.prompt_template and data.response_template"
            )
        return "pairs", shape
    if preset is not None and kind in ("auto", preset.kind):
        if missing := [column for column in preset.columns if column not in columns]:
            raise UserError(
                f"data: rows for {settings.source!r} need the columns {', '.join(preset.columns)}, but "
                f"{', '.join(missing)} is missing from {listed}: give data.prompt_template and "
                "data.response_template for other columns"
            )
        return (preset.kind, _from_chat(messages)) if preset.kind == "chat" else ("pairs", _from_preset(preset))
    if kind in ("auto", "chat") and messages in columns:
        return "chat", _from_chat(messages)
    if kind in ("auto", "pairs"):
        if {"instruction", "output"} <= {*columns}:
            return "pairs", _from_preset(PRESETS["alpaca"])
        for templates in TEMPLATES:
            shape, needed = _from_templates(*templates)
            if {*needed} <= {*columns}:
                return "pairs", shape
    if kind in ("auto", "text") and "text" in columns:
        return "text", _from_text("text")
    raise UserError(
        f"data.kind {kind!r} does not fit the columns {', '.join(map(repr, columns))}: expected messages "
        "or conversations (chats), text, or columns that data.prompt_template and data.response_template name"
    )


def _from_chat(column: str) -> Shape:
    def shape(row: Row) -> Row:
        tools = row.get("tools")
        try:
            tools = json.loads(tools) if isinstance(tools, str) else tools
        except ValueError:
            raise UnusableRow("whose tools are no JSON") from None
        return {"messages": clean_messages(row.get(column)), "tools": tools or None}

    return shape


def _from_text(column: str) -> Shape:
    def shape(row: Row) -> Row:
        text = row.get(column)
        if not isinstance(text, str) or not text.strip():
            raise UnusableRow("without text")
        return {"text": text}

    return shape


def _from_templates(prompt: str, response: str) -> tuple[Shape, list[str]]:
    """The shape of two format strings, and the columns that these name."""
    try:
        names = [name for template in (prompt, response) for _, name, _, _ in Formatter().parse(template)]
    except ValueError as error:
        raise UserError(f"data: a template cannot be read: {error}; write {{{{ and }}}} for literal braces") from error
    columns = [name for name in dict.fromkeys(names) if name and name.isidentifier()]
    return _from_pair(columns, {"prompt": prompt.format_map, "response": response.format_map}), columns


def _from_preset(preset: Preset) -> Shape:
    """Pairs in the preset's templates; ``said`` is what a user says to a chat model, where that is another text."""
    said = {} if preset.said is None else {"said": preset.said}
    return _from_pair(preset.columns, {"prompt": preset.prompt, "response": preset.response, **said})


def _from_pair(columns: Sequence[str], templates: Mapping[str, Callable[[Row], str]]) -> Shape:
    def shape(row: Row) -> Row:
        for column in columns:
            if row.get(column) is None:
                raise UnusableRow(f"without the column {column}")
        try:
            texts = {name: template(row) for name, template in templates.items()}
        except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
            raise UnusableRow("that do not fit the template", f"{type(error).__name__} {error}") from error
        for name in ("response", "prompt"):
            if not texts[name].strip():
                raise UnusableRow(f"without a {name}")
        return {**texts}

    return shape


# -- files and the Hub ------------------------------------------------------------------------------------------------


def _enough(settings: DataSettings) -> int | None:
    """Rows to read: four times the examples wanted, since some cannot be used; None: all."""
    limit = settings.train_limit
    return None if limit is None else 4 * (limit + settings.validation_examples + settings.test_examples)


def _from_files(files: Mapping[str, str], settings: DataSettings, preset: Preset | None) -> dict[str, list[Row]]:
    """Rows of local files by split; a preset may tell the splits of one file apart by a column."""
    found: dict[str, list[Row]] = {}
    for split, path in files.items():
        read: Iterable[Row] = iter_rows(path)
        if Path(path).suffix.lower() == ".txt":
            next(iter(read))  # raises for a file without text
            read = ({"text": text} for text in _passages(Path(path).read_text(encoding="utf-8")))
        rows = list(islice(read, _enough(settings) if settings.streaming else None))
        if preset is None or not preset.last_keys or split != "train":
            found[split] = rows
            continue
        for row in rows:
            named = preset.split_of(row) if all(column in row for column in preset.columns) else None
            found.setdefault(named or split, []).append(row)
    return found


def _passages(text: str) -> Iterator[str]:
    """Whole paragraphs (or, in a text without empty lines, lines), joined to at least `PASSAGE` characters."""
    gap, held = "\n\n" if "\n\n" in text else "\n", ""
    for paragraph in text.split(gap):
        held += paragraph + gap
        if len(held) >= PASSAGE:
            yield held
            held = ""
    if held.strip():
        yield held


def _local(source: str) -> dict[str, str]:
    """Files of a source that is a path: one file is the training split, a folder has a file for each split."""
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


def _from_hub(settings: DataSettings, preset: Preset | None, seed: int) -> dict[str, list[Row]]:
    """A data set of the Hub; of one with far more rows than needed a sample, of a stream the first rows."""
    name = preset.hub if preset else settings.source
    if name is None:
        raise UserError(f"data.source {settings.source!r} is not on the Hub: give local rows with data.train_file")
    enough, found = _enough(settings), dict[str, list[Row]]()
    try:
        name, revision = pinned(name)
        loaded = load_hub(name, preset.config if preset else None, **revision, streaming=settings.streaming)
    except UserError as error:
        known = f"a preset ({', '.join(PRESETS)}), a file, a folder or a Hub name"
        raise UserError(f"data.source {settings.source!r}: {error} (data.train_file); a source is {known}") from error
    for split, names in SPLIT_NAMES.items():
        wanted = preset.splits.get(split) if preset else next((n for n in names if n in loaded), None)
        if wanted not in loaded:
            continue
        rows = loaded[wanted]
        if not settings.streaming and enough and len(rows) > enough:
            rows = rows.shuffle(seed=seed).select(range(enough))
        try:
            found[split] = list(islice(rows, enough))
        except (OSError, ValueError, RuntimeError) as error:
            raise UserError(f"reading the data set {name!r} failed ({error}): run the command again") from error
    return found
