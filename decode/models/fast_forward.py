"""The forward of Llama-like models, Gemma 3, Phi and GPT-NeoX without per-call overhead.

Same arithmetic as transformers' modelling code, a few dozen operations a layer less: one projection for q, k and v,
rotation in place, one preallocated cache for all layers, masks made once a call. On CPUs the weights are laid out anew
for it (`families`). `fast_runner.FastRunner` makes a `Runner` of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from decode.errors import UserError
from decode.models.families import Layer, Weights
from decode.models.ragged_batch import KVCache, NewTokens, RaggedBatch, attention_mask
from decode.models.runner import joined

CacheSlots = tuple[Tensor, Tensor, Tensor]
"""Of one layer: where its new keys and values ``[1, 2 kv_heads, n, width]`` are copied to, and all keys and all values
``[1, kv_heads, m, width]``, the new ones included; of several sequences the whole cache, its keys and its values."""

LOOKED_UP = 1 << 23  # most bytes of the first layer's queries, keys and values that are computed once, for all tokens


@dataclass
class Placed:
    """Where the tokens of a forward belong: one sequence from a slot on, or several in a ragged batch."""

    rotary: list[Tensor]  # by kind of layers: rotary factors of the tokens
    seen: Sequence[tuple[int, Tensor | None]] = ()  # of one sequence, by kind of layers: see `attention_mask`
    start: int = 0  # of one sequence: cache slot of its first token
    count: int = 0  # of one sequence: its tokens
    batch: RaggedBatch | None = None  # of several sequences


class FastForward:
    """Decoder layers over a cache of their own. States are ``[n, hidden]``, n the tokens of all sequences.

    Attributes:
        cache: keys and values; a row is one sequence's.
        positions: positions that rotary factors are held for, those of a row of the cache.
        rotary_factors: of each kind of layers, by position: complex factors of a whole row of q, k and v (tuned), or
            cos and ∓sin, stacked.

    Args:
        weights: of the model.
        rotary: the model's own module that gives cos and sin of positions.
    """

    def __init__(self, weights: Weights, rotary: Any) -> None:
        self.weights, self.shape, self.layers = weights, weights.shape, weights.layers
        self.gated, self.parallel, self.activation = weights.gated, weights.parallel, weights.activation
        self.groups, self.rotary = self.shape.heads // self.shape.kv_heads, rotary
        self.device, self.dtype = weights.embedding.device, weights.embedding.dtype
        self.cache = KVCache(len(self.layers), self.shape.kv_heads, self.shape.width, self.weights.embedding)
        self.positions = 0
        self._extend_rotary()

    @cached_property
    def first_qkv(self) -> Tensor | None:
        """Queries, keys and values of the first layer by token ``[vocab, rows of qkv]``, which depend on nothing else.

        None where they would take more than `LOOKED_UP` bytes: only a small model has few other operations.
        """
        layer, table = self.layers[0], self.weights.embedding
        small = len(table) * layer.qkv.rows * table.element_size() <= LOOKED_UP
        if not self.shape.tuned or layer.norm2 is None or not small:
            return None
        with torch.inference_mode():
            return layer.qkv(layer.norm1(self.embed(torch.arange(len(table), device=self.device))))

    def _extend_rotary(self) -> None:
        """Hold rotary factors for all positions of the cache."""
        if self.positions == self.cache.capacity:
            return
        shape, self.positions, self.rotary_factors = self.shape, self.cache.capacity, []
        half = shape.rotated // 2
        for kind in self.weights.kinds:
            cos, sin = cos_and_sin(self.rotary, self.positions, self.dtype, self.device, kind.rope)
            if not shape.tuned:
                self.rotary_factors.append(torch.stack([cos, torch.cat([-sin[:, :half], sin[:, half:]], -1)], 1))
                continue
            rotation = torch.complex(cos[:, :half], sin[:, :half]).contiguous()
            whole = rotation.new_ones(self.positions, shape.heads + 2 * shape.kv_heads, shape.width // 2)
            whole[:, : -shape.kv_heads, :half] = rotation[:, None]
            self.rotary_factors.append(whole.flatten(1))

    def reserve(self, *, rows: int = 0, capacity: int = 0) -> None:
        """See `KVCache.reserve`."""
        self.cache.reserve(rows=rows, capacity=capacity)
        self._extend_rotary()

    def place(self, new: Sequence[NewTokens]) -> Placed:
        """Where these tokens belong; allocates their slots."""
        rows = self.cache.rows
        if len(rows) > 1 or new[0].end > self.positions:
            if None in rows:
                self.cache.compact()
            self.cache.grow(len(rows), max(one.end for one in new))
            self._extend_rotary()
        windows, like = [kind.window for kind in self.weights.kinds], self.weights.embedding
        if len(new) > 1 or self.cache.tensor.shape[1] > 1:
            batch = RaggedBatch(new, self.groups, windows, like)
            return Placed([factors.index_select(0, batch.positions) for factors in self.rotary_factors], batch=batch)
        one, seen = new[0], [attention_mask(new, self.groups, window, like) for window in windows]
        if one.depths is None:
            rotary = [factors.narrow(0, one.start, one.count) for factors in self.rotary_factors]
        else:
            at = torch.tensor(one.positions(), device=self.device)
            rotary = [factors.index_select(0, at) for factors in self.rotary_factors]
        return Placed(rotary, seen, one.start, one.count)

    def slots(self, first: int, last: int, placed: Placed) -> list[CacheSlots]:
        """Cache slots of layers ``[first, last)``."""
        views = self.cache.views[first:last]
        if placed.batch is not None:
            return views
        start, n, heads = placed.start, placed.count, self.shape.kv_heads
        end = start + n
        if last - first < 4:  # views one by one, or all at once: whichever are fewer operations
            return [(layer.narrow(2, start, n), k.narrow(2, 0, end), v.narrow(2, 0, end)) for layer, k, v in views]
        layers = self.cache.tensor[first:last]
        added, seen = layers.narrow(3, start, n), layers.narrow(3, 0, end)
        return list(zip(added.unbind(0), seen.narrow(2, 0, heads).unbind(0), seen.narrow(2, heads, heads).unbind(0)))

    def embed(self, tokens: Tensor) -> Tensor:
        """Input states of token ids."""
        x, scale = self.weights.embedding.index_select(0, tokens), self.weights.embedding_scale
        return x if scale == 1 else x.mul_(scale)

    def run_tokens(self, tokens: Tensor, placed: Placed, capture: tuple[int, ...] = ()) -> tuple[Tensor, Tensor | None]:
        """All layers on tokens; their last states, and the captured ones side by side (see `Runner.forward`)."""
        x, count = self.embed(tokens), len(self.layers)
        if not capture:
            qkv = None if self.first_qkv is None else self.first_qkv.index_select(0, tokens)
            return self.run(x, 0, count, placed, qkv), None
        done, kept = 0, []
        for layer in capture:
            x = self.run(x, done, layer, placed)
            done = layer
            kept.append(self.weights.final_norm(x) if layer == count else x)
        return self.run(x, done, count, placed), joined(kept, -1)

    def run(self, x: Tensor, first: int, last: int, placed: Placed, qkv: Tensor | None = None) -> Tensor:
        """Layers ``[first, last)`` on the states of tokens; `qkv`: the first one's, where known."""
        if first == last:
            return x
        for layer, slot in zip(self.layers[first:last], self.slots(first, last, placed)):
            if qkv is None:
                y = layer.norm1(x)
                qkv = layer.qkv(y)
            a = layer.out.add_to(x, self.attention(layer, qkv, placed, slot))
            z = y if layer.norm2 is None else layer.norm2(x if self.parallel else a)
            x, qkv = layer.down.add_to(a, self.mlp(layer, z)), None
        return x

    def project(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Logits of the states after any layer by the final norm and the output head, and what the head read."""
        hidden = self.weights.final_norm(x)
        return self.weights.head(hidden), hidden

    def mlp(self, layer: Layer, z: Tensor) -> Tensor:
        """The MLP before its projection down."""
        u = layer.up(z)
        if not self.gated:
            return self.activation(u)
        gate, up = u.chunk(2, -1)
        return self.activation(gate) * up

    def attention(self, layer: Layer, qkv: Tensor, placed: Placed, slot: CacheSlots) -> Tensor:
        """Attention before its projection, ``[n, heads · width]``; keys and values are stored in the slot.

        Args:
            layer: its weights.
            qkv: queries, keys and values ``[n, (heads + 2 kv_heads) · width]``, which are rotated in place.
            placed: where the tokens belong.
            slot: the layer's cache slots.
        """
        shape, n, (new, k, v), rotary = self.shape, qkv.shape[0], slot, placed.rotary[layer.kind]
        heads, kv_heads, d = shape.heads, shape.kv_heads, shape.width
        if shape.interleaved and not shape.tuned:
            rows = qkv.view(1, n, heads, 3, d).permute(0, 3, 2, 1, 4).flatten(1, 2)
        else:
            rows = qkv.view(1, n, -1, d).transpose(1, 2)
        if layer.qk_norm is not None:
            qk = rows.narrow(1, 0, heads + kv_heads)
            qk.copy_(layer.qk_norm(qk))
        if shape.tuned:
            qkv.view(rotary.dtype).mul_(rotary)
        else:
            part = rows[:, : heads + kv_heads, :, : shape.rotated]
            rolled = part.roll(shape.rotated // 2, -1)
            part.mul_(rotary[:, 0]).add_(rolled.mul_(rotary[:, 1]))
        q, stored = rows.narrow(1, 0, heads), rows.narrow(1, heads, 2 * kv_heads)
        if placed.batch is not None:
            return placed.batch.attend(q, stored, slot, layer.kind, shape.scale)
        new.copy_(stored)
        first, mask = placed.seen[layer.kind]
        if first:
            k, v = k[:, :, first:], v[:, :, first:]
        if heads == kv_heads:
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=shape.scale)
            return out.transpose(1, 2).reshape(n, -1)
        # grouped heads: the group becomes rows of its key head, so that keys are never repeated
        q = q.reshape(1, kv_heads, -1, d)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=shape.scale)
        return out.view(kv_heads, -1, n, d).permute(2, 0, 1, 3).reshape(n, -1)


def cos_and_sin(
    rotary: Any, positions: int, dtype: torch.dtype, device: torch.device, rope: str | None = None
) -> tuple[Tensor, Tensor]:
    """cos and sin of a model's own rotation at the first positions, ``[positions, rotated]``; `rope`: see `Kind`."""
    at, named = torch.arange(positions, device=device)[None], {} if rope is None else {"layer_type": rope}
    cos, sin = rotary(torch.empty(0, dtype=dtype, device=device), position_ids=at, **named)
    return cos[0], sin[0]


@dataclass(frozen=True)
class LayerSubset:
    """The sub-layers that a self-speculative draft runs; ``LayerSubset(E)`` exits after the first E layers."""

    shared: int  # layers before the first skipped sub-layer; all of them run
    attention: frozenset[int] = frozenset()  # layers from `shared` on whose attention runs
    mlp: frozenset[int] = frozenset()  # layers from `shared` on whose MLP runs

    @classmethod
    def skipping(cls, layers: int, attention: Iterable[int], mlp: Iterable[int]) -> LayerSubset:
        """The model without the attention and the MLP sub-layers of these layers.

        Raises:
            UserError: a layer outside the model.
        """
        no_attention, no_mlp = frozenset(attention), frozenset(mlp)
        outside = [i for i in sorted(no_attention | no_mlp) if not 0 <= i < layers]
        if outside:
            raise UserError(f"layer {outside[0]} cannot be skipped: the model has layers 0 to {layers - 1}")
        shared = min(no_attention | no_mlp, default=layers)
        rest = frozenset(range(shared, layers))
        return cls(shared, rest - no_attention, rest - no_mlp)

    @classmethod
    def early_exit(cls, layers: int, exit_layer: int) -> LayerSubset:
        """The first `exit_layer` of a model's layers.

        Raises:
            UserError: a layer outside the model, or its last one, which would be the target itself.
        """
        if not 1 <= exit_layer < layers:
            raise UserError(
                f"exit_layer is {exit_layer}; the model has {layers} layers, so it has to be 1 to {layers - 1} "
                "(the number of layers that the draft runs)"
            )
        return cls(exit_layer)

    @property
    def sublayers(self) -> int:
        """How many attention and MLP sub-layers run."""
        return 2 * self.shared + len(self.attention) + len(self.mlp)
