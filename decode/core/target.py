"""The target in the loop: prefill, score a draft, commit the accepted path."""

from collections.abc import Sequence

import torch
from torch import Tensor

from decode.core.errors import UserError
from decode.core.proposal import Draft
from decode.core.runner_protocol import Runner


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
        tokens, tree = self.feed(pending, draft)
        return self.runner.read(tokens, tree)

    def feed(self, pending: int, draft: Draft) -> tuple[Tensor, Draft | None]:
        """The tokens that `score` reads, and the tree if they are no chain; see there."""
        device = self.runner.device
        self._base = self.runner.length
        first = torch.full((1,), pending, device=device)
        if not len(draft):
            return first, None
        if not draft.is_chain and not self.runner.supports_trees:
            raise tree_error(self.runner)
        return torch.cat([first, draft.tokens.to(device)]), None if draft.is_chain else draft

    def commit(self, path: list[int]) -> None:
        """Keep the pending token and the accepted path, drop the other nodes."""
        self.runner.keep(self._base, [self._base, *(self._base + 1 + i for i in path)])


def score_together(targets: Sequence[Target], pending: Sequence[int], drafts: Sequence[Draft]) -> Sequence[Tensor]:
    """`Target.score` of several texts of one model, in one forward where its runner can."""
    if len(targets) == 1:
        return [targets[0].score(pending[0], drafts[0])]
    tokens, trees = zip(*(target.feed(token, draft) for target, token, draft in zip(targets, pending, drafts)))
    counts = [len(part) for part in tokens]
    runners = [target.runner for target in targets]
    return runners[0].read_texts(runners, torch.cat(tokens), counts, trees).split(counts)


def tree_error(runner: Runner) -> UserError:
    """What to say where a method drafts trees and the target reads chains only."""
    return UserError(
        f"{runner.name} cannot verify token trees: {runner.tree_refusal}; use a method that drafts chains (vanilla, "
        "eagle, prompt-lookup, layerskip)"
    )
