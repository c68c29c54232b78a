"""The base class of drafters, the part of a method that proposes tokens, and the drafter that proposes nothing."""

from __future__ import annotations

import copy
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from decode.draft import Draft
from decode.models.runner import Runner
from decode.sampling import Rng
from decode.stopping import StopRule
from decode.trace import Round


@dataclass
class DraftRequest:
    """What the drafter of one text is asked for; see `Drafter.propose`."""

    drafter: Any
    ids: list[int]
    stop: StopRule
    max_depth: int
    rng: Rng


class Drafter:
    """Proposes tokens for the target to verify; only `propose` has to be written, every other method may do nothing."""

    # hidden states that the target keeps of every row it reads, for drafters that build on them: i is the state that
    # enters layer i, the number of layers the last one, after the final norm
    captured_layers: tuple[int, ...] = ()
    stop_ids: Collection[int] = ()  # tokens that end the text; the loop sets them before `start`
    defer_prefill = (
        False  # the text begins with rounds without a draft: its prompt may be read later; set before `start`
    )

    def start(self, ids: list[int]) -> None:
        """A new text begins with these tokens; what was learned may persist, what belongs to the old text may not."""

    def propose(self, ids: list[int], stop: StopRule, max_depth: int, rng: Rng) -> Draft:
        """A draft to follow the text.

        Args:
            ids: the text; its last token is pending, chosen but not yet read by the target.
            stop: asked after each drafted token whether to go on.
            max_depth: the deepest node allowed; the tokens that the text may still grow by, less one.
            rng: source of every random choice.
        """
        raise NotImplementedError

    def propose_together(self, asked: Sequence[DraftRequest]) -> list[Draft]:
        """A draft for each of several texts, every one by its own drafter of this kind (see `fork`)."""
        return [one.drafter.propose(one.ids, one.stop, one.max_depth, one.rng) for one in asked]

    def fork(self, targets: Sequence[Runner]) -> list[Drafter]:
        """Drafters for the texts of these targets, which share weights and tables but nothing that belongs to a text.

        Each begins every text with what this one has learned. The only one of a single target uses the caches of this.
        """
        return [copy.copy(self) for _ in targets]

    @property
    def cache_bytes_per_token(self) -> int:
        """Bytes that a token of a text takes in caches of its drafter."""
        return 0

    def close(self) -> None:
        """Give back what `fork` took."""

    def commit(self, ids: list[int]) -> None:
        """The text has grown to `ids`; its last token is pending."""

    def observe(self, round: Round) -> None:
        """Learn from a verified round."""

    def reset(self) -> None:
        """Forget everything learned from earlier texts."""


class NoDrafter(Drafter):
    """Proposes nothing: the loop becomes plain autoregression, the baseline of every speedup."""

    def propose(self, ids: list[int], stop: StopRule, max_depth: int, rng: Rng) -> Draft:
        """The empty draft."""
        return Draft.empty()
