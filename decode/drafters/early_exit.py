"""The target's own first layers draft, on its own cache: LayerSkip, AdaSPEED, Draft & Verify."""

from __future__ import annotations

from decode.core.sampling import Warp
from decode.drafters.draft_model import ModelDrafter
from decode.models.runners.fast_runner import FastRunner, LayerSubsetRunner
from decode.models.runners.layer_subset import LayerSubset


class EarlyExitDrafter(ModelDrafter):
    """Drafts with a subset of the target's layers and the model's own final norm and head.

    The target has to use the same runner: what the draft computed in the shared layers is taken up by verification,
    and the target's own rollback is the draft's. Stop rules see the hidden state that the head saw at the exit.

    Attributes:
        subset: the sub-layers that run; `LayerSubset(E)` exits after layer E.
    """

    def __init__(self, runner: FastRunner, warp: Warp, subset: LayerSubset, *, keep_logits: bool = False) -> None:
        super().__init__(LayerSubsetRunner(runner, subset), warp, runner.vocab_size, keep_logits=keep_logits)
        self.subset = subset

    def start(self, ids: list[int]) -> None:
        """The target has read the prompt for both."""

    def commit(self, ids: list[int]) -> None:
        """The target has dropped what was rejected for both."""
