"""REST: what followed this context in a corpus, as a tree of continuations (He et al., NAACL 2024)."""

from __future__ import annotations

import struct
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from decode.draft import Draft, heaviest_tree
from decode.drafters.base import Drafter, DraftRequest
from decode.drafters.corpus_files import map_arrays, save_arrays
from decode.errors import UserError

KIND = "datastore"
FILE = "datastore.safetensors"
DEPTH = 32  # tokens that order the suffixes: the longest span plus continuation that can be asked for
BLOCK = 1 << 23  # suffixes refined at once: bounds the memory of the later passes


def suffix_array(text: np.ndarray, depth: int = DEPTH) -> np.ndarray:
    """Positions of all suffixes of ``text``, ordered by their first ``depth`` tokens or more.

    Prefix doubling (Manber & Myers) that sorts only the groups still tied (Larsson & Sadakane): the first
    pass packs as many tokens as fit into one 64-bit key, each later one doubles the depth.

    Args:
        text: unsigned ``[n]``, n < 2^31, as `join_documents` returns it: it ends with a separator.
        depth: how many tokens decide; suffixes equal that far keep an arbitrary order.

    Returns:
        int32 ``[n]``.
    """
    n, bits = len(text), 8 * text.dtype.itemsize
    known = 64 // bits  # tokens by which the suffixes are ordered
    key = np.zeros(n, dtype=np.uint64)
    for i in range(known):
        key <<= np.uint64(bits)
        key[: max(0, n - i)] |= text[i:]
    order = np.argsort(key).astype(np.int32)
    key = key[order]
    first = np.append(True, key[1:] != key[:-1])  # whether a slot starts a group of equal suffixes
    del key
    rank = np.empty(n, dtype=np.int32)  # the first slot of each suffix's group
    heads = np.flatnonzero(first).astype(np.int32)
    rank[order] = np.repeat(heads, np.diff(heads, append=n))
    while known < depth:
        tied = np.flatnonzero(~(first & np.append(first[1:], True))).astype(np.int32)
        begin = 0
        while begin < len(tied):
            end = begin + BLOCK
            while end < len(tied) and not first[tied[end]]:  # a group is never split between blocks
                end += 1
            slots = tied[begin:end]
            suffixes = order[slots]
            later = suffixes.astype(np.int64) + known
            key = rank[suffixes].astype(np.uint64) << np.uint64(32)
            key |= np.where(later < n, rank[np.minimum(later, n - 1)] + 1, 0).astype(np.uint64)
            by_key = np.argsort(key)
            key, suffixes = key[by_key], suffixes[by_key]
            head = np.append(True, key[1:] != key[:-1])
            order[slots], first[slots] = suffixes, head
            rank[suffixes] = slots[np.maximum.accumulate(np.where(head, np.arange(len(slots)), 0))]
            begin = end
        known *= 2
    return order


def save_datastore(text: np.ndarray, path: Path, fingerprint: str) -> Path:
    """Build a datastore of a corpus in the folder ``path``, and return its file.

    Args:
        text: unsigned ``[n]``, as `join_documents` returns it.
        path: the folder to write to.
        fingerprint: of the tokenizer (`tokenizer_fingerprint`); opening with another one is refused.

    Raises:
        UserError: more than 2^31 tokens.
    """
    if len(text) >= 2**31:
        raise UserError(f"the corpus has {len(text):,} tokens, the most is {2**31 - 1:,}: give fewer files")
    # big-endian, so that comparing bytes compares token sequences
    stored = text.astype(text.dtype.newbyteorder(">")).view(np.uint8)
    arrays, width = {"suffixes": suffix_array(text), "text": stored}, text.dtype.itemsize
    save_arrays(path / FILE, arrays, kind=KIND, fingerprint=fingerprint, tokens=len(text), width=width, depth=DEPTH)
    return path / FILE


class Datastore:
    """A corpus in suffix order, memory-mapped.

    Args:
        path: the folder that ``python -m decode datastore build`` wrote.
        fingerprint: of the tokenizer in use.

    Raises:
        UserError: the datastore is missing, truncated, corrupt, or of another tokenizer.
    """

    def __init__(self, path: str | Path, fingerprint: str) -> None:
        facts, arrays = map_arrays(Path(path) / FILE, kind=KIND, fingerprint=fingerprint, command="datastore build")
        self._width, self._bytes = int(facts["width"]), arrays["text"]
        self._text = np.frombuffer(self._bytes, dtype=f">u{self._width}")
        self._suffixes = arrays["suffixes"].cast("i")
        self._positions = np.frombuffer(arrays["suffixes"], dtype=np.int32)

    def __len__(self) -> int:
        """Number of tokens, the separator after each document included."""
        return len(self._positions)

    def longest(self, ids: Sequence[int], max_span: int = 16, min_span: int = 2) -> tuple[int, tuple[int, int]]:
        """The longest tail of ``ids`` that occurs (its length, 0 if none does), and its interval of suffixes."""
        text, suffixes, width = self._bytes, self._suffixes, self._width
        known: list[int] = []
        for token in reversed(ids[-max_span:]):
            if not 0 <= token < (1 << 8 * width) - 1:  # the store cannot hold it
                break
            known.insert(0, token + 1)
        pattern = struct.pack(f">{len(known)}{'H' if width == 2 else 'I'}", *known)

        def prefix(size: int) -> Callable[[int], bytes]:
            return lambda position: bytes(text[position * width : position * width + size])

        # where a tail occurs every shorter one does, so the longest is found by bisection
        low, high = min_span - 1, len(known)
        while low < high:
            middle = (low + high + 1) // 2
            tail = pattern[-middle * width :]
            at = bisect_left(suffixes, tail, key=prefix(len(tail)))
            if at < len(suffixes) and prefix(len(tail))(suffixes[at]) == tail:
                low, start, found = middle, at, tail
            else:
                high = middle - 1
        if low < min_span:
            return 0, (0, 0)
        return low, (start, bisect_right(suffixes, found, lo=start, key=prefix(len(found))))

    def continuations(
        self, ids: Sequence[int], *, length: int = 10, limit: int = 5000, max_span: int = 16, min_span: int = 2
    ) -> np.ndarray:
        """What followed the longest tail of ``ids`` that occurs.

        More than ``limit`` occurrences are thinned evenly over the interval, so that no continuation is
        preferred for its token ids.

        Returns:
            int64 ``[hits, length]`` in lexicographic order; -1 fills a row after the end of its document.
        """
        span, (low, high) = self.longest(ids, max_span, min_span)
        hits = min(limit, high - low)
        slots = low + np.arange(hits, dtype=np.int64) * (high - low) // max(1, hits)
        after = self._positions[slots].astype(np.int64)[:, None] + np.arange(span, span + length)
        rows = self._text[np.minimum(after, len(self) - 1)].astype(np.int64) - 1
        for column in range(1, length):  # nothing follows the end of a document
            rows[rows[:, column - 1] < 0, column] = -1
        return rows


@dataclass
class RetrievalDrafter(Drafter):
    """Drafts the heaviest continuations of the longest tail of the text that the corpus holds."""

    store: Datastore  # the corpus
    nodes: int = 64  # most nodes in the tree
    max_span: int = 16  # longest tail looked up; shorter ones follow, down to ``min_span``
    min_span: int = 2  # shortest tail looked up
    hits: int = 5000  # most occurrences read
    length: int = 10  # tokens read after each occurrence

    def draft(self, request: DraftRequest) -> Draft:
        """The tree of continuations, at most ``max_depth`` deep; empty where no tail of the text is known."""
        length, spans = min(self.length, request.max_depth), {"max_span": self.max_span, "min_span": self.min_span}
        return heaviest_tree(self.store.continuations(request.ids, length=length, limit=self.hits, **spans), self.nodes)
