"""Rows of local files and of the Hugging Face Hub, and the templates that turn them into prompts and responses."""

import csv
import hashlib
import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from jinja2 import Environment, StrictUndefined, Template, TemplateError

from decode.errors import UserError

Row = dict[str, Any]


FORMATS = (".csv", ".json", ".jsonl", ".parquet", ".txt")
"""File name suffixes of `iter_rows`. JSON and CSV are not read by ``datasets``, which changes values: in version 5 the
JSON text "2020-01-01" becomes a datetime, and the CSV text "1.50" becomes 1.5."""


def _read(path: Path) -> Iterator[Row]:
    if path.suffix.lower() == ".parquet":
        import pyarrow.parquet

        for batch in pyarrow.parquet.ParquetFile(path).iter_batches():  # ArrowInvalid is a ValueError
            yield from batch.to_pylist()
        return
    with path.open(encoding="utf-8-sig", newline="" if path.suffix.lower() == ".csv" else "\n") as file:
        if path.suffix.lower() == ".csv":
            yield from csv.DictReader(file)
        elif path.suffix.lower() == ".json":
            data = json.load(file)
            if isinstance(data, dict):
                lists = [value for value in data.values() if isinstance(value, list)]
                data = lists[0] if len(lists) == 1 else [data]
            yield from data
        else:
            lines = (line for line in file if line.strip())
            yield from (
                map(json.loads, lines)
                if path.suffix.lower() == ".jsonl"
                else ({"text": line.rstrip("\r\n")} for line in lines)
            )


def iter_rows(path: str | Path) -> Iterator[Row]:
    """The rows of a local file: json (a list of rows, or an object with one such list), jsonl, csv, parquet, or txt.

    A txt file gives a row ``{"text": line}`` for each line that is not empty. All formats but json are read lazily.

    Raises:
        UserError: no such file, an unknown suffix, a file that is unreadable or has no rows.
    """
    path, number = Path(path), 0
    if not path.is_file():
        raise UserError(f"there is no file {str(path)!r}: check the path (it is relative to {Path.cwd()})")
    if path.suffix.lower() not in FORMATS:
        raise UserError(f"{path} ends in {path.suffix!r}: rows are read from {', '.join(FORMATS)}")
    try:
        for row in _read(path):
            number += 1
            if not isinstance(row, dict):
                raise ValueError("a row must be an object with named columns, such as {'question': '...'}")
            yield row
    except (ValueError, OSError, csv.Error) as error:
        raise UserError(f"{path} cannot be read as {path.suffix} near row {number + 1}: {error}") from error
    if not number:
        raise UserError(f"{path} has no rows: give a file with at least one")


def read_rows(path: str | Path) -> list[Row]:
    """All rows of a local file, see `iter_rows`."""
    return list(iter_rows(path))


def load_hub(
    name: str,
    config: str | None = None,
    split: str | None = None,
    *,
    revision: str | None = None,
    streaming: bool = False,
) -> Any:
    """Load a data set from the Hugging Face Hub or its local cache.

    Whether the Hub answers is checked first with a timeout of 5 seconds; without a network only the cache is used,
    instead of the long retries of ``datasets``.

    Returns:
        A ``DatasetDict``, or the ``Dataset`` of one split; with ``streaming`` their iterable kinds.

    Raises:
        UserError: not reachable and not cached, no such data set, configuration or split.
    """
    import datasets
    import huggingface_hub
    from huggingface_hub import constants

    quiet_datasets()
    before = constants.HF_HUB_OFFLINE, datasets.config.HF_HUB_OFFLINE
    offline = constants.HF_HUB_OFFLINE
    if not offline:
        try:
            huggingface_hub.HfApi().dataset_info(name, timeout=5)
        except huggingface_hub.errors.HfHubHTTPError:
            pass
        except Exception:  # the network layer has many exceptions; all mean that the Hub does not answer
            offline = True
    constants.HF_HUB_OFFLINE = datasets.config.HF_HUB_OFFLINE = offline
    try:
        online = streaming and not offline
        return datasets.load_dataset(name, config, split=split, revision=revision, streaming=online)
    except (OSError, ValueError, RuntimeError) as error:
        reason = str(error).strip().split("\n")[0]
        if offline:
            reason = "it is not in the local cache, and the Hub is switched off (HF_HUB_OFFLINE) or does not answer"
        raise UserError(
            f"the data set {name!r} (configuration {config!r}, split {split!r}) cannot be loaded from the Hugging "
            f"Face Hub: {reason}. Check the name and the network, or give a local file"
        ) from error
    finally:
        constants.HF_HUB_OFFLINE, datasets.config.HF_HUB_OFFLINE = before


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
        turns = (
            None if self.kind == "chat" else row.get("turns") or row.get("prompt")
        )  # the latter in a copy of MT-Bench
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


def held_out(prompt: str, fraction: float = 0.05) -> str:
    """The split of a row whose source has no validation and test splits, by a hash of its prompt.

    ``fraction`` of all prompts go to validation, as many to test, the rest to train; equal prompts share a split.
    """
    place = int.from_bytes(hashlib.blake2b(prompt.encode(), digest_size=6).digest(), "big") / 2**48
    return "validation" if place < fraction else "test" if place < 2 * fraction else "train"


@cache
def _template(source: str) -> Template:
    def innermost(value: Any) -> str:  # the first text of a list that a data set nests to any depth
        while isinstance(value, list):
            value = value[0] if value else ""
        return str(value or "")

    environment = Environment(keep_trailing_newline=True, undefined=StrictUndefined)
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
