"""The error type for mistakes that a user can correct, and its messages for names that are not known."""

import difflib
import os
import pkgutil
import sys
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


def named(kind: str, name: str, entries: Mapping[str, Entry]) -> Entry:
    """The entry of a name, or what ``module.name`` is in code of the user's, in the working directory too.

    Raises:
        UserError: there is no such entry, or it cannot be imported or called.
    """
    if "." not in name:
        return choose(kind, name, entries)
    here = os.getcwd()
    sys.path.append(here)  # last: a file there replaces no other module
    try:
        found: Entry = pkgutil.resolve_name(name)
    except Exception as error:  # of any kind: the module is run
        raise UserError(
            f"{kind} {name!r} cannot be imported ({type(error).__name__}: {error}): give module.name of your own code"
        ) from error
    finally:
        sys.path[:] = [path for path in sys.path if path is not here]  # the module may have added others behind it
    if not callable(found):
        raise UserError(
            f"{kind} {name!r} is of type {type(found).__name__}, expected a function or class: give module.name of one"
        )
    return found
