"""Copies where the text repeats itself or a corpus, and a draft model or feature head everywhere else.

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
from decode.drafters.lookup import SuffixIndex, commonest, copy_from
from decode.drafters.model import ModelDrafter
from decode.drafters.rest import Datastore
from decode.models.api import Out

LONGEST, SHORTEST = 8, 2  # tokens of the text's end that are looked up
OCCURRENCES = 256  # most occurrences in the corpus whose continuations are read
SUPPORT = 0.2  # share of the occurrences that have to go on like the copy, for it to go on


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
    store: Datastore | None = None  # a corpus, such as the target's own answers; None looks in the text only
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
        matches = list(map(self._match, requests))
        copies = [
            self._copy(request, self.length, *match) if max(match[0], match[2]) >= self.match else []
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

    def _match(self, request: DraftRequest) -> tuple[int, int, int]:
        """Tokens of the text's end found in the text, the position after them, and tokens found in the corpus."""
        ids, longest = request.ids, max(LONGEST, self.match)
        in_store = self.store.longest(ids, longest, SHORTEST)[0] if self.store is not None else 0
        return *request.state.index.latest(ids, longest), in_store

    def _copy(self, request: DraftRequest, most: int, in_text: int, after: int, in_store: int) -> Ids:
        """The continuation of the longer match; from the corpus, the most frequent one that `SUPPORT` holds for."""
        matched = max(in_text, in_store)
        count = min(most, request.max_depth, 2 * matched)
        if count < 1:
            return []
        if in_text == matched or self.store is None:  # of equals the text is closer to what is being written
            return copy_from(request.ids, after, count)
        rows = self.store.continuations(
            request.ids, length=count, limit=OCCURRENCES, max_span=matched, min_span=SHORTEST
        )
        return commonest(rows.tolist(), SUPPORT)[0]

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
