"""Progressive stacking (Gong et al., ICML 2019): a deep model whose first layers are trained alone for a while.

The layers above start as copies of the trained ones. A step costs less while the model is shallow, and the copies
start from weights that already fit the residual stream.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from transformers import PreTrainedModel

from decode.core.errors import UserError
from decode.models.layer_locations import decoder_layers
from distill.config.language_models import StackingSettings


class ProgressiveStacking:
    """Which layers of a model are trained at a step.

    Args:
        model: Any causal LM whose layers can be found.
        settings: How many layers are trained first, and for how long.
        steps: Optimiser steps in all.

    Raises:
        UserError: The layers cannot be reached, or the model has no more than those trained first.
    """

    def __init__(self, model: PreTrainedModel, settings: StackingSettings, steps: int) -> None:
        self._layers, self._first = decoder_layers(model), settings.layers
        self._copy_step = int(settings.share * steps)
        if settings.layers >= len(self._layers):
            raise UserError(
                f"target.stacking.layers is {settings.layers} and the target has {len(self._layers)} layers: wanted "
                f"at most {len(self._layers) - 1}"
            )

    @contextmanager
    def training(self, step: int) -> Iterator[int]:
        """The model as deep as it is trained at this step; yields its number of layers.

        The copies are made before the first step at full depth. Evaluation is of the whole model at any time.
        """
        layers = self._layers
        if step == self._copy_step:
            for number in range(self._first, len(layers)):
                layers[number].load_state_dict(layers[number - self._first].state_dict())
        above = list(layers[self._first :]) if step < self._copy_step else []
        del layers[len(layers) - len(above) :]
        try:
            yield len(layers)
        finally:
            layers.extend(above)
