"""Rows from local files and from the Hugging Face Hub, with errors that say what to do next."""

import contextlib
import csv
import json
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from decode.core.errors import UserError

Row = dict[str, Any]


def read_rows(path: str | Path) -> list[Row]:
    """Every row of a local file, see `iter_rows`."""
    return list(iter_rows(path))


def iter_rows(path: str | Path) -> Iterator[Row]:
    """The rows of a local file: json, jsonl, csv, parquet, or txt (a row ``{"text": line}`` a line, none empty).

    All but json and txt are read as they are asked for.

    JSON is read with the standard library, so rows need not agree in their columns' types. A .json file is a list
    of rows, or an object with one list of them.

    Raises:
        UserError: no such file, an unknown ending, unreadable or without rows.
    """
    path = Path(path)
    if not path.is_file():
        raise UserError(f"there is no file {str(path)!r}: check the path (it is relative to {Path.cwd()})")
    reader = READERS.get(path.suffix.lower())
    if reader is None:
        raise UserError(f"{path} ends in {path.suffix!r}: rows are read from {', '.join(sorted(READERS))}")
    row = None
    try:
        for row in reader(path):
            if not isinstance(row, dict):
                raise UserError(
                    f"{path}: every row must be an object with named columns, such as {{'question': '...'}}"
                )
            yield row
    except UserError:
        raise
    except (ValueError, OSError, csv.Error) as error:
        raise UserError(f"{path} cannot be read as {path.suffix}: {error}") from error
    if row is None:
        raise UserError(f"{path} has no rows: give a file with at least one")


def load_hub(
    name: str,
    config: str | None = None,
    split: str | None = None,
    *,
    revision: str | None = None,
    streaming: bool = False,
) -> Any:
    """A data set from the Hugging Face Hub or its local cache: a ``DatasetDict``, or one split's ``Dataset``.

    With ``streaming`` their iterable kinds, which download what is asked for; from the cache, where the Hub is off.

    Whether the Hub answers is asked first, with a short limit: without a network this fails in seconds unless the
    data set is in the cache.

    Raises:
        UserError: not reachable and not cached, no such data set, configuration or split.
    """
    import datasets

    quiet_datasets()
    with _offline_unless_reachable(name) as offline:
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


def quiet_datasets() -> None:
    """Keeps the progress bars and messages of ``datasets`` out of the terminal."""
    import datasets

    datasets.disable_progress_bars()
    for noisy in ("datasets", "huggingface_hub", "httpx", "fsspec"):
        logging.getLogger(noisy).setLevel(logging.ERROR)


@contextlib.contextmanager
def _offline_unless_reachable(name: str) -> Iterator[bool]:
    """Inside, the Hub's libraries look in the cache only (True), if the Hub does not answer within seconds."""
    import datasets
    import huggingface_hub
    from huggingface_hub import constants

    offline = constants.HF_HUB_OFFLINE
    if not offline:
        try:
            huggingface_hub.HfApi().dataset_info(name, timeout=5)
        except huggingface_hub.errors.HfHubHTTPError:
            pass
        except Exception:  # whatever the network layer calls it: no answer
            offline = True
    before = constants.HF_HUB_OFFLINE, datasets.config.HF_HUB_OFFLINE
    constants.HF_HUB_OFFLINE = datasets.config.HF_HUB_OFFLINE = offline
    try:
        yield offline
    finally:
        constants.HF_HUB_OFFLINE, datasets.config.HF_HUB_OFFLINE = before


def _read_json(path: Path) -> list[Row]:
    data = json.loads(path.read_text(encoding="utf-8"))
    if isinstance(data, dict):
        lists = [value for value in data.values() if isinstance(value, list)]
        data = lists[0] if len(lists) == 1 else [data]
    return list(data)


def _read_jsonl(path: Path) -> Iterator[Row]:
    with path.open(encoding="utf-8", newline="\n") as lines:
        for number, line in enumerate(lines, 1):
            if line.strip():
                try:
                    yield json.loads(line)
                except ValueError as error:
                    raise ValueError(f"line {number}: {error}") from error


def _read_csv(path: Path) -> Iterator[Row]:
    with path.open(encoding="utf-8-sig", newline="") as file:
        yield from csv.DictReader(file)


def _read_parquet(path: Path) -> Iterator[Row]:
    import pyarrow
    import pyarrow.parquet

    try:
        for batch in pyarrow.parquet.ParquetFile(path).iter_batches():
            yield from batch.to_pylist()
    except pyarrow.ArrowException as error:
        raise ValueError(str(error)) from error


def _read_txt(path: Path) -> Iterator[Row]:
    lines = path.read_text(encoding="utf-8").splitlines()
    return ({"text": line} for line in lines if line.strip())


READERS: dict[str, Callable[[Path], Any]] = {
    ".json": _read_json,
    ".jsonl": _read_jsonl,
    ".csv": _read_csv,
    ".parquet": _read_parquet,
    ".txt": _read_txt,
}
