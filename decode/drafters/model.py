"""A smaller language model of the same vocabulary drafts, the target's own first layers, or a head on its states."""

import warnings
from collections.abc import Collection, Generator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from decode.core.draft import Draft, Ids, id_tensor
from decode.core.round import Round
from decode.core.sampling import LogitsWarper, argmax
from decode.core.stop import DraftedToken
from decode.drafters.base import Drafter, DraftRequest, Prompt
from decode.models.api import PIECE, Model, Out, Read, read_prompt
from decode.models.fast.forward import FastRunner, self_speculating
from decode.models.heads.block_runner import BlockRunner
from decode.models.heads.mtp import MtpRunner
from decode.models.heads.runner import DraftHeadRunner, in_target

Drafting = Generator[Any, Out, Draft]
"""Yields what `ModelDrafter.read` is to read next, is sent the output for it, and returns the draft."""


@dataclass
class ModelState:
    """The draft model's cache of a sequence, and the tokens that end the text."""

    cache: Any
    stop_ids: Collection[int]


class ModelDrafter(Drafter):
    """Draws from q, warped exactly as the target is, until the stop rule or the window ends the draft.

    A drafted token that ends the text is kept and ends the draft.

    Padded vocabularies of one family differ after the ids they share: a draft row that is longer than the target's
    vocabulary is cut, a shorter one filled with probability 0, which the residual makes up for.
    """

    runner: Model
    sample = True  # draw tokens; else the likeliest are drafted, as they are in greedy decoding

    def __init__(self, runner: Model, warp: LogitsWarper, vocab: int) -> None:
        self.runner, self.warp, self.vocab = runner, warp, vocab
        self.cache_bytes_per_token = runner.cache_bytes_per_token

    def start(self, prompt: Prompt) -> ModelState:
        """Read the prompt but for its pending token, unless the draft's context cannot hold it."""
        state = ModelState(self.runner.new_cache(), prompt.stop_ids)
        if not prompt.defer_prefill and self.room(state, prompt.ids) >= 0:
            read_prompt(self.runner, state.cache, self.ids(prompt.ids[:-1]))
        return state

    def room(self, state: ModelState, ids: Ids) -> int:
        """How many tokens may be drafted after a text."""
        return self.runner.remaining(ids)

    def limit(self, request: DraftRequest) -> int:
        """The longest draft that the stop rule, the text's budget and the draft model allow."""
        asked, runner = min(request.stop.window, request.max_depth), self.runner
        if asked > 0 and not runner.outgrown and runner.remaining(request.ids) < 1:
            runner.outgrown = True
            warnings.warn(
                f"after {runner.limit} tokens nothing is drafted: the context of {runner.name} holds no more",
                stacklevel=2,
            )
        return min(asked, self.room(request.state, request.ids))

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        """See `Drafter.propose`: the draft model reads the next token of all sequences in one forward."""
        drafts = [Draft.empty()] * len(requests)
        drafting = [self.drafting(request) for request in requests]
        results: dict[int, Any] = dict.fromkeys(range(len(requests)))
        while results:
            feeds = {}
            for i, result in results.items():
                try:
                    feeds[i] = drafting[i].send(result)
                except StopIteration as end:
                    drafts[i] = end.value
            caches = [requests[i].state.cache for i in feeds]
            results = dict(zip(feeds, self.read(caches, list(feeds.values())))) if feeds else {}
        return drafts

    def read(self, caches: list[Any], feeds: list[Any]) -> list[Out]:
        """The output for the last of the tokens that each sequence feeds, all at the same step of their drafts."""
        return self.runner.forward(list(map(Read, caches, feeds)), last=1)

    def drafting(self, request: DraftRequest) -> Drafting:
        """One draft, token by token."""
        state, ids, warp, stop = request.state, request.ids, self.warp, request.stop
        limit, prefixed = self.limit(request), warp.needs_prefix
        watch = None if stop.confidence is None else stop.watch()
        certain = warp.greedy or not self.sample
        plain = certain and not (watch or prefixed or request.keep_logits)
        # what follows the end of the text is never used; where nobody waits for the token anyway, looking is free
        looks = bool(state.stop_ids) and (watch is not None or self.runner.device.type == "cpu")
        tokens, probs, logits = list[Tensor](), [], []
        feed = self.unread(request) if limit > 0 else None
        for _ in range(limit):
            out = yield feed
            row = in_target(out.logits, None, self.vocab)
            if plain:
                feed = argmax(row)
            else:
                prefix = [ids + [int(token) for token in tokens]] if prefixed else None
                q = row if certain else warp(row, prefix)
                drafted = DraftedToken(q[0], None, row[0], out.hidden[-1], certain, out.accepted)
                if watch and watch.before(drafted):
                    break
                if certain:  # a deterministic draft: a draw from one-hot weights is their argmax
                    feed = warp.top(row, prefix)
                else:
                    feed = request.rng.draw(q[0]).view(1)
                    probs.append(q)
                if request.keep_logits:
                    logits.append(row)
            tokens.append(feed)
            if watch:
                drafted.token = feed[0]
                if watch.after(drafted):
                    break
            if looks and int(feed) in state.stop_ids:
                break
        if not tokens:
            return Draft.empty()
        drawn, raw = (torch.cat(rows) if rows else None for rows in (probs, logits))
        return Draft.chain(torch.cat(tokens), drawn, raw, watch.seen if watch else None)

    def ids(self, ids: Ids) -> Ids:
        """Ids as the draft reads them; one that only the target knows is read as the draft's last."""
        last = self.runner.vocab_size - 1
        return [min(i, last) for i in ids] if self.vocab > self.runner.vocab_size else ids

    def unread(self, request: DraftRequest) -> Tensor:
        """The tokens that a text's cache lacks, two after a fully accepted round; of many, only the last."""
        cache, ids = request.state.cache, request.ids
        if len(ids) - cache.length > PIECE:  # as a prompt is read
            read_prompt(self.runner, cache, self.ids(ids[cache.length : -1]))
        return id_tensor(self.ids(ids[cache.length :])).to(self.runner.device)

    def update(self, state: ModelState, ids: Ids, round: Round, out: Out) -> None:
        """Drop what was rejected; an unread tail is fed by the next proposal."""
        state.cache.truncate(len(ids) - 1)

    def close(self, state: ModelState) -> None:
        """See `Drafter.close`."""
        state.cache.close()


class EarlyExitDrafter(ModelDrafter):
    """Drafts with the first `exit_layer` layers and the model's own final norm and head, in the target's cache.

    So LayerSkip and AdaSPEED do. What the draft computed is used by verification, and the target's rollback is the
    draft's. Stop rules read the hidden state that the head read at the exit.

    Raises:
        UserError: a target whose layers cannot draft, or that lacks the layer.
    """

    runner: FastRunner

    def __init__(self, target: Model, warp: LogitsWarper, exit_layer: int) -> None:
        super().__init__(self_speculating(target, exit_layer), warp, target.vocab_size)
        self.exit_layer = exit_layer
        self.cache_bytes_per_token = 0  # the drafter has no cache

    def start(self, prompt: Prompt) -> ModelState:
        """The target has read the prompt for both."""
        return ModelState(prompt.cache, prompt.stop_ids)

    def read(self, caches: list[Any], feeds: list[Any]) -> list[Out]:
        """See `ModelDrafter.read`."""
        return self.runner.forward(list(map(Read, caches, feeds)), last=1, exit_layer=self.exit_layer)

    def update(self, state: ModelState, ids: Ids, round: Round, out: Out) -> None:
        """The target has dropped what was rejected for both."""

    def close(self, state: ModelState) -> None:
        """The target closes its cache."""


class HeadDrafter(ModelDrafter):
    """Drafts with a head, which the loop gives the target's hidden states that `capture` names."""

    def __init__(self, runner: DraftHeadRunner | MtpRunner, target: Model, warp: LogitsWarper) -> None:
        super().__init__(runner, warp, target.vocab_size)
        self.capture = runner.head.captured_layers

    def start(self, prompt: Prompt) -> ModelState:
        """Queue the features that the target's prefill returned, and read them unless that may wait."""
        state = ModelState(self.runner.new_cache(), prompt.stop_ids)
        if prompt.captured is not None:
            self._queue(state, prompt.ids, prompt.captured)
            if len(state.cache.unread) > 1 and not prompt.defer_prefill:
                self._read_text(state, prompt.ids)
        return state

    def _queue(self, state: ModelState, ids: Ids, features: Tensor) -> None:
        """Queue the target's features of a text's last tokens; in a full context none is ever read again."""
        if self.runner.remaining(ids) > 0:
            state.cache.settle(features)
        else:
            state.cache.truncate(0)

    def _read_text(self, state: ModelState, ids: Ids) -> None:
        """Read a text but for its pending token."""
        read_prompt(self.runner, state.cache, self.ids(ids[:-1]))

    def update(self, state: ModelState, ids: Ids, round: Round, out: Out) -> None:
        """Queue the target's features of the token that was pending and of the accepted ones."""
        assert out.captured is not None
        rows = torch.tensor([0, *(node + 1 for node in round.path)], device=out.captured.device)
        self._queue(state, ids, out.captured.index_select(0, rows))


class FeatureDrafter(HeadDrafter):
    """Drafts a chain with a feature head, drawn from the head's warped distribution like any draft model's.

    After every round the pairs that were drafted from the head's own states are replaced by pairs with the target's.
    """

    def room(self, state: ModelState, ids: Ids) -> int:
        """See `ModelDrafter.room`; a text of one token has no feature yet."""
        return super().room(state, ids) if len(state.cache.unread) else 0


class BlockDrafter(HeadDrafter):
    """Drafts a chain from one forward of a block head (DFlash and its descendants).

    It holds the likeliest tokens, as engines serve such heads, or with `sample` tokens drawn from q. The former are a
    deterministic draft, which exact rules accept with the target's probability. Drawn ones come from q given the tokens
    that were really drawn, which is 0 of ids that are no candidates where a scorer chooses among these; without a
    scorer all slots are drawn independently, so that their tokens need not fit together.
    """

    runner: BlockRunner

    def __init__(self, runner: BlockRunner, target: Model, warp: LogitsWarper, *, sample: bool = False) -> None:
        super().__init__(runner, target, warp)
        self.sample = sample

    def _read_text(self, state: ModelState, ids: Ids) -> None:
        self.runner.read([state.cache])

    def read(self, caches: list[Any], feeds: list[Any]) -> list[Any]:
        """The `Block` of each sequence."""
        return self.runner.draft(caches, *zip(*feeds))

    def unread(self, request: DraftRequest) -> Tensor:
        """The token that the block follows."""
        return torch.tensor(request.ids[-1:], device=self.runner.device)

    def drafting(self, request: DraftRequest) -> Drafting:
        """Tokens are chosen from left to right once the block was computed; all at once where nothing looks at them."""
        runner, limit, watched = self.runner, self.limit(request), request.stop.confidence is not None
        if limit < 1:
            return Draft.empty()
        out: Any = yield request.ids[-1], limit
        certain = self.warp.greedy or not self.sample
        at_once = certain and (not runner.head.conditional or runner.head.candidates > 0)
        if at_once and not (watched or self.warp.needs_prefix or request.keep_logits):
            return Draft.chain(runner.likeliest(out))
        choosing, slot = super().drafting(request), 0
        made = None
        while True:
            try:
                token = choosing.send(made)  # type: ignore[arg-type]
            except StopIteration as end:
                return end.value
            made = runner.condition(out, slot, token, greedy=certain if watched else None)
            made.logits, slot = runner.expand(made.logits), slot + 1
