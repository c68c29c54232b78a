"""Prompt lookup: what followed the same n-gram earlier in this text (Saxena, 2023)."""

from dataclasses import dataclass, field

from decode.draft import Draft
from decode.drafters.base import Drafter, DraftRequest, Prompt


@dataclass
class NgramIndex:
    """Where the n-grams of a growing text ended most recently."""

    longest: int = 3  # longest n-gram looked up
    shortest: int = 1  # shortest n-gram looked up
    _after: dict[tuple[int, ...], int] = field(default_factory=dict, init=False, repr=False)
    _indexed: int = field(default=0, init=False, repr=False)

    def find(self, ids: list[int]) -> tuple[int, int]:
        """The longest last n-gram known from earlier in the text.

        Returns:
            n, 0 if none is known, and the position after its most recent earlier occurrence.
        """
        for end in range(self._indexed + 1, len(ids)):  # the last token has no continuation yet
            for n in range(self.shortest, min(self.longest, end) + 1):
                self._after[tuple(ids[end - n : end])] = end
        self._indexed = max(self._indexed, len(ids) - 1)
        for n in range(min(self.longest, len(ids) - 1), self.shortest - 1, -1):
            after = self._after.get(tuple(ids[-n:]))
            if after is not None:
                return n, after
        return 0, 0


def copy_from(ids: list[int], after: int, count: int) -> list[int]:
    """The `count` tokens from a position on; a copy that reaches the end of the text goes on with itself."""
    copied = ids[after : after + count]
    period = len(ids) - after
    while len(copied) < count:
        copied.append(copied[len(copied) - period])
    return copied


@dataclass
class LookupDrafter(Drafter):
    """Copies what followed the most recent earlier occurrence of the text's last n-gram, longest n first."""

    length: int = 10  # most tokens copied
    max_ngram: int = 3  # longest n-gram looked up
    min_ngram: int = 1  # shortest n-gram looked up

    def start(self, prompt: Prompt) -> NgramIndex:
        """The index of a text."""
        return NgramIndex(self.max_ngram, self.min_ngram)

    def draft(self, request: DraftRequest) -> Draft:
        """A chain of at most `length`, `max_depth` and the stop rule's window; empty where nothing matches."""
        count = min(self.length, request.max_depth, request.stop.window)
        n, after = request.state.find(request.ids) if count > 0 else (0, 0)
        return Draft.empty().with_branch(copy_from(request.ids, after, count) if n else [])
