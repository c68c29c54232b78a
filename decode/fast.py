"""The forward of Llama-like models and GPT-NeoX without per-call overhead, over the model's own weights.

Same arithmetic as transformers' modelling code, a few dozen operations a layer less: one projection for q, k and v,
rotation in place, one preallocated cache for all layers, masks made once a call.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.activations import SiLUActivation

from .draft import Draft
from .runner import Runner, tree_mask

LLAMA_LIKE = {"llama", "mistral", "qwen2", "qwen3"}
COLUMNS = 1 << 15, 1 << 30
"""On CPUs, smallest weight (elements) worth a second copy column by column, and most bytes of copies in all."""


def supports(model: PreTrainedModel) -> bool:
    """Whether the hand-written forward knows this model, on one device, with plain weights."""
    config = model.config
    kind = config.model_type
    rope = getattr(config, "rope_parameters", None) or {}
    if kind not in LLAMA_LIKE | {"gpt_neox", "phi"} or rope.get("rope_type", "default") not in (
        "default",
        "linear",
        "llama3",
    ):
        return False
    if getattr(model, "hf_quantizer", None) is not None or len({p.device for p in model.parameters()}) != 1:
        return False
    if kind == "phi" and getattr(config, "qk_layernorm", False):
        return False
    if getattr(config, "layer_types", None) and len(set(config.layer_types)) > 1:
        return False
    return all(p.is_floating_point() for p in model.parameters()) and type(model.get_output_embeddings()) is nn.Linear


def _fuse(*linears: nn.Linear) -> tuple[Tensor, Tensor | None]:
    """One weight and bias for several projections of the same input; the originals become views of it."""
    with torch.inference_mode(False):  # the model's own weights from now on: it may yet be trained
        weight = torch.cat([m.weight.detach() for m in linears])
        bias = None if linears[0].bias is None else torch.cat([m.bias.detach() for m in linears])
    start = 0
    for m in linears:
        end = start + m.out_features
        m.weight.data = weight[start:end]
        if bias is not None:
            m.bias.data = bias[start:end]
        start = end
    return weight, bias


def _by_columns(weight: Tensor) -> Tensor:
    """The weight laid out so that x·Wᵀ of few rows is fastest: measured up to 1.5 times on CPUs where W is tall."""
    tall = weight.device.type == "cpu" and weight.shape[0] > weight.shape[1] and weight.numel() >= COLUMNS[0]
    return weight.t().contiguous().t() if tall else weight


@dataclass
class Layer:
    """Weights of one decoder layer; `up` holds gate and up projections stacked where the block is gated."""

    norm1: Callable[[Tensor], Tensor]
    norm2: Callable[[Tensor], Tensor] | None
    qkv: Tensor
    qkv_bias: Tensor | None
    out: Tensor
    out_bias: Tensor | None
    up: Tensor
    up_bias: Tensor | None
    down: Tensor
    down_bias: Tensor | None
    qk_norm: Callable[[Tensor], Tensor] | None = None


def _norm(module: Any) -> Callable[[Tensor], Tensor]:
    if isinstance(module, nn.LayerNorm):
        shape, weight, bias, eps = module.normalized_shape, module.weight, module.bias, module.eps
        return lambda x: F.layer_norm(x, shape, weight, bias, eps)
    weight, eps = module.weight, module.variance_epsilon

    if weight.dtype in (torch.float32, torch.float64):
        # x/√(Σx²/d + ε)·w as x/hypot(‖x‖, √(dε))·(w√d): four operations instead of six, the same to rounding
        width = weight.shape[-1]
        scaled, floor = weight.detach() * width**0.5, weight.new_tensor((eps * width) ** 0.5)

        def rms(x: Tensor) -> Tensor:
            return (x / torch.hypot(torch.linalg.vector_norm(x, dim=-1, keepdim=True), floor)).mul_(scaled)

        return rms

    def rms_low(x: Tensor) -> Tensor:
        y = x.float()
        y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + eps)
        return weight * y.to(x.dtype)

    return rms_low


def _llama_layer(block: Any, heads: int, kv_heads: int) -> Layer:
    attention, mlp = block.self_attn, block.mlp
    qkv, qkv_bias = _fuse(attention.q_proj, attention.k_proj, attention.v_proj)
    up, up_bias = _fuse(mlp.gate_proj, mlp.up_proj)
    qk_norm = None
    if hasattr(attention, "q_norm"):
        q_norm, k_norm = _norm(attention.q_norm), _norm(attention.k_norm)

        def qk_norm(x: Tensor) -> Tensor:
            return torch.cat([q_norm(x[:, :heads]), k_norm(x[:, heads:])], 1)

    return Layer(
        _norm(block.input_layernorm),
        _norm(block.post_attention_layernorm),
        qkv, qkv_bias, attention.o_proj.weight, attention.o_proj.bias,
        up, up_bias, mlp.down_proj.weight, mlp.down_proj.bias, qk_norm,
    )  # fmt: skip


def _neox_layer(block: Any, heads: int, kv_heads: int) -> Layer:
    attention, mlp = block.attention, block.mlp
    return Layer(
        _norm(block.input_layernorm),
        _norm(block.post_attention_layernorm),
        attention.query_key_value.weight, attention.query_key_value.bias, attention.dense.weight,
        attention.dense.bias, mlp.dense_h_to_4h.weight, mlp.dense_h_to_4h.bias, mlp.dense_4h_to_h.weight,
        mlp.dense_4h_to_h.bias,
    )  # fmt: skip


def _phi_layer(block: Any, heads: int, kv_heads: int) -> Layer:
    attention, mlp = block.self_attn, block.mlp
    qkv, qkv_bias = _fuse(attention.q_proj, attention.k_proj, attention.v_proj)
    return Layer(
        _norm(block.input_layernorm), None, qkv, qkv_bias, attention.dense.weight, attention.dense.bias,
        mlp.fc1.weight, mlp.fc1.bias, mlp.fc2.weight, mlp.fc2.bias,
    )  # fmt: skip


class FastRunner(Runner):
    """See the module's docstring. Results equal the model's to rounding; `open_runner` checks that."""

    def _open(self) -> None:
        config, base = self.config, self.model.base_model
        self.heads = config.num_attention_heads
        self.interleaved = config.model_type == "gpt_neox"  # q, k, v stand together for each head
        grouped = None if self.interleaved else getattr(config, "num_key_value_heads", None)
        self.kv_heads = grouped or self.heads
        self.head_dim = getattr(config, "head_dim", None) or config.hidden_size // self.heads
        self.groups = self.heads // self.kv_heads
        make = {"gpt_neox": _neox_layer, "phi": _phi_layer}.get(config.model_type, _llama_layer)
        self.layers = [make(block, self.heads, self.kv_heads) for block in base.layers]
        self.gated = config.model_type in LLAMA_LIKE
        self.parallel = config.model_type == "phi" or getattr(config, "use_parallel_residual", False)
        act = base.layers[0].mlp.act_fn if self.gated else self._plain_activation(base)
        # the function costs half of the module's call
        self.activation: Callable[[Tensor], Tensor] = F.silu if isinstance(act, nn.SiLU | SiLUActivation) else act
        self.embedding = self.model.get_input_embeddings().weight
        final = getattr(base, "norm", None) or getattr(base, "final_layer_norm", None) or base.final_layernorm
        self.final_norm = _norm(final)
        head = self.model.get_output_embeddings()
        self.head, self.head_bias = head.weight, head.bias
        if sum(p.numel() * p.element_size() for p in self.model.parameters()) <= COLUMNS[1]:
            self.head = _by_columns(self.head)
            for layer in self.layers:
                layer.qkv, layer.up = _by_columns(layer.qkv), _by_columns(layer.up)
        kinds = getattr(config, "layer_types", None)
        slides = "sliding_attention" in kinds if kinds else config.model_type == "mistral"
        self.window: int | None = config.sliding_window if slides else None
        self.rotary = base.rotary_emb
        self.capacity = 0
        self.reserve(256)

    @staticmethod
    def _plain_activation(base: Any) -> Any:
        mlp = base.layers[0].mlp
        return mlp.act if hasattr(mlp, "act") else mlp.activation_fn

    def reserve(self, capacity: int) -> None:
        """See `Runner.reserve`."""
        if capacity <= self.capacity:
            return
        capacity = max(capacity, 2 * self.capacity)
        shape = (len(self.layers), 1, 2 * self.kv_heads, capacity, self.head_dim)
        old, self.kv = getattr(self, "kv", None), torch.zeros(shape, dtype=self.dtype, device=self.device)
        if old is not None:
            self.kv[:, :, :, : old.shape[3]] = old  # tokens may have been read ahead of `length`
        positions = torch.arange(capacity, device=self.device)[None]
        cos, sin = self.rotary(torch.empty(0, dtype=self.dtype, device=self.device), position_ids=positions)
        self.rotated = cos.shape[-1]
        half = self.rotated // 2
        self.half = half
        self.cos = cos[0][:, None]
        self.sin = torch.cat([-sin[0, :, :half], sin[0, :, half:]], -1)[:, None]
        self.capacity = capacity

    def _truncate(self, length: int) -> None:
        pass  # slots past `length` are never read before they are written

    def _keep(self, base: int, slots: Tensor) -> None:
        self.kv[:, :, :, base : base + len(slots)] = self.kv.index_select(3, slots)

    def _mask(self, n: int, tree: Draft | None, past: int) -> Tensor | None:
        """Additive mask ``[groups · n, past + n]``, or None where every query may see every key."""
        window = self.window
        outside = window is not None and past + n > window
        if tree is not None:
            allowed = tree_mask(tree, past).to(self.device)
            depth = past + torch.tensor([0, *tree.depths()], device=self.device)
        elif n == 1 and not outside:
            return None
        else:
            allowed = torch.ones(n, past + n, dtype=torch.bool, device=self.device).tril_(past)
            depth = torch.arange(past, past + n, device=self.device)
        if window is not None and outside:
            position = torch.cat([torch.arange(past, device=self.device), depth])
            allowed &= depth[:, None] - position[None] < window
        mask = torch.zeros(allowed.shape, dtype=self.dtype, device=self.device).masked_fill_(~allowed, -torch.inf)
        return mask.repeat(self.groups, 1) if self.groups > 1 else mask

    def _forward(self, tokens: Tensor, tree: Draft | None, head: int | None) -> Tensor:
        start = self.length
        place = self._place(len(tokens), tree, start)
        if self.taps:
            return self._tapped(self.embedding[tokens], start, place, head)
        x = self.run_layers(self.embedding[tokens], 0, len(self.layers), start, *place)
        return self._logits(x if head is None else x[max(0, len(x) - head) :])

    def _tapped(self, x: Tensor, start: int, place: tuple[Tensor, Tensor, Tensor | None], head: int | None) -> Tensor:
        """The forward in pieces, keeping the states that `taps` (ascending) names."""
        done, kept = 0, []
        for tap in self.taps:
            x = self.run_layers(x, done, tap, start, *place) if tap > done else x
            done = tap
            kept.append(self.final_norm(x) if tap == len(self.layers) else x)
        self.features = kept[0] if len(kept) == 1 else torch.cat(kept, -1)
        if done < len(self.layers):
            x = self.run_layers(x, done, len(self.layers), start, *place)
        return self._logits(x if head is None else x[max(0, len(x) - head) :])

    def _place(self, n: int, tree: Draft | None, start: int) -> tuple[Tensor, Tensor, Tensor | None]:
        """Rotation (cos, sin) and mask of n tokens whose first cache slot is `start`; makes room for them."""
        self.reserve(start + n)
        if tree is None:
            cos, sin = self.cos[start : start + n], self.sin[start : start + n]
        else:
            at = start + torch.tensor([0, *tree.depths()], device=self.device)
            cos, sin = self.cos[at], self.sin[at]
        if self.interleaved:
            cos, sin = cos[:, None], sin[:, None]
        return cos, sin, self._mask(n, tree, start)

    def _logits(self, x: Tensor) -> Tensor:
        """Final norm and head on states ``[n, width]`` of any layer."""
        self.hidden = x = self.final_norm(x)
        return F.linear(x, self.head, self.head_bias)

    def run_layers(
        self, x: Tensor, first: int, last: int, start: int, cos: Tensor, sin: Tensor, mask: Tensor | None
    ) -> Tensor:
        """Layers ``[first, last)`` on states ``x [n, width]`` whose first cache slot is `start`."""
        n = len(x)
        cache = self.kv[first:last]
        slots = cache.narrow(3, start, n).unbind(0)
        seen = cache.narrow(3, 0, start + n)
        keys, values = seen[:, :, : self.kv_heads].unbind(0), seen[:, :, self.kv_heads :].unbind(0)
        for i, w in enumerate(self.layers[first:last]):
            y = w.norm1(x)
            a = self._attention(w, y, n, cos, sin, slots[i], keys[i], values[i], mask)
            if self.parallel:
                x = self._mlp(w, y if w.norm2 is None else w.norm2(x)) + a + x
            else:
                x = a + x
                assert w.norm2 is not None
                x = x + self._mlp(w, w.norm2(x))
        return x

    def _attention(
        self, w: Layer, y: Tensor, n: int, cos: Tensor, sin: Tensor, slot: Tensor, k: Tensor, v: Tensor, mask: Any
    ) -> Tensor:
        q = self._rotate(w, F.linear(y, w.qkv, w.qkv_bias), n, cos, sin, slot)
        return F.linear(self._attend(q, k, v, mask, n), w.out, w.out_bias)

    def _mlp(self, w: Layer, z: Tensor) -> Tensor:
        u = F.linear(z, w.up, w.up_bias)
        if self.gated:
            gate, up = u.chunk(2, -1)
            u = self.activation(gate) * up
        else:
            u = self.activation(u)
        return F.linear(u, w.down, w.down_bias)

    def _rotate(self, w: Layer, qkv: Tensor, n: int, cos: Tensor, sin: Tensor, slot: Tensor) -> Tensor:
        """Rotate q and k in place, store k and v, return q ``[n, heads, width]``."""
        d = self.head_dim
        if self.interleaved:
            qkv = qkv.view(n, self.heads, 3, d)
            qk = qkv[:, :, :2]
        else:
            qkv = qkv.view(n, self.heads + 2 * self.kv_heads, d)
            qk = qkv[:, : self.heads + self.kv_heads]
        if w.qk_norm is not None:
            qk.copy_(w.qk_norm(qk))
        turned = qk if self.rotated == d else qk[..., : self.rotated]
        rolled = turned.roll(self.half, -1)
        turned.mul_(cos).add_(rolled.mul_(sin))
        if self.interleaved:
            slot[0, : self.heads].copy_(qkv[:, :, 1].transpose(0, 1))
            slot[0, self.heads :].copy_(qkv[:, :, 2].transpose(0, 1))
            return qkv[:, :, 0]
        slot[0].copy_(qkv[:, self.heads :].transpose(0, 1))
        return qkv[:, : self.heads]

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, n: int) -> Tensor:
        """Attention of q ``[n, heads, width]`` over k, v ``[1, kv heads, m, width]`` -> ``[n, heads · width]``."""
        g, h, d = self.groups, self.kv_heads, self.head_dim
        if g == 1:
            out = F.scaled_dot_product_attention(q.transpose(0, 1)[None], k, v, attn_mask=mask)
            return out[0].transpose(0, 1).reshape(n, h * d)
        # grouped heads: the group becomes rows of its key head, so that keys are never repeated
        rows = q.reshape(n, h, g, d).permute(1, 2, 0, 3).reshape(1, h, g * n, d)
        out = F.scaled_dot_product_attention(rows, k, v, attn_mask=mask)
        return out.view(h, g, n, d).permute(2, 0, 1, 3).reshape(n, h * g * d)
