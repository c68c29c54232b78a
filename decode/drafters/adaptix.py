"""Adaptix: a corpus's n-gram model that learns from the text, searched for the draft tree (AAAI 2025)."""

import math
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from random import Random

import numpy as np

from decode.core.draft import Draft, Ids, Trie
from decode.drafters.base import Drafter, DraftRequest, Prompt
from decode.drafters.corpus import map_arrays, save_arrays
from decode.errors import UserError

KIND = "n-gram table"
FILE = "ngrams-3.safetensors"
SUCCESSORS = 12
BITS = 21  # of a token, so that a trigram is one 64-bit key
Weighted = tuple[Ids, list[float]]  # tokens that follow a context, and their weights
Successors = Callable[[int], Weighted]
MASK = (1 << 2 * BITS) - 1  # of a context, two tokens


def save_ngram_table(text: np.ndarray, path: Path, fingerprint: str) -> Path:
    """Count the trigrams of a corpus (as `join_documents` returns it), and write the table to the folder ``path``.

    P(w | context) = C(context, w) / C(context), over all successors of the context, of which the 12 most frequent are
    kept (ties: the smaller id). Trigrams never span two documents.

    Raises:
        UserError: ids of 2^21 or more.
    """
    if int(text.max()) > 1 << BITS:
        raise UserError(f"the table takes token ids below {1 << BITS:,}, the corpus holds {int(text.max()) - 1:,}")
    size = max(0, len(text) - 2)
    key, inside = np.zeros(size, dtype=np.uint64), np.ones(size, dtype=bool)
    for i in range(3):
        tokens = text[i : i + size]
        inside &= tokens > 0
        key = key << np.uint64(BITS) | tokens - (tokens > 0)
    grams, counts = np.unique(key[inside], return_counts=True)
    contexts, heads, sizes = np.unique(grams >> np.uint64(BITS), return_index=True, return_counts=True)
    first = np.repeat(heads, sizes)  # of each trigram, the first one of its context
    share = counts / np.bincount(first, counts)[first] if len(grams) else np.empty(0)
    ranked = np.lexsort((-counts, first))
    kept = ranked[np.arange(len(grams)) - first < SUCCESSORS]
    arrays = {
        "contexts": contexts,
        "offsets": np.append(0, np.cumsum(np.minimum(sizes, SUCCESSORS))),
        "tokens": (grams[kept] & np.uint64((1 << BITS) - 1)).astype(np.int32),
        "probabilities": share[kept].astype(np.float32),
    }
    return save_arrays(path / FILE, arrays, kind=KIND, fingerprint=fingerprint)


class NgramTable:
    """A memory-mapped table of trigrams.

    A context is one integer, the last two tokens packed in `BITS` bits each; appending a token is
    ``((context << BITS) | token) & MASK``. Its `successors` are the tokens that follow it, most frequent first, and
    their probabilities, whose sum may be below 1.

    Raises:
        UserError: the table is missing, truncated, or of another tokenizer.
    """

    def __init__(self, path: str | Path, fingerprint: str) -> None:
        _, arrays = map_arrays(Path(path) / FILE, kind=KIND, fingerprint=fingerprint)
        contexts, offsets = arrays["contexts"].data, arrays["offsets"].data
        tokens, probabilities = arrays["tokens"].data, arrays["probabilities"].data

        def successors(context: int) -> Weighted:
            at = bisect_left(contexts, context)
            if at == len(contexts) or contexts[at] != context:
                return [], []
            kept = slice(offsets[at], offsets[at + 1])
            return tokens[kept].tolist(), probabilities[kept].tolist()  # type: ignore[return-value]

        self.successors: Successors = lru_cache(maxsize=1 << 16)(successors)


def packed(ids: Ids) -> int | None:
    """The context of the last two tokens; None where there are too few, or an id is out of range."""
    if len(ids) < 2 or max(ids[-2:]) >> BITS:
        return None
    return ids[-2] << BITS | ids[-1]


C1, C2 = 32.0, 8.0


def search(
    root: int, successors: Successors, *, iterations: int, depth: int, random: Random
) -> tuple[list[int], list[int], list[int], list[int]]:
    """Adaptix's Monte Carlo tree search (Eqs. 2 and 3).

    An iteration walks down by PUCT, Q + (C1 + ln((N + C2 + 1) / C2)) · P · √N / (1 + n), an unvisited child
    first; expands the node it ends at, steps into its heaviest child, goes on to ``depth`` by sampling
    successors, and backs the path's score 1 + Σ w up. (Eq. 8 has Σ ln w; the published code looks each w up one token
    early, so its score hardly varies.) The root is a packed context.

    Returns:
        Token, parent, visits and packed context of each node. Node 0 is the root, and a node comes after its parent.
    """
    # One function over flat lists: node objects and calls would cost more than the search itself.
    # Node 0 is the root. The children of n are first[n] .. last[n] - 1; fresh[n] is its next unvisited one.
    bits, mask = BITS, MASK
    token, context, parent, weight_of = [-1], [root], [-1], [0.0]
    first, last, fresh, visits = [0], [0], [0], [0]
    total, mean, bonus = [0.0], [0.0], [0.0]
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
                weight_of += weights
                parent += [node] * n
                for column in (first, last, fresh, visits, total, mean, bonus):
                    column += [0] * n
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
            score += weight_of[node]
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
            bonus[i] = weight_of[i] / (1 + n)
    return token, parent, visits, context


Learned = dict[int, Weighted]  # by packed context: tokens that follow it, and their weights


@dataclass
class Memory:
    """What a text reads and writes of the learned weights, and the generator of its searches."""

    random: Random
    learned: Learned  # written to
    shared: Learned  # of earlier texts, read where `learned` says nothing


@dataclass
class TrigramDrafter(Drafter):
    """Drafts a tree of likely continuations under an n-gram model.

    Before each search every trigram of the last ``recent`` tokens gains ``gain`` in weight, so the model moves towards
    what the target writes. What is learned stays for later texts; in a batch each text keeps it to itself.
    """

    trees = True
    table: NgramTable  # the corpus's trigrams
    nodes: int = 64  # most nodes in the tree
    searches: int = 150  # Monte Carlo iterations
    depth: int = 3  # deepest node searched; the sequences grow by one more token
    sequences: int = 24  # most visited sequences, each then extended
    gain: float = 0.04  # weight added to a recent trigram; 0 turns learning off
    ceiling: float = 3.0  # the weight that learning stops at
    recent: int = 16  # tokens of the text whose trigrams are learned each time
    memory: int = 1 << 16  # contexts whose learned weights are kept, those met last
    widest: int = 64  # successors that a context keeps while it learns; the lightest leaves first
    seed: int = 0  # of the search's own generator, which restarts with every text and never touches the decoder's
    learned: Learned = field(default_factory=dict, init=False, repr=False)

    def start(self, prompt: Prompt) -> Memory:
        """A text that shares what it learns writes the drafter's weights, others their additions to them."""
        random = Random(self.seed)
        return Memory(random, self.learned, {}) if prompt.shares_learning else Memory(random, {}, self.learned)

    def draft(self, request: DraftRequest) -> Draft:
        """The most visited nodes of a search, each extended by its likeliest successor; at most ``max_depth`` deep.

        A parent has at least the visits of its child and comes first, so any number of the most visited form a tree.
        The draft is empty where the context is unknown.
        """
        state, root, most = request.state, packed(request.ids), request.max_depth
        self.learn(state, request.ids)
        if root is None or most < 1:
            return Draft(())
        learned, shared, known = state.learned, state.shared, self.table.successors

        def after(context: int) -> Weighted:
            return learned.get(context) or shared.get(context) or known(context)

        levels = min(self.depth, most)
        token, parent, visits, context = search(
            root, after, iterations=self.searches, depth=levels, random=state.random
        )
        tree, place, depth = Trie(), {0: -1}, {0: 0}
        best = sorted((i for i in range(1, len(token)) if visits[i]), key=lambda i: -visits[i])
        best = best[: min(self.sequences, self.nodes)]
        for i in best:
            place[i], depth[i] = tree.add(place[parent[i]], token[i]), depth[parent[i]] + 1
        for i in best:
            tokens, weights = after(context[i]) if depth[i] < most and len(tree.tokens) < self.nodes else ([], [])
            if tokens:
                tree.add(place[i], tokens[weights.index(max(weights))])
        return tree.draft()

    def learn(self, state: Memory, ids: Ids) -> None:
        """Raise the weight of each trigram among the last ``recent`` tokens."""
        learned, window = state.learned, ids[-self.recent :]
        for end in range(2, len(window)) if self.gain else ():
            context, token = packed(window[:end]), window[end]
            if context is None or token >> BITS:
                continue
            entry = learned.pop(context, None)
            if entry is None:
                known, values = state.shared.get(context) or self.table.successors(context)
                entry = list(known), list(values)
            tokens, weights = learned[context] = entry  # the latest at the end
            if token not in tokens:
                if len(tokens) >= self.widest:
                    lightest = weights.index(min(weights))
                    del tokens[lightest], weights[lightest]
                tokens.append(token)
                weights.append(0.0)
            at = tokens.index(token)
            weights[at] = min(self.ceiling, weights[at] + self.gain)
        while len(learned) > self.memory:
            del learned[next(iter(learned))]
