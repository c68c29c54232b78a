"""Draft models: language models of their own, or some of the target's layers."""

import copy

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from decode.errors import UserError
from decode.models.sources import language_model
from distill.data.dataset import REFERENCE, Batch, label_mask
from distill.losses.chunked import Rows
from distill.networks.layers import check_structure, decoder_layers
from distill.networks.lm_head import LMHead, last_hidden
from distill.signal.target import Signal


class LanguageModelDraft:
    """A language model as a draft: one row for each label token.

    Attributes:
        model: Is trained.
        monitor: The validation metric by which checkpoints are compared.
        depth: Positions of a draft at which validation measures acceptance.
    """

    monitor = "validation_alpha"
    blocks = False

    def __init__(self, model: PreTrainedModel, depth: int) -> None:
        self.model, self.depth = model, depth

    def rows(self, batch: Batch, signal: Signal, seed: int | None = None) -> Rows:
        """The batch's rows.

        ``seed`` is of what is drawn in training; None: nothing is drawn.
        """
        hidden = last_hidden(self.model, batch["input_ids"], label_mask(batch["labels"]))
        rows = Rows(hidden, LMHead(self.model), signal.rows(batch)[0], len(hidden))
        if REFERENCE in batch:
            rows.reference = batch[REFERENCE][:, 0]
        return rows


def kept_layers(layers: int | list[int], total: int) -> list[int]:
    """Returns the numbers of the target's layers that a cut draft keeps, in ascending order.

    Args:
        layers: Number of layers, spread evenly from the first to the last, or the layers themselves, counted from 0.
        total: Number of layers of the target.

    Raises:
        UserError: The target has fewer layers, or no layer is left out.
    """
    if isinstance(layers, int):
        kept = [round(i * (total - 1) / max(1, layers - 1)) for i in range(layers)]
    else:
        kept = layers
    if kept != sorted({*kept} & {*range(total)}) or not 0 < len(kept) < total:
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
    weights, copied = target.state_dict(), {}
    for name, wanted in draft.state_dict().items():
        prefix = next((prefix for prefix in sources if name.startswith(prefix)), "")
        weight = weights.get(sources.get(prefix, "") + name.removeprefix(prefix), wanted.new_empty(0))
        if weight.dim() == wanted.dim() and weight.shape != wanted.shape:  # parts of all layers, as in Gemma 4
            dim = next(i for i, size in enumerate(wanted.shape) if size != weight.shape[i])
            if weight.shape[dim] * len(kept) == wanted.shape[dim] * len(stack):
                weight = torch.cat([weight.chunk(len(stack), dim)[source] for source in kept], dim)
        wrong += [f"{name} would be {list(wanted.shape)}"] * (weight.shape != wanted.shape)
        copied[name] = weight
    if wrong:
        raise UserError(
            f"{type(target).__name__} ({config.model_type}) cannot be cut to layers {kept}: {', '.join(wrong[:2])}: "
            "name others in student.layers, such as the last one too, or choose another student.kind"
        )
    draft.load_state_dict(copied)
    draft.generation_config = copy.deepcopy(target.generation_config)
    return draft.train(target.training)
