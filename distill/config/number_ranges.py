"""Ranges of numbers that several sections of the settings share; jsonargparse refuses what is outside."""

from __future__ import annotations

from typing import TYPE_CHECKING

from jsonargparse.typing import restricted_number_type

if TYPE_CHECKING:
    ContextLength = int
    MinorShare = float
    ShareBelowOne = float
else:
    ContextLength = restricted_number_type("ContextLength", int, (">=", 8))
    MinorShare = restricted_number_type("MinorShare", float, [(">", 0), ("<", 0.5)])
    ShareBelowOne = restricted_number_type("ShareBelowOne", float, [(">=", 0), ("<", 1)])
