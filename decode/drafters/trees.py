"""Trees of the likeliest tokens: EAGLE-2's of a feature head (arXiv 2406.16858), DDTree's of a block (2604.12989).

Both are functions of the text, so they are verified as deterministic drafts.
"""

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from decode.core.draft import Draft, Drafts, fetch, upload, upload_all
from decode.core.sampling import LogitsWarper, Prefixes
from decode.drafters.base import DraftRequest
from decode.drafters.model import BlockDrafter, FeatureDrafter, HeadDrafter
from decode.models.api import Model
from decode.models.heads.block_runner import BlockRunner
from decode.models.heads.runner import HeadRunner, in_target

Children = tuple[Tensor, Tensor]
"""Log-probabilities of the likeliest tokens after each node, and these tokens, ``[texts, nodes, width]`` each."""
Expand = Callable[[int, Tensor, Tensor], Children]
"""The children of a level's nodes, given the level, the places of its nodes among the children of the level before, and
their tokens, ``[texts, nodes]`` each."""


def of_parents(values: Tensor, above: Tensor) -> Tensor:
    """For each node what its parent has: ``[texts, nodes, ..]`` from ``[texts, parents, n]`` by place."""
    return values.gather(1, above[..., None].expand(-1, -1, values.shape[2]))


class TreeDrafter(HeadDrafter):
    """Drafts a tree, as deep as the stop rule's window.

    Attributes:
        width: children tried of each node (EAGLE-2: 10).
        nodes: most nodes of the finished tree (EAGLE-2: 60).
        threshold: least cumulative probability of a node (EAGLE-2: 0).
    """

    trees = True

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

    def children(self, logits: Tensor, ids: Tensor | None) -> Children:
        """The likeliest tokens of each row, by their `ids` in the target, and their log-probabilities."""
        best = logits.float().log_softmax(-1).topk(min(self.width, logits.shape[-1]), -1)
        return best.values, best.indices if ids is None else ids[best.indices]

    def grow(self, roots: Children, expand: Expand, limits: Sequence[int], breadth: int) -> list[Draft]:
        """The trees of the most probable nodes, of equals the first, below the pending tokens of texts.

        A node's score is the log-probability of its tokens from the root on. At most `breadth` nodes of a level are
        expanded. The host waits once, for the finished trees; on a CPU, where looking is free, only what may be in them
        is expanded.

        Args:
            roots: children of the pending tokens.
            expand: gives the children of a level's nodes.
            limits: depth of each tree, at least 1.
            breadth: nodes expanded of a level.
        """
        least = math.log(self.threshold) if self.threshold else -math.inf
        depths = upload(limits, roots[0].device)[:, None]

        def possible(scores: Tensor, depth: int) -> Tensor:
            scores = scores.masked_fill(scores < least, -torch.inf) if self.threshold else scores
            return scores if depth <= min(limits) else scores.masked_fill(depths < depth, -torch.inf)

        last, ids = possible(roots[0][:, 0], 1), roots[1][:, 0]
        scores, tokens, parents, first = [last], [ids], [torch.full_like(ids, -1)], 0
        for level in range(1, max(limits)):
            best, at = (x[:, :breadth] for x in last.sort(dim=-1, descending=True, stable=True))
            if best.is_cpu:
                found = torch.cat(scores, 1)
                cut = found.topk(min(self.nodes, found.shape[1])).values[:, -1:]
                count = int(((best >= cut) & (best > -torch.inf)).sum(1).max())
                if not count:
                    break
                best, at = best[:, :count], at[:, :count]
            values, below = expand(level, at, ids.gather(1, at))
            parents.append((first + at).repeat_interleave(values.shape[-1], 1))
            first += last.shape[1]
            last, ids = possible((best[..., None] + values).flatten(1), level + 1), below.flatten(1)
            scores.append(last)
            tokens.append(ids)
        known = torch.cat(scores, 1)
        best, kept = (x[:, : self.nodes] for x in known.sort(dim=-1, descending=True, stable=True))
        held = (best > -torch.inf).sum(1)
        kept = kept.masked_fill(best == -torch.inf, known.shape[1] - 1).sort(-1).values  # parents before children
        columns = fetch(held, kept, *(torch.cat(part, 1).gather(1, kept) for part in (tokens, parents)))
        return [self._tree(*rows) for rows in zip(*columns)]

    @staticmethod
    def _tree(count: int, kept: Sequence[int], tokens: Sequence[int], parents: Sequence[int]) -> Draft:
        place = {node: i for i, node in enumerate(kept[:count])} | {-1: -1}
        return Draft(tokens[:count], [place[parent] for parent in parents[:count]])


class FeatureTreeDrafter(TreeDrafter, FeatureDrafter):
    """EAGLE-2: a level keeps the `width` nodes of the largest cumulative probability, the tree the best `nodes`."""

    runner: HeadRunner

    def drafts(self, requests: Sequence[DraftRequest], limits: Sequence[int]) -> Drafts:
        """See `ModelDrafter.drafts`."""
        runner, warp, count = self.runner, self.warp, len(requests)
        caches = [request.state.cache for request in requests]
        feeds = upload_all(list(map(self.unread, requests)), runner.device)
        out = self.read(caches, feeds)
        # of each node the state that drafts its children, which slots it sees, and the tokens down to it
        states, paths = out.hidden[:, None], feeds[0].new_empty(count, 1, 0)
        seen = paths.bool()

        def children(logits: Tensor) -> Children:
            # as in EAGLE-2 at temperature 1 and without cuts: neither changes the order of a node's children
            ids, nodes = runner.columns, len(logits) // count
            if warp.needs_prefix:
                histories = [request.history for request in requests]
                before = Prefixes(histories, [nodes] * count, paths.flatten(0, 1) if paths.shape[2] else None)
                logits, ids = warp.process(in_target(logits, ids, runner.vocab_size), before), None
            values, tokens = (x.unflatten(0, (count, nodes)) for x in self.children(logits, ids))
            return values, tokens

        def expand(level: int, at: Tensor, tokens: Tensor) -> Children:
            nonlocal states, seen, paths
            above = at // roots[0].shape[-1]
            own = torch.eye(at.shape[1], dtype=torch.bool, device=at.device).expand(count, -1, -1)
            seen = torch.cat([of_parents(seen, above), own], 2)
            if warp.needs_prefix:
                paths = torch.cat([of_parents(paths, above), tokens[..., None]], 2)
            out = runner.read_level(caches, tokens, of_parents(states, above), seen, level - 1)
            states = out.hidden.unflatten(0, (count, -1))
            return children(out.logits)

        roots = children(out.logits)
        return Drafts.of(self.grow(roots, expand, limits, self.width), runner.device, trees=True)


class BlockTreeDrafter(TreeDrafter, BlockDrafter):
    """DDTree: the nodes of the largest cumulative probability, children being the next slot's likeliest tokens."""

    runner: BlockRunner

    def drafts(self, requests: Sequence[DraftRequest], limits: Sequence[int]) -> Drafts:
        """See `ModelDrafter.drafts`."""
        runner, head, texts = self.runner, self.runner.head, range(len(requests))
        block = runner.draft([r.state.cache for r in requests], [r.ids[-1] for r in requests], limits)
        if not head.conditional:  # a slot's tokens are the same whatever stands before them
            values, ids = self.children(block.logits, runner.columns)

            def expand(level: int, at: Tensor, tokens: Tensor) -> Children:
                places = at.new_full(at.shape, level)
                return of_parents(values, places), of_parents(ids, places)

            roots = values[:, :1], ids[:, :1]
        elif head.candidates:
            candidates, scores = runner.scores(block)
            values, picked = self.children(scores, None)
            last = picked[:, 0, 0]  # the candidates that the last level's children are

            def expand(level: int, at: Tensor, tokens: Tensor) -> Children:
                nonlocal last
                above = last.gather(1, at)
                chosen = of_parents(picked[:, level], above)
                last = chosen.flatten(1)
                return of_parents(values[:, level], above), candidates[:, level].gather(1, last).view_as(chosen)

            roots = values[:, 0, :1], candidates[:, 0].gather(1, last)[:, None]
        else:

            def expand(level: int, at: Tensor, tokens: Tensor) -> Children:
                found = self.children(runner.condition(block, level, texts, tokens).logits, runner.columns)
                return found[0].unflatten(0, at.shape), found[1].unflatten(0, at.shape)

            found = self.children(runner.condition(block, 0, texts, None).logits, runner.columns)
            roots = found[0][:, None], found[1][:, None]
        return Drafts.of(self.grow(roots, expand, limits, self.nodes), runner.device, trees=True)
