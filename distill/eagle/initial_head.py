"""The weights that a feature head starts from: random, or the target's own last layer."""

from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel

from decode.core.errors import UserError
from decode.models.eagle.head import FeatureHead, RMSNorm
from decode.models.layer_locations import decoder_layers, final_norm


@torch.no_grad()
def start_from_target(head: FeatureHead, target: PreTrainedModel) -> list[str]:
    """Gives a head what fits of its target's last layer, so that it begins as that layer on the last captured state.

    ``fc`` passes the last captured state through. EAGLE-1's layer is moved behind the final norm. EAGLE-3's attention
    reads that state with the target's weights and the embedding with its own random ones; its norm is the target's
    final one, and its output rows are the target's.

    Returns:
        Names of the layer's weights that are not the target's: of other shapes, or of a family built otherwise.
    """
    width = int(head.config.hidden_size)
    head.fc.weight.zero_()
    head.fc.weight[:, -width:] = torch.eye(width)
    if head.fc.bias is not None:
        head.fc.bias.zero_()
    if head.version == 3:
        ids, output = head.draft_ids(), target.get_output_embeddings().weight
        head.lm_head.weight.copy_(output[: len(head.lm_head.weight)] if ids is None else output[ids])
    try:
        layers, norm = decoder_layers(target), final_norm(target)
    except UserError:
        return [name for name, _ in head.layer.named_parameters()]
    if head.version == 3 and _same_norm(head.norm, norm):
        head.norm.weight.copy_(norm.weight)  # type: ignore[arg-type]
    last, first, left = dict(layers[-1].named_modules()), dict(layers[0].named_modules()), []
    sources = {"hidden_norm": last.get("input_layernorm"), "input_layernorm": first.get("input_layernorm")}
    for name, module in head.layer.named_modules():
        if not isinstance(module, nn.Linear | RMSNorm):
            continue
        if not _copied(module, sources[name] if name in sources else last.get(name), embedded=head.version == 3):
            left.append(name)
    if head.version == 1:
        _move_behind_norm(head, target)
    return left


def _move_behind_norm(head: FeatureHead, target: PreTrainedModel) -> None:
    """Makes a copy of the last layer read and write states behind the target's final norm, which EAGLE-1's are.

    With the norm's weight w, a state h of size s (root mean square) before the norm is x = w · h / s behind it. So the
    attention and the MLP read x / w, and what they add is multiplied by w / s. Other norms than `RMSNorm` are left.
    """
    norm, layer, sizes = final_norm(target), head.layer, []
    first = getattr(decoder_layers(target)[-1], "input_layernorm", None)
    if first is None or not all(_same_norm(layer.post_attention_layernorm, plain) for plain in (norm, first)):
        return
    ids = torch.arange(64, device=target.device)[None] * 7 % int(head.config.vocab_size)
    hook = norm.register_forward_pre_hook(lambda _, read: sizes.append(read[0].pow(2).mean(-1).sqrt().median()))
    try:
        behind = target.base_model(input_ids=ids, use_cache=False).last_hidden_state
    finally:
        hook.remove()
    weight = cast(Tensor, norm.weight)
    w = weight.sign() * weight.abs().clamp_min(0.1 * weight.abs().median())  # what is divided by
    for reads in (layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj):
        reads.weight.mul_(first.weight / w)
    layer.post_attention_layernorm.weight.mul_(behind.pow(2).mean(-1).sqrt().median() / w)
    for writes in (layer.self_attn.o_proj, layer.mlp.down_proj):
        writes.weight.mul_((weight / sizes[0])[:, None])


def _copied(module: nn.Linear | RMSNorm, source: nn.Module | None, *, embedded: bool) -> bool:
    """Whether the module could take the source's weights; ``embedded``: a wider one takes them as its last columns."""
    if isinstance(module, RMSNorm):
        if source is None or not _same_norm(module, source):
            return False
        module.weight.copy_(source.weight)  # type: ignore[arg-type]
        return True
    weight = getattr(source, "weight", None)
    if not isinstance(source, nn.Linear) or not isinstance(weight, Tensor) or len(weight) != len(module.weight):
        return False
    extra = module.weight.shape[1] - weight.shape[1]
    if extra not in ((0, weight.shape[1]) if embedded else (0,)):
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
