"""A draft cut from the target: some of its layers, with its embeddings, norm and head.

For families that have no small model. The width is kept, so a cut draft costs about its share of the layers, and
starts from weights that already fit the target's states; distillation closes the gap that the missing layers leave.
"""

import copy

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from decode.core.errors import UserError
from decode.models.layer_locations import check_structure, decoder_layers


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
