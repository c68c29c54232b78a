"""Token trees: sequences merged by their common prefixes."""

import numpy as np

from decode.core.proposal import Draft


class Trie:
    """A token tree under construction; node -1 is the pending token, siblings carry different tokens."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.parents: list[int] = []
        self._index: dict[tuple[int, int], int] = {}

    def __len__(self) -> int:
        return len(self.tokens)

    def add(self, parent: int, token: int) -> int:
        """The child of ``parent`` that carries ``token``, made if it is missing."""
        node = self._index.setdefault((parent, token), len(self.tokens))
        if node == len(self.tokens):
            self.tokens.append(token)
            self.parents.append(parent)
        return node

    def draft(self) -> Draft:
        """The deterministic draft of this tree."""
        return Draft.tree(self.tokens, self.parents)


def heaviest_tree(rows: np.ndarray, nodes: int) -> Draft:
    """The ``nodes`` heaviest nodes of the prefix tree of ``rows``.

    The weight of a node is the number of rows that start with its path. A parent is never lighter than its
    child, and ties go to the shallower node, so the result is a tree.

    Args:
        rows: int ``[rows, length]``, sorted lexicographically; -1 ends a row early.
        nodes: the most nodes kept.
    """
    count, length = rows.shape
    if not rows.size:
        return Draft.empty()
    columns = np.ascontiguousarray(rows.T)
    # Sorted rows make every node a run of its column: a run starts where this column or one above it changes.
    starts = np.ones((length, count), dtype=bool)
    np.not_equal(columns[:, 1:], columns[:, :-1], out=starts[:, 1:])
    for level in range(1, length):
        starts[level] |= starts[level - 1]
    start = np.flatnonzero(starts)
    weight = np.diff(start, append=count * length)
    token = columns.ravel()[start]
    real = np.flatnonzero((weight > 1) & (token >= 0))
    if len(real) < nodes:  # most nodes occur once and are seldom needed
        real = np.flatnonzero(token >= 0)
    best = real[np.argsort(-weight[real], kind="stable")[:nodes]]  # stable: shallower nodes come first
    above = np.searchsorted(start, start[best] - count, side="right") - 1  # the run one column up; -1 at the top
    place = {node: i for i, node in enumerate(best.tolist())} | {-1: -1}
    return Draft.tree(token[best].tolist(), [place[node] for node in above.tolist()])
