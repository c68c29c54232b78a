"""REST: what followed this context in a corpus, as a tree of continuations (He et al., NAACL 2024)."""

from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

import numpy as np

from decode.core.draft import Draft, Ids
from decode.drafters.base import Drafter, DraftRequest
from decode.drafters.corpus import map_arrays, save_arrays
from decode.errors import UserError

KIND = "datastore"
FILE = "datastore.safetensors"
DEPTH = 32  # tokens that order the suffixes: the longest span plus continuation that can be asked for


def suffix_array(text: np.ndarray, depth: int = DEPTH) -> np.ndarray:
    """Positions of all suffixes of ``text``, ordered by their first ``depth`` tokens or more.

    Prefix doubling (Manber & Myers): the first pass packs as many tokens as fit into one 64-bit key, each later one
    doubles the depth, until no two suffixes are tied.

    ``text`` is unsigned ``[n]``, n < 2^31, as `join_documents` returns it; suffixes that are equal so far keep an
    arbitrary order. The result is int32 ``[n]``.
    """
    n, bits = len(text), 8 * text.dtype.itemsize
    known = 64 // bits  # tokens by which the suffixes are ordered
    key = np.zeros(n, dtype=np.uint64)
    for i in range(known):
        key <<= np.uint64(bits)
        key[: max(0, n - i)] |= text[i:]
    while True:
        order = np.argsort(key)
        key = key[order]
        first = np.append(False, key[1:] != key[:-1])  # whether a slot starts a group of equal suffixes but the first
        if known >= depth or first[1:].all():
            return order.astype(np.int32)
        rank = np.empty(n, dtype=np.uint64)
        rank[order] = np.cumsum(first)
        key = rank << np.uint64(32)
        key[: max(0, n - known)] |= rank[known:] + np.uint64(1)  # 0: the text has ended
        known *= 2


def save_datastore(text: np.ndarray, path: Path, fingerprint: str) -> Path:
    """Build a datastore of a corpus (as `join_documents` returns it) in the folder ``path``, and return its file.

    Opening it with a tokenizer of another `tokenizer_fingerprint` is refused.

    Raises:
        UserError: more than 2^31 tokens.
    """
    if len(text) >= 2**31:
        raise UserError(f"the corpus has {len(text):,} tokens, the most is {2**31 - 1:,}: give fewer files")
    # big-endian, so that comparing bytes compares token sequences
    stored = text.astype(text.dtype.newbyteorder(">")).view(np.uint8)
    arrays = {"suffixes": suffix_array(text), "text": stored}
    return save_arrays(path / FILE, arrays, kind=KIND, fingerprint=fingerprint, width=text.dtype.itemsize)


class Datastore:
    """A corpus in suffix order, memory-mapped from the folder that ``draftsmith decode datastore build`` wrote.

    Raises:
        UserError: the datastore is missing, truncated, or of another tokenizer.
    """

    def __init__(self, path: str | Path, fingerprint: str) -> None:
        facts, arrays = map_arrays(Path(path) / FILE, kind=KIND, fingerprint=fingerprint)
        self.text, self.suffixes = arrays["text"].view(f">u{facts['width']}"), arrays["suffixes"]

    def longest(self, ids: Ids, max_span: int = 16, min_span: int = 2) -> tuple[int, tuple[int, int]]:
        """The longest tail of ``ids`` that occurs (its length, 0 if none does), and its interval of suffixes."""
        width = self.text.itemsize
        text, suffixes = self.text.view(np.uint8).data, self.suffixes.data
        most = (1 << 8 * width) - 1  # ids that the store can hold
        known = [*takewhile(lambda token: 0 <= token < most, reversed(ids[-max_span:]))]
        pattern = np.array([token + 1 for token in reversed(known)], dtype=self.text.dtype).tobytes()

        # where a tail occurs every shorter one does, so the longest is found by bisection
        span, interval, low, high = 0, (0, 0), min_span, len(known)
        while low <= high:
            middle = (low + high + 1) // 2
            tail = pattern[-middle * width :]

            def prefix(at: int, size: int = len(tail)) -> bytes:
                return bytes(text[at * width : at * width + size])

            start = bisect_left(suffixes, tail, key=prefix)
            if start < len(suffixes) and prefix(suffixes[start]) == tail:
                span, low = middle, middle + 1
                interval = start, bisect_right(suffixes, tail, lo=start, key=prefix)
            else:
                high = middle - 1
        return span, interval

    def continuations(
        self, ids: Ids, *, length: int, limit: int = 5000, max_span: int = 16, min_span: int = 2
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
        after = self.suffixes[slots].astype(np.int64)[:, None] + np.arange(span, span + length)
        rows = self.text[np.minimum(after, len(self.text) - 1)].astype(np.int64) - 1
        rows[np.logical_or.accumulate(rows < 0, 1)] = -1  # nothing follows the end of a document
        return rows


def heaviest_tree(rows: np.ndarray, nodes: int) -> Draft:
    """The heaviest nodes of the prefix tree of ``rows [rows, length]``, sorted lexicographically; -1 ends a row early.

    The weight of a node is the number of rows that start with its path. A parent is never lighter than its child, and
    ties go to the shallower node, so the result is a tree.
    """
    count, length = rows.shape
    if not rows.size:
        return Draft(())
    columns = np.ascontiguousarray(rows.T)
    # Sorted rows make every node a run of its column: a run starts where this column or one above it changes.
    starts = np.ones((length, count), dtype=bool)
    np.not_equal(columns[:, 1:], columns[:, :-1], out=starts[:, 1:])
    start = np.flatnonzero(np.logical_or.accumulate(starts))
    weight = np.diff(start, append=count * length)
    token = columns.ravel()[start]
    real = np.flatnonzero((weight > 1) & (token >= 0))
    if len(real) < nodes:  # most nodes occur once and are seldom needed
        real = np.flatnonzero(token >= 0)
    best = real[np.argsort(-weight[real], kind="stable")[:nodes]]  # stable: shallower nodes come first
    above = np.searchsorted(start, start[best] - count, side="right") - 1  # the run one column up; -1 at the top
    place = {node: i for i, node in enumerate(best.tolist())} | {-1: -1}
    return Draft(token[best].tolist(), [place[node] for node in above.tolist()])


@dataclass
class RetrievalDrafter(Drafter):
    """Drafts the heaviest continuations of the longest tail of the text that the corpus holds."""

    trees = True
    store: Datastore  # the corpus
    nodes: int = 64  # most nodes in the tree
    max_span: int = 16  # longest tail looked up; shorter ones follow, down to ``min_span``
    min_span: int = 2  # shortest tail looked up
    length: int = 10  # tokens read after each occurrence

    def draft(self, request: DraftRequest) -> Draft:
        """The tree of continuations, at most ``max_depth`` deep; empty where no tail of the text is known."""
        length = min(self.length, request.max_depth)
        rows = self.store.continuations(request.ids, length=length, max_span=self.max_span, min_span=self.min_span)
        return heaviest_tree(rows, self.nodes)
