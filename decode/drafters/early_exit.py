"""The target's own first layers draft, on its own cache: LayerSkip, AdaSPEED."""

from typing import Any

from decode.core.draft import Ids
from decode.core.round import Round
from decode.core.sampling import LogitsWarper
from decode.drafters.base import Prompt
from decode.drafters.model import ModelDrafter, ModelState
from decode.models.api import Model, Out, Read
from decode.models.fast.forward import FastRunner, self_speculating


class EarlyExitDrafter(ModelDrafter):
    """Drafts with the first `exit_layer` layers and the model's own final norm and head, in the target's cache.

    What the draft computed is used by verification, and the target's rollback is the draft's. Stop rules read the
    hidden state that the head read at the exit.

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
