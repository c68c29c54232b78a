"""Ranges of numbers that several sections of the settings share; jsonargparse refuses what is outside."""

from __future__ import annotations

from typing import TYPE_CHECKING

from jsonargparse.typing import restricted_number_type

if TYPE_CHECKING:
    ShareBelowOne = float
else:
    ShareBelowOne = restricted_number_type("ShareBelowOne", float, [(">=", 0), ("<", 1)])
