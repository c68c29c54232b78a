"""The LayerSkip training recipe (arXiv 2404.16710): layer dropout and an early-exit loss, on any decoder.

Hooks on the layers drop them for single samples and keep the states of the exits whose turn it is, so the model's own
forward is used as it is. The rotational curriculum with one exit a step costs one more head per step.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from decode.core.errors import UserError
from decode.models.layer_locations import check_structure, decoder_layers, final_norm, state_of
from distill.config.language_models import LayerSkipSettings

WATCHED = 4  # exits at most whose loss is part of a validation


def dropout_rates(layers: int, step: int, steps: int, highest: float, *, scratch: bool) -> list[float]:
    """p(l, t) = S(t)·D(l)·p_max, with D(l) = exp(l·ln 2/(L − 1)) − 1 and, from scratch, S(t) = exp(t·ln 2/(T − 1)) − 1.

    Args:
        layers: L.
        step: t, from 0.
        steps: T.
        highest: p_max.
        scratch: the rates rise over the training; otherwise S = 1.
    """
    time = math.expm1(step * math.log(2) / max(1, steps - 1)) if scratch else 1.0
    return [time * math.expm1(i * math.log(2) / max(1, layers - 1)) * highest for i in range(layers)]


def exits_on(settings: LayerSkipSettings, layers: int, step: int, steps: int) -> list[int]:
    """C(t, l): indices of the layers (the last one not among them) whose exits are trained at this step."""
    early = trained_exits(settings, layers)
    count = len(early)
    if settings.curriculum == "gradual":
        # one more exit every T/(2L) steps, from the last one down
        return early[count - min(count, int(step * 2 * (count + 1) / max(1, steps))) :]
    distance = max(1, settings.rotation or count)
    return early[step % distance :: distance]


def trained_exits(settings: LayerSkipSettings, layers: int) -> list[int]:
    """Indices of the layers whose exits are trained, ascending; the last layer is not among them."""
    return sorted({e - 1 for e in settings.exits if e < layers}) or list(range(layers - 1))


def exit_weights(settings: LayerSkipSettings, layers: int, exits: list[int]) -> tuple[list[float], float]:
    """Weights of the exits and of the last layer; they add up to 1."""
    scale = settings.early_exit_scale
    if settings.weighting == "uniform":
        early, last = [scale] * len(exits), 1.0
    else:
        # e(l) = s·Σᵢ≤l i, and for the last layer L − 1 + s·Σᵢ≤L−2 i
        early = [scale * i * (i + 1) / 2 for i in exits]
        last = layers - 1 + scale * (layers - 2) * (layers - 1) / 2
    total = sum(early) + last or 1.0
    return [w / total for w in early], last / total


class LayerSkip:
    """Applies the recipe to a model in training mode; in evaluation no layer is dropped.

    Args:
        model: any causal LM whose layers can be found.
        settings: the recipe.
        steps: optimiser steps in all.
        scratch: the model starts from random weights.

    Raises:
        UserError: the layers cannot be reached, or there is only one.
    """

    def __init__(self, model: PreTrainedModel, settings: LayerSkipSettings, steps: int, *, scratch: bool) -> None:
        check_structure(model)
        self.settings, self.steps, self.scratch = settings, steps, scratch
        layers = decoder_layers(model)
        self.count = len(layers)
        if self.count < 2:
            raise UserError("layerskip needs a model of at least two layers; this one has no early exit")
        if settings.exits and max(settings.exits) >= self.count:
            raise UserError(
                f"layerskip.exits has {max(settings.exits)}; the model has {self.count} layers, so exits are 1 to "
                f"{self.count - 1} (the number of layers that run)"
            )
        self._norm, self._running = final_norm(model), self.count
        self._rates: list[float] = []
        self._exits: list[int] = []
        self._states: dict[int, Tensor] = {}
        self._hooks = [layer.register_forward_hook(self._hook(i), with_kwargs=True) for i, layer in enumerate(layers)]

    def begin(self, step: int, layers: int | None = None) -> None:
        """A training step: which exits are trained, and how likely layers are dropped.

        Args:
            step: Its number, from 0.
            layers: How many layers run at this step; None: all.
        """
        settings, self._running = self.settings, layers or self.count
        self._rates = dropout_rates(self._running, step, self.steps, settings.dropout, scratch=self.scratch)
        self._exits = exits_on(settings, self._running, step, self.steps) if settings.early_exit_scale else []
        self._states = {}

    def watch(self) -> None:
        """A validation batch: no layer is dropped, and some exits are looked at, the same in every validation."""
        exits = trained_exits(self.settings, self.count)
        self._running, self._rates, self._states = self.count, [], {}
        self._exits = exits[:: -(-len(exits) // WATCHED)]

    def combine(self, last: Tensor, loss_of: Callable[[Tensor], Tensor], mask: Tensor) -> Tensor:
        """The last layer's loss together with the exits'.

        Args:
            last: the last layer's loss.
            loss_of: loss of head inputs ``[rows, width]``.
            mask: ``[batch, time]``, positions whose states make the rows.
        """
        weights, rest = exit_weights(self.settings, self._running, self._exits)
        total = rest * last
        for weight, layer in zip(weights, self._exits):
            if weight:
                total = total + weight * loss_of(self._norm(self._states[layer][mask]))
        self._states, self._exits = {}, []  # but not the rates: gradient checkpointing drops the same layers again
        return total

    def remove(self) -> None:
        """Takes the hooks away."""
        for hook in self._hooks:
            hook.remove()

    def _hook(self, index: int) -> Callable[..., Any]:
        def after(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
            state = state_of(output)
            if module.training and self._rates and self._rates[index] > 0:
                before = args[0] if args else kwargs["hidden_states"]
                kept = torch.rand(len(state), 1, 1, device=state.device) >= self._rates[index]
                state = torch.where(kept, state, before)
                output = (state, *output[1:]) if isinstance(output, tuple) else state
            if index in self._exits:
                self._states[index] = state
            return output

        return after
