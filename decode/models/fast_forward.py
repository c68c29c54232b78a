"""The forward of Llama-like models, Phi and GPT-NeoX without per-call overhead.

Same arithmetic as transformers' modelling code, a few dozen operations a layer less: one projection for q, k and v,
rotation in place, one preallocated cache for all layers, masks made once a call. On CPUs the weights are laid out anew
for it (`fast_architectures`). `fast_runner.FastRunner` makes a `Runner` of it.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from decode.draft import Draft
from decode.errors import UserError
from decode.models.families import Layer, Weights
from decode.models.huggingface_runner import tree_mask
from decode.models.ragged_batch import NewTokens, TextsTogether

CacheSlots = tuple[Any, Tensor, Tensor]
"""Of one layer: cache ``[1, 2 kv_heads, n, width]`` of the new tokens (anything with ``copy_``), and all keys and all
values ``[1, kv_heads, m, width]``, the new ones among them; of several texts as `TextsTogether` gives them."""

Mask = Tensor | TextsTogether | None
"""Additive ``[groups · n, m]`` of one text, or None where every query may see every key; or what tells texts apart."""


LOOKED_UP = 1 << 23  # most bytes of the first layer's queries, keys and values that are computed once, for all tokens


class FastForward:
    """Decoder layers over a cache of their own. States are ``[n, hidden]``, n the tokens of one text or of several.

    Attributes:
        cache: ``[layers, rows, 2 kv_heads, capacity, width]``, keys before values; a row is one text's.
        capacity: positions of a row.
        rotary_factors: by position: complex factors of a whole row of q, k and v (tuned), or cos and ∓sin, stacked.

    Args:
        weights: of the model.
        rotary: the model's own module that gives cos and sin of positions.
    """

    def __init__(self, weights: Weights, rotary: Any) -> None:
        self.weights, self.shape, self.layers = weights, weights.shape, weights.layers
        self.gated, self.parallel, self.activation = weights.gated, weights.parallel, weights.activation
        self.device, self.dtype = weights.embedding.device, weights.embedding.dtype
        self.rotary = rotary
        self._new_cache()

    def first_layers(self, count: int) -> FastForward:
        """The first layers with the final norm and the head, over a cache of their own; weights are shared."""
        fewer = copy.copy(self)
        fewer.layers = self.layers[:count]
        fewer._new_cache()
        return fewer

    @property
    def depth(self) -> int:
        """Number of layers."""
        return len(self.layers)

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
            return layer.qkv(layer.norm1(table))

    # -- the cache and what depends on positions -------------------------------------------------------------------

    def _new_cache(self) -> None:
        size = (len(self.layers), 1, 2 * self.shape.kv_heads, 0, self.shape.width)
        self.cache, self.capacity = torch.zeros(size, dtype=self.dtype, device=self.device), 0
        self.reserve(256)

    @property
    def rows(self) -> int:
        """Texts that the cache has room for."""
        return self.cache.shape[1]

    def reserve(self, capacity: int) -> None:
        """Allocate for `capacity` positions of each text, keeping what is held."""
        if capacity <= self.capacity:
            return
        # one text's cache doubles; that of many grows in smaller steps, since memory is what bounds their number
        capacity = max(capacity, 2 * self.capacity if self.rows == 1 else self.capacity + self.capacity // 4)
        self._allocate(self.rows, capacity)
        self.rotary_factors = self._rotary_factors(capacity)

    def reserve_rows(self, rows: int) -> None:
        """Give the cache room for exactly so many texts, keeping what the first of them hold."""
        if rows != self.rows:
            self._allocate(rows, self.capacity)

    def _allocate(self, rows: int, capacity: int) -> None:
        old, heads = self.cache, self.shape.kv_heads
        grown = old.new_zeros(old.shape[0], rows, 2 * heads, capacity, self.shape.width)
        kept = min(rows, self.rows)
        grown[:, :kept, :, : old.shape[3]] = old[:, :kept]
        self.cache, self.capacity = grown, capacity
        self._views = [(layer, layer[:, :heads], layer[:, heads:]) for layer in grown.unbind(0)]

    def gather(self, base: int, slots: Tensor, row: int = 0) -> None:
        """Move a text's cache entries at `slots` (ascending) to `base` and the slots behind it."""
        held = self.cache[:, row]
        held[:, :, base : base + len(slots)] = held.index_select(2, slots)

    def move_row(self, source: int, to: int, length: int) -> None:
        """Copy the first `length` positions of one row to another."""
        self.cache[:, to, :, :length] = self.cache[:, source, :, :length]

    def _rotary_factors(self, positions: int) -> Tensor:
        (cos, sin), shape = cos_and_sin(self.rotary, positions, self.dtype, self.device), self.shape
        half = shape.rotated // 2
        if not shape.tuned:
            return torch.stack([cos, torch.cat([-sin[:, :half], sin[:, half:]], -1)], 1)
        rotation = torch.complex(cos[:, :half], sin[:, :half]).contiguous()
        whole = rotation.new_ones(positions, shape.heads + 2 * shape.kv_heads, shape.width // 2)
        whole[:, : -shape.kv_heads, :half] = rotation[:, None]
        return whole.flatten(1)

    def mask_behind(self, past: int, own: Tensor) -> Tensor:
        """Additive mask ``[groups · n, past + m]`` of n queries that see the first slots and of the next m their own.

        Args:
            past: how many slots all of them see.
            own: bool ``[n, m]``.
        """
        groups, (n, m) = self.shape.heads // self.shape.kv_heads, own.shape
        mask = torch.zeros(groups, n, past + m, dtype=self.dtype, device=self.device)
        mask[:, :, past:].masked_fill_(~own, -torch.inf)
        return mask.view(groups * n, past + m)

    def _mask(self, n: int, tree: Draft | None, past: int, depths: Tensor | None) -> Tensor | None:
        """`mask_behind` for the tokens of a chain or tree, or None where every query may see every key."""
        window = self.weights.window
        outside = window is not None and past + n > window
        if n == 1 and not outside:
            return None
        if tree is None:
            own = torch.ones(n, n, dtype=torch.bool, device=self.device).tril_()
        else:
            own = tree_mask(tree, 0).to(self.device)
        mask = self.mask_behind(past, own)
        if window is not None and outside:
            at = past + (torch.arange(n, device=self.device) if depths is None else depths)
            position = torch.cat([torch.arange(past, device=self.device), at])
            mask.view(-1, n, past + n).masked_fill_(at[:, None] - position[None] >= window, -torch.inf)
        return mask

    def place(self, n: int, tree: Draft | None, start: int, row: int = 0) -> tuple[Tensor, Mask]:
        """Rotary factors and mask of n tokens of a text whose first cache slot is `start`; reserves it."""
        if self.rows > 1:
            return self.place_texts([NewTokens.of(row, start, n, tree)])
        self.reserve(start + n)
        if tree is None:
            return self.rotary_factors.narrow(0, start, n), self._mask(n, None, start, None)
        depths = torch.tensor([0, *tree.depths()], device=self.device)
        return self.rotary_factors.index_select(0, start + depths), self._mask(n, tree, start, depths)

    def place_texts(self, texts: Sequence[NewTokens]) -> tuple[Tensor, TextsTogether]:
        """Rotary factors of the new tokens of several texts, and what tells them apart."""
        self.reserve(max(text.end for text in texts))
        groups = self.shape.heads // self.shape.kv_heads
        together = TextsTogether(texts, groups, self.weights.window, self.cache)
        return self.rotary_factors.index_select(0, together.positions), together

    def slots(self, first: int, last: int, start: int, n: int, mask: Mask = None) -> list[CacheSlots]:
        """Of layers ``[first, last)``, for n tokens whose first cache slot is `start`, or several texts'."""
        if isinstance(mask, TextsTogether):
            return mask.slots(self._views[first:last])
        end, heads = start + n, self.shape.kv_heads
        if last - first < 4:  # views one by one, or all at once: whichever are fewer operations
            views = self._views[first:last]
            return [(layer.narrow(2, start, n), k.narrow(2, 0, end), v.narrow(2, 0, end)) for layer, k, v in views]
        layers = self.cache[first:last]
        new, seen = layers.narrow(3, start, n), layers.narrow(3, 0, end)
        return list(zip(new.unbind(0), seen.narrow(2, 0, heads).unbind(0), seen.narrow(2, heads, heads).unbind(0)))

    # -- the layers ------------------------------------------------------------------------------------------------

    def embed(self, tokens: Tensor) -> Tensor:
        """Input states of token ids."""
        return self.weights.embedding.index_select(0, tokens)

    def run_tokens(self, tokens: Tensor, start: int, rotary: Tensor, mask: Mask) -> Tensor:
        """All layers on tokens whose first cache slot is `start` (see `place`)."""
        x, count = self.embed(tokens), len(self.layers)
        qkv = None if self.first_qkv is None else self.first_qkv.index_select(0, tokens)
        return self.run_layers(x, 0, count, self.slots(0, count, start, len(tokens), mask), rotary, mask, qkv)

    def run(self, x: Tensor, first: int, last: int, start: int, rotary: Tensor, mask: Mask) -> Tensor:
        """Layers ``[first, last)`` on the states of tokens whose first cache slot is `start` (see `place`)."""
        return self.run_layers(x, first, last, self.slots(first, last, start, x.shape[0], mask), rotary, mask)

    def run_layers(
        self,
        x: Tensor,
        first: int,
        last: int,
        slots: list[CacheSlots],
        rotary: Tensor,
        mask: Mask,
        qkv: Tensor | None = None,
    ) -> Tensor:
        """Layers ``[first, last)`` on the states of tokens in these slots; `qkv`: the first one's, where known."""
        for layer, slot in zip(self.layers[first:last], slots):
            if qkv is None:
                y = layer.norm1(x)
                qkv = layer.qkv(y)
            a = layer.out.add_to(x, self.attention(layer, qkv, rotary, mask, slot))
            z = y if layer.norm2 is None else layer.norm2(x if self.parallel else a)
            x, qkv = layer.down.add_to(a, self.mlp(layer, z)), None
        return x

    def project(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Logits of states behind any layer by the final norm and the output head, and what the head read."""
        hidden = self.weights.final_norm(x)
        return self.weights.head(hidden), hidden

    def mlp(self, layer: Layer, z: Tensor) -> Tensor:
        """The MLP before its projection down."""
        u = layer.up(z)
        if not self.gated:
            return self.activation(u)
        gate, up = u.chunk(2, -1)
        return self.activation(gate) * up

    def attention(self, layer: Layer, qkv: Tensor, rotary: Tensor, mask: Mask, slot: CacheSlots) -> Tensor:
        """Attention before its projection, ``[n, heads · width]``; keys and values are stored in the slot.

        Args:
            layer: its weights.
            qkv: queries, keys and values ``[n, (heads + 2 kv_heads) · width]``, which are rotated in place.
            rotary: rotary factors of the tokens.
            mask: see `place`.
            slot: the layer's.
        """
        shape, n, (new, k, v) = self.shape, qkv.shape[0], slot
        heads, kv_heads, d = shape.heads, shape.kv_heads, shape.width
        rows = self._rotated(layer, qkv, rotary)
        new.copy_(rows.narrow(1, heads, 2 * kv_heads))
        q = rows.narrow(1, 0, heads)
        if isinstance(mask, TextsTogether):
            return mask.attend(q, k, v)
        if heads == kv_heads:
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
            return out.transpose(1, 2).reshape(n, -1)
        # grouped heads: the group becomes rows of its key head, so that keys are never repeated
        out = F.scaled_dot_product_attention(q.reshape(1, kv_heads, -1, d), k, v, attn_mask=mask)
        return out.view(kv_heads, -1, n, d).permute(2, 0, 1, 3).reshape(n, -1)

    def _rotated(self, layer: Layer, qkv: Tensor, rotary: Tensor) -> Tensor:
        """Heads of q, k and v ``[1, heads + 2 kv_heads, n, width]``, the first two rotated to their positions."""
        shape, n = self.shape, qkv.shape[0]
        rotating = shape.heads + shape.kv_heads
        if shape.interleaved and not shape.tuned:
            rows = qkv.view(1, n, shape.heads, 3, shape.width).permute(0, 3, 2, 1, 4).flatten(1, 2)
        else:
            rows = qkv.view(1, n, -1, shape.width).transpose(1, 2)
        if layer.qk_norm is not None:
            qk = rows.narrow(1, 0, rotating)
            qk.copy_(layer.qk_norm(qk))
        if shape.tuned:
            qkv.view(rotary.dtype).mul_(rotary)
            return rows
        part = rows[:, :rotating, :, : shape.rotated]
        rolled = part.roll(shape.rotated // 2, -1)
        part.mul_(rotary[:, 0]).add_(rolled.mul_(rotary[:, 1]))
        return rows


def cos_and_sin(rotary: Any, positions: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """cos and sin of a model's own rotation at the first positions, ``[positions, rotated]``."""
    at = torch.arange(positions, device=device)[None]
    cos, sin = rotary(torch.empty(0, dtype=dtype, device=device), position_ids=at)
    return cos[0], sin[0]


@dataclass(frozen=True)
class LayerSubset:
    """The sub-layers that a self-speculative draft runs; ``LayerSubset(E)`` exits behind the first E layers."""

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
