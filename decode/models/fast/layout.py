"""The architectures that the hand-written forward knows, and the weights of each in the layout that it reads.

There are two layouts. `tuned` weights are copies for the CPU: scales of RMS norms are folded into the projections that
follow (unless weights are held in 16 bits, which the scaled ones would not fit), and rows of q and k are sorted so that
rotation is one multiplication of complex numbers. Otherwise the layout is the model's own. Projections of one input are
always fused into one weight. It is a copy, or for models of more than `COPIED` bytes the model's own memory: the
parameters become views of it, keep their values, and can be trained and saved.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.activations import SiLUActivation

from decode.models.fast.weights import WIDE, Function, Linear, Linears, NormedLinear, RmsNorm, norm
from decode.models.huggingface import rotations

COPIED = 1 << 30  # most bytes of a model whose weights are copied
LLAMA_LIKE = ("llama", "mistral", "qwen2", "qwen3", "phi3", "gemma", "gemma3_text")
FAMILIES = (*LLAMA_LIKE, "phi", "gpt_neox")  # what the hand-written forward knows
PROJECTIONS = {
    "llama": ("q_proj k_proj v_proj", "o_proj", "gate_proj up_proj", "down_proj"),
    "phi3": ("qkv_proj", "o_proj", "gate_up_proj", "down_proj"),
    "phi": ("q_proj k_proj v_proj", "dense", "fc1", "fc2"),
    "gpt_neox": ("query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h"),
}
"""Of attention into and out of it, and of the MLP; families that are missing here are named as Llama."""
WEIGHTED = re.compile("Linear|Embedding|LayerNorm|.*RMSNorm|.*TextScaledWordEmbedding")  # modules with known weights
ROPE_TYPES = ("default", "linear", "llama3", "yarn")  # scalings that rotate a position alike in every forward


def supports(model: PreTrainedModel) -> bool:
    """Whether the hand-written forward knows this model, on one device, with plain weights and plain layers.

    Models with adapters, quantised weights or hooks are not supported.
    """
    if not isinstance(model, PreTrainedModel) or model.config.model_type not in FAMILIES:
        return False
    config, parameters = model.config, list(model.parameters())
    unknown = ("use_bidirectional_attention", "attn_logit_softcapping", "final_logit_softcapping")
    return (
        all(settings.get("rope_type", "default") in ROPE_TYPES for settings in rotations(config))
        and set(getattr(config, "layer_types", None) or ()) <= {"full_attention", "sliding_attention"}
        and not (config.model_type == "phi" and getattr(config, "qk_layernorm", False))
        and not any(getattr(config, name, None) for name in unknown)
        and len({p.device for p in parameters}) == 1
        and all(p.is_floating_point() for p in parameters)
        and getattr(model, "hf_quantizer", None) is None
        and all(map(_is_plain, model.modules()))
    )


def _is_plain(module: nn.Module) -> bool:
    """Whether a module does what its class in torch or transformers does, with no weights but those known here."""
    hooks = [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]
    kind, weights = type(module), list(module.parameters(recurse=False))
    return (
        "forward" not in vars(module)
        # transformers leaves hooks of its own once hidden states have been asked for; they change nothing
        and all(getattr(hook, "__module__", "").startswith("transformers.") for hook in hooks)
        and kind.__module__.startswith(("torch.", "transformers."))
        and (not weights or WEIGHTED.fullmatch(kind.__name__) is not None)
    )


@dataclass(frozen=True)
class Shape:
    """Attention of a model."""

    heads: int  # of queries
    kv_heads: int  # of keys and of values
    width: int  # of a head
    rotated: int  # leading elements of a head that positions rotate
    interleaved: bool = False  # whether q, k and v are stored together for each head (GPT-NeoX)
    tuned: bool = False  # whether weights are copies for the CPU
    folded: bool = False  # whether the projections that follow RMS norms hold the norms' scales
    in_place: bool = False  # whether projections are fused in the model's own memory (see `fuse`)
    scale: float | None = None  # of scores; None: 1/√width


@dataclass(frozen=True)
class Kind:
    """What layers that attend alike share."""

    window: int | None = None  # tokens that attention sees, or None for all
    rope: str | None = None  # their rotation's name in a rotary module that has several


def layer_kinds(config: Any) -> tuple[list[Kind], list[int]]:
    """The kinds of layers of a model, and the index of each layer's."""
    slides = "sliding_attention" if config.model_type in ("mistral", "phi3") else "full_attention"
    types = getattr(config, "layer_types", None) or [slides] * config.num_hidden_layers
    names = list(dict.fromkeys(types))
    several = names[0] in (getattr(config, "rope_parameters", None) or {})
    windows = [config.sliding_window if name == "sliding_attention" else None for name in names]
    kinds = [Kind(window, name if several else None) for name, window in zip(names, windows)]
    return kinds, [names.index(name) for name in types]


@dataclass
class Layer:
    """One decoder layer."""

    norm1: Function  # before attention
    norm2: Function | None  # before the MLP; None where it reads what attention reads
    qkv: Linear  # to ``(heads + 2 kv_heads) · width``
    out: Linear  # of attention, from ``heads · width``
    up: Linear  # gate and up projections stacked where the block is gated, else up
    down: Linear  # from the MLP's inner width
    # of rotated heads  # [1, heads + kv_heads, n, width] if tuned, else [n, heads + kv_heads, width]
    qk_norm: Function | None = None
    kind: int = 0  # which of `Weights.kinds`


def is_small(model: nn.Module) -> bool:
    """Whether the weights take at most `COPIED` bytes."""
    return sum(p.nbytes for p in model.parameters()) <= COPIED


def tunable(model: nn.Module) -> bool:
    """Whether copies of a model's weights pay: on a CPU, in 32 bits or more, up to `COPIED`."""
    return is_small(model) and all(p.device.type == "cpu" and p.dtype in WIDE for p in model.parameters())


def fuse(linears: Sequence[nn.Linear], *, in_place: bool) -> tuple[Tensor, Tensor | None]:
    """One weight and bias for several projections of an input; `in_place` makes their parameters views of it."""
    weight = _fused([linear.weight for linear in linears], in_place)
    return weight, None if linears[0].bias is None else _fused([linear.bias for linear in linears], in_place)


def _fused(parameters: Sequence[Any], in_place: bool) -> Tensor:
    first, sizes = parameters[0], [len(p) for p in parameters]
    if len(parameters) < 2:
        return first
    fused: Tensor | None = getattr(first, "fused", None)  # by another runner
    if fused is not None and all(p.data_ptr() == x.data_ptr() for p, x in zip(parameters, fused.split(sizes))):
        return fused
    with torch.inference_mode(False):  # in place they are the model's own weights, which may yet be trained
        joined = torch.cat([p.detach() for p in parameters])
    if in_place:
        first.fused = joined
        for p, view in zip(parameters, joined.split(sizes), strict=True):
            p.data = view
    return joined


def _pairs(shape: Shape, heads: Tensor) -> Tensor:
    """Elements of heads ``[.., width]`` sorted so that those that rotate together are neighbours."""
    turned, rest = heads[..., : shape.rotated], heads[..., shape.rotated :]
    return torch.cat([turned.unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2), rest], -1)


@dataclass
class Weights:
    """What the hand-written forward reads of a model."""

    shape: Shape  # of its attention
    layers: list[Layer]  # the decoder layers
    activation: Function  # of the MLP
    gated: bool  # whether the MLP multiplies the activated gate with a second projection
    parallel: bool  # whether attention and MLP read the same state
    kinds: list[Kind]  # of layers
    embedding: Tensor  # ``[vocab, hidden]``
    final_norm: Function  # before the output head
    head: Linear  # the output head, to ``vocab``
    embedding_scale: float = 1.0  # by which embeddings are multiplied


def model_weights(model: Any, rotated: int, make: Linears, *, tuned: bool, folded: bool) -> Weights:
    """The weights of a causal language model of one of `FAMILIES`; see `Shape` for `rotated`, `tuned` and `folded`."""
    config, base = model.config.get_text_config(), model.base_model
    kind, heads = config.model_type, config.num_attention_heads
    kv_heads = heads if kind == "gpt_neox" else getattr(config, "num_key_value_heads", None) or heads
    width = getattr(config, "head_dim", None) or config.hidden_size // heads
    in_place = not tuned and make.pack == "off" and not is_small(model)
    tuned = tuned and width % 2 == 0
    scale = getattr(config, "query_pre_attn_scalar", width) ** -0.5
    shape = Shape(heads, kv_heads, width, rotated, kind == "gpt_neox", tuned, tuned and folded, in_place, scale)
    act = next(child for name, child in base.layers[0].mlp.named_children() if "act" in name)
    final = next(
        child for name, child in base.named_children() if name in ("norm", "final_layernorm", "final_layer_norm")
    )
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    kinds, of_layers = layer_kinds(config)
    return Weights(
        shape,
        [replace(decoder_layer(kind, layer, shape, make), kind=i) for layer, i in zip(base.layers, of_layers)],
        # the function costs half of the module's call
        F.silu if isinstance(act, nn.SiLU | SiLUActivation) else getattr(act, "act", act),
        gated=kind in LLAMA_LIKE,
        parallel=kind == "phi" or getattr(config, "use_parallel_residual", False),
        kinds=kinds,
        embedding=embedding.weight,
        final_norm=norm(final),
        head=make(head.weight, head.bias),
        embedding_scale=float(embedding.embed_scale.to(model.dtype)) if hasattr(embedding, "embed_scale") else 1.0,
    )


def decoder_layer(kind: str, block: Any, shape: Shape, make: Linears, *, normed: bool = False) -> Layer:
    """One layer of a family of `FAMILIES`, of its module.

    With `normed` the states that attention reads are normed already, and `Layer.norm1` does nothing.
    """
    attention, mlp = block.attention if kind == "gpt_neox" else block.self_attn, block.mlp
    names = PROJECTIONS.get(kind, PROJECTIONS["llama"])
    inputs, (out,) = ([getattr(attention, name) for name in part.split()] for part in names[:2])
    ups, (down,) = ([getattr(mlp, name) for name in part.split()] for part in names[2:])
    (qkv, qkv_bias), (up, up_bias) = fuse(inputs, in_place=shape.in_place), fuse(ups, in_place=shape.in_place)
    norm1: Function = (lambda x: x) if normed else norm(block.input_layernorm)
    normed_twice = hasattr(block, "pre_feedforward_layernorm")  # results of attention and MLP are normed too
    before_mlp = "pre_feedforward_layernorm" if normed_twice else "post_attention_layernorm"
    norm2 = None if kind == "phi" else norm(getattr(block, before_mlp))
    if shape.folded and isinstance(norm1, RmsNorm):
        qkv, norm1.folded = qkv * norm1.scale, True
    if shape.folded and isinstance(norm2, RmsNorm):
        up, norm2.folded = up * norm2.scale, True
    if shape.tuned:  # heads of q, then k, then v
        rows = torch.arange(len(qkv)).view(-1, shape.width)
        if shape.interleaved:
            rows = rows.view(shape.heads, 3, shape.width).transpose(0, 1).reshape(-1, shape.width)
        rows = torch.cat([_pairs(shape, rows[: -shape.kv_heads]), rows[-shape.kv_heads :]]).flatten()
        qkv, qkv_bias = qkv[rows], None if qkv_bias is None else qkv_bias[rows]
    qk_norm = None
    if hasattr(attention, "q_norm"):
        q, k = attention.q_norm, attention.k_norm
        scale = torch.cat([q.weight.detach().expand(shape.heads, -1), k.weight.detach().expand(shape.kv_heads, -1)])
        qk_norm = norm(q, _pairs(shape, scale)[:, None].contiguous() if shape.tuned else scale)
    attended, mapped = make(out.weight, out.bias), make(down.weight, down.bias)
    if normed_twice:
        attended = NormedLinear(attended, norm(block.post_attention_layernorm))
        mapped = NormedLinear(mapped, norm(block.post_feedforward_layernorm))
    return Layer(norm1, norm2, make(qkv, qkv_bias), attended, make(up, up_bias), mapped, qk_norm)
