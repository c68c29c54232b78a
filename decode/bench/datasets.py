"""Rows of local files and of the Hugging Face Hub, and the templates that turn them into prompts and responses."""

import csv
import hashlib
import io
import json
import logging
import lzma
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any

import pyarrow.ipc
import pyarrow.parquet
import yaml
from jinja2 import Environment, StrictUndefined, Template, TemplateError

from decode.errors import UserError

Row = dict[str, Any]


FORMATS = (".csv", ".tsv", ".json", ".jsonl", ".ndjson", ".parquet", ".arrow", ".txt")
"""File name suffixes of `iter_rows`. JSON and CSV are not read by ``datasets``, which changes values: in version 5 the
JSON text "2020-01-01" becomes a datetime, and the CSV text "1.50" becomes 1.5."""
csv.field_size_limit(2**31 - 1)  # a chat in one field may be long


def file_format(path: str | Path) -> str:
    """The suffix among `FORMATS` of a file, which may be compressed (rows.jsonl.gz); empty if it has none of them."""
    suffixes = [suffix.lower() for suffix in Path(path).suffixes]
    while suffixes and suffixes[-1] in (".gz", ".bz2", ".xz", ".zst"):
        suffixes.pop()
    return suffixes[-1] if suffixes and suffixes[-1] in FORMATS else ""


def text_lines(path: str | Path, newline: str | None = None) -> Iterator[str]:
    """The lines of a text file, which may be compressed; in UTF-8, or UTF-16 or 32 by its byte order mark.

    Raises:
        UserError: a byte that is not UTF-8, with its line, or a damaged file.
    """
    try:
        suffix = Path(path).suffix.lower()
        packed = {".gz": "gzip", ".bz2": "bz2", ".zst": "zstd"}.get(suffix)
        unpack = lzma.LZMAFile if suffix == ".xz" else partial(pyarrow.input_stream, compression=packed)
        binary = io.BufferedReader(unpack(str(path)), 1 << 20)
        encoding = json.detect_encoding(binary.peek(4)[:4])
        for number, line in enumerate(io.TextIOWrapper(binary, encoding, "surrogateescape", newline), 1):
            try:
                line.encode()
            except UnicodeEncodeError as bad:
                where = f"line {number}: its character {bad.start + 1}, the byte 0x{ord(line[bad.start]) & 255:02x},"
                raise ValueError(f"{where} is not UTF-8; save the file as UTF-8 (iconv -f latin1 -t utf-8)") from bad
            yield line
    except (OSError, EOFError, ValueError, lzma.LZMAError) as error:
        raise UserError(f"{path} cannot be read: {error}") from error


def _read(path: Path) -> Iterator[Any]:
    form = file_format(path)
    if form == ".parquet":
        for batch in pyarrow.parquet.ParquetFile(path).iter_batches():  # ArrowInvalid is a ValueError
            yield from batch.to_pylist()
    elif form == ".arrow":
        with pyarrow.memory_map(str(path)) as source:
            opened = pyarrow.ipc.open_file if source.read(6) == b"ARROW1" else pyarrow.ipc.open_stream
            source.seek(0)
            for batch in opened(source).read_all().to_batches():
                yield from batch.to_pylist()
    elif form in (".csv", ".tsv"):
        reader = csv.DictReader(text_lines(path, ""), delimiter="," if form == ".csv" else "\t", strict=True)
        for row in reader:
            if None in row or len(row) < len(reader.fieldnames or ()):
                raise ValueError(
                    f"its {len(row)} fields are not those of the header: quote fields with a separator inside"
                )
            yield row
    elif form == ".txt":
        yield from ({"text": line.rstrip("\r\n")} for line in text_lines(path) if line.strip())
    elif form == ".json":
        lines = list(text_lines(path))
        try:
            yield from _rows_of(json.loads("".join(lines)))
        except json.JSONDecodeError as error:
            if error.msg != "Extra data":
                raise
            yield from map(json.loads, filter(str.strip, lines))  # JSON Lines under the name of JSON
    else:
        yield from map(json.loads, filter(str.strip, text_lines(path)))


def _rows_of(data: Any) -> list[Any]:
    """The rows of a JSON file: a list of them, also under a name, a table as pandas writes it, or one row."""
    if not isinstance(data, dict):
        return data if isinstance(data, list) else [data]
    values = list(data.values())
    if {"columns", "data"} <= data.keys() and all(isinstance(row, list) for row in data["data"]):  # orient="split"
        return [dict(zip(data["columns"], row, strict=True)) for row in data["data"]]
    if all(isinstance(value, dict) for value in values):
        if all(name.isdigit() for name in data):  # orient="index"
            return values
        if all(label.isdigit() for column in values for label in column):  # orient="columns"
            return [{name: column.get(label) for name, column in data.items()} for label in values[0]]
    lists = [value for value in values if isinstance(value, list) and not messages_of(value)]
    tables = [value for value in lists if value and all(isinstance(row, dict) for row in value)]
    if len(tables) < len(lists) == len(values) and len(set(map(len, lists))) == 1:  # orient="list"
        return [dict(zip(data, row)) for row in zip(*lists)]
    return tables[0] if len(tables) == 1 else [data]


def messages_of(value: Any) -> list[Any] | None:
    """The messages in a value that is a list of them, or the JSON text of one; None for other values."""
    try:
        found = json.loads(value) if isinstance(value, str) and value.lstrip().startswith("[") else value
    except ValueError:
        return None
    roles = {"role", "from"}
    chat = isinstance(found, list) and found and all(isinstance(one, dict) and roles & one.keys() for one in found)
    return found if chat else None


def iter_rows(path: str | Path) -> Iterator[Row]:
    """The rows of a local file of one of `FORMATS`; text formats may be compressed with gzip, bz2, xz or zstd.

    A txt file gives a row ``{"text": line}`` for each line that is not empty. All formats but json are read lazily.

    Raises:
        UserError: no such file, an unknown suffix, a file that is unreadable or has no rows.
    """
    path, number = Path(path), 0
    if not path.is_file():
        raise UserError(f"there is no file {str(path)!r}: check the path (it is relative to {Path.cwd()})")
    if not file_format(path):
        raise UserError(f"{path} ends in {path.suffix!r}: rows are read from {', '.join(FORMATS)}")
    try:
        for row in _read(path):
            if not isinstance(row, dict):
                raise ValueError("a row must be an object with named columns, such as {'question': '...'}")
            number += 1
            yield row
    except UserError:
        raise
    except (ValueError, TypeError, OSError, NotImplementedError, csv.Error) as error:
        raise UserError(f"{path} cannot be read as {file_format(path)} near row {number + 1}: {error}") from error
    if not number:
        raise UserError(f"{path} has no rows: give a file with at least one")


def read_rows(path: str | Path) -> list[Row]:
    """All rows of a local file, see `iter_rows`."""
    return list(iter_rows(path))


def load_hub(name: str, config: str | None = None, split: str | None = None, *, streaming: bool = False) -> Any:
    """Load a data set from the Hugging Face Hub (its branch, tag or commit behind an @) or its local cache.

    Returns:
        A ``DatasetDict``, or the ``Dataset`` of one split; with ``streaming`` their iterable kinds.

    Raises:
        UserError: not reachable and not cached, no such data set, configuration or split.
    """
    import datasets
    from huggingface_hub import constants

    from decode.models.wrapped import pinned

    quiet_datasets()
    repository, revision = pinned(name)
    datasets.config.HF_HUB_OFFLINE = offline = constants.HF_HUB_OFFLINE
    try:
        return datasets.load_dataset(repository, config, split=split, streaming=streaming and not offline, **revision)
    except (OSError, ValueError, RuntimeError, datasets.exceptions.DatasetsError) as error:
        reason = " ".join(str(error.__cause__ or error).split())
        if offline:
            reason = "it is not in the local cache, and the Hub is switched off (HF_HUB_OFFLINE) or does not answer"
        raise UserError(
            f"the data set {name!r} (configuration {config!r}, split {split!r}) cannot be loaded from the Hugging "
            f"Face Hub: {reason}. Check the name and the network, or give a local file"
        ) from error


def quiet_datasets() -> None:
    """Switch off the progress bars and messages of ``datasets``."""
    import datasets

    datasets.disable_progress_bars()
    for noisy in ("datasets", "huggingface_hub", "httpx", "fsspec"):
        logging.getLogger(noisy).setLevel(logging.ERROR)


@dataclass(frozen=True)
class Preset:
    """Templates of one data set and its place on the Hub; ``datasets.yaml`` documents each key."""

    columns: Sequence[str]
    templates: Mapping[str, str]  # Jinja templates; keys among ``prompt``, ``response`` and ``said``
    hub: str | None = None
    config: str | None = None
    configs: Sequence[str] = ()
    file: str = ""
    placeholder: str = ""
    splits: Mapping[str, str] = field(default_factory=lambda: {"train": "train", "test": "test"})
    kind: str = "pairs"
    scorer: str | None = None
    key: str = ""
    category: str = ""
    groups: Mapping[str, str] = field(default_factory=dict)
    several_turns: bool = False
    last_keys: Mapping[str, int] = field(default_factory=dict)

    def prompt(self, row: Mapping[str, Any]) -> str:
        """The text that a model continues.

        Raises:
            ValueError: a row without its turns, or that does not fit the template.
        """
        return self._filled("prompt", row) if "prompt" in self.templates else self.turns(row)[0]

    def response(self, row: Mapping[str, Any]) -> str:
        """The expected answer, as text to train on; raises as `prompt` does."""
        return self._filled("response", row)

    @property
    def said(self) -> Callable[[Mapping[str, Any]], str] | None:
        """A function from a row to the user's turn for a chat model; None: the prompt is the turn."""
        return (lambda row: self._filled("said", row)) if "said" in self.templates else None

    def turns(self, row: Mapping[str, Any]) -> tuple[str, ...]:
        """The user's turns of a row with several turns; empty for data sets of one turn."""
        if not self.several_turns:
            return ()
        # the Hub's copy of MT-Bench calls them prompt
        turns = None if self.kind == "chat" else row.get("turns") or row.get("prompt")
        if turns is None:
            turns = [message["content"] for message in row.get("messages") or () if message["role"] == "user"]
        if not isinstance(turns, list | tuple) or not turns or not all(isinstance(turn, str) for turn in turns):
            raise ValueError(
                f"the turns must be a list of texts in a column turns, prompt or messages; it has {', '.join(row)}"
            )
        return tuple(turns)

    def split_of(self, row: Mapping[str, Any]) -> str | None:
        """The official split of a row, for files that hold all splits; None where a file is one split."""
        return next((split for split, last in self.last_keys.items() if row[self.key] <= last), None)

    def _filled(self, name: str, row: Mapping[str, Any]) -> str:
        try:
            return _template(self.templates[name]).render(row)
        except TemplateError as error:
            raise ValueError(str(error)) from error


def held_out(key: Any, fraction: float = 0.05) -> str:
    """The split of a row whose source has no validation and test splits, by a hash of its prompt, or of a chat.

    ``fraction`` of all keys go to validation, as many to test, the rest to train; rows of equal keys share a split.
    """
    key = key if isinstance(key, str) else json.dumps(key, sort_keys=True, default=str)
    place = int.from_bytes(hashlib.blake2b(key.encode(), digest_size=6).digest(), "big") / 2**48
    return "validation" if place < fraction else "test" if place < 2 * fraction else "train"


@cache
def _template(source: str) -> Template:
    def innermost(value: Any) -> str:  # the first text of a list that a data set nests to any depth
        while isinstance(value, list):
            value = value[0] if value else ""
        return str(value or "")

    def plain(value: Any) -> Any:
        if isinstance(value, list | dict):
            raise ValueError(f"a {type(value).__name__} where a text is expected: {str(value)[:60]}")
        return value

    environment = Environment(keep_trailing_newline=True, undefined=StrictUndefined, finalize=plain)
    environment.filters["innermost"] = innermost
    return environment.from_string(source)


def _presets() -> dict[str, Preset]:
    found = {}
    for name, entry in yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8")).items():
        templates = {key: entry.pop(key) for key in ("prompt", "response", "said") if key in entry}
        groups = {category: group for group, of in entry.pop("groups", {}).items() for category in of}
        found[name] = Preset(templates=templates, several_turns=entry.pop("turns", False), groups=groups, **entry)
    return found


PRESETS = _presets()
"""All known data sets by their names in ``data.source`` and ``--suite``."""
