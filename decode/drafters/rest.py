"""REST: what followed this context in a corpus, as a tree of continuations (He et al., NAACL 2024)."""

from __future__ import annotations

import struct
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from transformers import PreTrainedTokenizerBase

from decode.draft import Draft, heaviest_tree
from decode.drafters.base import Drafter, DraftRequest
from decode.drafters.corpus_files import map_arrays, require_fingerprint, save_arrays
from decode.errors import UserError

KIND = "datastore"
FILE = "datastore.safetensors"
DEPTH = 32
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
    known = 64 // bits
    key = np.zeros(n, dtype=np.uint64)
    for i in range(known):
        key <<= np.uint64(bits)
        key[: max(0, n - i)] |= text[i:]
    order = np.argsort(key).astype(np.int32)
    key = key[order]
    first = np.ones(n, dtype=bool)  # whether a slot starts a group of equal suffixes
    np.not_equal(key[1:], key[:-1], out=first[1:])
    del key
    rank = np.empty(n, dtype=np.int32)  # the first slot of each suffix's group
    heads = np.flatnonzero(first)
    rank[order] = np.repeat(heads.astype(np.int32), np.diff(heads, append=n))
    del heads
    while known < depth and _refine(order, rank, first, known):
        known *= 2
    return order


def _refine(order: np.ndarray, rank: np.ndarray, first: np.ndarray, known: int) -> bool:
    """Sort each tied group by the ranks of the suffixes ``known`` tokens later; whether any was tied."""
    n = len(order)
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
        del later
        by_key = np.argsort(key)
        key, suffixes = key[by_key], suffixes[by_key]
        head = np.ones(len(slots), dtype=bool)
        np.not_equal(key[1:], key[:-1], out=head[1:])
        order[slots] = suffixes
        first[slots] = head
        rank[suffixes] = slots[np.maximum.accumulate(np.where(head, np.arange(len(slots)), 0))]
        begin = end
    return bool(len(tied))


def save_datastore(text: np.ndarray, path: Path, fingerprint: str, *, depth: int = DEPTH) -> Path:
    """Build a datastore of a corpus (as `join_documents` returns it) in the folder ``path``, and return its file.

    Args:
        text: unsigned ``[n]``; continuations never run from one document into the next.
        path: the folder to write to.
        fingerprint: of the tokenizer (`tokenizer_fingerprint`); opening with another one is refused.
        depth: how many tokens order the suffixes: the longest span plus continuation that can be asked for.

    Raises:
        UserError: more than 2^31 tokens.
    """
    if len(text) >= 2**31:
        raise UserError(f"the corpus has {len(text):,} tokens, the most is {2**31 - 1:,}: give fewer files")
    file = path / FILE
    # Big-endian, so that comparing bytes compares token sequences.
    stored = text.astype(text.dtype.newbyteorder(">")).view(np.uint8)
    arrays = {"suffixes": suffix_array(text, depth), "text": stored}
    facts = {"tokens": len(text), "width": text.dtype.itemsize, "depth": depth}
    save_arrays(file, arrays, kind=KIND, fingerprint=fingerprint, **facts)
    return file


class Datastore:
    """A corpus in suffix order, memory-mapped."""

    def __init__(self, text: memoryview, suffixes: memoryview, width: int, depth: int) -> None:
        """Wrap the mapped bytes; use `open`."""
        self.depth = depth  # the longest span plus continuation that queries may ask for
        self._width = width
        self._bytes = text
        self._text = np.frombuffer(text, dtype=f">u{width}")
        self._suffixes = suffixes.cast("i")
        self._positions = np.frombuffer(suffixes, dtype=np.int32)

    @classmethod
    def open(cls, path: str | Path, fingerprint: str, *, verify: bool = True) -> Datastore:
        """Map the datastore in the folder ``path``.

        Args:
            path: the folder that ``python -m decode datastore build`` wrote.
            fingerprint: of the tokenizer in use.
            verify: compare the checksum first, which reads the whole file once.

        Raises:
            UserError: missing, truncated, corrupt, or of another tokenizer.
        """
        manifest, arrays = map_arrays(Path(path) / FILE, kind=KIND, fingerprint=fingerprint, verify=verify)
        return cls(arrays["text"], arrays["suffixes"], int(manifest["width"]), int(manifest["depth"]))

    def __len__(self) -> int:
        """Number of tokens, the separator after each document included."""
        return len(self._positions)

    def _encode(self, ids: Sequence[int]) -> bytes:
        """The stored form of the longest tail of ``ids`` that the store's integers can hold."""
        limit = 1 << 8 * self._width
        known = [i + 1 for i in ids]
        for at in range(len(known) - 1, -1, -1):
            if not 0 < known[at] < limit:
                known = known[at + 1 :]
                break
        return struct.pack(f">{len(known)}{'H' if self._width == 2 else 'I'}", *known)

    def _prefix(self, size: int) -> Callable[[int], bytes]:
        text, width = self._bytes, self._width

        def prefix(position: int) -> bytes:
            at = position * width
            return bytes(text[at : at + size])

        return prefix

    def _first(self, pattern: bytes) -> int:
        """The first slot that is not smaller than ``pattern``."""
        return bisect_left(self._suffixes, pattern, key=self._prefix(len(pattern)))

    def _interval(self, pattern: bytes) -> tuple[int, int]:
        low = self._first(pattern)
        return low, bisect_right(self._suffixes, pattern, lo=low, key=self._prefix(len(pattern)))

    def find(self, ids: Sequence[int]) -> tuple[int, int]:
        """The half-open interval of slots whose suffixes start with ``ids``; its length counts occurrences.

        Args:
            ids: at least one token, at most `depth`.
        """
        pattern = self._encode(ids)
        return self._interval(pattern) if len(pattern) == len(ids) * self._width else (0, 0)

    def longest(self, ids: Sequence[int], max_span: int = 16, min_span: int = 2) -> tuple[int, tuple[int, int]]:
        """The longest tail of ``ids`` that occurs (its length, 0 if none does) and its interval."""
        pattern, width = self._encode(ids[-max_span:]), self._width
        # Where a tail occurs every shorter one does, so the longest is found by bisection.
        low, high = min_span - 1, len(pattern) // width
        while low < high:
            middle = (low + high + 1) // 2
            tail = pattern[-middle * width :]
            at = self._first(tail)
            if at < len(self) and self._prefix(len(tail))(self._suffixes[at]) == tail:
                low = middle
            else:
                high = middle - 1
        return (low, self._interval(pattern[-low * width :])) if low >= min_span else (0, (0, 0))

    def continuations(
        self,
        ids: Sequence[int],
        *,
        length: int = 10,
        limit: int = 5000,
        max_span: int = 16,
        min_span: int = 2,
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
        rows = self.store.continuations(
            request.ids,
            length=min(self.length, request.max_depth),
            limit=self.hits,
            max_span=self.max_span,
            min_span=self.min_span,
        )
        return heaviest_tree(rows, self.nodes)


def open_rest(folder: str | Path, tokenizer: PreTrainedTokenizerBase | None) -> RetrievalDrafter:
    """REST with the paper's settings over the datastore in ``folder``.

    Raises:
        UserError: no tokenizer, or a datastore that is missing, damaged, or of another tokenizer.
    """
    return RetrievalDrafter(Datastore.open(folder, require_fingerprint(tokenizer)))
