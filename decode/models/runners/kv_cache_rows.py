"""Runners whose texts share a cache, each in a row of it, so that one forward reads all of them."""

from collections.abc import Sequence
from typing import Self

from torch import Tensor

from decode.core.runner_protocol import Runner
from decode.models.runners.fast_forward import FastForward


class RowRunner(Runner):
    """A runner over a row of a `FastForward`'s cache."""

    forward: FastForward  # the layers and their cache
    _row = 0
    _texts: list[Self]
    """By row, once the cache is shared."""

    @property
    def row(self) -> int:
        """See `Runner.row`; it changes when a text in a lower one is closed."""
        return self._row

    @property
    def slots_used(self) -> int:
        """Slots of the cache that are in use."""
        return self.length

    @property
    def cache_bytes_per_token(self) -> int:
        """See `Runner.cache_bytes_per_token`."""
        cache = self.forward.cache
        return cache.shape[0] * cache.shape[2] * cache.shape[4] * cache.element_size()

    def share(self, forks: list[Self]) -> None:
        """Give runners of the same forward rows of the cache behind those in use."""
        self._texts.extend([] if self._texts else [self])
        self.forward.reserve_rows(len(self._texts) + len(forks))
        for fork in forks:
            fork._row, fork._texts = len(self._texts), self._texts
            self._texts.append(fork)

    def close(self) -> None:
        """Leave the cache; the text in its last row moves into the free one. The memory goes with the last but one.

        A text that has left or never shared is left as it is.
        """
        if not self._texts:
            return
        last = self._texts.pop()
        if last is not self:
            self.forward.move_row(last._row, self._row, last.slots_used)
            last._row, self._texts[self._row] = self._row, last
        if len(self._texts) == 1:
            self._texts.clear()
            self.forward.reserve_rows(1)
        self._texts = []


def hand_out(texts: Sequence[Runner], hidden: Tensor, counts: Sequence[int]) -> None:
    """Give each text its rows of the last hidden states, text after text."""
    for text, own in zip(texts, hidden.split(list(counts))):
        text.hidden = own
