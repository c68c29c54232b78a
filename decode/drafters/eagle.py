"""A feature head drafts (EAGLE): a chain, or EAGLE-2's dynamic tree (arXiv 2406.16858)."""

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from decode.draft import Draft
from decode.drafters.base import DraftRequest, Prompt
from decode.drafters.draft_model import Drafting, ModelDrafter, ModelState
from decode.errors import UserError
from decode.models.head_runner import HeadRunner
from decode.models.runner import Output, Runner
from decode.sampling import LogitsWarper
from decode.trace import Step


def head_of(draft: Runner | None) -> HeadRunner:
    """The feature head among a method's parts.

    Raises:
        UserError: there is no draft, or it is a language model.
    """
    if isinstance(draft, HeadRunner):
        return draft
    given = "no draft is given" if draft is None else "the draft given is a language model of its own, for vanilla"
    raise UserError(
        f"this method drafts with a feature head (EAGLE), and {given}; give a head's folder with --draft (train one: "
        "python -m distill --config configs/quickstart-eagle.yaml)"
    )


class FeatureDrafter(ModelDrafter):
    """Drafts a chain from the target's features, drawn from the head's warped distribution like any draft model's.

    The loop has the target return the hidden states named by `capture`; after every round the pairs that were drafted
    from the head's own states are replaced by pairs with the target's.
    """

    runner: HeadRunner

    def __init__(self, runner: HeadRunner, target: Runner, warp: LogitsWarper) -> None:
        super().__init__(runner, warp, target.vocab_size)
        self.capture = runner.feature_head.captured_layers

    def start(self, prompt: Prompt) -> ModelState:
        """Pair the prompt's tokens with the features that the target's prefill returned."""
        state = ModelState(self.runner.new_cache(), prompt.stop_ids)
        if self._fits(state, prompt.ids) and prompt.captured is not None:
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

    def update(self, state: ModelState, ids: list[int], round: Step) -> None:
        """Queue the target's features of the pending token and of the accepted ones."""
        if not state.full:
            assert round.captured is not None
            rows = torch.tensor([0, *(node + 1 for node in round.path)], device=round.captured.device)
            state.cache.settle(round.captured.index_select(0, rows))


class FeatureTreeDrafter(FeatureDrafter):
    """EAGLE-2: a level keeps the `width` nodes of the largest cumulative probability, the tree the best `nodes` of all.

    The tree is a function of the text, so it is verified as a deterministic draft.

    Attributes:
        width: nodes expanded a level, and children tried of each (the paper's top k, 10).
        nodes: most nodes of the finished tree (the paper: 60).
        threshold: least cumulative probability of a node (the paper: 0).
    """

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
        runner, state, ids = self.runner, request.state, request.ids
        depth = min(request.stop.cap(), request.max_depth, runner.limit - len(ids))
        if not self._fits(state, ids) or depth < 1 or not len(state.cache.unread):
            return Draft.empty()
        out = yield self._known(ids[state.cache.length :])
        width = min(self.width, out.logits.shape[-1])
        found = _Candidates(math.log(self.threshold) if self.threshold else -math.inf)
        expanded = [-1]
        for level in range(depth):
            paths = [found.path(node) for node in expanded] if self.warp.needs_prefix else []
            best = self._log_probs(out.logits, ids, paths).topk(width, -1)
            tokens = best.indices if runner.draft_ids is None else runner.draft_ids[best.indices]
            first = len(found.tokens)
            found.add(expanded, tokens.tolist(), best.values.tolist())
            expanded = found.likeliest(self.width, first) if level + 1 < depth else []
            if not expanded:
                break
            rows = torch.tensor([(node - first) // width for node in expanded], device=runner.device)
            picked = torch.tensor([found.tokens[node] for node in expanded], device=runner.device)
            seen = found.read(expanded).to(runner.device)
            out = yield picked, out.hidden.index_select(0, rows), seen, level
        return found.tree(self.nodes)

    def _forward(self, caches: list[Any], feeds: list[Any]) -> list[Output]:
        """Outputs over the head's vocabulary, for the tokens of the sequences or for those of a level."""
        if not isinstance(feeds[0], tuple):
            return self.runner.forward_pairs(caches, feeds, 1).split([1] * len(caches))
        tokens, states, seen, levels = zip(*feeds)
        return self.runner.forward_level(caches, tokens, states, seen, levels[0]).split([len(own) for own in tokens])

    def _log_probs(self, logits: Tensor, ids: list[int], paths: list[list[int]]) -> Tensor:
        """log q of each row ``[w, draft vocab]``, with penalties, at temperature 1 and without cuts.

        As in EAGLE-2: temperature and cuts leave the order of a node's children as it is. Warped rows would take longer
        and, at temperatures below 1, put more nodes above a threshold.
        """
        if self.warp.needs_prefix:
            prefixes = [ids + path for path in paths]
            logits = self.runner.reduce(self.warp.process(self.runner.expand(logits), prefixes))
        return logits.float().log_softmax(-1)


class _Candidates:
    """The nodes that a tree is chosen from, parents before children.

    Attributes:
        tokens: of each node.
        scores: log-probability of each with its ancestors; no node is likelier than its parent.

    Args:
        least: nodes below this log-probability are neither expanded nor drafted.
    """

    def __init__(self, least: float) -> None:
        self.least = least
        self.tokens: list[int] = []
        self.scores: list[float] = []
        self._parents: list[int] = []
        self._slots: dict[int, int] = {}  # of the nodes that the head has read, in their order

    def add(self, parents: list[int], tokens: list[list[int]], log_q: list[list[float]]) -> None:
        """The best children of each of these nodes (-1: the text)."""
        for parent, children, values in zip(parents, tokens, log_q):
            above = self.scores[parent] if parent >= 0 else 0.0
            self.tokens += children
            self.scores += [above + value for value in values]
            self._parents += [parent] * len(children)

    def likeliest(self, count: int, first: int = 0) -> list[int]:
        """At most so many nodes from `first` on, the most probable ones; of equals the first count."""
        nodes = sorted(range(first, len(self.scores)), key=self.scores.__getitem__, reverse=True)[:count]
        return [node for node in nodes if self.scores[node] >= self.least and self.scores[node] > -math.inf]

    def _above(self, node: int) -> list[int]:
        """The ancestors of a node, nearest first."""
        above = []
        while (node := self._parents[node]) >= 0:
            above.append(node)
        return above

    def path(self, node: int) -> list[int]:
        """Tokens down to and including a node (-1: none)."""
        return [self.tokens[n] for n in (*reversed(self._above(node)), node)] if node >= 0 else []

    def read(self, nodes: list[int]) -> Tensor:
        """Note that the head reads these nodes next; which of those read before each sees, bool ``[nodes, read]``."""
        seen = np.zeros((len(nodes), len(self._slots)), dtype=bool)
        for row, node in enumerate(nodes):
            seen[row, [self._slots[n] for n in self._above(node)]] = True
        self._slots |= {node: len(self._slots) + i for i, node in enumerate(nodes)}
        return torch.from_numpy(seen)

    def tree(self, count: int) -> Draft:
        """The tree of at most so many of the most probable nodes."""
        kept = sorted(self.likeliest(count))
        place = {node: i for i, node in enumerate(kept)} | {-1: -1}
        return Draft.tree([self.tokens[node] for node in kept], [place[self._parents[node]] for node in kept])
