"""Texts from outside: of files, settings and standard input, in UTF-8.

A lone surrogate, for which no tokenizer has ids, is left out of a setting or a prompt (`whole`), and a row that holds
one is dropped (`whole_rows`); both are named. All else stays as it was written.
"""

import gzip
import io
import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import yaml

from decode.errors import UserError
from decode.files import Fields

SURROGATE = re.compile("[\ud800-\udfff]")
DROPPED = "with a lone surrogate dropped"
"""Completes "3 rows ..."."""


def whole(text: str, name: str) -> str:
    """The text without lone surrogates, which a line on standard error names; pairs of them are joined."""
    if not SURROGATE.search(text):
        return text
    units = text.encode("utf-16-le", "surrogatepass")
    text = units.decode("utf-16-le", "ignore")
    if len(text.encode("utf-16-le")) < len(units):
        print(f"{name} holds a lone surrogate, or a byte that is not UTF-8: left out", file=sys.stderr)
    return text


def is_whole(*values: Any) -> bool:
    """Whether no text in plain data holds a lone surrogate."""
    return not SURROGATE.search(json.dumps(values, ensure_ascii=False, default=str))


def whole_rows(rows: Iterable[Fields], say: Callable[[str], object]) -> Iterator[Fields]:
    """The rows without lone surrogates; `say` is told at the end how many have some, and which is the first."""
    dropped = []
    for number, row in enumerate(rows, 1):
        if is_whole(row):
            yield row
        else:
            dropped.append(number)
    if dropped:
        say(f"{len(dropped)} row{'s' * (len(dropped) > 1)} {DROPPED} (row {dropped[0]})")


def columnar_rows(tables: Iterable[Any]) -> Iterator[Fields]:
    """The rows of Arrow's tables or batches as JSON has them.

    A struct has the keys of all others as nulls, which are left out; a map is an object, and a JSON column its value.
    """
    for table in tables:
        kinds = {column.name: column.type for column in table.schema}
        for row in table.to_pylist():
            yield {name: _plain(value, kinds[name]) for name, value in row.items()}


def _plain(value: Any, kind: Any) -> Any:
    if isinstance(value, str) and getattr(kind, "extension_name", "") == "arrow.json":
        return json.loads(value)
    if isinstance(value, dict):
        return {part.name: _plain(value[part.name], part.type) for part in kind if value[part.name] is not None}
    if isinstance(value, list):
        if hasattr(kind, "item_type"):  # a map's pairs
            return {str(key): _plain(item, kind.item_type) for key, item in value}
        return [_plain(item, getattr(kind, "value_type", None)) for item in value]
    return value


def arrow_batches(path: Path) -> list[Any]:
    """The batches of an Arrow file, or of a stream, as `datasets` writes it."""
    import pyarrow

    file = pyarrow.memory_map(str(path))
    opened = pyarrow.ipc.open_file if file.read(6) == b"ARROW1" else pyarrow.ipc.open_stream
    file.seek(0)
    return opened(file).read_all().to_batches(1000)


def text_lines(path: str | Path, newline: str | None = None) -> Iterator[str]:
    """The lines of a text file, which may be compressed with gzip.

    Raises:
        UserError: a byte that is not UTF-8, or a damaged file.
    """
    try:
        opener: Any = gzip.open if Path(path).suffix.lower() == ".gz" else open
        with opener(path, "rt", encoding="utf-8-sig", newline=newline) as file:
            yield from file
    except UnicodeDecodeError as error:
        raise UserError(f"{path} cannot be read: {error}; save it as UTF-8 (iconv -f latin1 -t utf-8)") from error
    except (OSError, EOFError, ValueError) as error:
        raise UserError(f"{path} cannot be read: {error}") from error


def read_stdin() -> str:
    """The text on standard input, whatever the locale's encoding."""
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(encoding="utf-8-sig", errors="surrogateescape")
    return whole(sys.stdin.read(), "standard input")


# -- YAML -------------------------------------------------------------------------------------------------------------

NUMBER, DATE = (f"tag:yaml.org,2002:{name}" for name in ("float", "timestamp"))


class _Loader(yaml.SafeLoader):
    """YAML whose numbers may be written as in JSON (1e6), and whose dates are texts."""

    yaml_implicit_resolvers = {  # noqa: RUF012
        first: [(tag, rule) for tag, rule in rules if tag != DATE]
        for first, rules in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }


_Loader.add_implicit_resolver(NUMBER, re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"), list("-+.0123456789"))


def read_yaml(content: str) -> Any:
    """Plain data of YAML; a ValueError for what is no YAML."""
    try:
        return yaml.load(content, _Loader)
    except yaml.YAMLError as error:
        raise ValueError(" ".join(str(error).split())) from error
