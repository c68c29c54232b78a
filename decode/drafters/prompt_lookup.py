"""Prompt lookup: what followed the same n-gram earlier in this text (Saxena, 2023)."""

from dataclasses import dataclass

from decode.draft import Draft
from decode.drafters.base import Drafter, DraftRequest, Prompt
from decode.drafters.suffix import SuffixIndex


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

    def start(self, prompt: Prompt) -> SuffixIndex:
        """The index of a text."""
        return SuffixIndex(self.min_ngram)

    def draft(self, request: DraftRequest) -> Draft:
        """A chain of at most `length`, `max_depth` and the stop rule's window; empty where nothing matches."""
        count = min(self.length, request.max_depth, request.stop.window)
        n, after = request.state.latest(request.ids, self.max_ngram) if count > 0 else (0, 0)
        return Draft.empty().with_branch(copy_from(request.ids, after, count) if n else [])
