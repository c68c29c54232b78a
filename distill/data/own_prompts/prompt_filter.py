"""Which prompts are kept: rules that look at one, and a memory of those before it."""

import math
import re
from collections import Counter, defaultdict
from collections.abc import Collection

from distill.config.own_prompts import PromptSettings

WORD = re.compile(r"\w+")
Triple = tuple[str, ...]


class PromptFilter:
    """Keeps what is new and usable, and counts why the others were dropped.

    Args:
        settings: Limits.
        markers: Texts of the chat template that no prompt may contain.

    Attributes:
        kept: Prompts kept so far.
        dropped: How many were dropped for which reason.
    """

    def __init__(self, settings: PromptSettings, markers: Collection[str] = ()) -> None:
        self.settings, self.markers = settings, tuple(markers)
        self.kept, self.dropped = 0, Counter[str]()
        self._texts: set[str] = set()
        self._starts: set[Triple] = set()
        self._triples: list[set[Triple]] = []
        self._places: dict[Triple, list[int]] = defaultdict(list)

    def written(self, text: str, tokens: int, *, ended: bool) -> bool:
        """Whether a prompt that the target wrote is kept.

        Args:
            text: What it wrote, without the end token.
            tokens: How many tokens that is.
            ended: Whether it ended by itself.
        """
        return self._count(self._unusable(text, tokens, ended) or self._seen(text), text)

    def given(self, text: str) -> bool:
        """Whether a prompt of a file is kept: unless it repeats one before it."""
        return self._count(self._seen(text), text)

    def _count(self, reason: str | None, text: str) -> bool:
        if reason is not None:
            self.dropped[reason] += 1
            return False
        self.kept += 1
        words = _words(text)
        self._texts.add(" ".join(words) or text)
        if len(words) >= self.settings.same_start:
            self._starts.add(tuple(words[: self.settings.same_start]))
        triples = _triples(words)
        for triple in triples:
            self._places[triple].append(len(self._triples))
        self._triples.append(triples)
        return True

    def _unusable(self, text: str, tokens: int, ended: bool) -> str | None:
        """What is wrong with a prompt by itself."""
        settings = self.settings
        if not ended:
            return f"unfinished after {settings.max_tokens} tokens"
        if tokens < settings.min_tokens or not text.strip():
            return f"shorter than {settings.min_tokens} tokens"
        if "\ufffd" in text:
            return "broken characters"
        if any(marker in text for marker in self.markers):
            return "template markers inside"
        letters = [character for character in text if character.isalpha()]
        if sum(map(str.isascii, letters)) < settings.ascii_letters * max(1, len(letters)):
            return f"less than {settings.ascii_letters:.0%} ASCII letters"
        return None

    def _seen(self, text: str) -> str | None:
        """Whether it repeats a prompt that was kept."""
        words = _words(text)
        if (" ".join(words) or text) in self._texts:
            return "repeated"
        start = tuple(words[: self.settings.same_start])
        if len(start) == self.settings.same_start and start in self._starts:
            return "nearly repeated"
        triples = _triples(words)
        needed = math.ceil(self.settings.overlap * len(triples))
        if not needed:
            return None
        # an earlier prompt with so many of the triples has at least one of the rarest (all - needed + 1) among them
        rare = sorted(triples, key=lambda triple: (len(self._places.get(triple, ())), triple))
        places = {place for triple in rare[: len(triples) - needed + 1] for place in self._places.get(triple, ())}
        near = any(len(triples & self._triples[place]) >= needed for place in places)
        return "nearly repeated" if near else None


def _words(text: str) -> list[str]:
    return WORD.findall(text.lower())


def _triples(words: list[str]) -> set[Triple]:
    return {tuple(words[at : at + 3]) for at in range(len(words) - 2)}
