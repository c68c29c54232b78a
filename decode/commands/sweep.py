"""``--sweep KEY=VALUE,VALUE``: a small grid of settings, run point by point; finished points are kept."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from decode.core.errors import UserError
from decode.core.files import write_text

MOST = 200
"""Points of a grid above which a typing mistake is likelier than patience."""


@dataclass(frozen=True)
class Point:
    """One place in the grid: option to value, both as typed."""

    values: Mapping[str, str]

    @property
    def label(self) -> str:
        """Such as ``beta=0.1 draft_length=3``: the last part of each key, or all of it where two would be alike."""
        lasts = [key.rsplit(".", 1)[-1] for key in self.values]
        names = [last if lasts.count(last) == 1 else key for last, key in zip(lasts, self.values)]
        return " ".join(f"{name}={value}" for name, value in zip(names, self.values.values()))

    @property
    def folder(self) -> str:
        """The label as a plain folder name."""
        return re.sub(r"[^\w.=-]+", ",", self.label).strip(",.")

    @property
    def options(self) -> list[str]:
        """The values as options, for the parser."""
        return [f"--{key}={value}" for key, value in self.values.items()]

    @property
    def typed(self) -> dict[str, Any]:
        """The values as YAML reads them: numbers are numbers."""
        return {key: yaml.safe_load(value) for key, value in self.values.items()}


def take_sweep(argv: list[str]) -> dict[str, list[str]]:
    """Remove every ``--sweep KEY=VALUE,VALUE`` from the arguments; returns the values by key, empty without any.

    Raises:
        UserError: no key, no value, or a key that is swept twice.
    """
    axes: dict[str, list[str]] = {}
    rest: list[str] = []
    items = iter(argv)
    for item in items:
        if item != "--sweep" and not item.startswith("--sweep="):
            rest.append(item)
            continue
        given = item.partition("=")[2] if item != "--sweep" else next(items, "")
        key, _, told = given.partition("=")
        key, values = key.lstrip("-"), list(dict.fromkeys(v.strip() for v in told.split(",") if v.strip()))
        if not key or not values:
            raise UserError(f"--sweep is {given!r}, wanted KEY=VALUE,VALUE such as --sweep draft_length=1,3,5")
        if key in axes:
            raise UserError(f"{key} is swept twice; give all its values in one --sweep {key}=...")
        axes[key] = values
    argv[:] = rest
    return axes


def grid(axes: Mapping[str, Sequence[str]]) -> list[Point]:
    """All combinations, the last key varying fastest.

    Raises:
        UserError: more of them than anybody would wait for.
    """
    points = [Point(dict(zip(axes, values))) for values in itertools.product(*axes.values())]
    if len(points) > MOST:
        raise UserError(f"the sweep has {len(points)} points, the most is {MOST}; take fewer values")
    return points


def each(
    points: Sequence[Point], results: Sequence[Path], key: Callable[[int], str], measure: Callable[[int], None]
) -> None:
    """Run what is not finished; a point counts as finished while its key stays the same and its result is there.

    Args:
        points: of the grid.
        results: the file that each point ends with; a note on what it was made from is kept beside it.
        key: fingerprint of everything that the point's result depends on.
        measure: runs the point of this index.
    """
    for index, point in enumerate(points):
        note = results[index].with_name("point.json")
        print(f"[{index + 1}/{len(points)}] {point.label}", end="", flush=True)
        if results[index].is_file() and finished(note, key(index)):
            print(": finished before, kept")
            continue
        print(flush=True)
        note.unlink(missing_ok=True)
        measure(index)
        write_text(note, json.dumps({"key": key(index)}) + "\n")


def finished(note: Path, key: str) -> bool:
    """Whether the note speaks of a finished point with this key."""
    try:
        return bool(json.loads(note.read_text(encoding="utf-8"))["key"] == key)
    except (OSError, ValueError, KeyError, TypeError):
        return False
