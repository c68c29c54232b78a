"""The target's own first layers draft, on its own cache: LayerSkip, AdaSPEED, Draft & Verify."""

from __future__ import annotations

import copy
from collections.abc import Sequence

from torch import Tensor

from decode.core.drafter_base import Drafter
from decode.core.proposal import Draft
from decode.core.runner_protocol import Runner
from decode.core.sampling import Warp
from decode.drafters.draft_model import ModelDrafter
from decode.models.runners.fast_runner import FastRunner, self_speculating
from decode.models.runners.layer_subset import LayerSubset


class LayerSubsetRunner(Runner):
    """A subset of a model's layers in the role of a draft model, on the model's own cache.

    The cache is the target's to roll back: what is read here lies ahead of the target's text until the target reads.
    """

    def __init__(self, whole: FastRunner, subset: LayerSubset) -> None:
        super().__init__(
            whole.name,
            device=whole.device,
            dtype=whole.dtype,
            vocab_size=whole.vocab_size,
            limit=whole.limit,
            model=whole.model,
        )
        self.whole, self.subset = whole, subset

    @property
    def length(self) -> int:
        """Positions read, those read ahead among them."""
        return self.whole.length + self.whole.length_ahead

    def read(self, tokens: Tensor, tree: Draft | None = None, head: int | None = None) -> Tensor:
        """See `FastRunner.read_subset`; logits of all rows whatever `head` is."""
        logits = self.whole.read_subset(tokens, self.subset)
        self.hidden = self.whole.hidden
        return logits

    def read_texts(
        self,
        texts: Sequence[LayerSubsetRunner],
        tokens: Tensor,
        counts: Sequence[int],
        trees: Sequence[Draft | None] | None = None,
        *,
        last_only: bool = False,
    ) -> Tensor:
        """See `FastRunner.read_subset_of_texts`."""
        assert last_only, "drafting takes the last token's logits"
        logits = self.whole.read_subset_of_texts([text.whole for text in texts], tokens, counts, self.subset)
        for text in texts:
            text.hidden = text.whole.hidden
        return logits

    def truncate(self, length: int) -> None:
        """The target does."""


class EarlyExitDrafter(ModelDrafter):
    """Drafts with a subset of the target's layers and the model's own final norm and head.

    The target has to use the same runner: what the draft computed in the shared layers is taken up by verification,
    and the target's own rollback is the draft's. Stop rules see the hidden state that the head saw at the exit.
    """

    def __init__(self, runner: FastRunner, warp: Warp, subset: LayerSubset) -> None:
        super().__init__(LayerSubsetRunner(runner, subset), warp, runner.vocab_size)
        self.subset = subset  # the sub-layers that run; `LayerSubset(E)` exits after layer E

    def fork(self, targets: Sequence[Runner]) -> list[Drafter]:
        """See `Drafter.fork`: each on its own text's target."""
        forks = [copy.copy(self) for _ in targets]
        for fork, target in zip(forks, targets):
            fork.runner = LayerSubsetRunner(self_speculating(target), self.subset)
        return list(forks)

    def start(self, ids: list[int]) -> None:
        """The target has read the prompt for both."""

    def commit(self, ids: list[int]) -> None:
        """The target has dropped what was rejected for both."""
