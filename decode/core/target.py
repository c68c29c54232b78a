"""The target in the loop: prefill, score a draft, commit the accepted path."""

from __future__ import annotations

import torch
from torch import Tensor

from decode.core.errors import UserError
from decode.core.proposal import Draft
from decode.core.runner import Runner


class Target:
    """The target model over its rolling cache.

    Between rounds the cache holds one position less than the text: the last token is pending, chosen but not read.
    """

    def __init__(self, runner: Runner) -> None:
        self.runner = runner

    @property
    def hidden(self) -> Tensor:
        """Last hidden states ``[n + 1, width]`` of the rows scored last."""
        return self.runner.hidden

    def prefill(self, ids: list[int]) -> None:
        """Read a new text, all but its pending token."""
        self.runner.truncate(0)
        if ids:
            self.runner.read(torch.tensor(ids, device=self.runner.device), head=0)

    def score(self, pending: int, draft: Draft) -> Tensor:
        """One forward over the pending token and the draft.

        Returns:
            Logits ``[n + 1, vocab]``: row 0 follows the pending token, row i + 1 follows node i.

        Raises:
            UserError: a tree that branches, and a target that reads none.
        """
        device = self.runner.device
        self._base = self.runner.length
        first = torch.full((1,), pending, device=device)
        if not len(draft):
            return self.runner.read(first)
        if not draft.is_chain and not self.runner.supports_trees:
            raise tree_error(self.runner)
        tokens = torch.cat([first, draft.tokens.to(device)])
        return self.runner.read(tokens, None if draft.is_chain else draft)

    def commit(self, path: list[int]) -> None:
        """Keep the pending token and the accepted path, drop the other nodes."""
        self.runner.keep(self._base, [self._base, *(self._base + 1 + i for i in path)])


def tree_error(runner: Runner) -> UserError:
    """What to say where a method drafts trees and the target reads chains only."""
    return UserError(
        f"{runner.name} cannot verify token trees: {runner.tree_refusal}; use a method that drafts chains (vanilla, "
        "eagle, prompt-lookup, layerskip)"
    )
