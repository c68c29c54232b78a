"""The error type for mistakes that a user can correct, and its messages for names that are not known."""

import difflib
from collections.abc import Collection, Mapping
from typing import TypeVar

Entry = TypeVar("Entry")


class UserError(ValueError):
    """A foreseeable mistake; the message has the value seen, what was expected and the next step.

    The command-line front ends print it without a traceback and exit with status 2.
    """


def first_line(message: object) -> str:
    """The first line of a message that says something; empty if none does."""
    return next((line.strip() for line in str(message).splitlines() if line.strip()), "")


def unknown(kind: str, name: str, entries: Collection[str]) -> str:
    """The message for a name that is not among the known ones: the nearest of them, then all."""
    near = "".join(f"did you mean {other!r}? " for other in difflib.get_close_matches(name, entries, 1))
    return f"unknown {kind} {name!r}; {near}choose one of {', '.join(entries)}"


def choose(kind: str, name: str, entries: Mapping[str, Entry]) -> Entry:
    """The entry of a name; a `UserError` with the nearest one where there is none."""
    if name not in entries:
        raise UserError(unknown(kind, name, entries))
    return entries[name]
