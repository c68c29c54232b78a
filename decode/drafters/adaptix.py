"""Adaptix: a corpus's n-gram model that learns from the text, searched for the draft tree (AAAI 2025)."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from random import Random

import numpy as np
from transformers import PreTrainedTokenizerBase

from decode.draft import Draft, Trie
from decode.drafters.base import Drafter, DraftRequest, Prompt
from decode.drafters.corpus_files import map_arrays, require_fingerprint, save_arrays
from decode.errors import UserError

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


Successors = Callable[[int], tuple[list[int], list[float]]]

C1, C2 = 32.0, 8.0


def search(
    root: int,
    successors: Successors,
    *,
    bits: int,
    mask: int,
    iterations: int,
    depth: int,
    random: Random,
) -> tuple[Trie, list[int], list[int]]:
    """Adaptix's Monte Carlo tree search (Eqs. 2 and 3).

    An iteration walks down by PUCT, Q + (C1 + ln((N + C2 + 1) / C2)) · P · √N / (1 + n), an unvisited child
    first; expands the node it ends at, steps into its heaviest child, goes on to ``depth`` by sampling
    successors, and backs the path's score 1 + Σ w up. (Eq. 8 has Σ ln w; the published code looks each w up one token
    early, so its score hardly varies.)

    Args:
        root: the packed context.
        successors: tokens and weights that follow a packed context.
        bits: bits per token of a packed context.
        mask: keeps the tokens of a context.
        iterations: number of searches.
        depth: deepest node.
        random: for the samples.

    Returns:
        The tree of visited nodes, the visits of each and the packed context after each; a node comes after
        its parent.
    """
    # One function over flat lists: node objects and calls would cost more than the search itself.
    # Node 0 is the root. The children of n are first[n] .. last[n] - 1; fresh[n] is its next unvisited one.
    token, context, parent, gain = [-1], [root], [-1], [0.0]
    prior, first, last, fresh = [0.0], [0], [0], [0]
    visits, total, mean, bonus = [0], [0.0], [0.0], [0.0]
    sqrt, log, uniform = math.sqrt, math.log, random.random
    for _ in range(iterations):
        node, level, score, path = 0, 0, 1.0, [0]
        while level < depth:
            low = first[node]
            if low < 0:
                break
            expanding = not low
            if expanding:
                tokens, weights = successors(context[node])
                n = len(tokens)
                if not n:
                    first[node] = -1
                    break
                low = fresh[node] = first[node] = len(token)
                last[node] = low + n
                above = context[node] << bits
                token += tokens
                context += [(above | t) & mask for t in tokens]
                prior += weights
                gain += weights
                parent += [node] * n
                zeros = [0] * n
                first += zeros
                last += zeros
                fresh += zeros
                visits += zeros
                empty = [0.0] * n
                total += empty
                mean += empty
                bonus += empty
            child, high = fresh[node], last[node]
            if child < high:
                fresh[node] = child + 1
            else:
                n = visits[node]
                explore = (C1 + log((n + C2 + 1) / C2)) * sqrt(n)
                best = -math.inf
                for i in range(low, high):
                    value = mean[i] + explore * bonus[i]
                    if value > best:
                        best, child = value, i
            node = child
            path.append(node)
            score += gain[node]
            level += 1
            if expanding:
                break
        here = context[node]
        while level < depth:
            tokens, weights = successors(here)
            if not tokens:
                break
            left = uniform() * sum(weights)
            for t, weight in zip(tokens, weights):  # noqa: B007
                left -= weight
                if left < 0:
                    break
            here = ((here << bits) | t) & mask
            score += weight
            level += 1
        for i in path:
            n = visits[i] = visits[i] + 1
            value = total[i] = total[i] + score
            mean[i] = value / n
            bonus[i] = prior[i] / (1 + n)
    return _visited(token, parent, visits, context)


def _visited(
    token: list[int], parent: list[int], visits: list[int], context: list[int]
) -> tuple[Trie, list[int], list[int]]:
    """The visited nodes below the root as a trie, with their visits and contexts."""
    tree, place = Trie(), {0: -1}
    kept = [i for i in range(1, len(token)) if visits[i]]
    for i in kept:
        place[i] = tree.add(place[parent[i]], token[i])
    return tree, [visits[i] for i in kept], [context[i] for i in kept]


def most_visited(
    tree: Trie,
    visits: list[int],
    contexts: list[int],
    successors: Successors,
    *,
    sequences: int,
    nodes: int,
    max_depth: int,
) -> Trie:
    """The ``sequences`` most visited nodes, each extended by its likeliest successor.

    A parent has at least the visits of its child and comes first, so any number of the most visited form a
    tree.
    """
    out, place, depth = Trie(), {-1: -1}, {-1: 0}
    best = sorted(range(len(visits)), key=lambda i: -visits[i])[: min(sequences, nodes)]
    for i in best:
        place[i] = out.add(place[tree.parents[i]], tree.tokens[i])
        depth[i] = depth[tree.parents[i]] + 1
    for i in best:
        if depth[i] >= max_depth or len(out) >= nodes:
            continue
        tokens, weights = successors(contexts[i])
        if tokens:
            out.add(place[i], tokens[weights.index(max(weights))])
    return out


Learned = dict[int, tuple[list[int], list[float]]]  # by packed context: tokens that follow it, and their weights


@dataclass
class TrigramState:
    """What a sequence has learned, and the generator of its searches."""

    table: NgramTable
    random: Random
    learned: Learned

    def successors(self, context: int) -> tuple[list[int], list[float]]:
        """Tokens and weights that follow a packed context, learning included."""
        return self.learned.get(context) or self.table.successors(context)


@dataclass
class TrigramDrafter(Drafter):
    """Drafts a tree of likely continuations under an n-gram model.

    Before each search every n-gram of the last ``recent`` tokens gains ``gain`` in weight, so the model moves
    towards what the target writes. What is learned stays for later texts; `reset` forgets it.
    """

    table: NgramTable  # the corpus's n-grams
    nodes: int = 64  # most nodes in the tree
    searches: int = 150  # Monte Carlo iterations
    depth: int = 3  # deepest node searched; the sequences grow by one more token
    sequences: int = 24  # most visited sequences, each then extended
    gain: float = 0.04  # weight added to a recent n-gram; 0 turns learning off
    ceiling: float = 3.0  # the weight that learning stops at
    recent: int = 16  # tokens of the text whose n-grams are learned each time
    memory: int = 1 << 16  # contexts whose learned weights are kept, those met last
    widest: int = 64  # successors that a context keeps while it learns; the lightest leaves first
    seed: int = 0  # of the search's own generator, which restarts with every text and never touches the decoder's
    _learned: Learned = field(default_factory=dict, init=False, repr=False)

    def start(self, prompt: Prompt) -> TrigramState:
        """A search's generator, and the learned weights: those of the drafter, or a copy for this sequence alone."""
        learned = self._learned
        if not prompt.alone:
            learned = {context: (list(t), list(w)) for context, (t, w) in learned.items()}
        return TrigramState(self.table, Random(self.seed), learned)

    def reset(self) -> None:
        """Forget what was learned from texts."""
        self._learned.clear()

    def draft(self, request: DraftRequest) -> Draft:
        """The searched tree, at most ``max_depth`` deep; empty where the context is unknown."""
        state, ids, most = request.state, request.ids, request.max_depth
        self._learn(state.learned, ids)
        root = self.table.context(ids)
        if root is None or most < 1:
            return Draft.empty()
        bits, mask, depth, after = self.table.bits, self.table.mask, min(self.depth, most), state.successors
        found = search(root, after, bits=bits, mask=mask, iterations=self.searches, depth=depth, random=state.random)
        return most_visited(*found, after, sequences=self.sequences, nodes=self.nodes, max_depth=most).draft()

    def _learn(self, known: Learned, ids: list[int]) -> None:
        """Raise the weight of each n-gram among the last ``recent`` tokens."""
        size = self.table.order - 1
        window = ids[-self.recent :]
        for end in range(size, len(window)) if self.gain else ():
            context, token = self.table.context(window[end - size : end]), window[end]
            if context is None or token >> self.table.bits:
                continue
            learned = known.pop(context, None)
            tokens, weights = learned if learned is not None else self.table.successors(context)
            if learned is None:
                tokens, weights = tokens.copy(), weights.copy()
            known[context] = tokens, weights  # the latest at the end
            if token not in tokens:
                if len(tokens) >= self.widest:
                    lightest = weights.index(min(weights))
                    del tokens[lightest], weights[lightest]
                tokens.append(token)
                weights.append(0.0)
            at = tokens.index(token)
            weights[at] = min(self.ceiling, weights[at] + self.gain)
        while len(known) > self.memory:
            del known[next(iter(known))]


def open_adaptix(folder: str | Path, tokenizer: PreTrainedTokenizerBase | None, *, order: int = 3) -> TrigramDrafter:
    """Adaptix with the paper's settings over the n-gram table in ``folder``.

    Raises:
        UserError: no tokenizer, or a table that is missing, damaged, or of another tokenizer.
    """
    return TrigramDrafter(NgramTable.open(folder, require_fingerprint(tokenizer), order=order))
