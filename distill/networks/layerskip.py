"""LayerSkip's training recipe (arXiv 2404.16710): layer dropout, and losses of early exits through the shared head."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from decode.errors import UserError
from distill.config.models import LayerSkipSettings
from distill.networks.layers import check_structure, decoder_layers, final_norm, state_of

WATCHED = 4  # most exits whose loss is part of a validation


def dropout_rates(layers: int, step: int, steps: int, highest: float, *, scratch: bool) -> list[float]:
    """Return p(l, t) = S(t)·D(l)·p_max of every layer, with D(l) = exp(l·ln 2/(L − 1)) − 1.

    Args:
        layers: Number of layers, L.
        step: Optimiser step t, from 0.
        steps: Number of optimiser steps, T.
        highest: p_max.
        scratch: Whether the rates rise over the training, S(t) = exp(t·ln 2/(T − 1)) − 1. Otherwise S = 1.
    """
    time = math.expm1(step * math.log(2) / max(1, steps - 1)) if scratch else 1.0
    return [time * math.expm1(i * math.log(2) / max(1, layers - 1)) * highest for i in range(layers)]


def exits_on(settings: LayerSkipSettings, layers: int, step: int) -> list[int]:
    """Return the indices of the layers whose exits are trained at a step, C(t, l), without the last layer."""
    distance = max(1, settings.rotation or layers - 1)
    return list(range(step % distance, layers - 1, distance))


class LayerSkip:
    """Applies LayerSkip's recipe to a model in training mode. In evaluation no layer is dropped.

    ``steps`` are those of the training, which begins from random weights where it is from ``scratch``.

    Attributes:
        exits: Indices of the layers whose exits are trained at this step.

    Raises:
        UserError: The layers cannot be accessed, there is only one, or some keep a recurrent state.
    """

    def __init__(self, model: PreTrainedModel, settings: LayerSkipSettings, steps: int, *, scratch: bool) -> None:
        check_structure(model)
        layers = decoder_layers(model)
        self.settings, self.steps, self.scratch, self.count = settings, steps, scratch, len(layers)
        if self.count < 2:
            raise UserError("layerskip needs a model of at least two layers; this one has no early exit")
        kinds = sorted(set(getattr(model.config.get_text_config(), "layer_types", None) or ()))
        if any("attention" not in kind or "linear" in kind for kind in kinds):
            raise UserError(
                f"layerskip needs layers that keep keys and values alone, and this model has {', '.join(kinds)}, with "
                "which no exit can draft: set target.layerskip.enabled to false"
            )
        self.norm = final_norm(model)
        self.rates: list[float] = []
        self.exits: list[int] = []
        self.states: dict[int, Tensor] = {}
        self.hooks = [
            layer.register_forward_hook(partial(self._hook, i), with_kwargs=True) for i, layer in enumerate(layers)
        ]

    def begin(self, step: int) -> None:
        """Start a training step, counted from 0: its exits are set, and the layers' dropout rates."""
        settings = self.settings
        self.rates = dropout_rates(self.count, step, self.steps, settings.dropout, scratch=self.scratch)
        self.exits = exits_on(settings, self.count, step) if settings.early_exit_scale else []

    def watch(self) -> None:
        """Start a validation batch: no layer is dropped, and some exits are evaluated, always the same ones."""
        self.rates, self.exits = [], list(range(0, self.count - 1, -(-(self.count - 1) // WATCHED)))

    def combine(self, last: Tensor, loss_of: Callable[[Tensor], Tensor], places: Tensor) -> Tensor:
        """Return the weighted mean of the last layer's loss, whose weight is 1, and the exits'.

        Args:
            last: Loss of the last layer.
            loss_of: Maps head inputs ``[rows, width]`` to their loss.
            places: Positions of the rows among all of the batch's, ``[rows]``.
        """
        scale = self.settings.early_exit_scale
        exits = [self.norm(self.states[i].flatten(0, 1).index_select(0, places)) for i in self.exits if scale]
        total = sum((scale * loss_of(states) for states in exits), last)
        self.states, self.exits = {}, []  # the rates stay: gradient checkpointing drops the same layers again
        return total / (1 + scale * len(exits))

    def remove(self) -> None:
        """Remove the hooks."""
        for hook in self.hooks:
            hook.remove()

    def _hook(self, index: int, module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        """Drop what a layer did to some samples, and keep the states of an exit."""
        state = state_of(output)
        if module.training and self.rates and self.rates[index] > 0:
            before = args[0] if args else kwargs["hidden_states"]
            kept = torch.rand(len(state), 1, 1, device=state.device) >= self.rates[index]
            state = torch.where(kept, state, before)
            output = (state, *output[1:]) if isinstance(output, tuple) else state
        if index in self.exits:
            self.states[index] = state
        return output
