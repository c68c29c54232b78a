"""How a head begins: with weights of the target's layers or of another head, and for the most frequent tokens alone."""

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional
from transformers import PreTrainedModel

from decode.errors import UserError
from decode.models.heads.eagle import DraftHead, FeatureHead, RMSNorm
from decode.models.heads.files import load_head
from distill.config.models import StudentSettings
from distill.data.dataset import Examples
from distill.kinds.kind import of_model
from distill.networks.layers import decoder_layers, final_norm


def frequent(rows: Examples, count: int, vocab: int) -> tuple[Tensor, float]:
    """Returns the most frequent label tokens (FR-Spec, arXiv 2502.14856) below ``vocab``, ascending, and their share.

    Ties are broken by the ids, as is the order of tokens that never occur.
    """
    counts = np.zeros(vocab, np.int64)
    for chunk in rows.labels.chunks:
        labels = chunk.flatten().to_numpy()
        counts += np.bincount(labels[(labels >= 0) & (labels < vocab)], minlength=vocab)
    ids = np.sort(np.argsort(-counts, kind="stable")[:count])
    return torch.from_numpy(ids), float(counts[ids].sum() / max(1, counts.sum()))


def check_states(target: PreTrainedModel) -> None:
    """Refuses a target that keeps several states of a token between its layers, or not one for each layer.

    Only shapes are computed, by another model without memory. A family in which that fails passes if it has a list of
    as many layers as its configuration says.

    Raises:
        UserError: With the shapes.
    """
    between = last = seen = None
    base = target.base_model
    with suppress(Exception), torch.no_grad(), FakeTensorMode():
        bare = type(base)._from_config(base.config, dtype=torch.bfloat16)  # experts' shapes are known in this format
        out = bare(input_ids=torch.zeros(1, 2, dtype=torch.long), use_cache=False, output_hidden_states=True)
        between, last = out.hidden_states[0].shape, out.last_hidden_state.shape
        seen = len(out.hidden_states) - 1
    if seen is None:
        with suppress(UserError):
            seen = len(decoder_layers(target))
    if seen != (depth := base.config.get_text_config().num_hidden_layers):  # LongCat-Flash counts its sublayers
        raise UserError(
            f"{type(target).__name__} has no list of {depth} layers, as its configuration counts them, so heads do not "
            "know whose states they read: train a draft model (student.kind scratch, finetune, lora or cut)"
        )
    if between != last:
        raise UserError(
            f"{type(target).__name__} keeps several states of a token between its layers ({between}), and heads read "
            "one: train a draft model (student.kind scratch, finetune, lora or cut)"
        )


@torch.no_grad()
def start_from_head(
    settings: StudentSettings, target: PreTrainedModel, captured: Sequence[int], seed: int
) -> tuple[DraftHead, list[str]]:
    """Returns a head that drafts what the one that ``student.model`` names drafts, and its parts that are new.

    A DFlash head can become another block head: what that adds changes nothing at first, but that a DFlash 2 head
    drafts among its candidates alone. Everything else stays as it is in the given head. ``captured`` are the layers of
    the target whose states the run reads, and the seed is that of new parts.

    Raises:
        UserError: The given head is of a kind that does not fit, or of another shape than the settings say.
    """
    given = load_head(str(settings.model), target).float()
    kind, name, its = settings.draft, f"the head in {settings.model}", of_model(given).name
    if its not in (kind.name, *kind.grown):
        also = f", also one of kind {', '.join(kind.grown)}" if kind.grown else ""
        raise UserError(
            f"{name} is of kind {its}, from which student.kind {kind.name} cannot be started: that takes a head of the "
            f"same kind{also}"
        )
    for key, (wanted, present) in kind.check_given(given, settings).items():
        if wanted != present:
            raise UserError(f"student.{key} is {wanted}, and {name} has {present}: set it to {present}")
    if list(given.captured_layers) != list(captured):
        raise UserError(f"{name} reads the states that enter layers {given.captured_layers}, and a run {captured}")
    return (given, []) if its == kind.name else kind.grow(given, settings, seed)


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
    eagle = isinstance(head, FeatureHead)
    if eagle:
        ids, output = head.draft_ids(), target.get_output_embeddings().weight
        head.lm_head.weight.copy_(output[: len(head.lm_head.weight)] if ids is None else output[ids])
    layers_of_head = [head.layer] if eagle else list(head.layers)
    try:
        layers, norm = decoder_layers(target), final_norm(target)
    except UserError:
        return [name for name, _ in layers_of_head[0].named_parameters()]
    pairs: list[tuple[str, Any, Any]] = [("", head.norm, norm)]
    for layer, source in zip(layers_of_head, list(layers)[-len(layers_of_head) :]):
        sources = dict(source.named_modules())
        if eagle:
            sources["hidden_norm"] = sources.get("input_layernorm")
            sources["input_layernorm"] = dict(layers[0].named_modules()).get("input_layernorm")
        parts = [(name, part) for name, part in layer.named_modules() if isinstance(part, nn.Linear | RMSNorm)]
        pairs += [(name, part, sources.get(name)) for name, part in parts]
    left = dict[str, None]()
    for name, part, source in pairs:
        if _does_the_same(part, source):
            # attention reads the embedding before the state
            part.weight[..., -source.weight.shape[-1] :] = source.weight
        elif name:
            left[name] = None
    return list(left)


def _does_the_same(part: nn.Linear | RMSNorm, source: Any) -> bool:
    """Whether a part of a head with the weight of a part of the target would do what that does."""
    weight = getattr(source, "weight", None)
    if not isinstance(weight, Tensor) or weight.is_meta or len(weight) != len(part.weight):
        return False
    if isinstance(part, nn.Linear):
        return isinstance(source, nn.Linear) and part.in_features in (source.in_features, 2 * source.in_features)
    x = torch.linspace(-2, 3, len(weight), dtype=weight.dtype, device=weight.device)[None]
    wanted = functional.rms_norm(x, weight.shape, weight, part.variance_epsilon)
    return torch.allclose(source(x), wanted, rtol=1e-3, atol=1e-4)  # some families add 1 to the weights, or a bias
