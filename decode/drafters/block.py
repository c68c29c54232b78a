"""A block head drafts (DFlash, DSpark): a chain from one forward, or a tree of its likeliest tokens (DDTree)."""

from __future__ import annotations

import heapq
import math
from typing import Any

import torch
from torch import Tensor

from decode.draft import Draft
from decode.drafters.base import DraftRequest, Prompt
from decode.drafters.draft_model import Drafting, HeadDrafter, ModelState
from decode.models.block_runner import BlockRunner
from decode.models.runner import Output, Runner
from decode.sampling import LogitsWarper, argmax, one_hot
from decode.stopping import DraftedToken


class Chain:
    """The conditions of a block's tokens, from left to right.

    Args:
        runner: the head.
        hidden: states of the block's slots, ``[drafts, width]``.
        token: the token before the first one, 0-d long.
    """

    def __init__(self, runner: BlockRunner, hidden: Tensor, token: Tensor, state: Tensor | None = None) -> None:
        self.runner, self.hidden, self.token, self.state = runner, hidden, token, state
        self.rows: Tensor | None = None

    def condition(self, slot: int, logits: Tensor) -> Tensor:
        """The slot's logits ``[1, draft vocab]``, with the bias by the token before."""
        markov, own = self.runner.head.markov_head, self.hidden[slot : slot + 1]
        if markov is None or self.runner.bias is None:
            return logits
        self.rows = markov.markov_w1.weight.index_select(0, self.token.view(1))
        m, self.state = markov.step(own, self.rows, self.state)
        return self.runner.bias.add_to(logits, m)

    def confidence(self, slot: int, *, greedy: bool) -> float | None:
        """The confidence head's estimate that the slot's token is accepted, which does not look at that token."""
        head = self.runner.head
        if head.confidence_head is None:
            return None
        own = self.hidden[slot : slot + 1]
        wide = head.confidence_head.proj.in_features > own.shape[1]
        odds = head.confidence_head(torch.cat([own, self.rows], -1) if wide and self.rows is not None else own).item()
        temperatures = head.temperatures if greedy else head.sampled_temperatures
        temperature = temperatures[slot] if slot < len(temperatures) else 1.0
        return 1 / (1 + math.exp(-max(-50.0, min(50.0, odds / temperature))))


class BlockDrafter(HeadDrafter):
    """Drafts a chain: the likeliest tokens, as engines serve such heads, or with `sample` tokens drawn from q.

    The likeliest tokens are a deterministic draft, which exact rules accept with the target's probability. Drawn ones
    come from q with the Markov bias of the token that was really drawn; without a Markov head all slots are drawn
    independently, so that their tokens need not fit together.
    """

    runner: BlockRunner

    def __init__(self, runner: BlockRunner, target: Runner, warp: LogitsWarper, *, sample: bool = False) -> None:
        super().__init__(runner, warp, target.vocab_size)
        self.capture, self.sample = runner.head.captured_layers, sample

    def start(self, prompt: Prompt) -> ModelState:
        """Queue the features that the target's prefill returned, and read them unless that may wait."""
        state = ModelState(self.runner.new_cache(), prompt.stop_ids)
        if prompt.captured is not None and self._limit(state, prompt.ids) > 0:
            state.cache.settle(prompt.captured)
            if not prompt.defer_prefill:
                self.runner.read([state.cache])
        return state

    def _limit(self, state: ModelState, ids: list[int]) -> int:
        """The tokens that a block may draft after the sequence; features that will never be read are not kept."""
        head = self.runner.head
        room = self.runner.limit - len(ids) + head.from_anchor
        state.full = room < 1
        if state.full:
            state.cache.truncate(0)
        return min(head.drafts, room)

    def _forward(self, caches: list[Any], feeds: list[Any]) -> list[Output]:
        """The outputs of a block for each sequence."""
        return self.runner.draft(caches, *zip(*feeds))

    def _drafting(self, request: DraftRequest) -> Drafting:
        """One chain, whose tokens are chosen from left to right once the block was computed."""
        state, ids, stop, runner = request.state, request.ids, request.stop, self.runner
        limit = min(stop.window, request.max_depth, self._limit(state, ids))
        if limit < 1:
            return Draft.empty()
        out = yield ids[-1], limit
        greedy, prefixed, watch = self.warp.greedy, self.warp.needs_prefix, stop.confidence is not None
        if not (watch or prefixed or self.sample or self.keep_logits or runner.bias is not None):
            drawn = self._known_to_target(argmax(out.logits))
            return Draft.chain(drawn, one_hot(drawn, runner.expand(out.logits)) if self.keep_probs else None)
        chain = Chain(runner, out.hidden, torch.tensor(ids[-1], device=runner.device))
        tokens, probs, logits, row = list[Tensor](), list[Tensor](), list[Tensor](), out.logits
        for slot in range(limit):
            row = chain.condition(slot, out.logits[slot : slot + 1])
            whole = runner.expand(row) if watch or prefixed or self.sample or self.keep_logits else row
            prefix = [ids + [int(t) for t in tokens]] if prefixed else None
            q = self.warp(whole, prefix) if self.sample or watch or prefixed else None
            own = DraftedToken(whole[0] if q is None else q[0], None, whole[0], out.hidden[slot], greedy)
            if watch:
                own.accepted = chain.confidence(slot, greedy=greedy or not self.sample)
                if stop.before(own):
                    break
            if self.sample and q is not None:
                token = request.rng.draw(q[0]).view(1)
                probs.append(q)
            elif q is not None:
                token = argmax(q if greedy or prefixed else whole)
            else:
                token = self._known_to_target(argmax(row))
            tokens.append(token)
            chain.token = token
            if self.keep_logits:
                logits.append(whole)
            own.token = token[0]
            if watch and stop.after(own):
                break
        if not tokens:
            return Draft.empty()
        drawn = torch.cat(tokens)
        certain = None if probs or not self.keep_probs else one_hot(drawn, runner.expand(row))
        return Draft.chain(
            drawn, torch.cat(probs) if probs else certain, torch.cat(logits) if self.keep_logits else None
        )

    def _known_to_target(self, ids: Tensor) -> Tensor:
        """The target's ids of tokens of the head's vocabulary."""
        return ids if self.runner.draft_ids is None else self.runner.draft_ids[ids]


class BlockTreeDrafter(BlockDrafter):
    """DDTree (arXiv 2604.12989): the most probable nodes of the tree that a block's distributions span.

    A best-first search adds the node of the largest cumulative probability; its children are the next slot's likeliest
    tokens after it. The tree is a function of the text, so it is verified as a deterministic draft.

    Attributes:
        width: children of a node.
        nodes: most nodes of the tree.
        threshold: least cumulative probability of a node.
    """

    def __init__(
        self,
        runner: BlockRunner,
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
        """The tree, as deep as the stop rule's window."""
        state, ids, runner = request.state, request.ids, self.runner
        depth = min(request.stop.window, request.max_depth, self._limit(state, ids))
        if depth < 1:
            return Draft.empty()
        out = yield ids[-1], depth
        width = min(self.width, out.logits.shape[-1])
        apart = None
        if runner.bias is None:  # the slots do not depend on the tokens before
            apart = out.logits.float().log_softmax(-1).topk(width, -1)
        least = math.log(self.threshold) if self.threshold else -math.inf
        tokens, parents, number = list[int](), list[int](), 0
        heap: list[
            tuple[float, int, int, int, int, Tensor | None]
        ] = []  # -score, order, parent, slot, token, RNN state

        def add(parent: int, slot: int, score: float, token: int, memory: Tensor | None) -> None:
            """Queue the children of a node."""
            nonlocal number
            if apart is not None:
                values, best = apart.values[slot], apart.indices[slot]
            else:
                chain = Chain(runner, out.hidden, torch.tensor(token, device=runner.device), memory)
                row = chain.condition(slot, out.logits[slot : slot + 1])
                values, best = row[0].float().log_softmax(-1).topk(width)
                memory = chain.state
            for value, child in zip(values.tolist(), self._known_to_target(best).tolist()):
                if score + value >= least and score + value > -math.inf:
                    heapq.heappush(heap, (-(score + value), number, parent, slot, child, memory))
                    number += 1

        add(-1, 0, 0.0, ids[-1], None)
        while heap and len(tokens) < self.nodes:
            score, _, parent, slot, token, memory = heapq.heappop(heap)
            tokens.append(token)
            parents.append(parent)
            if slot + 1 < depth and len(tokens) < self.nodes:
                add(len(tokens) - 1, slot + 1, -score, token, memory)
        return Draft.tree(tokens, parents)
