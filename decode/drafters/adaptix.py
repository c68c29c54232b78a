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

from decode.draft import Draft, Trie
from decode.drafters.base import Drafter, DraftRequest, Prompt
from decode.drafters.corpus_files import map_arrays, save_arrays
from decode.errors import UserError

KIND = "n-gram table"
SUCCESSORS = 12


def save_ngram_table(text: np.ndarray, path: Path, fingerprint: str, *, order: int = 3) -> Path:
    """Count the n-grams of a corpus (as `join_documents` returns it), and write the table to the folder ``path``.

    P(w | context) = C(context, w) / C(context), over all successors of the context, of which the 12 most frequent are
    kept (ties: the smaller id). N-grams never span two documents.

    Args:
        text: unsigned ``[n]``, id + 1 of each token, 0 after each document.
        path: the folder to write to.
        fingerprint: of the tokenizer.
        order: n of the n-grams, 2 to 4.

    Raises:
        UserError: ids too large for the order (order 4 takes ids below 65,536).
    """
    bits = min(31, 64 // order)  # of a token, so that an n-gram is one 64-bit key
    if int(text.max()) > 1 << bits:
        raise UserError(
            f"order {order} takes token ids below {1 << bits:,}, the corpus holds {int(text.max()) - 1:,}: "
            "take a lower order"
        )
    size = max(0, len(text) - order + 1)
    key, inside = np.zeros(size, dtype=np.uint64), np.ones(size, dtype=bool)
    for i in range(order):
        tokens = text[i : i + size]
        inside &= tokens > 0
        key = key << np.uint64(bits) | tokens - (tokens > 0)
    grams, counts = np.unique(key[inside], return_counts=True)
    contexts, heads, sizes = np.unique(grams >> np.uint64(bits), return_index=True, return_counts=True)
    first = np.repeat(heads, sizes)  # of each n-gram, the first one of its context
    share = counts / np.bincount(first, counts)[first] if len(grams) else np.empty(0)
    ranked = np.lexsort((-counts, first))
    kept = ranked[np.arange(len(grams)) - first < SUCCESSORS]
    arrays = {
        "contexts": contexts,
        "offsets": np.append(0, np.cumsum(np.minimum(sizes, SUCCESSORS))),
        "tokens": (grams[kept] & np.uint64((1 << bits) - 1)).astype(np.int32),
        "probabilities": share[kept].astype(np.float32),
    }
    file = path / f"ngrams-{order}.safetensors"
    save_arrays(file, arrays, kind=KIND, fingerprint=fingerprint)
    return file


class NgramTable:
    """A memory-mapped n-gram table.

    A context is one integer, the tokens of the last ``order − 1`` positions packed ``bits`` bits each;
    appending a token is ``((context << bits) | token) & mask``.

    Args:
        path: the folder of the table.
        fingerprint: of the tokenizer in use.
        order: n of the n-grams.

    Attributes:
        successors: of a packed context the tokens that follow it, most frequent first, and their probabilities, whose
            sum may be below 1.

    Raises:
        UserError: the table is missing, truncated, or of another tokenizer.
    """

    def __init__(self, path: str | Path, fingerprint: str, *, order: int = 3) -> None:
        file, command = Path(path) / f"ngrams-{order}.safetensors", f"trigrams build --order {order}"
        _, arrays = map_arrays(file, kind=KIND, fingerprint=fingerprint, command=command)
        self.order, self.bits = order, min(31, 64 // order)
        self.mask = (1 << self.bits * (order - 1)) - 1
        contexts, offsets = arrays["contexts"].data, arrays["offsets"].data
        tokens, probabilities = arrays["tokens"].data, arrays["probabilities"].data

        def successors(context: int) -> tuple[list[int], list[float]]:
            at = bisect_left(contexts, context)
            if at == len(contexts) or contexts[at] != context:
                return [], []
            kept = slice(offsets[at], offsets[at + 1])
            return tokens[kept].tolist(), probabilities[kept].tolist()  # type: ignore[return-value]

        self.successors: Successors = lru_cache(maxsize=1 << 16)(successors)

    def context(self, ids: Sequence[int]) -> int | None:
        """The packed last ``order − 1`` tokens; None where there are too few, or an id is out of range."""
        tail = ids[len(ids) - self.order + 1 :] if len(ids) >= self.order - 1 else ()
        if not tail or max(tail) >> self.bits:
            return None
        key = 0
        for token in tail:
            key = (key << self.bits) | token
        return key


Successors = Callable[[int], tuple[list[int], list[float]]]

C1, C2 = 32.0, 8.0


def search(
    root: int, successors: Successors, table: NgramTable, *, iterations: int, depth: int, random: Random
) -> tuple[list[int], list[int], list[int], list[int]]:
    """Adaptix's Monte Carlo tree search (Eqs. 2 and 3).

    An iteration walks down by PUCT, Q + (C1 + ln((N + C2 + 1) / C2)) · P · √N / (1 + n), an unvisited child
    first; expands the node it ends at, steps into its heaviest child, goes on to ``depth`` by sampling
    successors, and backs the path's score 1 + Σ w up. (Eq. 8 has Σ ln w; the published code looks each w up one token
    early, so its score hardly varies.)

    Args:
        root: the packed context.
        successors: tokens and weights that follow a packed context.
        table: packs contexts.
        iterations: number of searches.
        depth: deepest node.
        random: for the samples.

    Returns:
        Token, parent, visits and packed context of each node. Node 0 is the root, and a node comes after its parent.
    """
    # One function over flat lists: node objects and calls would cost more than the search itself.
    # Node 0 is the root. The children of n are first[n] .. last[n] - 1; fresh[n] is its next unvisited one.
    bits, mask = table.bits, table.mask
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


Learned = dict[int, tuple[list[int], list[float]]]  # by packed context: tokens that follow it, and their weights


@dataclass
class TrigramDrafter(Drafter):
    """Drafts a tree of likely continuations under an n-gram model.

    Before each search every n-gram of the last ``recent`` tokens gains ``gain`` in weight, so the model moves
    towards what the target writes. What is learned stays for later texts.
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
    learned: Learned = field(default_factory=dict, init=False, repr=False)

    def start(self, prompt: Prompt) -> tuple[Random, Learned]:
        """A search's generator, and the learned weights: those of the drafter, or a copy for this sequence alone."""
        if prompt.alone:
            return Random(self.seed), self.learned
        return Random(self.seed), {context: (list(t), list(w)) for context, (t, w) in self.learned.items()}

    def draft(self, request: DraftRequest) -> Draft:
        """The most visited nodes of a search, each extended by its likeliest successor; at most ``max_depth`` deep.

        A parent has at least the visits of its child and comes first, so any number of the most visited form a tree.
        The draft is empty where the context is unknown.
        """
        table, (random, learned), most = self.table, request.state, request.max_depth
        self.learn(learned, request.ids)
        root = table.context(request.ids)
        if root is None or most < 1:
            return Draft.empty()

        def after(context: int) -> tuple[list[int], list[float]]:
            return learned.get(context) or table.successors(context)

        levels = min(self.depth, most)
        token, parent, visits, context = search(
            root, after, table, iterations=self.searches, depth=levels, random=random
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

    def learn(self, known: Learned, ids: list[int]) -> None:
        """Raise the weight of each n-gram among the last ``recent`` tokens."""
        size, window = self.table.order - 1, ids[-self.recent :]
        for end in range(size, len(window)) if self.gain else ():
            context, token = self.table.context(window[end - size : end]), window[end]
            if context is None or token >> self.table.bits:
                continue
            if context in known:
                tokens, weights = known.pop(context)
            else:
                tokens, weights = map(list, self.table.successors(context))  # type: ignore[arg-type]
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
