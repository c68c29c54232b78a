"""The layers and the final norm of a model of any architecture."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from decode.errors import UserError
from decode.models.sources import decoder_of

NORMS = ("norm", "final_layernorm", "final_layer_norm", "ln_f", "norm_f")


def decoder_layers(model: PreTrainedModel) -> nn.ModuleList:
    """The decoder layers, in order.

    Raises:
        UserError: they cannot be found.
    """
    return _stack(model)[1]


def final_norm(model: PreTrainedModel) -> nn.Module:
    """The norm between the last layer and the head, which early exits use too.

    Raises:
        UserError: it cannot be found.
    """
    norms = [child for name, child in _stack(model)[0].named_children() if name in NORMS]
    if not norms:
        raise _unreachable(model, "no norm after the last layer")
    return norms[0]


@contextmanager
def entering(model: PreTrainedModel, layers: Sequence[int]) -> Iterator[dict[int, torch.Tensor]]:
    """Inside, every forward pass leaves here the states ``[batch, time, width]`` that enter these layers, no others.

    Layer i is transformers' ``hidden_states[i]``, and the number of layers the last one's output before the norm.
    """
    states = dict[int, torch.Tensor]()
    stack = decoder_layers(model) if layers else nn.ModuleList()

    def keep(layer: int, module: nn.Module, given: tuple[torch.Tensor, ...], named: dict[str, Any]) -> None:
        states[layer] = given[0] if given else named["hidden_states"]

    with ExitStack() as hooks:
        for layer in layers:
            module = stack[layer] if layer < len(stack) else final_norm(model)
            hooks.enter_context(module.register_forward_pre_hook(partial(keep, layer), with_kwargs=True))
        yield states


def _stack(model: PreTrainedModel) -> tuple[Any, nn.ModuleList]:
    """The module that holds the decoder layers, and the layers; never those of a vision or audio tower."""
    count = model.config.get_text_config().num_hidden_layers
    for parent in decoder_of(model).modules():
        for child in parent.children():
            if isinstance(child, nn.ModuleList) and len(child) == count:
                return parent, child
    raise _unreachable(model, f"no list of {count} layers")


def probe_ids(model: PreTrainedModel) -> torch.Tensor:
    """Eight token ids ``[1, 8]``, on which a model is compared with its parts."""
    return (torch.arange(8, device=model.device) * 7 % model.get_input_embeddings().num_embeddings)[None]


@torch.no_grad()
def check_structure(model: PreTrainedModel) -> None:
    """Check that the model's last hidden state is the final norm of its last layer's output, as early exits assume.

    Raises:
        UserError: the model does something else between the last layer and the head.
    """
    was_training = model.training
    model.eval()
    kept: list[torch.Tensor] = []
    with decoder_layers(model)[-1].register_forward_hook(lambda module, args, output: kept.append(state_of(output))):
        expected = model.base_model(input_ids=probe_ids(model), use_cache=False).last_hidden_state.float()
    model.train(was_training)
    seen = final_norm(model)(kept[0]).float()
    limit = (1e-4 if model.dtype == torch.float32 else 5e-2) * expected.abs().max().clamp_min(1e-6)
    if seen.shape != expected.shape or not (seen - expected).abs().max() < limit:
        raise _unreachable(model, "its last hidden state is not the final norm of the last layer's output")


def state_of(output: Any) -> torch.Tensor:
    """The hidden state ``[batch, time, width]`` in what a layer returns."""
    state: torch.Tensor = output[0] if isinstance(output, tuple) else output
    return state


def _unreachable(model: PreTrainedModel, why: str) -> UserError:
    return UserError(
        f"the layers of {type(model).__name__} ({model.config.model_type}) cannot be reached: {why}; early exits need "
        "a decoder with a list of layers and a final norm, such as llama, qwen, mistral, phi, gpt_neox, gpt2 or gemma"
    )
