"""A smaller language model of the same vocabulary drafts, token by token."""

from collections.abc import Collection, Generator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from decode.draft import Draft
from decode.drafters.base import Drafter, DraftRequest, Prompt
from decode.models.runner import Output, Runner
from decode.sampling import LogitsWarper, argmax, one_hot
from decode.stopping import DraftedToken
from decode.trace import Step

Drafting = Generator[Any, Output, Draft]
"""Yields what the draft model has to read next, is sent the output for it, and returns the draft."""


@dataclass
class ModelState:
    """The draft model's cache of a sequence, and the tokens that end the text."""

    cache: Any
    stop_ids: Collection[int] = ()
    full: bool = False  # of a feature head: the sequence is longer than its context


class ModelDrafter(Drafter):
    """Draws from q, warped exactly as the target is, until the stop rule or the window ends the draft.

    A drafted token that ends the text is kept and ends the draft.

    Attributes:
        runner: the draft model.
        warp: the same object that warps the target.
        vocab: the target's vocabulary size. Padded vocabularies of one family differ after the ids they share: a
            longer draft row is cut, a shorter one filled with probability 0, which the residual makes up for.
        keep_logits: give the draft its unwarped logits, for rules that read them.
        keep_probs: give greedy drafts their one-hot probabilities; without, they are deterministic drafts, which exact
            rules treat the same.
    """

    def __init__(self, runner: Runner, warp: LogitsWarper, vocab: int, *, keep_logits: bool = False) -> None:
        self.runner, self.warp, self.vocab = runner, warp, vocab
        self.padded = vocab != runner.vocab_size
        self.keep_logits, self.keep_probs = keep_logits, True
        self.cache_bytes_per_token = runner.cache_bytes_per_token

    def start(self, prompt: Prompt) -> ModelState:
        """Read the prompt but for its pending token, unless the draft's context cannot hold it."""
        state = ModelState(self.runner.new_cache(), prompt.stop_ids)
        fits = self.runner.remaining(state.cache, prompt.ids) >= 0
        if not prompt.defer_prefill and len(prompt.ids) > 1 and fits:
            self.runner.forward([state.cache], [self._known(prompt.ids[:-1])], last=0)
        return state

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        """See `Drafter.propose`: the draft model reads the next token of all sequences in one forward."""
        drafts = [Draft.empty()] * len(requests)
        drafting = [self._drafting(request) for request in requests]
        results: dict[int, Any] = dict.fromkeys(range(len(requests)))
        while results:
            feeds: dict[int, Any] = {}
            for i, result in results.items():
                try:
                    feeds[i] = drafting[i].send(result)
                except StopIteration as end:
                    drafts[i] = end.value
            caches = [requests[i].state.cache for i in feeds]
            results = dict(zip(feeds, self._forward(caches, list(feeds.values())))) if feeds else {}
        return drafts

    def _forward(self, caches: list[Any], feeds: list[Any]) -> list[Output]:
        """The output for the last of the tokens that each sequence feeds, all at the same step of their drafts."""
        return self.runner.forward(caches, feeds, last=1).split([1] * len(caches))

    def _drafting(self, request: DraftRequest) -> Drafting:
        """One draft, token by token."""
        state, ids, stop, runner = request.state, request.ids, request.stop, self.runner
        limit = min(stop.window, request.max_depth, runner.remaining(state.cache, ids))
        feed = self._known(ids[state.cache.length :])  # two tokens after a fully accepted step
        tokens, probs, logits = list[Tensor](), list[Tensor](), list[Tensor]()
        greedy, prefixed, watch = self.warp.greedy, self.warp.needs_prefix, stop.confidence is not None
        # what follows the end of the text is never used; where nobody waits for the token anyway, looking is free
        reads_tokens = bool(state.stop_ids) and (watch or runner.device.type == "cpu")
        at_once = greedy and not watch and not prefixed
        for _ in range(limit):
            out = yield feed
            row = out.logits
            if self.padded:
                missing = self.vocab - row.shape[-1]
                row = F.pad(row, (0, missing), value=-torch.inf) if missing > 0 else row[:, : self.vocab]
            if at_once:  # a draw from one-hot weights is their argmax: all of them are made together at the end
                feed = argmax(row)
            else:
                q = self.warp(row, [ids + [int(t) for t in tokens]] if prefixed else None)
                if watch and stop.before(DraftedToken(q[0], None, row[0], out.hidden[-1], greedy)):
                    break
                feed = request.rng.draw(q[0]).view(1)
                probs.append(q)
            tokens.append(feed)
            if self.keep_logits:
                logits.append(row)
            if watch and stop.after(DraftedToken(q[0], feed[0], row[0], out.hidden[-1], greedy)):
                break
            if reads_tokens and int(feed) in state.stop_ids:
                break
        if not tokens:
            return Draft.empty()
        drawn = torch.cat(tokens)
        return Draft.chain(
            drawn,
            torch.cat(probs) if probs else one_hot(drawn, row) if self.keep_probs else None,
            torch.cat(logits) if self.keep_logits else None,
        )

    def _known(self, ids: list[int]) -> Tensor:
        """Ids as the draft reads them; one that only the target knows is read as the draft's last."""
        last = self.runner.vocab_size - 1
        if self.vocab > self.runner.vocab_size:
            ids = [min(i, last) for i in ids]
        known = torch.from_numpy(np.asarray(ids, dtype=np.int64))  # in half of torch.tensor's time
        return known.to(self.runner.device)

    def update(self, state: ModelState, ids: list[int], step: Step) -> None:
        """Drop what was rejected; an unread tail is fed by the next proposal."""
        state.cache.truncate(len(ids) - 1)

    def close(self, state: ModelState) -> None:
        """See `Drafter.close`."""
        state.cache.close()

    def reserve(self, rows: int) -> None:
        """See `Drafter.reserve`."""
        self.runner.reserve(rows=rows)


class HeadDrafter(ModelDrafter):
    """Drafts with a head, which the loop gives the target's hidden states that `capture` names."""

    def update(self, state: ModelState, ids: list[int], step: Step) -> None:
        """Queue the target's features of the pending token and of the accepted ones."""
        if not state.full:
            assert step.captured is not None
            rows = torch.tensor([0, *(node + 1 for node in step.path)], device=step.captured.device)
            state.cache.settle(step.captured.index_select(0, rows))
