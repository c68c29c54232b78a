"""Command lines as people type them, put into the form that the parser reads."""

from __future__ import annotations

import json
import typing
from collections.abc import Sequence

VERBATIM = {"stop", "input", "runs"}
"""List options whose values are never cut at commas."""


def tidy(argv: Sequence[str], settings_class: type, prefix: str = "") -> list[str]:
    """Options as people type them, in the form that the parser reads: always ``--key=value``.

    Hyphens in names become underscores, a switch needs no value, lists take several values or commas.

    Args:
        argv: arguments.
        settings_class: whose options they are; unknown ones pass unchanged.
        prefix: put before the known names (the section of a configuration).
    """
    hints = typing.get_type_hints(settings_class)
    tidied: list[str] = []
    lists: dict[str, list[str]] = {}
    rest = list(argv)
    while rest:
        item = rest.pop(0)
        name, equals, value = item.partition("=")
        key = name[2:].replace("-", "_") if name.startswith("--") else ""
        if key.startswith("no_") and hints.get(key[3:]) is bool and not equals:
            tidied.append(f"--{prefix}{key[3:]}=false")
        elif key not in hints:
            tidied.append(item)
        elif hints[key] is bool:
            follows = rest.pop(0) if not equals and rest and rest[0].lower() in ("true", "false") else "true"
            tidied.append(f"--{prefix}{key}={value or follows}")
        elif typing.get_origin(hints[key]) is list:
            given = [value] if equals else []
            while not equals and rest and not rest[0].startswith("--"):
                given.append(rest.pop(0))
            if key not in VERBATIM:
                given = [part for one in given for part in _parts(one)]
            lists.setdefault(key, []).extend(given)
        elif equals or rest:
            tidied.append(f"--{prefix}{key}={value if equals else rest.pop(0)}")
        else:
            tidied.append(item)
    for key, given in lists.items():
        numbers = typing.get_args(hints[key])[0] is not str
        tidied.append(f"--{prefix}{key}=" + (f"[{','.join(given)}]" if numbers else json.dumps(given)))
    return tidied


def _parts(given: str) -> list[str]:
    if given.startswith("["):
        try:
            return [str(part) for part in json.loads(given)]
        except ValueError:
            given = given.strip("[]")
    return [part.strip() for part in given.split(",") if part.strip()]
