"""How rows of a source, whatever their columns, become pairs, chats or texts."""

import contextlib
import json
from collections.abc import Callable, Iterable, Sequence
from string import Formatter
from typing import Any

from decode.core.errors import UserError
from decode.prompts.data_presets import PRESETS, Preset
from decode.prompts.dataset_files import Row
from distill.config.data import DataSettings
from distill.data.tokenization.chat_masks import clean_messages
from distill.data.tokenization.label_masks import UnusableRow

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
