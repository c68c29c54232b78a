"""Trees of the likeliest tokens: EAGLE-2's of a feature head (arXiv 2406.16858), DDTree's of a block (2604.12989).

Both are functions of the text, so they are verified as deterministic drafts.
"""

import math
from collections.abc import Iterable, Sequence
from heapq import heappop, heappush
from typing import Any

import torch
from torch import Tensor

from decode.core.draft import Draft, Ids
from decode.core.sampling import LogitsWarper
from decode.drafters.base import DraftRequest
from decode.drafters.model import BlockDrafter, Drafting, FeatureDrafter, HeadDrafter
from decode.models.api import Model, Out
from decode.models.heads.block_runner import BlockRunner
from decode.models.heads.runner import HeadRunner, Level


class Candidates:
    """Nodes that a tree may have, parents before children; a score is the log-probability of a node with its ancestors.

    They are few numbers, which are kept on the host, where they cost least.
    """

    def __init__(self, threshold: float) -> None:
        self.least = math.log(threshold) if threshold else -math.inf
        self.tokens, self.parents, self.scores = list[int](), list[int](), list[float]()

    def add(self, parent: int, tokens: Ids, log_probs: Sequence[float]) -> range:
        """Children of a node (-1: the pending token), the likeliest first, but for those below the threshold."""
        first, above = len(self.tokens), self.scores[parent] if parent >= 0 else 0.0
        for token, value in zip(tokens, log_probs):
            if above + value < self.least or above + value == -math.inf:
                break
            self.tokens.append(token)
            self.parents.append(parent)
            self.scores.append(above + value)
        return range(first, len(self.tokens))

    def likeliest(self, nodes: Iterable[int], count: int) -> list[int]:
        """The most probable of these nodes; of equals the first count."""
        return sorted(nodes, key=self.scores.__getitem__, reverse=True)[:count]

    def draft(self, nodes: Sequence[int]) -> Draft:
        """The tree of these nodes, parents before children."""
        place = {node: i for i, node in enumerate(nodes)} | {-1: -1}
        return Draft.tree([self.tokens[node] for node in nodes], [place[self.parents[node]] for node in nodes])


class TreeDrafter(HeadDrafter):
    """Drafts a tree, as deep as the stop rule's window.

    Attributes:
        width: children tried of each node (EAGLE-2: 10).
        nodes: most nodes of the finished tree (EAGLE-2: 60).
        threshold: least cumulative probability of a node (EAGLE-2: 0).
    """

    def __init__(
        self,
        runner: HeadRunner | BlockRunner,
        target: Model,
        warp: LogitsWarper,
        *,
        width: int = 10,
        nodes: int = 60,
        threshold: float = 0.0,
    ) -> None:
        super().__init__(runner, target, warp)
        self.width, self.nodes, self.threshold = width, nodes, threshold

    def _children(self, logits: Tensor, ids: Tensor | None) -> tuple[list[Ids], list[list[float]]]:
        """The likeliest tokens of each row, by their `ids` in the target, and their log-probabilities."""
        best = logits.float().log_softmax(-1).topk(min(self.width, logits.shape[-1]), -1)
        return (best.indices if ids is None else ids[best.indices]).tolist(), best.values.tolist()


class FeatureTreeDrafter(TreeDrafter, FeatureDrafter):
    """EAGLE-2: a level keeps the `width` nodes of the largest cumulative probability, the tree the best `nodes`."""

    runner: HeadRunner

    def drafting(self, request: DraftRequest) -> Drafting:
        """See `ModelDrafter.drafting`."""
        runner, ids, warp, limit = self.runner, request.ids, self.warp, self.limit(request)
        if limit < 1:
            return Draft.empty()
        tree, expanded, slots = Candidates(self.threshold), [-1], dict[int, int]()
        paths: dict[int, list[int]] = {-1: []}  # the nodes down to each expanded one; slots: their places in the cache
        out = yield self.unread(request)
        for level in range(limit):
            logits, known = out.logits, runner.draft_ids
            if warp.needs_prefix:
                prefixes = [ids + [tree.tokens[n] for n in paths[node]] for node in expanded]
                logits, known = warp.process(runner.expand(logits), prefixes), None
            # as in EAGLE-2 at temperature 1 and without cuts: neither changes the order of a node's children
            children = [node for new in map(tree.add, expanded, *self._children(logits, known)) for node in new]
            above, expanded = expanded, tree.likeliest(children, self.width) if level + 1 < limit else []
            if not expanded:
                break
            seen = torch.zeros(len(expanded), len(slots), dtype=torch.bool)
            for row, node in enumerate(expanded):
                paths[node] = [*paths[tree.parents[node]], node]
                seen[row, [slots[n] for n in paths[node][:-1]]] = True
            slots |= {node: len(slots) + i for i, node in enumerate(expanded)}
            rows = torch.tensor([above.index(tree.parents[node]) for node in expanded], device=runner.device)
            picked = torch.tensor([tree.tokens[node] for node in expanded], device=runner.device)
            out = yield Level(picked, out.hidden.index_select(0, rows), seen, level)
        return tree.draft(sorted(tree.likeliest(range(len(tree.tokens)), self.nodes)))

    def read(self, caches: list[Any], feeds: list[Any]) -> list[Out]:
        """Outputs over the head's vocabulary, for the tokens of the sequences or for a level of each."""
        first = isinstance(feeds[0], Tensor)
        return self.runner.read_pairs(caches, feeds, 1) if first else self.runner.read_levels(caches, feeds)


class BlockTreeDrafter(TreeDrafter, BlockDrafter):
    """DDTree: a best-first search adds the node of the largest cumulative probability.

    Its children are the next slot's likeliest tokens after it.
    """

    runner: BlockRunner

    def drafting(self, request: DraftRequest) -> Drafting:
        """See `ModelDrafter.drafting`."""
        runner, limit = self.runner, self.limit(request)
        if limit < 1:
            return Draft.empty()
        out: Any = yield request.ids[-1], limit
        tree, heap, kept = Candidates(self.threshold), list[tuple[float, int]](), list[int]()
        depths = {-1: 0}
        # without a scorer a slot's tokens are the same whatever stands before them
        apart = None if runner.head.conditional else self._children(out.logits, runner.draft_ids)

        def expand(node: int, token: int) -> None:
            """Add the children of a node."""
            slot = depths[node]
            if apart is None:
                before = torch.tensor(token, device=runner.device)
                conditioned = runner.condition(out, slot, before)
                (tokens,), (values,) = self._children(conditioned.logits, runner.draft_ids)
            else:
                tokens, values = apart[0][slot], apart[1][slot]
            for child in tree.add(node, tokens, values):
                heappush(heap, (-tree.scores[child], child))
                depths[child] = slot + 1

        expand(-1, request.ids[-1])
        while heap and len(kept) < self.nodes:
            _, node = heappop(heap)
            kept.append(node)
            if depths[node] < limit and len(kept) < self.nodes:
                expand(node, tree.tokens[node])
        return tree.draft(kept)
