"""The n-gram table of a corpus: the most frequent successors of every context (Adaptix, Eq. 1)."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

import numpy as np

from decode.core.errors import UserError
from decode.drafters.corpus_files import map_arrays, save_arrays

KIND = "n-gram table"
SUCCESSORS = 12


def table_file(path: str | Path, order: int) -> Path:
    """Where the table of this order lies in the folder ``path``."""
    return Path(path) / f"ngrams-{order}.safetensors"


def bits_per_token(order: int) -> int:
    """Bits a token gets, so that an n-gram is one 64-bit key."""
    return min(31, 64 // order)


def save_ngram_table(
    text: np.ndarray, path: Path, fingerprint: str, *, order: int = 3, successors: int = SUCCESSORS
) -> Path:
    """Count the n-grams of a corpus (as `join_documents` returns it), and write the table to the folder ``path``.

    P(w | context) = C(context, w) / C(context), over all successors of the context, of which the
    ``successors`` most frequent are kept (ties: the smaller id). N-grams never span two documents.

    Raises:
        UserError: an order outside 2 to 4, or ids too large for the order (order 4 takes ids below 65,536).
    """
    if not 2 <= order <= 4:
        raise UserError(f"n-gram order {order} is not supported: give 2, 3 or 4")
    bits = bits_per_token(order)
    if int(text.max()) > 1 << bits:
        raise UserError(
            f"order {order} takes token ids below {1 << bits:,}, the corpus holds {int(text.max()) - 1:,}: "
            "take a lower order"
        )
    grams, counts = _count(text, order, bits)
    contexts = grams >> np.uint64(bits)
    heads = np.flatnonzero(np.diff(contexts, prepend=~contexts[:1]))
    sizes = np.diff(heads, append=len(grams))
    share = counts / np.repeat(np.add.reduceat(counts, heads), sizes) if len(grams) else np.empty(0)
    ranked = np.lexsort((-counts, contexts))
    kept = ranked[np.arange(len(grams)) - np.repeat(heads, sizes) < successors]
    arrays = {
        "contexts": contexts[heads],
        "offsets": np.append(0, np.cumsum(np.minimum(sizes, successors))).astype(np.int64),
        "tokens": (grams[kept] & np.uint64((1 << bits) - 1)).astype(np.int32),
        "probabilities": share[kept].astype(np.float32),
    }
    file = table_file(path, order)
    save_arrays(file, arrays, kind=KIND, fingerprint=fingerprint, order=order, successors=successors)
    return file


def _count(text: np.ndarray, order: int, bits: int) -> tuple[np.ndarray, np.ndarray]:
    """Every n-gram inside a document as an ascending 64-bit key, and how often it occurs."""
    size = max(0, len(text) - order + 1)
    key = np.zeros(size, dtype=np.uint64)
    inside = np.ones(size, dtype=bool)
    for i in range(order):
        tokens = text[i : i + size]
        inside &= tokens > 0
        key <<= np.uint64(bits)
        key |= tokens - (tokens > 0)
    key = key[inside]
    key.sort()
    heads = np.flatnonzero(np.append(True, key[1:] != key[:-1])[: len(key)])
    return key[heads], np.diff(heads, append=len(key))


class NgramTable:
    """A memory-mapped n-gram table.

    A context is one integer, the tokens of the last ``order − 1`` positions packed ``bits`` bits each;
    appending a token is ``((context << bits) | token) & mask``.
    """

    def __init__(self, arrays: dict[str, memoryview], order: int) -> None:
        """Wrap the mapped arrays; use `open`."""
        self.order = order
        self.bits = bits_per_token(order)
        self.mask = (1 << self.bits * (order - 1)) - 1
        self._contexts = arrays["contexts"].cast("Q")
        self._offsets = arrays["offsets"].cast("q")
        self._tokens = arrays["tokens"].cast("i")
        self._probabilities = arrays["probabilities"].cast("f")
        self.successors = lru_cache(maxsize=1 << 16)(self._successors)

    @classmethod
    def open(cls, path: str | Path, fingerprint: str, *, order: int = 3, verify: bool = True) -> NgramTable:
        """Map the table of this order in the folder ``path``.

        Raises:
            UserError: missing, truncated, corrupt, or of another tokenizer.
        """
        file = table_file(path, order)
        command = f"trigrams build --order {order}"
        _, arrays = map_arrays(file, kind=KIND, fingerprint=fingerprint, verify=verify, command=command)
        return cls(arrays, order)

    def __len__(self) -> int:
        """Number of contexts."""
        return len(self._contexts)

    def context(self, ids: Sequence[int]) -> int | None:
        """The packed last ``order − 1`` tokens; None where there are too few, or an id is out of range."""
        tail = ids[len(ids) - self.order + 1 :] if len(ids) >= self.order - 1 else ()
        if not tail or max(tail) >> self.bits:
            return None
        key = 0
        for token in tail:
            key = (key << self.bits) | token
        return key

    def _successors(self, context: int) -> tuple[list[int], list[float]]:
        """Successors of a packed context, most frequent first, and their probabilities (the sum may be < 1)."""
        at = bisect_left(self._contexts, context)
        if at == len(self._contexts) or self._contexts[at] != context:
            return [], []
        low, high = self._offsets[at], self._offsets[at + 1]
        probabilities: list[float] = self._probabilities[low:high].tolist()  # type: ignore[assignment]
        return self._tokens[low:high].tolist(), probabilities
