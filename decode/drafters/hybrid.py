"""Copies where the text repeats itself or a corpus, and a draft model or feature head everywhere else.

After enough matching tokens a copy is accepted more often than what a small head drafts, and costs no forward.
"""

import copy
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from decode.draft import Draft
from decode.drafters.base import Drafter, DraftRequest
from decode.drafters.draft_model import ModelDrafter
from decode.drafters.prompt_lookup import LookupDrafter
from decode.drafters.rest import Datastore
from decode.models.runner import Runner
from decode.sampling import Rng
from decode.stopping import StopRule
from decode.trace import Round

LONGEST, SHORTEST = 8, 2  # tokens of the text's end that are looked up
OCCURRENCES = 256  # most occurrences in the corpus whose continuations are read
SUPPORT = 0.2  # share of the occurrences that have to go on like the copy, for it to go on


class HybridDrafter(Drafter):
    """The continuation of the longest matching end of the text, of at least `match` tokens; else the head's draft.

    Where the head drafts nothing, because its stop rule refuses or its context is full, a shorter match serves. What
    is copied depends on the text alone, so a copy is a deterministic draft and as lossless as prompt lookup's; whether
    the head is asked depends on the text alone too.

    Attributes:
        head: the draft model or feature head.
        store: a corpus, such as the target's own answers; None looks in the text only.
        match: tokens that have to match for a copy to go before the head.
        length: most tokens copied; twice as many as matched at most.
        branch: most tokens copied after a shorter match, as a branch of the head's tree; 0 where it drafts chains.
    """

    def __init__(
        self, head: ModelDrafter, store: Datastore | None = None, *, match: int = 4, length: int = 10, branch: int = 0
    ) -> None:
        self.head, self.store, self.match, self.length, self.branch = head, store, match, length, branch
        self.text = LookupDrafter(length=length, max_ngram=max(LONGEST, match), min_ngram=SHORTEST)

    @property
    def captured_layers(self) -> tuple[int, ...]:  # type: ignore[override]
        """Those of the head."""
        return self.head.captured_layers

    def start(self, ids: list[int]) -> None:
        """Index the text, and let the head read it."""
        self.head.stop_ids, self.head.defer_prefill = self.stop_ids, self.defer_prefill
        self.text.start(ids)
        self.head.start(ids)

    def propose(self, ids: list[int], stop: StopRule, max_depth: int, rng: Rng) -> Draft:
        """A copy or the head's draft; the stop rule's window is the head's."""
        return self.propose_together([DraftRequest(self, ids, stop, max_depth, rng)])[0]

    def propose_together(self, asked: Sequence[DraftRequest]) -> list[Draft]:
        """See `Drafter.propose_together`: the heads that are asked draft together."""
        drafts = [Draft.empty() for _ in asked]
        matches = [one.drafter._match(one.ids) for one in asked]
        copies: list[list[int]] = [
            one.drafter._copy(one.ids, min(self.length, one.max_depth), *match) if max(match[::2]) >= self.match else []
            for one, match in zip(asked, matches)
        ]
        heads = [i for i, one in enumerate(asked) if one.max_depth > 0 and not copies[i]]
        if heads:
            to_heads = [replace(asked[i], drafter=asked[i].drafter.head) for i in heads]
            for i, draft in zip(heads, self.head.propose_together(to_heads)):
                drafts[i] = draft
        for i, one in enumerate(asked):
            if not len(drafts[i]):
                copied = copies[i] or one.drafter._copy(one.ids, min(self.length, one.max_depth), *matches[i])
                drafts[i] = Draft.chain(torch.tensor(copied, dtype=torch.long))
            elif self.branch:
                copied = one.drafter._copy(one.ids, min(self.branch, one.max_depth), *matches[i])
                drafts[i] = drafts[i].with_branch(copied)
        return drafts

    def _match(self, ids: list[int]) -> tuple[int, int, int]:
        """Tokens of the text's end found in the text, the position behind them, and tokens found in the corpus."""
        in_store = self.store.longest(ids, self.text.max_ngram, SHORTEST)[0] if self.store is not None else 0
        return *self.text.find(ids), in_store

    def _copy(self, ids: list[int], most: int, in_text: int, after: int, in_store: int) -> list[int]:
        """The continuation of the longer match."""
        matched = max(in_text, in_store)
        count = min(most, 2 * matched)
        if count < 1:
            return []
        if in_text == matched:  # of equals the text is closer to what is being written
            return self.text.copy(ids, after, count)
        assert self.store is not None
        rows = self.store.continuations(ids, length=count, limit=OCCURRENCES, max_span=matched, min_span=SHORTEST)
        return most_frequent(rows)

    def fork(self, targets: Sequence[Runner]) -> list[Drafter]:
        """See `Drafter.fork`."""
        forks = [copy.copy(self) for _ in targets]
        for fork, head in zip(forks, self.head.fork(targets)):
            assert isinstance(head, ModelDrafter)
            fork.head, fork.text = head, copy.copy(self.text)
        return list(forks)

    @property
    def cache_bytes_per_token(self) -> int:
        """See `Drafter.cache_bytes_per_token`."""
        return self.head.cache_bytes_per_token

    def close(self) -> None:
        """See `Drafter.close`."""
        self.head.close()

    def commit(self, ids: list[int]) -> None:
        """The head drops what was rejected."""
        self.head.commit(ids)

    def observe(self, round: Round) -> None:
        """The head sees copies too: it drafts on from their features."""
        self.head.observe(round)

    def reset(self) -> None:
        """Forget what the head learned."""
        self.head.reset()


def most_frequent(rows: np.ndarray) -> list[int]:
    """The most frequent first token, the most frequent one after it, and so on, as long as `SUPPORT` holds.

    Args:
        rows: int ``[rows, length]``; -1 ends a row early.
    """
    chain: list[int] = []
    needed = SUPPORT * len(rows)
    for column in range(rows.shape[1]):
        tokens, counts = np.unique(rows[:, column], return_counts=True)
        counts[tokens < 0] = 0
        if not len(counts) or counts.max() < max(1.0, needed):
            break
        chain.append(int(tokens[counts.argmax()]))
        rows = rows[rows[:, column] == chain[-1]]
    return chain
