"""The base class of drafters, the part of a method that proposes tokens, and the drafter that proposes nothing."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from decode.core.draft import Draft, Ids
from decode.core.round import Round
from decode.core.sampling import Rng
from decode.core.stop import StopRule
from decode.models.api import Capture, Model, Out


@dataclass
class Prompt:
    """A sequence that begins, as a drafter sees it."""

    ids: Ids  # the last one is pending, chosen but not yet read by the target
    cache: Any = None  # the target's cache of the sequence
    captured: Tensor | None = None  # `Drafter.capture` states of all tokens that the target has read
    stop_ids: Collection[int] = ()  # tokens that end the text
    defer_prefill: bool = False  # the first steps have no draft, so that the prompt may be read later
    alone: bool = True  # see `decode.core.loop.Text`


@dataclass
class DraftRequest:
    """What a drafter needs to propose a draft for one sequence."""

    state: Any  # what the drafter remembers of the sequence
    ids: Ids  # the sequence; its last token is pending
    stop: StopRule  # asked after each drafted token whether to go on
    max_depth: int  # the deepest node allowed: the tokens that the text may still grow by, less one
    rng: Rng  # source of every random choice
    keep_logits: bool = False  # the acceptance rule reads the draft's unwarped logits


class Drafter:
    """Proposes tokens for the target to verify. What it remembers of a sequence is a state, which `start` returns.

    A drafter has to define `draft`, or `propose` where sequences are drafted for together.
    """

    runner: Model | None = None
    """The model that drafts, if there is one."""
    capture: Capture = ()
    """Hidden states of the target that the drafter reads; see `Model.forward`."""
    cache_bytes_per_token: int = 0
    """Bytes that a token of a sequence takes in caches of the drafter."""

    def start(self, prompt: Prompt) -> Any:
        """The state of a sequence that begins."""

    def draft(self, request: DraftRequest) -> Draft:
        """A draft to follow one sequence."""
        raise NotImplementedError

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        """A draft for each of several sequences."""
        return [self.draft(request) for request in requests]

    def update(self, state: Any, ids: Ids, round: Round, out: Out) -> None:
        """Learn from a verified round, after which the text is `ids`; its last token is pending.

        `out` is the target's, row 0 after the token that was pending and row i + 1 after node i of the draft.
        """

    def close(self, state: Any) -> None:
        """Free the memory of a sequence that has ended."""

    def reserve(self, rows: int, length: int = 0) -> None:
        """See `Model.reserve`."""
        if self.runner is not None:
            self.runner.reserve(rows, length)


class NoDrafter(Drafter):
    """Proposes nothing: the loop becomes plain autoregression, the baseline of every speedup."""

    def draft(self, request: DraftRequest) -> Draft:
        """The empty draft."""
        return Draft.empty()
