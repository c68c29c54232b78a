"""A smaller language model of the same vocabulary drafts, token by token."""

import copy
from collections.abc import Generator, Sequence
from typing import Any, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from decode.draft import Draft
from decode.drafters.base import Drafter, DraftRequest
from decode.models.runner import Runner
from decode.sampling import LogitsWarper, Rng, argmax, one_hot
from decode.stopping import DraftedToken, StopRule

Drafting = Generator[Any, Any, Draft]
"""Yields what the draft model has to read next, is sent the logits behind it, and returns the draft."""


class ModelDrafter(Drafter):
    """Draws from q, warped exactly as the target is, until the stop rule or the window ends the draft.

    Attributes:
        vocab: the target's vocabulary size. Padded vocabularies of one family differ behind the ids they share: a
            longer draft row is cut, a shorter one filled with probability 0, which the residual makes up for.
        keep_probs: give greedy drafts their one-hot probabilities; without, they are deterministic drafts, which exact
            rules treat the same.

    A drafted token of `stop_ids` is kept and ends the draft.
    """

    def __init__(self, runner: Runner, warp: LogitsWarper, vocab: int, *, keep_logits: bool = False) -> None:
        self.runner = runner  # the draft model over its own cache
        self.warp = warp  # the same object that warps the target
        self.vocab = vocab
        self.padded = vocab != runner.vocab_size
        self.keep_logits = keep_logits  # give the draft its unwarped logits, for rules that look at them
        self.keep_probs = True

    def start(self, ids: list[int]) -> None:
        """Read the prompt but for its pending token, unless the draft's context cannot hold it."""
        self.runner.truncate(0)
        if not self.defer_prefill and len(ids) > 1 and self.runner.room(ids) >= 0:
            self.runner.read(self._known(ids[:-1]), head=0)

    def propose(self, ids: list[int], stop: StopRule, max_depth: int, rng: Rng) -> Draft:
        """See `Drafter.propose`."""
        drafting = self._drafting(ids, stop, max_depth, rng)
        try:
            feed = next(drafting)
            while True:
                feed = drafting.send(self._read(feed))
        except StopIteration as end:
            return cast(Draft, end.value)

    def propose_together(self, asked: Sequence[DraftRequest]) -> list[Draft]:
        """See `Drafter.propose_together`: the draft model reads the next token of all texts in one forward."""
        if len(asked) == 1:
            return super().propose_together(asked)
        drafting = [one.drafter._drafting(one.ids, one.stop, one.max_depth, one.rng) for one in asked]
        drafts: dict[int, Draft] = {}
        rows: dict[int, Tensor | None] = dict.fromkeys(range(len(asked)))
        while rows:
            feeds: dict[int, Any] = {}
            for i, row in rows.items():
                try:
                    feeds[i] = drafting[i].send(row)
                except StopIteration as end:
                    drafts[i] = end.value
            if not feeds:
                break
            rows = dict(zip(feeds, self._read_texts([asked[i].drafter.runner for i in feeds], list(feeds.values()))))
        return [drafts[i] for i in range(len(asked))]

    def _read(self, feed: Any) -> Tensor:
        """Logits behind what `_drafting` yields."""
        return self.runner.read(feed, head=1)

    def _read_texts(self, runners: list[Any], feeds: list[Any]) -> Sequence[Tensor]:
        """`_read` of several texts, all at the same step of their drafts."""
        return runners[0].read_texts(runners, torch.cat(feeds), list(map(len, feeds)), last_only=True).split(1)

    def fork(self, targets: Sequence[Runner]) -> list[Drafter]:
        """See `Drafter.fork`."""
        forks = [copy.copy(self) for _ in targets]
        for fork, runner in zip(forks, [self.runner] if len(forks) == 1 else self.runner.fork(len(forks))):
            fork.runner = runner
        return list(forks)

    @property
    def cache_bytes_per_token(self) -> int:
        """See `Drafter.cache_bytes_per_token`."""
        return self.runner.cache_bytes_per_token

    def close(self) -> None:
        """See `Drafter.close`."""
        self.runner.close()

    def _drafting(self, ids: list[int], stop: StopRule, max_depth: int, rng: Rng) -> Drafting:
        """The draft, token by token."""
        runner = self.runner
        limit = min(stop.cap(), max_depth, runner.room(ids))
        feed = self._known(ids[runner.length :])  # two tokens after a fully accepted round
        tokens: list[Tensor] = []
        probs: list[Tensor] = []
        logits: list[Tensor] = []
        hidden: list[Tensor] = []
        greedy, prefixed, watch = self.warp.greedy, self.warp.needs_prefix, stop.confidence is not None
        # what follows the end of the text is never used; where nobody waits for the token anyway, looking is free
        reads_tokens = bool(self.stop_ids) and (watch or runner.device.type == "cpu")
        at_once = greedy and not watch and not prefixed
        for _ in range(limit):
            row = yield feed
            if self.padded:
                row = self._fit(row)
            if at_once:  # a draw from one-hot weights is their argmax: all of them are made together at the end
                feed = argmax(row)
            else:
                q = self.warp(row, [ids + [int(t) for t in tokens]] if prefixed else None)
                if watch and stop.before(DraftedToken(q[0], None, row[0], runner.hidden[-1], greedy)):
                    break
                feed = rng.draw(q[0]).view(1)
                probs.append(q)
            tokens.append(feed)
            if self.keep_logits:
                logits.append(row)
            if watch:
                hidden.append(runner.hidden[-1:])
                if stop.after(DraftedToken(q[0], feed[0], row[0], runner.hidden[-1], greedy)):
                    break
            if reads_tokens and int(feed) in self.stop_ids:
                break
        if not tokens:
            return Draft.empty()
        drawn = torch.cat(tokens)
        return Draft.chain(
            drawn,
            torch.cat(probs) if probs else one_hot(drawn, row) if self.keep_probs else None,
            logits=torch.cat(logits) if self.keep_logits else None,
            hidden=torch.cat(hidden) if hidden else None,
            confidence=list(stop.seen),
        )

    def _known(self, ids: list[int]) -> Tensor:
        """Ids as the draft reads them; one that only the target knows is read as the draft's last."""
        last = self.runner.vocab_size - 1
        if self.vocab > self.runner.vocab_size:
            ids = [min(i, last) for i in ids]
        known = torch.from_numpy(np.asarray(ids, dtype=np.int64))  # in half of torch.tensor's time
        return known.to(self.runner.device)

    def _fit(self, logits: Tensor) -> Tensor:
        missing = self.vocab - logits.shape[-1]
        return F.pad(logits, (0, missing), value=-torch.inf) if missing > 0 else logits[:, : self.vocab]

    def commit(self, ids: list[int]) -> None:
        """Drop what was rejected; an unread tail is fed by the next proposal."""
        self.runner.truncate(len(ids) - 1)
