"""Texts from outside: of files, settings and standard input.

Files and standard input are UTF-8, or UTF-16 or 32 by their byte order mark, which is no part of the text. Half a
character (a lone surrogate), for which no tokenizer has ids, is left out of a setting or a prompt (`whole`), and a row
that holds one is dropped (`whole_rows`); both are counted and named. All else stays as it was written.
"""

import bz2
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

PACKED: Fields = {".gz": gzip, ".bz2": bz2}
HALF = re.compile("[\ud800-\udfff]+")
HALVED = "with half a character (a lone surrogate) dropped"
"""Completes "3 rows ..."."""


def whole(text: str, name: str) -> str:
    """The text without half characters, which a line on standard error counts and names; two halves are joined."""
    if not HALF.search(text):
        return text
    text, count = HALF.subn("", text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "surrogatepass"))
    if count:
        where = f"half a character at {count} place{'s' * (count > 1)}"
        print(f"{name} holds {where} (a lone surrogate, or a byte that is not UTF-8): left out", file=sys.stderr)
    return text


def is_whole(*values: Any) -> bool:
    """Whether no text in plain data holds half a character."""
    return not HALF.search(json.dumps(values, ensure_ascii=False, default=str))


def whole_rows(rows: Iterable[Fields], say: Callable[[str], object]) -> Iterator[Fields]:
    """The rows whose texts are whole; `say` is told at the end how many are not, and which is the first."""
    halved = []
    for number, row in enumerate(rows, 1):
        if is_whole(row):
            yield row
        else:
            halved.append(number)
    if halved:
        say(f"{len(halved)} row{'s' * (len(halved) > 1)} {HALVED} (row {halved[0]})")


def columnar_row(row: Fields) -> Fields:
    """A row of a columnar format, which gives every object the keys of all others as nulls, without these nulls."""
    return {key: _without_nulls(value) for key, value in row.items()}


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return list(map(_without_nulls, value)) if isinstance(value, list) else value


def text_lines(path: str | Path, newline: str | None = None) -> Iterator[str]:
    """The lines of a text file, which may be compressed.

    Raises:
        UserError: a byte that is not UTF-8, with its line, or a damaged file.
    """
    try:
        packed = PACKED.get(Path(path).suffix.lower())
        with io.BufferedReader(packed.open(path) if packed else io.FileIO(path), 1 << 20) as binary:
            encoding = json.detect_encoding(binary.peek(4)[:4])
            for number, line in enumerate(io.TextIOWrapper(binary, encoding, "surrogateescape", newline), 1):
                if not line.isascii() and (bad := HALF.search(line)):
                    byte = ord(bad[0][0]) & 255
                    where = f"line {number}: its character {bad.start() + 1}, the byte 0x{byte:02x}"
                    raise ValueError(f"{where}, is not UTF-8; save it as UTF-8 (iconv -f latin1 -t utf-8)")
                yield line
    except (OSError, EOFError, ValueError) as error:
        raise UserError(f"{path} cannot be read: {error}") from error


def read_stdin() -> str:
    """The text on standard input, whatever the locale's encoding.

    Raises:
        UserError: UTF-16 or 32 that is damaged.
    """
    try:
        if isinstance(sys.stdin, io.TextIOWrapper) and isinstance(sys.stdin.buffer, io.BufferedReader):
            start = sys.stdin.buffer.peek(4)[:4]
            sys.stdin.reconfigure(encoding=json.detect_encoding(start), errors="surrogateescape")
        return whole(sys.stdin.read(), "standard input")
    except UnicodeDecodeError as error:
        raise UserError(f"standard input cannot be read: {error}; give it as UTF-8") from error


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
