"""The base class of drafters, the part of a method that proposes tokens, and the drafter that proposes nothing."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from decode.core.draft import Draft, Drafts, Ids
from decode.core.round import Round
from decode.core.sampling import History, Rng
from decode.core.stop import StopRule
from decode.models.api import Capture, Model, Out


@dataclass
class Prompt:
    """A sequence that begins, as a drafter sees it."""

    ids: Ids  # the last one is pending, chosen but not yet read by the target
    cache: Any = None  # the target's cache of the sequence
    stop_ids: Collection[int] = ()  # tokens that end the text
    defer_prefill: bool = False  # the first steps have no draft, so that the prompt may be read later
    shares_learning: bool = True  # see `decode.loop.Text`


@dataclass
class DraftRequest:
    """What a drafter needs to propose a draft for one sequence."""

    state: Any  # what the drafter remembers of the sequence
    ids: Ids  # the sequence; its last token is pending
    stop: StopRule  # asked after each drafted token whether to go on
    max_depth: int  # the deepest node allowed: the tokens that the text may still grow by, less one
    rng: Rng  # source of every random choice
    history: History  # of `ids`, for warps that look at them
    keep_logits: bool = False  # the acceptance rule reads the draft's unwarped logits


class Drafter:
    """Proposes tokens for the target to verify. What it remembers of a sequence is a state, which `start` returns.

    A drafter has to define `draft`, or `propose` where sequences are drafted for together.
    """

    trees: bool = False
    """Whether drafts may be trees; otherwise they are chains."""
    runner: Model | None = None
    """The model that drafts, if there is one."""
    capture: Capture = ()
    """Hidden states of the target that the drafter reads; see `Model.forward`."""
    cache_bytes_per_token: int = 0
    """Bytes that a token of a sequence takes in caches of the drafter."""

    def start(self, prompt: Prompt) -> Any:
        """The state of a sequence that begins, before the target has read it."""

    def feed(self, state: Any, prompt: Prompt, captured: Tensor) -> None:
        """Take the `capture` states ``[tokens, captured layers · width]`` of a prompt's next tokens."""

    def draft(self, request: DraftRequest) -> Draft:
        """A draft to follow one sequence, made on the host."""
        raise NotImplementedError

    def propose(self, requests: Sequence[DraftRequest], device: torch.device) -> Drafts:
        """A draft for each of several sequences, on this device, the target's."""
        return Drafts.of([self.draft(request) for request in requests], device, trees=self.trees)

    def update(
        self, requests: Sequence[DraftRequest], rounds: Sequence[Round], out: Out, rows: Sequence[Sequence[int]]
    ) -> None:
        """Learn from verified rounds, one of each sequence, after which its text is `DraftRequest.ids`.

        Args:
            requests: of the round.
            rounds: its results.
            out: the target's, of each sequence a row after the token that was pending and one after each node of the
                draft that was proposed.
            rows: of each sequence those of the token that was pending and of the accepted nodes.
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
        return Draft(())
