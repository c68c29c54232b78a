"""A smaller language model of the same vocabulary drafts, token by token."""

from __future__ import annotations

from collections.abc import Collection

import torch
import torch.nn.functional as F
from torch import Tensor

from ..draft import Draft
from ..rng import Rng
from ..runner import Runner
from ..stop import Step, StopRule
from ..trace import Round
from ..warp import Warp


class ModelDrafter:
    """Draws from q, warped exactly as the target is, until the stop rule or the window ends the draft.

    Attributes:
        runner: the draft model over its own cache.
        warp: the same object that warps the target.
        vocab: the target's vocabulary size. Padded vocabularies of one family differ behind the ids they share: a
            longer draft row is cut, a shorter one filled with probability 0, which the residual makes up for.
        ends: tokens that end a text: a drafted one is kept and ends the draft.
    """

    def __init__(self, runner: Runner, warp: Warp, vocab: int, *, keep_logits: bool = False) -> None:
        self.runner = runner
        self.warp = warp
        self.vocab = vocab
        self.keep_logits = keep_logits
        self.ends: Collection[int] = ()

    def start(self, ids: list[int]) -> None:
        """Read the prompt but for its pending token, unless the draft's context cannot hold it."""
        self.runner.truncate(0)
        if len(ids) > 1 and self.runner.room(ids) >= 0:
            self.runner.read(self._known(ids[:-1]), head=0)

    def propose(self, ids: list[int], stop: StopRule, room: int, rng: Rng) -> Draft:
        """See `Drafter.propose`."""
        runner = self.runner
        limit = min(stop.cap(), room, runner.room(ids))
        feed = self._known(ids[runner.length :])  # two tokens after a fully accepted round
        tokens: list[Tensor] = []
        probs: list[Tensor] = []
        logits: list[Tensor] = []
        hidden: list[Tensor] = []
        watch = stop.confidence is not None
        # what follows the end of the text is never used; where nobody waits for the token anyway, looking is free
        reads_tokens = bool(self.ends) and (watch or runner.device.type == "cpu")
        at_once = self.warp.greedy and not watch and not self.warp.needs_prefix
        for _ in range(limit):
            row = self._fit(runner.read(feed, head=1))
            if at_once:  # a one-hot law's draw is its argmax: all rows are warped together at the end
                feed = row.argmax(-1)
                tokens.append(feed[0])
                logits.append(row[0])
                if reads_tokens and int(feed) in self.ends:
                    break
                continue
            q = self.warp(row, [ids + [int(t) for t in tokens]] if self.warp.needs_prefix else None)[0]
            if watch and stop.before(Step(q, None, row[0], runner.hidden[-1])):
                break
            x = rng.draw(q)
            tokens.append(x)
            probs.append(q)
            if self.keep_logits:
                logits.append(row[0])
            if watch:
                hidden.append(runner.hidden[-1])
                if stop.after(Step(q, x, row[0], runner.hidden[-1])):
                    break
            if reads_tokens and int(x) in self.ends:
                break
            feed = x.view(1)
        if not tokens:
            return Draft.empty()
        return Draft.chain(
            torch.stack(tokens),
            self.warp(torch.stack(logits)) if at_once else torch.stack(probs),
            logits=torch.stack(logits) if self.keep_logits else None,
            hidden=torch.stack(hidden) if hidden else None,
            confidence=list(stop.seen),
        )

    def _known(self, ids: list[int]) -> Tensor:
        """Ids as the draft reads them; one that only the target knows is read as the draft's last."""
        last = self.runner.vocab_size - 1
        if self.vocab > self.runner.vocab_size:
            ids = [min(i, last) for i in ids]
        return torch.tensor(ids, device=self.runner.device)

    def _fit(self, logits: Tensor) -> Tensor:
        missing = self.vocab - logits.shape[-1]
        if missing > 0:
            return F.pad(logits, (0, missing), value=-torch.inf)
        return logits[:, : self.vocab] if missing else logits

    def commit(self, ids: list[int]) -> None:
        """Drop what was rejected; an unread tail is fed by the next proposal."""
        self.runner.truncate(len(ids) - 1)

    def observe(self, round: Round) -> None:
        """Nothing to learn."""
