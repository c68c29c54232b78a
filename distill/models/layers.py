"""A draft cut from the target: some of its layers, with its embeddings, norm and head.

For families that have no small model. The width is kept, so a cut draft costs about its share of the layers, and
starts from weights that already fit the target's states; distillation closes the gap that the missing layers leave.
"""

import copy
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from decode.errors import UserError
from decode.models.families import check_structure, decoder_layers, final_norm, state_of
from distill.config.training import LayerSkipSettings, StackingSettings


def kept_layers(layers: int | list[int], total: int) -> list[int]:
    """Numbers of the target's layers that are kept.

    Args:
        layers: How many, spread evenly from the first to the last; or which, counted from 0.
        total: Layers of the target.

    Raises:
        UserError: more than the target has, or none that could be left out.
    """
    if isinstance(layers, int):
        kept = [0] if layers == 1 else [round(i * (total - 1) / (layers - 1)) for i in range(layers)]
    else:
        kept = list(layers)
    if kept != sorted(set(kept)) or not kept or kept[0] < 0 or kept[-1] >= total or len(kept) >= total:
        raise UserError(
            f"initial.layers is {layers} and the target has {total} layers: wanted a number from 1 to {total - 1}, or "
            f"different layers from 0 to {total - 1} in ascending order, at least one left out"
        )
    return kept


@torch.no_grad()
def cut(target: PreTrainedModel, layers: int | list[int]) -> PreTrainedModel:
    """A model of the target's family with some of its layers; its weights are copies.

    Raises:
        UserError: the layers cannot be reached, or `layers` do not fit.
    """
    check_structure(target)
    stack = decoder_layers(target)
    kept = kept_layers(layers, len(stack))
    config = copy.deepcopy(target.config)
    text = config.get_text_config()
    for name, value in list(vars(text).items()):  # such as layer_types: one entry a layer
        if isinstance(value, list) and len(value) == len(stack) and name.endswith(("layers", "types")):
            setattr(text, name, [value[i] for i in kept])
    text.num_hidden_layers = len(kept)
    draft: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=target.dtype)
    prefix = next(name for name, module in target.named_modules() if module is stack) + "."
    weights = target.state_dict()
    found = {}
    for name in draft.state_dict():
        source = name
        if name.startswith(prefix):
            number, _, rest = name.removeprefix(prefix).partition(".")
            source = f"{prefix}{kept[int(number)]}.{rest}"
        found[name] = weights[source]
    draft.load_state_dict(found)
    draft.generation_config = copy.deepcopy(target.generation_config)
    return draft.train(target.training)


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
