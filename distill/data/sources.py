"""Rows of the three splits, from wherever the settings point, in one of three plain shapes.

A row is ``{"prompt", "response"}`` (pairs), ``{"messages", "tools"}`` (chat) or ``{"text"}`` (text), each with its
``number`` in the source, from 1. Rows that do not fit are left out, counted and named. Splits that a source lacks are
taken from its training rows by a hash of the prompt of a pair, of a whole chat or of a text, so they depend neither on
the seed nor on the order, and equal rows stay together.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice
from pathlib import Path
from string import Formatter

from decode.bench import datasets
from decode.bench.arithmetic import problems
from decode.bench.datasets import PRESETS, Preset, Row, file_format, held_out, iter_rows, messages_of
from decode.errors import UserError
from distill.config.data import DataSettings
from distill.data.messages import UnusableRow, clean_messages

SPLITS = ("train", "validation", "test")
SPLIT_NAMES = {"train": ("train", "training"), "validation": ("validation", "valid", "val", "dev"), "test": ("test",)}
TEMPLATES = (
    ("{prompt}", "{response}"),
    ("{prompt}", "{completion}"),
    ("{prompt}", "{chosen}"),
    ("{question}\n", "{answer}"),
    ("{input}\n", "{output}"),
)
"""Prompt and response of rows with these columns, where no other template is given."""
NUMBER = re.compile(r"\d{5,}(-of-\d{5,}(-[0-9a-f]{16})?)?|\d+[-_]of[-_]\d+|[-_.]?\d+(?=\.)")  # of a part of a split
NO_ROWS = ("dataset_info", "dataset_infos", "dataset_dict", "state")  # files of `datasets` about a data set
CHAT_COLUMNS = "messages", "conversations"
HELD_OUT = 0.05  # share of the training rows that goes to each split that the source lacks
PASSAGE = 2000  # least characters of a plain text file that go to one split together (whole paragraphs)
Shape = Callable[[Row], Row]  # brings a row of a source into its plain shape
LeftOut = list[tuple[str, int, str]]
"""Rows that are not used as they are: reason, number, and what is particular to each."""


@dataclass
class SourceRows:
    """Rows of each split in one shape, and sentences about what was left out."""

    kind: str
    splits: dict[str, list[Row]]
    notes: list[str] = field(default_factory=list)


def sentences(split: str, left_out: LeftOut) -> list[str]:
    """One sentence for each reason why rows of a split are left out: how many it concerns, and the first of them."""
    found: dict[str, list[tuple[int, str]]] = {}
    for reason, number, detail in left_out:
        found.setdefault(reason, []).append((number, f": {detail}" if detail else ""))
    return [
        f"{split}: {len(rows)} row{'s' * (len(rows) > 1)} {reason} (row {min(rows)[0]}{min(rows)[1]})"
        for reason, rows in found.items()
    ]


def load_rows(settings: DataSettings, seed: int) -> SourceRows:
    """The rows of train, validation and test; no row of a later split, nor the prompt of a pair, is in an earlier one.

    Raises:
        UserError: No such source, missing columns, or a split without rows.
    """
    notes = list[str]()
    raw, preset = _raw_rows(settings, seed, notes), PRESETS.get(settings.source)
    if not raw.get("train"):
        raise UserError(f"data.source {settings.source!r} has no training rows: give them with data.train_file")
    kind, shape, read = _shape(settings, preset, raw["train"][:100])
    rows = SourceRows(kind, {split: [] for split in SPLITS}, notes)
    if unread := [name for name in raw["train"][0] if name not in read]:
        notes.append(f"columns that are not read: {', '.join(map(repr, unread[:30]))}")
    for split, kept in rows.splits.items():
        left_out = []
        for number, row in enumerate(raw.pop(split, ()), 1):
            try:
                made = shape(row) | {"number": number}
                json.dumps(made, ensure_ascii=False, default=str).encode()
                kept.append(made)
            except UnusableRow as error:
                left_out.append((f"{error.reason} dropped", number, error.detail))
            except UnicodeEncodeError:
                left_out.append(("with half a character (a lone surrogate) dropped", number, ""))
        rows.notes += sentences(split, left_out)
    if not rows.splits["train"]:
        raise UserError(
            f"data: no training row of {settings.source!r} can be used ({'; '.join(rows.notes)}): check data.kind and "
            "the templates, or name other columns with data.prompt_template and data.response_template"
        )
    often = set[str]()
    if kind == "pairs":
        counts = Counter(_key_of(row) for kept in rows.splits.values() for row in kept)
        often = {prompt for prompt, count in counts.items() if count > max(10, HELD_OUT * counts.total())}
        rows.notes += [f"{counts[text]} rows have the prompt {text[:60]!r}: it is in every split" for text in often]
    empty = [split for split in SPLITS if not rows.splits[split]]
    if empty:  # their share of the training rows
        given, rows.splits["train"] = rows.splits["train"], []
        for row in given:
            split = held_out(_key_of(row, often), HELD_OUT)
            rows.splits[split if split in empty else "train"].append(row)
    seen: set[str] = set()
    for split in reversed(SPLITS):
        keys = [_key_of(row, often) for row in rows.splits[split]]
        if kind != "text":
            rows.splits[split] = [row for row, key in zip(rows.splits[split], keys) if key not in seen]
            seen.update(keys)
        if lost := len(keys) - len(rows.splits[split]):
            what = "their prompts" if kind == "pairs" else "they"
            rows.notes.append(f"{split}: {lost} rows dropped, because {what} are in a later split too")
        if not rows.splits[split]:
            raise UserError(
                f"data.source {settings.source!r} leaves no {split} rows: give more rows, or a data.{split}_file"
            )
    return rows


def _key_of(row: Row, often: Collection[str] = ()) -> str:
    """What keeps rows in one split: a whole chat, a text, a pair's prompt (if frequent: the whole pair)."""
    if "messages" in row:
        return json.dumps(row["messages"], sort_keys=True, default=str)
    key = str(row["text"] if "text" in row else row["prompt"] or row["response"])
    return key + row["response"] if key in often else key


# -- shapes -----------------------------------------------------------------------------------------------------------


def _shape(settings: DataSettings, preset: Preset | None, rows: Sequence[Row]) -> tuple[str, Shape, Sequence[str]]:
    """The kind of rows like these, the function that brings one into its plain shape, and the columns that it reads."""
    kind, own, columns = settings.kind, settings.templates(), list(dict.fromkeys(name for row in rows for name in row))
    chats = [name for name in columns if any(messages_of(row.get(name)) for row in rows)]
    messages = [name for name in CHAT_COLUMNS if name in columns][:1]
    if not messages and (answers := [name for name in ("completion", "chosen") if name in chats]):
        messages = [*(["prompt"] if "prompt" in chats else []), answers[0]]  # TRL's preferences and completions
    given = own or (preset if preset is not None and kind in ("auto", preset.kind) else None)
    if given is not None:
        needed, shape = _pairs(given)
        if missing := [column for column in needed if column not in columns]:
            raise UserError(
                f"data: the templates {' and '.join(map(repr, own or [settings.source]))} need the columns "
                f"{', '.join(needed)}, and {', '.join(missing)} is missing from {', '.join(columns)}: correct "
                "data.prompt_template and data.response_template"
            )
        chat = given is preset and preset.kind == "chat"
        return ("chat", _chat(messages), columns) if chat else ("pairs", shape, columns)
    if kind in ("auto", "chat") and messages:
        return "chat", _chat(messages), [*messages, "tools"]
    if kind in ("auto", "pairs"):
        if {"instruction", "output"} <= {*columns}:
            return "pairs", _pairs(PRESETS["alpaca"])[1], ["instruction", "input", "output"]
        for usual in TEMPLATES:
            needed, shape = _pairs(usual)
            if {*needed} <= {*columns}:
                return "pairs", shape, needed
    if kind in ("auto", "chat") and len(chats) == 1:
        return "chat", _chat(chats), [*chats, "tools"]
    if kind in ("auto", "text") and "text" in columns:
        return "text", _text, ["text"]
    raise UserError(
        f"data.kind {kind!r} does not fit the columns {', '.join(map(repr, columns[:30]))}: expected messages or "
        "conversations (chats), text, or columns that templates name (--data.prompt_template '{COLUMN}' "
        "--data.response_template '{COLUMN}')"
    )


def _chat(columns: Sequence[str]) -> Shape:
    """Chats in one column, or a prompt's messages in one and the answer's in another."""

    def shape(row: Row) -> Row:
        tools, messages = row.get("tools"), row.get(columns[-1])
        try:
            tools = json.loads(tools) if isinstance(tools, str) else tools
        except ValueError:
            raise UnusableRow("whose tools are no JSON") from None
        if columns[1:]:
            prompt, messages = messages_of(row.get(columns[0])) or [], messages_of(messages) or []
            messages = messages if messages[: len(prompt)] == prompt else prompt + messages
        messages, notes = clean_messages(messages)
        return {"messages": messages, "tools": tools or None, "notes": notes}

    return shape


def _text(row: Row) -> Row:
    if not isinstance(row.get("text"), str) or not row["text"].strip():
        raise UnusableRow("without text")
    return {"text": row["text"]}


def _pairs(source: Preset | tuple[str, str]) -> tuple[Sequence[str], Shape]:
    """The columns that a preset, or two format strings, need, and the shape of a prompt and its response.

    A preset's ``said`` is what a user says to a chat model, where that is another text than the prompt.
    """
    templates: dict[str, Callable[[Row], str]]
    if isinstance(source, Preset):
        columns, templates = source.columns, {"prompt": source.prompt, "response": source.response}
        if source.said is not None:
            templates["said"] = source.said
    else:
        try:
            names = [name for template in source for _, name, _, _ in Formatter().parse(template)]
        except ValueError as error:
            raise UserError(f"data: a template cannot be read: {error}; write {{{{ and }}}} for a brace") from error
        columns = [name for name in dict.fromkeys(names) if name and name.isidentifier()]
        templates = {"prompt": source[0].format_map, "response": source[1].format_map}

    def shape(row: Row) -> Row:
        for column in columns:
            if row.get(column) is None or row[column] != row[column]:  # NaN, a missing value of pandas
                raise UnusableRow(f"without the column {column}")
            if not isinstance(source, Preset) and not isinstance(row[column], str | int | float):
                raise UnusableRow(f"whose column {column} is a {type(row[column]).__name__}, not a text")
        try:
            texts = {name: template(row) for name, template in templates.items()}
        except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
            raise UnusableRow("that do not fit the template", f"{type(error).__name__} {error}") from error
        for name in ("response", "prompt"):
            if not texts[name].strip():
                raise UnusableRow(f"without a {name}")
        return {**texts}

    return columns, shape


# -- files and the Hub ------------------------------------------------------------------------------------------------


def _raw_rows(settings: DataSettings, seed: int, notes: list[str]) -> dict[str, list[Row]]:
    """Rows by split as they are in files, in a data set of the Hub, or made by the built-in task."""
    source, preset = settings.source, PRESETS.get(settings.source)
    files = {split: [path] for split in SPLITS if (path := getattr(settings, f"{split}_file")) is not None}
    counts = (settings.train_limit, settings.validation_examples, settings.test_examples)
    if source == "arithmetic" and not files:
        made = {split: problems(seed, split, n or 0, settings.difficulty) for split, n in zip(SPLITS, counts)}
        return {split: [{"question": p.question, "answer": p.solution} for p in made[split]] for split in SPLITS}
    if preset is None:  # the name of a preset wins over a path
        files = _local(source, notes) | files
    enough = None if counts[0] is None else 4 * sum(counts)  # some cannot be used
    found = {} if "train" in files else _from_hub(settings, preset, seed, enough)
    for split, paths in files.items():
        found[split] = []
        rows: Iterable[Row] = chain.from_iterable(map(iter_rows, paths))
        if file_format(paths[0]) == ".txt":
            rows = [{"text": text} for path in paths for text in _passages("".join(datasets.text_lines(path)))]
        for row in islice(rows, enough if settings.streaming else None):
            named = None  # the split of a row, of a preset whose splits are in one file
            if split == "train" and preset and preset.last_keys and all(column in row for column in preset.columns):
                named = preset.split_of(row)
            found.setdefault(named or split, []).append(row)
    return found


def _passages(text: str) -> list[str]:
    """Whole paragraphs (or, in a text without empty lines, lines), joined to at least `PASSAGE` characters."""
    gap, passages = "\n\n" if "\n\n" in text else "\n", [""]
    for paragraph in text.split(gap):
        passages[-1] += paragraph + gap
        if len(passages[-1]) >= PASSAGE:
            passages.append("")
    return [passage for passage in passages if passage.strip()]


def _local(source: str, notes: list[str]) -> dict[str, list[str]]:
    """Files of a source that is a path: one file is the training split, those of a folder go by their names.

    A split is one file or its numbered parts (data/train-00000-of-00002.parquet), at any depth.
    """
    path = Path(source)
    if not path.is_dir():
        looks = file_format(path) or source.startswith((".", "/", "~"))
        return {"train": [source]} if looks or path.is_file() else {}
    series: dict[str, dict[str, list[str]]] = {split: {} for split in ("", *SPLITS)}
    files = (file for file in path.rglob("*") if file_format(file) and file.stem not in NO_ROWS)
    for file in sorted(files):
        parts = reversed(file.relative_to(path).parts)  # the file's own name before its folders'
        words = [word for part in parts for word in re.findall("[a-z]+", part.lower())]
        split = next((split for word in words for split in SPLITS if word in SPLIT_NAMES[split]), "")
        numberless = file.parent / NUMBER.sub("", file.name)
        series[split].setdefault(str(numberless), []).append(str(file))
    other = series.pop("")
    if not series["train"] and len(other) == 1:
        series["train"], other = other, {}
    for split, found in series.items():
        if len(found) > 1 or (split == "train" and not found):
            names = ", ".join(files[0] for files in (found or other).values())
            raise UserError(
                f"data.source: the folder {source!r} has {len(found)} sets of {split} rows ({names or 'no file'}): "
                "give one file, or a folder with one file named train (jsonl, parquet, ...), or train-00000 and so on"
            )
    if other:
        notes.append(f"{source}: not read, as no split is in their names: {', '.join(other)}")
    return {split: files for split, found in series.items() for files in found.values()}


def _from_hub(settings: DataSettings, preset: Preset | None, seed: int, enough: int | None) -> dict[str, list[Row]]:
    """A data set of the Hub; of one with far more rows than needed a sample, of a stream the first rows."""
    name = preset.hub if preset else settings.source
    if name is None:
        raise UserError(f"data.source {settings.source!r} is not on the Hub: give local rows with data.train_file")
    found = dict[str, list[Row]]()
    try:
        loaded = datasets.load_hub(name, preset.config if preset else None, streaming=settings.streaming)
        for split, names in SPLIT_NAMES.items():
            wanted = preset.splits.get(split) if preset else next((n for n in names if n in loaded), None)
            if wanted in loaded:
                rows = loaded[wanted]
                if not settings.streaming and enough and len(rows) > enough:
                    rows = rows.shuffle(seed=seed).select(range(enough))
                found[split] = list(islice(rows, enough))
        if "train" not in found:
            raise ValueError(f"none of its splits {', '.join(loaded)} is named train")
    except (OSError, ValueError, RuntimeError) as error:
        raise UserError(
            f"data.source {settings.source!r} cannot be read: {' '.join(str(error).split())} (data.train_file; `hf "
            f"download {name} --repo-type dataset --local-dir DIR` fetches its files). A source is a preset "
            f"({', '.join(PRESETS)}), a file, a folder or a Hub name"
        ) from error
    return found
