"""Every setting of a configuration and every option of a command stands in the list ``settings.yaml``."""

from __future__ import annotations

import inspect
import pkgutil
from collections.abc import Iterable
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, get_type_hints

import yaml

from decode.__main__ import COMMANDS
from decode.commands.cli import _types
from distill.config import AblateSettings
from probes.settings import ProbesSettings

MOST = 115  # of a training


def by_class(kinds: Iterable[Any]) -> dict[str, str]:
    """The names that each dataclass of settings adds, with its bases and sections; a section itself is no setting."""
    found: dict[str, str] = {}
    for kind in kinds:
        bases, hints = list(filter(is_dataclass, kind.__mro__)), get_type_hints(kind)
        inherited = {field.name for base in bases[1:] for field in fields(base)}
        sections = {name: [*filter(is_dataclass, _types(hints[name]))] for name in inspect.get_annotations(kind)}
        names = " ".join(name for name, inside in sections.items() if not inside and name not in inherited)
        found |= {kind.__name__: names} if names else {}
        found |= by_class([*bases[1:], *(each for inside in sections.values() for each in inside)])
    return found


def test_a_setting_is_added_by_changing_the_list() -> None:
    """A section that is used twice, such as training, counts once."""
    settings = by_class([AblateSettings])
    found = {
        "distill": settings,
        "probes": dict(by_class([ProbesSettings]).items() - settings.items()),
        "decode": by_class(pkgutil.resolve_name(command["settings"]) for command in COMMANDS.values()),
    }
    assert found == yaml.safe_load(Path(__file__).with_name("settings.yaml").read_text())
    assert len(" ".join(settings.values()).split()) <= MOST
