"""Searches for the draft tree of an n-gram model: Monte Carlo tree search with PUCT, and the exact best tree.

Both work on packed contexts (`NgramTable`): ``((context << bits) | token) & mask`` appends a token to one.
"""

import math
from collections.abc import Callable
from heapq import heappop, heappush
from random import Random

from decode.drafters.token_tree import Trie

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


def best_tree(root: int, successors: Successors, *, bits: int, mask: int, nodes: int, depth: int) -> Trie:
    """The ``nodes`` most probable nodes: the tree with the most expected accepted tokens under the model.

    The probability of a node is the product along its path of the weights, normalised where they exceed 1 in
    sum. No node is likelier than its parent, so a best-first search takes the nodes in order.

    Args:
        root: the packed context.
        successors: tokens and weights that follow a packed context.
        bits: bits per token of a packed context.
        mask: keeps the tokens of a context.
        nodes: size of the tree.
        depth: deepest node.
    """
    tree = Trie()
    frontier: list[tuple[float, int, int, int, int, int]] = []
    serial = 0  # ties go to the node that was found first

    def expand(node: int, context: int, probability: float, level: int) -> None:
        nonlocal serial
        tokens, weights = successors(context)
        scale = probability / max(1.0, sum(weights))
        for token, weight in zip(tokens, weights):
            serial += 1
            below = ((context << bits) | token) & mask
            heappush(frontier, (-weight * scale, serial, node, token, below, level))

    if depth > 0:
        expand(-1, root, 1.0, 1)
    while frontier and len(tree) < nodes:
        probability, _, parent, token, context, level = heappop(frontier)
        node = tree.add(parent, token)
        if level < depth:
            expand(node, context, -probability, level + 1)
    return tree
