"""Settings that came later, and fingerprints of settings that stay as they were before."""

from dataclasses import MISSING, asdict, fields, is_dataclass
from typing import Any

LATER = {"later": True}
"""Metadata of a setting that came after others were in fingerprints: while it has its default it is in none, so that
what was made before there was such a setting stays valid."""


def decisive(section: Any) -> dict[str, Any]:
    """A section's settings for a fingerprint: all but those that came later and have their default."""
    values = asdict(section)
    for field in fields(section):
        value = getattr(section, field.name)
        default = field.default if field.default_factory is MISSING else field.default_factory()
        if field.metadata == LATER and value == default:
            del values[field.name]
        elif is_dataclass(value):
            values[field.name] = decisive(value)
    return values
