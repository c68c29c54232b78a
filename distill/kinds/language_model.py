"""Draft models: language models of their own, or some of the target's layers."""

import copy
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel
from typing_extensions import override

from decode.errors import UserError
from decode.measure.acceptance import DEPTH
from decode.models.huggingface import mask_of
from decode.models.sources import language_model
from distill.data.dataset import PLACES, REFERENCE, Batch, Chance
from distill.kinds.base import GROUPS, Draft
from distill.kinds.kind import Kind, Rules
from distill.kinds.parallel import ParallelDraft
from distill.losses.chunked import Rows
from distill.networks.layers import check_structure, decoder_layers
from distill.networks.lm_head import LMHead, check_head, last_hidden
from distill.signal.target import Signal


class LanguageModelDraft(Draft):
    """A language model as a draft: one row for each label token."""

    monitor = "validation_alpha"

    @override
    def index(self, batch: Batch, chance: Chance | None) -> Batch:
        return {GROUPS: [len(batch[PLACES])]}

    @override
    def rows(self, batch: Batch, signal: Signal, *, training: bool = False) -> Rows:
        hidden, (target, _) = last_hidden(self.model, batch["input_ids"], batch[PLACES]), signal.rows(batch)
        reference, head = batch[REFERENCE][:, 0] if REFERENCE in batch else None, LMHead(self.model).only(signal.ids)
        return Rows(hidden, head, target, len(hidden), weight=target.learnable, reference=reference)


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


class LanguageModel(Kind):
    """Language models of their own, and some of the target's layers; with several steps they draft in one forward."""

    @override
    def rules(self, settings: Any) -> Rules:
        student, gguf = settings.student, bool(settings.export.gguf)
        other = student.steps > 1 and settings.trainer.attention not in ("auto", "sdpa", "eager")
        told = "and llama.cpp, for which export.gguf asks, does not run such drafts: set it to null"
        return [
            (other, "trainer.attention", "which reads no masked slots: set it to sdpa, or student.unroll to null"),
            (gguf and student.steps > 1, "student.unroll", told),
            (gguf and student.draft_vocab, "student.draft_vocab", told),
        ]

    @override
    def captured(self, student: Any, config: Any) -> list[int]:
        return []

    @override
    def shrink(self, student: Any) -> None:
        student.layers = [1]  # the last of two, without which Gemma 4 cannot be cut

    @override
    def draft(self, model: Any, student: Any, *, accepted_only: bool = False) -> Draft:
        check_head(model, LMHead(model))
        if mask_of(model) is not None and student.steps < 2:
            raise UserError("the draft has a pard_token: set student.unroll to the tokens that it drafts, such as 8")
        return ParallelDraft(model, student.steps) if student.steps > 1 else LanguageModelDraft(model, DEPTH)


LANGUAGE_MODEL = LanguageModel(
    name="scratch", version=None, served="draft_model", head=False, start="undistilled", decodable=True,
    method="vanilla", sniffed=("eagle-", "eagle3", "dflash", "dspark"),
)  # fmt: skip
