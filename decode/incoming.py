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


def columnar_row(row: Fields) -> Fields:
    """A row of a columnar format, which gives every object the keys of all others as nulls, without these nulls."""
    return {key: _without_nulls(value) for key, value in row.items()}


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return list(map(_without_nulls, value)) if isinstance(value, list) else value


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
