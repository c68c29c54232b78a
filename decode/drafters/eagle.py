"""A feature head drafts (EAGLE): a chain, or EAGLE-2's dynamic tree (arXiv 2406.16858)."""

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from decode.draft import Draft
from decode.drafters.base import DraftRequest, Prompt
from decode.drafters.draft_model import Drafting, HeadDrafter, ModelState
from decode.errors import UserError
from decode.models.head_runner import HeadRunner
from decode.models.mtp import MtpRunner
from decode.models.runner import Output, Runner
from decode.sampling import LogitsWarper


def head_of(draft: Runner | None) -> HeadRunner:
    """The feature head among a method's parts.

    Raises:
        UserError: there is no draft, or it is a language model.
    """
    if isinstance(draft, HeadRunner):
        return draft
    given = "no draft is given" if draft is None else f"the draft given is {draft.name}, for vanilla or block"
    raise UserError(
        f"this method drafts with a feature head (EAGLE), and {given}; give a head's folder with --draft (train one: "
        "python -m distill --config configs/quickstart-eagle.yaml)"
    )


class FeatureDrafter(HeadDrafter):
    """Drafts a chain from the target's features, drawn from the head's warped distribution like any draft model's.

    The loop has the target return the hidden states named by `capture`; after every step the pairs that were drafted
    from the head's own states are replaced by pairs with the target's.
    """

    runner: HeadRunner | MtpRunner

    def __init__(self, runner: HeadRunner | MtpRunner, target: Runner, warp: LogitsWarper) -> None:
        super().__init__(runner, warp, target.vocab_size)
        self.capture = runner.model.captured_layers

    def start(self, prompt: Prompt) -> ModelState:
        """Pair the prompt's tokens with the features that the target's prefill returned."""
        state = ModelState(self.runner.new_cache(), prompt.stop_ids)
        if prompt.captured is not None and self._fits(state, prompt.ids):
            state.cache.settle(prompt.captured)
            if not prompt.defer_prefill:
                self.runner.forward([state.cache], [self._known(prompt.ids[:-1])], last=0)
        return state

    def _fits(self, state: ModelState, ids: list[int]) -> bool:
        """Whether the head's context holds the sequence; features that it will never read are not kept."""
        state.full = len(ids) > self.runner.limit
        if state.full:
            state.cache.truncate(0)
        return not state.full

    def _drafting(self, request: DraftRequest) -> Drafting:
        """A text of one token has no feature yet, so nothing is drafted."""
        if not self._fits(request.state, request.ids) or not len(request.state.cache.unread):
            return Draft.empty()
        return (yield from super()._drafting(request))


class FeatureTreeDrafter(FeatureDrafter):
    """EAGLE-2: a level keeps the `width` nodes of the largest cumulative probability, the tree the best `nodes` of all.

    The tree is a function of the text, so it is verified as a deterministic draft.

    Attributes:
        width: nodes expanded a level, and children tried of each (the paper's top k, 10).
        nodes: most nodes of the finished tree (the paper: 60).
        threshold: least cumulative probability of a node (the paper: 0).
    """

    runner: HeadRunner

    def __init__(
        self,
        runner: HeadRunner,
        target: Runner,
        warp: LogitsWarper,
        *,
        width: int = 10,
        nodes: int = 60,
        threshold: float = 0.0,
    ) -> None:
        super().__init__(runner, target, warp)
        self.width, self.nodes, self.threshold = width, nodes, threshold

    def _drafting(self, request: DraftRequest) -> Drafting:
        """The tree, as deep as the stop rule's window; its few numbers are kept on the host, where they cost least."""
        runner, state, ids, warp = self.runner, request.state, request.ids, self.warp
        depth = min(request.stop.window, request.max_depth, runner.limit - len(ids))
        if not self._fits(state, ids) or depth < 1 or not len(state.cache.unread):
            return Draft.empty()
        out = yield self._known(ids[state.cache.length :])
        width = min(self.width, out.logits.shape[-1])
        least = math.log(self.threshold) if self.threshold else -math.inf
        # the candidates, parents before children; a score is the log-probability of a node with its ancestors
        tokens: list[int] = []
        scores: list[float] = []
        parents: list[int] = []

        def likeliest(nodes: Iterable[int], count: int) -> list[int]:
            """The most probable of these nodes; of equals the first count."""
            best = sorted(nodes, key=scores.__getitem__, reverse=True)[:count]
            return [node for node in best if scores[node] >= least and scores[node] > -math.inf]

        expanded, slots = [-1], dict[int, int]()  # slots: of the nodes that the head has read, in their order
        paths: dict[int, list[int]] = {-1: []}  # nodes down to each expanded one
        for level in range(depth):
            logits = out.logits
            if warp.needs_prefix:
                prefixes = [ids + [tokens[n] for n in paths[node]] for node in expanded]
                logits = runner.reduce(warp.process(runner.expand(logits), prefixes))
            # as in EAGLE-2 at temperature 1 and without cuts: neither changes the order of a node's children
            best = logits.float().log_softmax(-1).topk(width, -1)
            children = best.indices if runner.draft_ids is None else runner.draft_ids[best.indices]
            first = len(tokens)
            for node, own, log_q in zip(expanded, children.tolist(), best.values.tolist()):
                above = scores[node] if node >= 0 else 0.0
                tokens += own
                scores += [above + value for value in log_q]
                parents += [node] * width
            expanded = likeliest(range(first, len(tokens)), self.width) if level + 1 < depth else []
            if not expanded:
                break
            seen = torch.zeros(len(expanded), len(slots), dtype=torch.bool)
            for row, node in enumerate(expanded):
                paths[node] = [*paths[parents[node]], node]
                seen[row, [slots[n] for n in paths[node][:-1]]] = True
            slots |= {node: len(slots) + i for i, node in enumerate(expanded)}
            rows = torch.tensor([(node - first) // width for node in expanded], device=runner.device)
            picked = torch.tensor([tokens[node] for node in expanded], device=runner.device)
            out = yield picked, out.hidden.index_select(0, rows), seen, level
        kept = sorted(likeliest(range(len(tokens)), self.nodes))
        place = {node: i for i, node in enumerate(kept)} | {-1: -1}
        return Draft.tree([tokens[node] for node in kept], [place[parents[node]] for node in kept])

    def _forward(self, caches: list[Any], feeds: list[Any]) -> list[Output]:
        """Outputs over the head's vocabulary, for the tokens of the sequences or for those of a level."""
        if isinstance(feeds[0], Tensor):
            return self.runner.forward_pairs(caches, feeds, 1).split([1] * len(caches))
        tokens, states, seen, levels = zip(*feeds)
        return self.runner.forward_level(caches, tokens, states, seen, levels[0]).split([len(own) for own in tokens])
