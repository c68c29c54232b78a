"""Layers of a model: drafts that start from the target's, LayerSkip's training recipe, progressive stacking."""

import copy
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AutoModelForCausalLM, PreTrainedModel

from decode.errors import UserError
from decode.models.families import check_structure, decoder_layers, final_norm, state_of
from decode.models.heads import FeatureHead, RMSNorm
from decode.models.wrapped import language_model
from distill.config.training import LayerSkipSettings, StackingSettings

WATCHED = 4  # most exits whose loss is part of a validation


# -- drafts from the target's layers ----------------------------------------------------------------------------------


def kept_layers(layers: int | list[int], total: int) -> list[int]:
    """Returns the numbers of the target's layers that a cut draft keeps.

    Args:
        layers: Number of layers, spread evenly from the first to the last, or the layers themselves, counted from 0.
        total: Number of layers of the target.

    Raises:
        UserError: The target has fewer layers, or no layer is left out.
    """
    if isinstance(layers, int):
        kept = [0] if layers == 1 else [round(i * (total - 1) / (layers - 1)) for i in range(layers)]
    else:
        kept = list(layers)
    if kept != sorted(set(kept)) or not kept or kept[0] < 0 or kept[-1] >= total or len(kept) >= total:
        raise UserError(
            f"student.layers is {layers} and the target has {total} layers: wanted a number from 1 to {total - 1}, or "
            f"different layers from 0 to {total - 1} in ascending order, at least one left out"
        )
    return kept


@torch.no_grad()
def cut(target: PreTrainedModel, layers: int | list[int]) -> PreTrainedModel:
    """Returns a model with some of the target's layers, and copies of its embeddings, norm and head.

    It is a draft for families that have no small model. Its weights fit the target's states from the start.

    Raises:
        UserError: The layers cannot be accessed, or ``layers`` does not fit.
    """
    target = language_model(target)
    check_structure(target)
    stack = decoder_layers(target)
    kept = kept_layers(layers, len(stack))
    config = copy.deepcopy(target.config)
    text = config.get_text_config()
    for name, value in list(vars(text).items()):  # such as layer_types, with one entry per layer
        if isinstance(value, list) and len(value) == len(stack) and name.endswith(("layers", "types")):
            setattr(text, name, [value[i] for i in kept])
    text.num_hidden_layers = len(kept)
    if per_layer := config.to_dict().get("per_layer_config"):  # fields that differ between layers, by number
        by_number = {int(number): fields for number, fields in per_layer.items()}
        text.per_layer_config = {i: by_number[source] for i, source in enumerate(kept) if source in by_number}
    read = type(config).from_dict(config.to_dict()).to_dict()
    wrong = [f"{key} would be {read[key]}" for key, value in config.to_dict().items() if read.get(key) != value]
    draft: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=target.dtype)
    layer = next(name for name, module in target.named_modules() if module is stack) + ".{}."
    sources = {layer.format(number): layer.format(source) for number, source in enumerate(kept)}
    weights, found = target.state_dict(), {}
    for name, wanted in draft.state_dict().items():
        own = next((prefix for prefix in sources if name.startswith(prefix)), "")
        weight = weights.get(sources.get(own, "") + name.removeprefix(own), wanted.new_empty(0))
        if weight.dim() == wanted.dim() and weight.shape != wanted.shape:  # parts of all layers, as in Gemma 4
            dim = next(i for i, size in enumerate(wanted.shape) if size != weight.shape[i])
            if weight.shape[dim] * len(kept) == wanted.shape[dim] * len(stack):
                weight = torch.cat([weight.chunk(len(stack), dim)[source] for source in kept], dim)
        wrong += [f"{name} would be {list(wanted.shape)}"] * (weight.shape != wanted.shape)
        found[name] = weight
    if wrong:
        raise UserError(
            f"{type(target).__name__} ({config.model_type}) cannot be cut to layers {kept}: {', '.join(wrong[:2])}: "
            "name others in student.layers, such as the last one too, or choose another student.kind"
        )
    draft.load_state_dict(found)
    draft.generation_config = copy.deepcopy(target.generation_config)
    return draft.train(target.training)


@torch.no_grad()
def start_from_target(head: Any, target: PreTrainedModel) -> list[str]:
    """Copies what fits of the target's last layers into a head, so that it begins as these.

    ``fc`` passes the last captured state through. EAGLE-3's attention reads that state with the target's weights and
    the embedding with its own random ones, and its output rows are the target's. The norm is the target's final one.

    Returns:
        Names of the layers' weights that are not the target's: of other shapes, or of a family built otherwise.
    """
    width = int(head.config.hidden_size)
    head.fc.weight.zero_()
    head.fc.weight[:, -width:] = torch.eye(width)
    if isinstance(head, FeatureHead):
        ids, output = head.draft_ids(), target.get_output_embeddings().weight
        head.lm_head.weight.copy_(output[: len(head.lm_head.weight)] if ids is None else output[ids])
    own = [head.layer] if isinstance(head, FeatureHead) else list(head.layers)
    try:
        layers, norm = decoder_layers(target), final_norm(target)
    except UserError:
        return [name for name, _ in own[0].named_parameters()]

    def copied(module: nn.Linear | RMSNorm, source: nn.Module | None) -> bool:
        weight = getattr(source, "weight", None)
        if source is None or not isinstance(weight, Tensor) or len(weight) != len(module.weight):
            return False
        extra = module.weight.shape[-1] - weight.shape[-1]  # of attention, which reads the embedding before the state
        if isinstance(module, RMSNorm):  # some families add 1 to the weights, or a bias
            x = torch.linspace(-2, 3, len(weight), dtype=weight.dtype, device=weight.device)[None]
            wanted = functional.rms_norm(x, weight.shape, weight, module.variance_epsilon)
            fits = torch.allclose(source(x), wanted, rtol=1e-3, atol=1e-4)
        else:
            fits = isinstance(source, nn.Linear) and extra in (0, weight.shape[1])
        if fits:
            module.weight[..., extra:] = weight
        return fits

    copied(head.norm, norm)
    first, left = dict(layers[0].named_modules()), list[str]()
    for layer, source in zip(own, list(layers)[-len(own) :]):
        last = dict(source.named_modules())
        if isinstance(head, FeatureHead):
            last |= {"hidden_norm": last.get("input_layernorm"), "input_layernorm": first.get("input_layernorm")}
        parts = [(name, part) for name, part in layer.named_modules() if isinstance(part, nn.Linear | RMSNorm)]
        left += [name for name, part in parts if not copied(part, last.get(name)) and name not in left]
    return left


# -- LayerSkip --------------------------------------------------------------------------------------------------------


def dropout_rates(layers: int, step: int, steps: int, highest: float, *, scratch: bool) -> list[float]:
    """Returns p(l, t) = S(t)·D(l)·p_max of every layer, with D(l) = exp(l·ln 2/(L − 1)) − 1.

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
    """Returns the indices of the layers whose exits are trained at a step, C(t, l), without the last layer."""
    distance = max(1, settings.rotation or layers - 1)
    return list(range(step % distance, layers - 1, distance))


def exit_weights(settings: LayerSkipSettings, layers: int, exits: list[int]) -> tuple[list[float], float]:
    """Returns the weights of the exits and of the last layer, whose sum is 1."""
    scale = settings.early_exit_scale
    if settings.weighting == "uniform":
        early, last = [scale] * len(exits), 1.0
    else:  # e(l) = s·Σᵢ≤l i, and for the last layer L − 1 + s·Σᵢ≤L−2 i
        early = [scale * i * (i + 1) / 2 for i in exits]
        last = layers - 1 + scale * (layers - 2) * (layers - 1) / 2
    total = sum(early) + last or 1.0
    return [w / total for w in early], last / total


class LayerSkip:
    """Applies LayerSkip's recipe to a model in training mode. In evaluation no layer is dropped.

    Args:
        model: A causal language model whose layers can be accessed.
        settings: The recipe.
        steps: Number of optimiser steps.
        scratch: Whether the model starts from random weights.

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
        self.norm, self.running = final_norm(model), self.count
        self.rates: list[float] = []
        self.exits: list[int] = []
        self.states: dict[int, Tensor] = {}
        self.hooks = [layer.register_forward_hook(self._hook(i), with_kwargs=True) for i, layer in enumerate(layers)]

    def begin(self, step: int, layers: int | None = None) -> None:
        """Starts a training step, for which it sets the trained exits and the dropout rates of the layers.

        Args:
            step: Number of the step, from 0.
            layers: Number of layers that run at this step. None: all.
        """
        settings, self.running = self.settings, layers or self.count
        self.rates = dropout_rates(self.running, step, self.steps, settings.dropout, scratch=self.scratch)
        self.exits = exits_on(settings, self.running, step) if settings.early_exit_scale else []

    def watch(self) -> None:
        """Starts a validation batch: no layer is dropped, and some exits are evaluated, always the same ones."""
        exits = list(range(0, self.count - 1, -(-(self.count - 1) // WATCHED)))
        self.running, self.rates, self.exits = self.count, [], exits

    def combine(self, last: Tensor, loss_of: Callable[[Tensor], Tensor], mask: Tensor) -> Tensor:
        """Returns the weighted sum of the last layer's loss and the exits'.

        Args:
            last: Loss of the last layer.
            loss_of: Maps head inputs ``[rows, width]`` to their loss.
            mask: Positions of the rows, ``[batch, time]``.
        """
        weights, rest = exit_weights(self.settings, self.running, self.exits)
        total = rest * last
        for weight, layer in zip(weights, self.exits):
            if weight:
                total = total + weight * loss_of(self.norm(self.states[layer][mask]))
        self.states, self.exits = {}, []  # the rates stay: gradient checkpointing drops the same layers again
        return total

    def remove(self) -> None:
        """Removes the hooks."""
        for hook in self.hooks:
            hook.remove()

    def _hook(self, index: int) -> Callable[..., Any]:
        def after(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
            state = state_of(output)
            if module.training and self.rates and self.rates[index] > 0:
                before = args[0] if args else kwargs["hidden_states"]
                kept = torch.rand(len(state), 1, 1, device=state.device) >= self.rates[index]
                state = torch.where(kept, state, before)
                output = (state, *output[1:]) if isinstance(output, tuple) else state
            if index in self.exits:
                self.states[index] = state
            return output

        return after


class ProgressiveStacking:
    """Trains the first layers of a model alone, and then copies them over the layers above.

    Args:
        model: A causal language model whose layers can be accessed.
        settings: Number of the first layers, and share of the steps for them.
        steps: Number of optimiser steps.

    Raises:
        UserError: The layers cannot be accessed, or the model has no more layers than are trained first.
    """

    def __init__(self, model: PreTrainedModel, settings: StackingSettings, steps: int) -> None:
        self.layers, self.first, self.copy_step = decoder_layers(model), settings.layers, int(settings.share * steps)
        if settings.layers >= len(self.layers):
            raise UserError(
                f"target.stacking.layers is {settings.layers} and the target has {len(self.layers)} layers: wanted "
                f"at most {len(self.layers) - 1}"
            )

    @contextmanager
    def training(self, step: int) -> Iterator[int]:
        """Reduces the model to the layers that are trained at a step, and yields their number.

        The copies are made before the first step at full depth. Evaluation always uses the whole model.
        """
        layers = self.layers
        if step == self.copy_step:
            for number in range(self.first, len(layers)):
                layers[number].load_state_dict(layers[number - self.first].state_dict())
        above = list(layers[self.first :]) if step < self.copy_step else []
        del layers[len(layers) - len(above) :]
        try:
            yield len(layers)
        finally:
            layers.extend(above)
