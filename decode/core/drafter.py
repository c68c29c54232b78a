"""Who drafts: the protocol `Drafter`, and the drafter that proposes nothing."""

from __future__ import annotations

from typing import Protocol

from decode.core.proposal import Draft
from decode.core.rng import Rng
from decode.core.stopping import StopRule
from decode.core.trace import Round


class Drafter(Protocol):
    """Proposes tokens for the target to verify."""

    def start(self, ids: list[int]) -> None:
        """A new text begins with these tokens; learned tables may persist, what is bound to the old text may not."""
        ...

    def propose(self, ids: list[int], stop: StopRule, room: int, rng: Rng) -> Draft:
        """A draft below the last token of `ids`, no deeper than `room`."""
        ...

    def commit(self, ids: list[int]) -> None:
        """The text as accepted so far; its last token is pending."""
        ...

    def observe(self, round: Round) -> None:
        """Learn from a verified round."""
        ...


class NoDrafter:
    """Proposes nothing: the loop becomes plain autoregression, the baseline of every speedup."""

    def start(self, ids: list[int]) -> None:
        """Nothing to prepare."""

    def propose(self, ids: list[int], stop: StopRule, room: int, rng: Rng) -> Draft:
        """The empty draft."""
        return Draft.empty()

    def commit(self, ids: list[int]) -> None:
        """Nothing to keep."""

    def observe(self, round: Round) -> None:
        """Nothing to learn."""
