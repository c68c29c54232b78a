"""The architectures that the hand-written forward knows, and the weights of each in the layout that it reads.

Two layouts. `tuned` weights are copies for the CPU: scales of RMS norms folded into the projection behind them (except
where 16 bits hold the weights, which they would not hold with the scales), and rows of q and k sorted so that rotation
is one multiplication of complex numbers. Where a copy would cost too much, or numbers are too narrow for complex
arithmetic, the layout stays the model's own. Projections of one input are fused into one weight: a copy, or for models
of more than `COPIED` bytes the model's own memory, of which its parameters become views (they keep their values, and
can be trained and saved).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.activations import SiLUActivation

from decode.errors import UserError
from decode.models.weights import WIDE, Function, Linear, Linears, RmsNorm, half_scale, norm, rms_norm

COPIED = 1 << 30  # most bytes of a model whose weights are copied

WeightAndBias = tuple[Tensor, Tensor | None]
Products = tuple[Linear, Linear, Linear, Linear]
LLAMA_LIKE = ("llama", "mistral", "qwen2", "qwen3", "phi3")
FAMILIES = (*LLAMA_LIKE, "phi", "gpt_neox")  # what the hand-written forward knows
ROPE_TYPES = ("default", "linear", "llama3", "yarn")
"""Scalings whose rotation of a position is the same in every forward."""


def supports(model: PreTrainedModel) -> bool:
    """Whether the hand-written forward knows this model, on one device, with plain weights and plain layers.

    Adapters, quantised weights and hooks are none of it: they go through the ordinary model call.
    """
    if not isinstance(model, PreTrainedModel) or model.config.model_type not in FAMILIES:
        return False
    config, parameters = model.config, list(model.parameters())
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type", "default") not in ROPE_TYPES or len(set(getattr(config, "layer_types", None) or ())) > 1:
        return False
    if config.model_type == "phi" and getattr(config, "qk_layernorm", False):
        return False
    if len({p.device for p in parameters}) != 1 or not all(p.is_floating_point() for p in parameters):
        return False
    return getattr(model, "hf_quantizer", None) is None and all(map(_is_plain, model.modules()))


def _is_plain(module: nn.Module) -> bool:
    """Whether a module does what its class in torch or transformers says, and its weights are all there is to it."""
    hooks = [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]
    # transformers leaves hooks of its own once hidden states have been asked for; they change nothing
    if "forward" in vars(module) or any(
        not getattr(hook, "__module__", "").startswith("transformers.") for hook in hooks
    ):
        return False
    if not type(module).__module__.startswith(("torch.", "transformers.")):
        return False
    holds_weights = any(True for _ in module.parameters(recurse=False))
    kinds = (nn.Linear, nn.Embedding, nn.LayerNorm)
    return not holds_weights or type(module) in kinds or type(module).__name__.endswith("RMSNorm")


@dataclass(frozen=True)
class Shape:
    """Attention of a model."""

    heads: int  # of queries
    kv_heads: int  # of keys and of values
    width: int  # of a head
    rotated: int  # leading elements of a head that positions rotate
    interleaved: bool = False  # whether q, k and v stand together for each head (GPT-NeoX)
    tuned: bool = False  # whether weights are copies for the CPU
    folded: bool = False  # whether the projections behind RMS norms hold the norms' scales
    in_place: bool = False  # whether projections are fused in the model's own memory (see `fuse`)


@dataclass
class Layer:
    """One decoder layer."""

    norm1: Function  # before attention
    norm2: Function | None  # before the MLP; None where it reads what attention reads
    qkv: Linear  # to ``(heads + 2 kv_heads) · width``
    out: Linear  # of attention, from ``heads · width``
    up: Linear  # gate and up projections stacked where the block is gated, else up
    down: Linear  # from the MLP's inner width
    qk_norm: Function | None = None  # norm of rotated heads ``[.., heads + kv_heads, n, width]``


def tunable(model: nn.Module) -> bool:
    """Whether copies of a model's weights pay: on a CPU, in 32 bits or more, up to `COPIED`."""
    return is_small(model) and all(p.device.type == "cpu" and p.dtype in WIDE for p in model.parameters())


def published_in_half(model: nn.Module) -> bool:
    """Whether float16 holds all matrices, as it does those of a checkpoint in 16 bits that was loaded in float32."""
    return all(half_scale(p) is not None for p in model.parameters() if p.dim() == 2)


def is_small(model: nn.Module) -> bool:
    """Whether the weights take at most `COPIED` bytes."""
    return sum(p.numel() * p.element_size() for p in model.parameters()) <= COPIED


def fuse(linears: Sequence[nn.Linear], *, in_place: bool) -> tuple[Tensor, Tensor | None]:
    """One weight and bias for several projections of the same input.

    Args:
        linears: the projections, of one input.
        in_place: make the originals views of the result, so that the weights are not held twice; else leave them.
    """
    if len(linears) == 1:
        return linears[0].weight, linears[0].bias
    with torch.inference_mode(False):  # in place they are the model's own weights, which may yet be trained
        weight = torch.cat([m.weight.detach() for m in linears])
        bias = None if linears[0].bias is None else torch.cat([m.bias.detach() for m in linears])
    start = 0
    for m in linears if in_place else ():
        end = start + m.out_features
        m.weight.data = weight[start:end]
        if bias is not None:
            m.bias.data = bias[start:end]
        start = end
    return weight, bias


def _behind(module: Any, weight: Tensor, shape: Shape) -> tuple[Function, Tensor]:
    """A norm and the projection behind it, the norm's scale in the projection where that can be."""
    made = norm(module)
    if not shape.folded or not isinstance(made, RmsNorm) or made.scale is None:
        return made, weight
    return RmsNorm(made.floor, None), weight * made.scale


def _sorted_rows(shape: Shape, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Tuned: heads of q, then k, then v; in q and k, elements that rotate together side by side."""
    if not shape.tuned:
        return weight, bias
    rows = torch.arange(weight.shape[0]).view(-1, shape.width)
    if shape.interleaved:
        rows = rows.view(shape.heads, 3, shape.width).transpose(0, 1).reshape(-1, shape.width)
    rows = torch.cat([_pairs(shape, rows[: -shape.kv_heads]), rows[-shape.kv_heads :]]).flatten()
    return weight[rows], None if bias is None else bias[rows]


def _pairs(shape: Shape, heads: Tensor) -> Tensor:
    """Elements of heads ``[.., width]`` sorted so that those that rotate together stand side by side."""
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
    window: int | None  # tokens that attention sees, or None for all
    embedding: Tensor  # ``[vocab, hidden]``
    final_norm: Function  # before the output head
    head: Linear  # the output head, to ``vocab``


def model_weights(model: Any, rotated: int, make: Linears, *, tuned: bool, folded: bool) -> Weights:
    """The weights of a causal language model of one of `FAMILIES`.

    Args:
        model: the model.
        rotated: leading elements of a head that positions rotate.
        make: makes the products.
        tuned: copy them into the layout for CPUs.
        folded: see `Shape`; tuned weights only.
    """
    config, base = model.config.get_text_config(), model.base_model
    kind, heads = config.model_type, config.num_attention_heads
    kv_heads = heads if kind == "gpt_neox" else getattr(config, "num_key_value_heads", None) or heads
    width = getattr(config, "head_dim", None) or config.hidden_size // heads
    in_place = not tuned and make.pack == "off" and not is_small(model)
    tuned = tuned and width % 2 == 0
    shape = Shape(heads, kv_heads, width, rotated, kind == "gpt_neox", tuned, tuned and folded, in_place)
    gated, mlp = kind in LLAMA_LIKE, base.layers[0].mlp
    act = mlp.activation_fn if kind in ("phi", "phi3") else mlp.act if kind == "gpt_neox" else mlp.act_fn
    final = base.final_layer_norm if kind == "gpt_neox" else base.final_layernorm if kind == "phi" else base.norm
    head = model.get_output_embeddings()
    layer_types = getattr(config, "layer_types", None)
    slides = "sliding_attention" in layer_types if layer_types else kind in ("mistral", "phi3")
    return Weights(
        shape,
        [decoder_layer(kind, block, shape, make) for block in base.layers],
        # the function costs half of the module's call
        F.silu if isinstance(act, nn.SiLU | SiLUActivation) else act,
        gated=gated,
        parallel=kind == "phi" or getattr(config, "use_parallel_residual", False),
        window=config.sliding_window if slides else None,
        embedding=model.get_input_embeddings().weight,
        final_norm=norm(final),
        head=make(head.weight, head.bias),
    )


def decoder_layer(kind: str, block: Any, shape: Shape, make: Linears) -> Layer:
    """One layer of a family of `FAMILIES`."""
    if kind == "gpt_neox":
        return neox_layer(block, shape, make)
    if kind == "phi":
        return phi_layer(block, shape, make)
    return llama_layer(block.self_attn, block.mlp, block.input_layernorm, block.post_attention_layernorm, shape, make)


def llama_layer(attention: Any, mlp: Any, norm1: Any, norm2: Any, shape: Shape, make: Linears) -> Layer:
    """A gated layer, of which Phi-3 stores projections fused; without `norm1`, what it reads is normed already."""
    fused = hasattr(attention, "qkv_proj")
    inputs = [attention.qkv_proj] if fused else [attention.q_proj, attention.k_proj, attention.v_proj]
    gates = [mlp.gate_up_proj] if fused else [mlp.gate_proj, mlp.up_proj]
    qkv, qkv_bias = fuse(inputs, in_place=shape.in_place)
    up, up_bias = fuse(gates, in_place=shape.in_place)
    first, qkv = (lambda x: x, qkv) if norm1 is None else _behind(norm1, qkv, shape)
    second, up = _behind(norm2, up, shape)
    qkv, qkv_bias = _sorted_rows(shape, qkv, qkv_bias)
    qk_norm = None
    if hasattr(attention, "q_norm"):
        q, k = attention.q_norm, attention.k_norm
        scale = torch.cat([q.weight.detach().expand(shape.heads, -1), k.weight.detach().expand(shape.kv_heads, -1)])
        scale = _pairs(shape, scale) if shape.tuned else scale
        qk_norm = rms_norm(scale[:, None].contiguous(), q.variance_epsilon)
    products = _products(make, (qkv, qkv_bias), attention.o_proj, (up, up_bias), mlp.down_proj)
    return Layer(first, second, *products, qk_norm)


def _products(make: Linears, qkv: WeightAndBias, out: Any, up: WeightAndBias, down: Any) -> Products:
    """`Layer.qkv` to `Layer.down`."""
    return make(*qkv), make(out.weight, out.bias), make(*up), make(down.weight, down.bias)


def neox_layer(block: Any, shape: Shape, make: Linears) -> Layer:
    """A layer of GPT-NeoX."""
    attention, mlp = block.attention, block.mlp
    qkv = _sorted_rows(shape, attention.query_key_value.weight, attention.query_key_value.bias)
    up = mlp.dense_h_to_4h
    products = _products(make, qkv, attention.dense, (up.weight, up.bias), mlp.dense_4h_to_h)
    return Layer(norm(block.input_layernorm), norm(block.post_attention_layernorm), *products)


def phi_layer(block: Any, shape: Shape, make: Linears) -> Layer:
    """A layer of Phi, whose attention and MLP read the same."""
    attention, mlp = block.self_attn, block.mlp
    qkv = _sorted_rows(shape, *fuse([attention.q_proj, attention.k_proj, attention.v_proj], in_place=shape.in_place))
    products = _products(make, qkv, attention.dense, (mlp.fc1.weight, mlp.fc1.bias), mlp.fc2)
    return Layer(norm(block.input_layernorm), None, *products)


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
    parent, _ = _stack(model)
    for name in NORMS:
        found = getattr(parent, name, None)
        if isinstance(found, nn.Module):
            return found
    raise _unreachable(model, "no norm after the last layer")


def _stack(model: PreTrainedModel) -> tuple[Any, nn.ModuleList]:
    """The module that holds the decoder layers, and the layers."""
    count = model.config.get_text_config().num_hidden_layers
    for parent in model.base_model.modules():
        for child in parent.children():
            if isinstance(child, nn.ModuleList) and len(child) == count:
                return parent, child
    raise _unreachable(model, f"no list of {count} layers")


@torch.no_grad()
def check_structure(model: PreTrainedModel) -> None:
    """Make sure that an exit behind the last layer would be the model itself: final norm of its output.

    Raises:
        UserError: something else stands between the last layer and the head.
    """
    was_training = model.training
    model.eval()
    kept: list[torch.Tensor] = []
    hook = decoder_layers(model)[-1].register_forward_hook(lambda module, args, output: kept.append(state_of(output)))
    ids = (torch.arange(8, device=model.device) * 7 % model.get_input_embeddings().num_embeddings)[None]
    try:
        expected = model.base_model(input_ids=ids, use_cache=False).last_hidden_state.float()
    finally:
        hook.remove()
        model.train(was_training)
    seen = final_norm(model)(kept[0]).float()
    gap = (seen - expected).abs().max() / expected.abs().max().clamp_min(1e-6)
    if seen.shape != expected.shape or not gap < (1e-4 if model.dtype == torch.float32 else 5e-2):
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
