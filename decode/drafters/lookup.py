"""What followed the same tokens before: prompt lookup (Saxena, 2023) and suffix decoding (Oliaro et al., NeurIPS 2025).

An index holds tokens and the places of their n-grams. A match of the text's last n-gram is extended backwards place by
place, so no suffix tree is needed, and counts of continuations are counts of places.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from decode.core.draft import Draft, Ids
from decode.core.round import Round
from decode.drafters.base import Drafter, DraftRequest, Prompt
from decode.models.api import Out

NEWEST = 256  # most places of a match that are looked at, the last ones
END = -1  # follows every text of an index of several; no token


@dataclass
class SuffixIndex:
    """Tokens, and for each n-gram of them the positions after its occurrences."""

    ngram: int = 1  # shortest match
    tokens: Ids = field(default_factory=list)
    _after: dict[tuple[int, ...], list[int]] = field(default_factory=dict, init=False, repr=False)

    def extend(self, tokens: Ids) -> None:
        """Add tokens at the end; of an index of several texts, a text and `END`."""
        known = self.tokens
        first, n = max(self.ngram, len(known)), self.ngram
        known += tokens
        for at in range(first, len(known)):
            self._after.setdefault(tuple(known[at - n : at]), []).append(at)

    def matches(self, ids: Ids, longest: int) -> Iterator[tuple[int, list[int]]]:
        """What the end of a text matches here, shorter matches first; of those at the same places only the longest.

        At most `longest` tokens are compared, and the last `NEWEST` places looked at. Yields how many tokens match, and
        the positions after them in ascending order.
        """
        known, end, matched = self.tokens, ids[-longest:], self.ngram
        places = self._after.get(tuple(end[-matched:]), [])[-NEWEST:]
        while places:
            before = end[-matched - 1] if matched < len(end) else None
            longer = [at for at in places if at > matched and known[at - matched - 1] == before]
            if len(longer) < len(places):
                yield matched, places
            matched, places = matched + 1, longer

    def latest(self, ids: Ids, longest: int) -> tuple[int, int]:
        """Tokens at the end of a growing text that stand in it earlier too (0: none), and the last place after them."""
        self.extend(ids[len(self.tokens) :])
        matched, places = [(0, [0]), *self.matches(ids, longest)][-1]
        return matched, places[-1]


def copy_from(ids: Ids, after: int, count: int) -> Ids:
    """The `count` tokens from a position on; a copy that reaches the end of the text goes on with itself."""
    copied = ids[after : after + count]
    period = len(ids) - after
    while len(copied) < count:
        copied.append(copied[len(copied) - period])
    return copied


def commonest(rows: Sequence[Ids], least: float) -> tuple[Ids, float]:
    """Follow the commonest token of each column, among the rows that agree so far; of equals that of the first row.

    Rows are continuations, which `END` may end early. The tokens are followed while at least the share `least` of all
    rows begins with them, which estimates the probability that they are accepted. Returns the tokens, and the sum of
    these shares, which estimates how many of them are accepted.
    """
    total, chain, score = len(rows), Ids(), 0.0
    while True:
        depth = len(chain)
        counts = Counter(row[depth] for row in rows if len(row) > depth and row[depth] != END)
        token, count = max(counts.items(), key=lambda item: item[1], default=(END, 0))
        if not count or count < least * total:
            return chain, score
        rows = [row for row in rows if len(row) > depth and row[depth] == token]
        chain.append(token)
        score += count / total


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
        return Draft(copy_from(request.ids, after, count) if n else ())


@dataclass
class SuffixDrafter(Drafter):
    """Drafts the continuation with the highest expected number of accepted tokens.

    Every match of the text's end in the text itself or in earlier texts gives a continuation (`commonest`), which is at
    most `factor` times as long as the match. Texts that end are added to the index, prompts included; in a batch, where
    a text must not depend on its neighbours, none is added.
    """

    longest: int = 24  # most tokens of the text's end that are compared
    factor: float = 1.0  # drafted tokens for each token that matches
    least: float = 0.1  # least product of frequencies of a drafted token
    capacity: int = 1 << 18  # tokens of earlier texts; beyond, the older half is forgotten
    earlier: SuffixIndex = field(default_factory=SuffixIndex, init=False, repr=False)

    def start(self, prompt: Prompt) -> tuple[SuffixIndex, bool]:
        """The index of the text, and whether later texts may know it."""
        index = SuffixIndex()
        index.extend(prompt.ids)
        return index, prompt.shares_learning

    def draft(self, request: DraftRequest) -> Draft:
        """A chain of at most `max_depth` tokens and the stop rule's window; empty where nothing matches."""
        index, most = request.state[0], min(request.max_depth, request.stop.window)
        matches = [
            (n, places, known.tokens)
            for known in (index, self.earlier)
            for n, places in known.matches(request.ids, self.longest)
        ]
        chain, score = [], 0.0
        for n, places, tokens in sorted(matches, key=lambda match: -match[0]):
            length = min(most, int(self.factor * n))
            if length <= score:  # a token counts one at most
                break
            # of equally common tokens the latest
            new, expected = commonest([tokens[at : at + length] for at in reversed(places)], self.least)
            if expected > score:
                chain, score = new, expected
        return Draft(chain)

    def update(
        self, requests: Sequence[DraftRequest], rounds: Sequence[Round], out: Out, rows: Sequence[Sequence[int]]
    ) -> None:
        """Index what the round added to each text."""
        for request in requests:
            index = request.state[0]
            index.extend(request.ids[len(index.tokens) :])

    def close(self, state: tuple[SuffixIndex, bool]) -> None:
        """Learn the text for later ones."""
        index, shares_learning = state
        if shares_learning:
            self.earlier.extend([*index.tokens, END])
        if len(self.earlier.tokens) > self.capacity:
            kept, self.earlier = self.earlier.tokens[-self.capacity // 2 :], SuffixIndex(self.earlier.ngram)
            self.earlier.extend(kept)
