"""Copies where the text repeats itself, and a draft model or feature head everywhere else.

After enough matching tokens a copy is accepted more often than what a small head drafts, and costs no forward.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from decode.core.draft import Drafts, Ids
from decode.core.round import Round
from decode.drafters.base import Drafter, DraftRequest, Prompt
from decode.drafters.lookup import SuffixIndex, copy_from
from decode.drafters.model import ModelDrafter
from decode.models.api import Out

LONGEST, SHORTEST = 8, 2  # tokens of the text's end that are looked up


@dataclass
class HybridState:
    """The head's state of a sequence, and the index of its text."""

    head: Any
    index: SuffixIndex


@dataclass
class HybridDrafter(Drafter):
    """The continuation of the longest matching end of the text, of at least `match` tokens; else the head's draft.

    Where the head drafts nothing, because its stop rule refuses or its context is full, a shorter match serves. What
    is copied depends on the text alone, so a copy is a deterministic draft and as lossless as prompt lookup's; whether
    the head is asked depends on the text alone too.
    """

    head: ModelDrafter  # the draft model or feature head
    match: int = 4  # tokens that have to match for a copy to be preferred to the head's draft
    length: int = 10  # most tokens copied; twice as many as matched at most
    branch: int = 0  # most tokens copied after a shorter match, as a branch of the head's tree; 0: it drafts chains

    def __post_init__(self) -> None:
        self.runner, self.capture = self.head.runner, self.head.capture
        self.cache_bytes_per_token = self.head.cache_bytes_per_token

    def start(self, prompt: Prompt) -> HybridState:
        """Index the text, and let the head read it."""
        return HybridState(self.head.start(prompt), SuffixIndex(SHORTEST))

    def propose(self, requests: Sequence[DraftRequest], device: torch.device) -> Drafts:
        """A copy or the head's draft; the heads that are asked draft together, and the stop rule's window is theirs."""
        matches = [request.state.index.latest(request.ids, max(LONGEST, self.match)) for request in requests]
        copies = [
            self._copy(request, self.length, *match) if match[0] >= self.match else []
            for request, match in zip(requests, matches)
        ]
        asked = [
            replace(self._of_head(r), max_depth=0) if copy else self._of_head(r) for r, copy in zip(requests, copies)
        ]
        drafts = self.head.propose(asked, device)
        for i, (request, n) in enumerate(zip(requests, drafts.lengths)):
            if not copies[i]:
                copies[i] = self._copy(request, self.branch if n else self.length, *matches[i])
                if not n:  # on an accelerator the head may have read what it refused, and a copy comes in its place
                    request.state.head.cache.truncate(len(request.ids))
        return drafts.with_copies(copies)

    @staticmethod
    def _of_head(request: DraftRequest) -> DraftRequest:
        return replace(request, state=request.state.head)

    @staticmethod
    def _copy(request: DraftRequest, most: int, matched: int, after: int) -> Ids:
        """The continuation of so many matched tokens, from the position after them."""
        count = min(most, request.max_depth, 2 * matched)
        return copy_from(request.ids, after, count) if count > 0 else []

    def feed(self, state: HybridState, prompt: Prompt, captured: Tensor) -> None:
        """See `Drafter.feed`."""
        self.head.feed(state.head, prompt, captured)

    def update(
        self, requests: Sequence[DraftRequest], rounds: Sequence[Round], out: Out, rows: Sequence[Sequence[int]]
    ) -> None:
        """The head learns from copies too: it drafts on from their features."""
        self.head.update(list(map(self._of_head, requests)), rounds, out, rows)

    def close(self, state: HybridState) -> None:
        """See `Drafter.close`."""
        self.head.close(state.head)
