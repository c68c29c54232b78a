"""Rows of the three splits, from wherever the settings point, in one of three plain shapes.

A row is ``{"prompt", "response"}`` (pairs), ``{"messages"}`` (chat) or ``{"text"}`` (text). Splits that a source
lacks are split off its training rows by a hash of the prompt: deterministic, independent of the seed and of the
order, and equal prompts stay together.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from decode.core.errors import UserError
from decode.prompts.arithmetic import problems
from decode.prompts.files import READERS, Row, load_hub, read_rows
from decode.prompts.presets import PRESETS, Preset, held_out
from distill.config.data import DataSettings

SPLITS = ("train", "validation", "test")
SPLIT_NAMES = {"train": ("train",), "validation": ("validation", "valid", "val", "dev"), "test": ("test",)}
TEMPLATES = (
    ("{prompt}", "{response}"),
    ("{prompt}", "{completion}"),
    ("{question}\n", "{answer}"),
    ("{input}\n", "{output}"),
)
"""Prompt and response of rows with these columns, where no other template is given."""
PASSAGE = 2000
"""Characters of a plain text file that go to one split together, at least (whole paragraphs)."""


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
        counts = (settings.train_examples, settings.validation_examples, settings.test_examples)
        return SourceRows("pairs", {s: _arithmetic(seed, s, n, settings.difficulty) for s, n in zip(SPLITS, counts)})
    preset = PRESETS.get(settings.source)
    raw = _raw(settings, preset, seed)
    if not raw.get("train"):
        raise UserError(f"data.source {settings.source!r} has no training rows: give them with data.train_file")
    kind, shape = _shape(settings, preset, raw["train"][0])
    rows = SourceRows(kind, {split: [shape(row) for row in raw.get(split, [])] for split in SPLITS})
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


def _arithmetic(seed: int, split: str, count: int, difficulty: int) -> list[Row]:
    made = ({"question": p.question, "answer": p.solution} for p in problems(seed, split, count, difficulty))
    return [_from_preset(PRESETS["arithmetic"])(row) for row in made]


def _files(settings: DataSettings) -> dict[str, str]:
    given = {split: getattr(settings, f"{split}_file") for split in SPLITS}
    return {split: path for split, path in given.items() if path is not None}


def _raw(settings: DataSettings, preset: Preset | None, seed: int) -> dict[str, list[Row]]:
    """SourceRows as they are in the source, by split."""
    files = _files(settings) or _local(settings.source)
    if not files:
        return _hub(settings, preset, seed)
    found: dict[str, list[Row]] = {}
    for split, path in files.items():
        for row in _read(path, settings):
            own = (
                preset.split_of(row) if preset and split == "train" and not _has_columns_missing(preset, row) else None
            )
            found.setdefault(own or split, []).append(row)
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
    enough = 4 * (settings.train_examples + settings.validation_examples + settings.test_examples)
    found = {}
    for split, names in SPLIT_NAMES.items():
        wanted = preset.splits.get(split) if preset else next((n for n in names if n in loaded), None)
        if wanted in loaded:
            rows = loaded[wanted]
            chosen = rows.shuffle(seed=seed).select(range(enough)) if len(rows) > enough else rows
            found[split] = list(chosen)
    return found


def _has_columns_missing(preset: Preset, row: Row) -> list[str]:
    return [column for column in preset.columns if column not in row]


def _shape(settings: DataSettings, preset: Preset | None, row: Row) -> tuple[str, Callable[[Row], Row]]:
    """The kind of the rows, and the function that brings one into its plain shape."""
    if settings.prompt_template is not None and settings.response_template is not None:
        return "pairs", _from_templates(settings.prompt_template, settings.response_template)
    if preset is not None and settings.kind in ("auto", preset.kind):
        if missing := _has_columns_missing(preset, row):
            raise UserError(
                f"data: rows for {settings.source!r} need the columns {', '.join(preset.columns)}, but "
                f"{', '.join(missing)} is missing from {', '.join(row)}: give data.prompt_template and "
                "data.response_template for other columns"
            )
        if preset.kind == "chat":
            return "chat", lambda r: {"messages": r[settings.messages_column]}
        return "pairs", _from_preset(preset)
    return _guess(settings, row)


SHAREGPT = {"human": "user", "gpt": "assistant"}
"""ShareGPT's roles in the usual words."""


def _guess(settings: DataSettings, row: Row) -> tuple[str, Callable[[Row], Row]]:
    """The shape of rows without a preset, told by their columns as far as ``kind`` leaves it open."""
    kind, messages, text = settings.kind, settings.messages_column, settings.text_column
    if kind in ("auto", "chat") and messages in row:
        return "chat", lambda r: {"messages": _as_list(r[messages])}
    if kind in ("auto", "pairs"):
        if {"instruction", "output"} <= row.keys():
            return "pairs", _from_preset(PRESETS["alpaca"])
        for prompt, response in TEMPLATES:
            if {prompt.strip("{}\n"), response.strip("{}")} <= row.keys():
                return "pairs", _from_templates(prompt, response)
    if kind in ("auto", "text") and text in row:
        return "text", lambda r: {"text": str(r[text])}
    raise UserError(
        f"data.kind {kind!r} does not fit the columns {', '.join(map(repr, row))}: name the right one with "
        f"data.messages_column (now {messages!r}) or data.text_column (now {text!r}), or give data.prompt_template "
        "and data.response_template"
    )


def _as_list(value: Any) -> list[dict[str, Any]]:
    """Messages of a row; csv holds them as JSON text, ShareGPT names their fields otherwise and may begin halfway."""
    messages = list(json.loads(value) if isinstance(value, str) else value)
    if not messages or "from" not in messages[0]:
        return messages
    messages = [{"role": SHAREGPT.get(m["from"], m["from"]), "content": m["value"]} for m in messages]
    return messages[1:] if messages[0]["role"] == "assistant" else messages


def _from_preset(preset: Preset) -> Callable[[Row], Row]:
    return lambda row: {"prompt": preset.prompt(row), "response": preset.response(row)}


def _from_templates(prompt: str, response: str) -> Callable[[Row], Row]:
    def shape(row: Row) -> Row:
        try:
            return {"prompt": prompt.format_map(row), "response": response.format_map(row)}
        except (KeyError, IndexError, ValueError) as error:
            raise UserError(
                f"data: the templates {prompt!r} and {response!r} do not fit a row with the columns "
                f"{', '.join(row)}: {error}"
            ) from error

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
            rows.notes.append(f"{split}: {lost} rows left out, because their prompts are in a later split too")
        rows.splits[split] = kept
        seen |= {key_of(row) for row in kept}
