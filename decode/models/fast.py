"""The forward of Llama-like models and GPT-NeoX without per-call overhead, over the model's own weights.

Same arithmetic as transformers' modelling code, a few dozen operations a layer less: one projection for q, k and v,
rotation in place, one preallocated cache for all layers, masks made once a call. On CPUs the weights are laid out anew
for it (`decode.models.fast_weights`).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.activations import SiLUActivation

from decode.core.proposal import Draft
from decode.models.fast_weights import (
    Function,
    Layer,
    Shape,
    by_columns,
    llama_layer,
    neox_layer,
    norm,
    phi_layer,
    tunable,
)
from decode.models.huggingface import Runner, tree_mask

LLAMA_LIKE = {"llama", "mistral", "qwen2", "qwen3"}


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


class FastRunner(Runner):
    """See the module's docstring. Results equal the model's to rounding; `open_runner` checks that."""

    def _open(self) -> None:
        config, base = self.config, self.model.base_model
        kind, heads = config.model_type, config.num_attention_heads
        grouped = None if kind == "gpt_neox" else getattr(config, "num_key_value_heads", None)
        width = getattr(config, "head_dim", None) or config.hidden_size // heads
        self._shape_of(heads, grouped or heads, width, base.rotary_emb, self._tunes(), kind == "gpt_neox")
        self.layers = [self._layer(block) for block in base.layers]
        self.gated = kind in LLAMA_LIKE
        self.parallel = kind == "phi" or getattr(config, "use_parallel_residual", False)
        act = base.layers[0].mlp.act_fn if self.gated else self._plain_activation(base)
        # the function costs half of the module's call
        self.activation: Function = F.silu if isinstance(act, nn.SiLU | SiLUActivation) else act
        self.embedding = self.model.get_input_embeddings().weight
        final = getattr(base, "norm", None) or getattr(base, "final_layer_norm", None) or base.final_layernorm
        self.final_norm = norm(final)
        head = self.model.get_output_embeddings()
        self.head, self.head_bias = head.weight, head.bias
        if self.shape.tuned:
            self.head = by_columns(self.head)
        kinds = getattr(config, "layer_types", None)
        slides = "sliding_attention" in kinds if kinds else kind == "mistral"
        self.window: int | None = config.sliding_window if slides else None
        self.reserve(256)

    def _tunes(self) -> bool:
        return tunable(self.model)

    def _shape_of(self, heads: int, kv_heads: int, width: int, rotary: Any, tuned: bool, interleaved: bool) -> None:
        self.rotary, self.capacity = rotary, 0
        rotated = self._angles(1)[0].shape[-1]
        tuned = tuned and width % 2 == 0
        self.shape = Shape(heads, kv_heads, width, rotated, interleaved, tuned)

    def _layer(self, block: Any) -> Layer:
        if self.config.model_type == "gpt_neox":
            return neox_layer(block, self.shape)
        if self.config.model_type == "phi":
            return phi_layer(block, self.shape)
        return llama_layer(
            block.self_attn, block.mlp, block.input_layernorm, block.post_attention_layernorm, self.shape
        )

    @staticmethod
    def _plain_activation(base: Any) -> Any:
        mlp = base.layers[0].mlp
        return mlp.act if hasattr(mlp, "act") else mlp.activation_fn

    # -- the cache and what depends on positions -------------------------------------------------------------------

    def reserve(self, capacity: int) -> None:
        """See `Runner.reserve`."""
        if capacity <= self.capacity:
            return
        capacity = max(capacity, 2 * self.capacity)
        size = (len(self.layers), 1, 2 * self.shape.kv_heads, capacity, self.shape.width)
        old, self.kv = getattr(self, "kv", None), torch.zeros(size, dtype=self.dtype, device=self.device)
        if old is not None:
            self.kv[:, :, :, : old.shape[3]] = old  # tokens may have been read ahead of `length`
        heads = self.shape.kv_heads
        self.views = [(kv, kv[:, :heads], kv[:, heads:]) for kv in self.kv.unbind(0)]
        self.turns = self._turns(capacity)
        self.capacity = capacity

    def _angles(self, positions: int) -> tuple[Tensor, Tensor]:
        """cos and sin of the model's own rotation, ``[positions, rotated]``."""
        at = torch.arange(positions, device=self.device)[None]
        cos, sin = self.rotary(torch.empty(0, dtype=self.dtype, device=self.device), position_ids=at)
        return cos[0], sin[0]

    def _turns(self, positions: int) -> Tensor:
        """Rotation by position: complex factors of a whole row of q, k and v (tuned), or cos and ∓sin, stacked."""
        (cos, sin), shape = self._angles(positions), self.shape
        half = shape.rotated // 2
        if not shape.tuned:
            return torch.stack([cos, torch.cat([-sin[:, :half], sin[:, half:]], -1)], 1)
        turned = torch.complex(cos[:, :half], sin[:, :half]).contiguous()
        whole = turned.new_ones(positions, shape.heads + 2 * shape.kv_heads, shape.width // 2)
        whole[:, : -shape.kv_heads, :half] = turned[:, None]
        return whole.flatten(1)

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
        groups = self.shape.heads // self.shape.kv_heads
        return mask.repeat(groups, 1) if groups > 1 else mask

    def _place(self, n: int, tree: Draft | None, start: int) -> tuple[Tensor, Tensor | None]:
        """Rotation and mask of n tokens whose first cache slot is `start`; makes room for them."""
        self.reserve(start + n)
        if tree is None:
            return self.turns.narrow(0, start, n), self._mask(n, tree, start)
        at = start + torch.tensor([0, *tree.depths()], device=self.device)
        return self.turns.index_select(0, at), self._mask(n, tree, start)

    def _room(self, first: int, last: int, start: Any, n: int) -> list[tuple[Any, Tensor, Tensor]]:
        """For layers ``[first, last)``: the cache slots of n new tokens, and all keys and values up to them."""
        end, heads = start + n, self.shape.kv_heads
        if last - first < 4:  # views one by one, or all at once: whichever are fewer operations
            views = self.views[first:last]
            return [(kv.narrow(2, start, n), k.narrow(2, 0, end), v.narrow(2, 0, end)) for kv, k, v in views]
        kv = self.kv[first:last]
        slots, seen = kv.narrow(3, start, n), kv.narrow(3, 0, end)
        return list(zip(slots.unbind(0), seen.narrow(2, 0, heads).unbind(0), seen.narrow(2, heads, heads).unbind(0)))

    # -- the forward -----------------------------------------------------------------------------------------------

    def _forward(self, tokens: Tensor, tree: Draft | None, head: int | None) -> Tensor:
        n, start = tokens.shape[0], self.length
        place = self._place(n, tree, start)
        x = self.embedding.index_select(0, tokens)
        if self.taps:
            return self._tapped(x, start, place, head)
        x = self.run_layers(x, 0, len(self.layers), start, *place)
        return self._logits(x if head is None or head >= n else x[n - head :])

    def _tapped(self, x: Tensor, start: int, place: tuple[Tensor, Tensor | None], head: int | None) -> Tensor:
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

    def _logits(self, x: Tensor) -> Tensor:
        """Final norm and head on states ``[n, hidden]`` of any layer."""
        self.hidden = x = self.final_norm(x)
        return F.linear(x, self.head, self.head_bias)

    def run_layers(self, x: Tensor, first: int, last: int, start: Any, turn: Tensor, mask: Tensor | None) -> Tensor:
        """Layers ``[first, last)`` on states ``x [n, hidden]`` whose first cache slot is `start` (see `_room`)."""
        for w, room in zip(self.layers[first:last], self._room(first, last, start, x.shape[0])):
            y = w.norm1(x)
            a = onto(x, self._attention(w, y, turn, mask, *room), w.out, w.out_bias)
            z = y if w.norm2 is None else w.norm2(x if self.parallel else a)
            x = onto(a, self._mlp(w, z), w.down, w.down_bias)
        return x

    def _mlp(self, w: Layer, z: Tensor) -> Tensor:
        """The MLP before its projection down."""
        u = F.linear(z, w.up, w.up_bias)
        if not self.gated:
            return self.activation(u)
        gate, up = u.chunk(2, -1)
        return self.activation(gate) * up

    def _attention(
        self, w: Layer, y: Tensor, turn: Tensor, mask: Tensor | None, slot: Any, k: Tensor, v: Tensor
    ) -> Tensor:
        """Attention before its projection, ``[n, heads · width]``; keys and values are stored.

        Args:
            w: the layer.
            y: normed states ``[n, hidden]``.
            turn: see `_place`.
            mask: see `_mask`.
            slot: cache ``[1, 2 kv_heads, n, width]`` of these tokens.
            k: cached keys ``[1, kv_heads, m, width]``, these tokens' among them.
            v: cached values.
        """
        shape, n = self.shape, y.shape[0]
        heads, kv_heads, d = shape.heads, shape.kv_heads, shape.width
        rows = self._rotated(w, F.linear(y, w.qkv, w.qkv_bias), turn)
        slot.copy_(rows.narrow(1, heads, 2 * kv_heads))
        q = rows.narrow(1, 0, heads)
        if heads == kv_heads:
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
            return out.transpose(1, 2).reshape(n, -1)
        # grouped heads: the group becomes rows of its key head, so that keys are never repeated
        out = F.scaled_dot_product_attention(q.reshape(1, kv_heads, -1, d), k, v, attn_mask=mask)
        return out.view(kv_heads, -1, n, d).permute(2, 0, 1, 3).reshape(n, -1)

    def _rotated(self, w: Layer, qkv: Tensor, turn: Tensor) -> Tensor:
        """Heads of q, k and v ``[1, heads + 2 kv_heads, n, width]``, the first two turned to their positions."""
        shape, n = self.shape, qkv.shape[0]
        turning = shape.heads + shape.kv_heads
        if shape.interleaved and not shape.tuned:
            rows = qkv.view(1, n, shape.heads, 3, shape.width).permute(0, 3, 2, 1, 4).flatten(1, 2)
        else:
            rows = qkv.view(1, n, -1, shape.width).transpose(1, 2)
        if w.qk_norm is not None:
            qk = rows.narrow(1, 0, turning)
            qk.copy_(w.qk_norm(qk))
        if shape.tuned:
            qkv.view(turn.dtype).mul_(turn)
            return rows
        turned = rows[:, :turning, :, : shape.rotated]
        rolled = turned.roll(shape.rotated // 2, -1)
        turned.mul_(turn[:, 0]).add_(rolled.mul_(turn[:, 1]))
        return rows


def onto(x: Tensor, y: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x + y·W + b in as few operations as it takes, W transposed."""
    x = torch.addmm(x, y, weight)
    return x if bias is None else x.add_(bias)
