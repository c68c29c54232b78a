"""A block head drafts a chain from one forward (DFlash and its descendants)."""

from typing import Any

import torch
from torch import Tensor

from decode.core.draft import Draft
from decode.core.sampling import LogitsWarper
from decode.drafters.base import DraftRequest
from decode.drafters.model import Drafting, HeadDrafter, ModelState
from decode.models.api import Model
from decode.models.heads.block_runner import BlockRunner


class BlockDrafter(HeadDrafter):
    """Drafts a chain: the likeliest tokens, as engines serve such heads, or with `sample` tokens drawn from q.

    The likeliest tokens are a deterministic draft, which exact rules accept with the target's probability. Drawn ones
    come from q given the tokens that were really drawn, which is 0 of ids that are no candidates where a scorer chooses
    among these; without a scorer all slots are drawn independently, so that their tokens need not fit together.
    """

    runner: BlockRunner

    def __init__(self, runner: BlockRunner, target: Model, warp: LogitsWarper, *, sample: bool = False) -> None:
        super().__init__(runner, target, warp)
        self.sample = sample

    def _read_text(self, state: ModelState, ids: list[int]) -> None:
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
