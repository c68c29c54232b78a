"""The one error type for mistakes that a user can correct."""

import difflib
from collections.abc import Collection, Mapping
from typing import TypeVar

Entry = TypeVar("Entry")


class UserError(ValueError):
    """A foreseeable mistake: says what was seen, what was wanted and what to do next.

    The command-line front ends print it without a traceback and exit with status 2.
    """


def unknown(kind: str, name: str, known: Collection[str]) -> str:
    """What to say of a name that is not among the known ones: the nearest of them, then all."""
    near = difflib.get_close_matches(name, known, 1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    return f"unknown {kind} {name!r}; {hint}choose one of {', '.join(known)}"


def choose(kind: str, name: str, known: Mapping[str, Entry]) -> Entry:
    """The entry of a name; a `UserError` with the nearest one where there is none."""
    if name not in known:
        raise UserError(unknown(kind, name, known))
    return known[name]
