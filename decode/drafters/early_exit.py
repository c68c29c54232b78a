"""The target's own first layers draft, on its own cache: LayerSkip, AdaSPEED, Draft & Verify."""

from __future__ import annotations

from decode.core.sampling import Warp
from decode.drafters.draft_model import ModelDrafter
from decode.models.partial import Part, PartialRunner, PartReader


class EarlyExitDrafter(ModelDrafter):
    """Drafts with a part of the target's layers and the model's own final norm and head.

    The target has to use the same runner: what the draft computed in the shared layers is taken up by verification,
    and the target's own rollback is the draft's. Stop rules see the hidden state that the head saw at the exit.

    Attributes:
        part: the sub-layers that run; `Part(E)` exits after layer E.
    """

    def __init__(self, runner: PartialRunner, warp: Warp, part: Part, *, keep_logits: bool = False) -> None:
        super().__init__(PartReader(runner, part), warp, runner.vocab_size, keep_logits=keep_logits)
        self.part = part

    def start(self, ids: list[int]) -> None:
        """The target has read the prompt for both."""

    def commit(self, ids: list[int]) -> None:
        """The target has dropped what was rejected for both."""
