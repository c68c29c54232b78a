"""The weights that an EAGLE-3 head starts from: random, or the target's own last layer."""

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel

from decode.core.errors import UserError
from decode.models.eagle.head import FeatureHead, RMSNorm
from decode.models.layer_locations import decoder_layers, final_norm


@torch.no_grad()
def start_from_target(head: FeatureHead, target: PreTrainedModel) -> list[str]:
    """Gives an EAGLE-3 head what fits of its target's last layer, so that it begins as that layer on the last state.

    ``fc`` passes the last captured state through. Attention reads that state with the target's weights and the
    embedding with its own random ones. The norm is the target's final one, and the output rows are the target's.

    Returns:
        Names of the layer's weights that are not the target's: of other shapes, or of a family built otherwise.
    """
    width = int(head.config.hidden_size)
    head.fc.weight.zero_()
    head.fc.weight[:, -width:] = torch.eye(width)
    ids, output = head.draft_ids(), target.get_output_embeddings().weight
    head.lm_head.weight.copy_(output[: len(head.lm_head.weight)] if ids is None else output[ids])
    try:
        layers, norm = decoder_layers(target), final_norm(target)
    except UserError:
        return [name for name, _ in head.layer.named_parameters()]
    if _same_norm(head.norm, norm):
        head.norm.weight.copy_(norm.weight)  # type: ignore[arg-type]
    last, first, left = dict(layers[-1].named_modules()), dict(layers[0].named_modules()), []
    sources = {"hidden_norm": last.get("input_layernorm"), "input_layernorm": first.get("input_layernorm")}
    for name, module in head.layer.named_modules():
        if not isinstance(module, nn.Linear | RMSNorm):
            continue
        if not _copied(module, sources[name] if name in sources else last.get(name)):
            left.append(name)
    return left


def _copied(module: nn.Linear | RMSNorm, source: nn.Module | None) -> bool:
    """Whether the module could take the source's weights; one that is twice as wide takes them as its last columns."""
    if isinstance(module, RMSNorm):
        if source is None or not _same_norm(module, source):
            return False
        module.weight.copy_(source.weight)  # type: ignore[arg-type]
        return True
    weight = getattr(source, "weight", None)
    if not isinstance(source, nn.Linear) or not isinstance(weight, Tensor) or len(weight) != len(module.weight):
        return False
    extra = module.weight.shape[1] - weight.shape[1]
    if extra not in (0, weight.shape[1]):
        return False
    module.weight[:, extra:] = weight
    return True


def _same_norm(norm: RMSNorm, other: nn.Module) -> bool:
    """Whether another norm with its weights is an `RMSNorm` with the same: some add 1 to them, or a bias."""
    weight = getattr(other, "weight", None)
    if not isinstance(weight, Tensor) or weight.shape != norm.weight.shape:
        return False
    x = torch.linspace(-2, 3, len(weight), dtype=weight.dtype, device=weight.device)[None]
    wanted = functional.rms_norm(x, weight.shape, weight, norm.variance_epsilon)
    found = other(x)
    return isinstance(found, Tensor) and torch.allclose(found, wanted, rtol=1e-3, atol=1e-4)
