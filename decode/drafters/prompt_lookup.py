"""Prompt lookup: what followed the same n-gram earlier in this text (Saxena, 2023)."""

from dataclasses import dataclass, field

import torch

from decode.draft import Draft
from decode.drafters.base import Drafter
from decode.sampling import Rng
from decode.stopping import StopRule


@dataclass
class LookupDrafter(Drafter):
    """Copies what followed the most recent earlier occurrence of the text's last n-gram, longest n first."""

    length: int = 10  # most tokens copied
    max_ngram: int = 3  # longest n-gram looked up
    min_ngram: int = 1  # shortest n-gram looked up
    _after: dict[tuple[int, ...], int] = field(default_factory=dict, init=False, repr=False)
    _indexed: int = field(default=0, init=False, repr=False)

    def start(self, ids: list[int]) -> None:
        """Forget the previous text and index this one."""
        self._after, self._indexed = {}, 0
        self._index(ids)

    def propose(self, ids: list[int], stop: StopRule, max_depth: int, rng: Rng) -> Draft:
        """A chain of at most ``length``, ``max_depth`` and the stop rule's cap; empty where nothing matches."""
        count = min(self.length, max_depth, stop.cap())
        n, after = self.find(ids) if count > 0 else (0, 0)
        return Draft.chain(torch.tensor(self.copy(ids, after, count), dtype=torch.long)) if n else Draft.empty()

    def find(self, ids: list[int]) -> tuple[int, int]:
        """The longest last n-gram known from earlier in the text.

        Returns:
            n, 0 if none is known, and the position after its most recent earlier occurrence.
        """
        self._index(ids)
        for n in range(min(self.max_ngram, len(ids) - 1), self.min_ngram - 1, -1):
            after = self._after.get(tuple(ids[-n:]))
            if after is not None:
                return n, after
        return 0, 0

    def copy(self, ids: list[int], after: int, count: int) -> list[int]:
        """The `count` tokens from a position on; a copy that reaches the end of the text goes on with itself."""
        copied = ids[after : after + count]
        period = len(ids) - after
        while len(copied) < count:
            copied.append(copied[len(copied) - period])
        return copied

    def _index(self, ids: list[int]) -> None:
        """Enter the n-grams that end before the last token, which has no continuation yet."""
        for end in range(self._indexed + 1, len(ids)):
            for n in range(self.min_ngram, min(self.max_ngram, end) + 1):
                self._after[tuple(ids[end - n : end])] = end
        self._indexed = max(self._indexed, len(ids) - 1)
