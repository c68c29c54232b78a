"""The forward of Llama-like models, Gemma 3, Phi and GPT-NeoX without per-call overhead, and the `Model` made of it.

Same arithmetic as transformers' modelling code, a few dozen operations a layer less: one projection for q, k and v,
rotation in place, one preallocated cache for all layers, masks made once a call. On CPUs the weights are laid out anew
for it (see `decode.models.fast.layout`). A subset of the first layers can read ahead (self-speculation).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from decode.errors import UserError
from decode.files import Fields
from decode.models.api import Capture, Model, Out, Read, free_memory, joined
from decode.models.fast.cache import LEAST, KVCache, NewTokens, OneText, RaggedBatch, Row, Views
from decode.models.fast.layout import (
    FAMILIES,
    Layer,
    Weights,
    is_small,
    layer_kinds,
    model_weights,
    tunable,
)
from decode.models.fast.weights import Linears, half_scale
from decode.models.huggingface import facts_of

Placed = OneText | RaggedBatch
LOOKED_UP = 1 << 23  # most bytes of the first layer's queries, keys and values that are computed once, for all tokens
ROOM = 1.5  # memory that has to be free before a large model's weights are copied, in their sizes


class FastForward:
    """Decoder layers over a cache of their own. States are ``[n, hidden]``, n the tokens of all texts.

    Attributes:
        cache: keys and values; a row is one text's.
        positions: positions that rotary factors are held for, those of a row of the cache.
        rotary_factors: of each kind of layers, by position: complex factors of a whole row of q, k and v (tuned), or
            cos and sin  # [positions, 2, 1, width]; of the tokens of a forward the matrices that rotate their heads
            # [tokens, width, width]
    """

    def __init__(self, weights: Weights, rotary: Any) -> None:
        self.weights, self.shape, self.layers, self.rotary = weights, weights.shape, weights.layers, rotary
        self.device, self.dtype = weights.embedding.device, weights.embedding.dtype
        self.cache = KVCache(len(self.layers), self.shape.kv_heads, self.shape.width, weights.embedding)
        self._extend_rotary(LEAST)

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

    def _extend_rotary(self, positions: int) -> None:
        """Hold rotary factors for so many positions."""
        self.positions = positions
        shape, half, d = self.shape, self.shape.rotated // 2, self.shape.width
        self.rotary_factors = []
        for kind in self.weights.kinds:
            cos, sin = cos_and_sin(self.rotary, self.positions, self.dtype, self.device, kind.rope)
            if not shape.tuned:
                same = F.pad(cos, (0, d - shape.rotated), value=1.0), F.pad(sin, (0, d - shape.rotated))
                self.rotary_factors.append(torch.stack(same, 1)[:, :, None])
                continue
            rotation = torch.complex(cos[:, :half], sin[:, :half]).contiguous()
            factors = rotation.new_ones(self.positions, shape.heads + 2 * shape.kv_heads, shape.width // 2)
            factors[:, : -shape.kv_heads, :half] = rotation[:, None]
            self.rotary_factors.append(factors.flatten(1))

    def place(self, new: Sequence[NewTokens]) -> Placed:
        """Where these tokens belong; allocates their slots."""
        cache = self.cache
        if len(cache.rows) > 1 or not new[0].end <= self.positions <= cache.capacity:
            if None in cache.rows:
                cache.compact()
            end = max(text.end for text in new)
            cache.grow(len(cache.rows), end)
            if not end <= self.positions <= cache.capacity:
                self._extend_rotary(min(max(end, 2 * self.positions), cache.capacity))
        windows, like = [kind.window for kind in self.weights.kinds], self.weights.embedding
        several = len(new) > 1 or cache.tensor.shape[1] > 1
        heads, groups = self.shape.heads, self.shape.heads // self.shape.kv_heads
        kind = RaggedBatch if several else OneText
        placed: Placed = kind(new, heads, groups, windows, self.rotary_factors, like)
        if not self.shape.tuned:  # one product with a small matrix is one launch, where its parts would be four
            same, turned = self.half_turn
            placed.rotary = [torch.addcmul(x[:, 0] * same, x[:, 1], turned) for x in placed.rotary]
        return placed

    @cached_property
    def half_turn(self) -> tuple[Tensor, Tensor]:
        """The matrices by which heads stay as they are, and by which their rotated halves (x, y) become (-y, x)."""
        same, half = torch.eye(self.shape.width, dtype=self.dtype, device=self.device), self.shape.rotated // 2
        turned = torch.zeros_like(same)
        turned[half : 2 * half, :half] = -same[:half, :half]
        turned[:half, half : 2 * half] = same[:half, :half]
        return same, turned

    def embed(self, tokens: Tensor) -> Tensor:
        """Input states of token ids."""
        x, scale = self.weights.embedding.index_select(0, tokens), self.weights.embedding_scale
        return x if scale == 1 else x.mul_(scale)

    def run_tokens(self, tokens: Tensor, placed: Placed, capture: Capture) -> tuple[Tensor, Tensor | None]:
        """All layers on tokens; their last states, and the captured ones side by side (see `Model.forward`)."""
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
        for layer, views in zip(self.layers[first:last], placed.views(self.cache, first, last)):
            if qkv is None:
                y = layer.norm1(x)
                qkv = layer.qkv(y)
            a = layer.out.add_to(x, self.attention(layer, qkv, placed, views))
            z = y if layer.norm2 is None else layer.norm2(x if self.weights.parallel else a)
            x, qkv = layer.down.add_to(a, self.mlp(layer, z)), None
        return x

    def project(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Logits of the states after any layer by the final norm and the output head, and what the head read."""
        hidden = self.weights.final_norm(x)
        return self.weights.head(hidden), hidden

    def mlp(self, layer: Layer, z: Tensor) -> Tensor:
        """The MLP before its projection down."""
        u, activation = layer.up(z), self.weights.activation
        if not self.weights.gated:
            return activation(u)
        gate, up = u.chunk(2, -1)
        return activation(gate) * up

    def attention(self, layer: Layer, qkv: Tensor, placed: Placed, views: Views) -> Tensor:
        """Attention before its projection, ``[n, heads · width]``; queries and keys in `qkv` are rotated in place."""
        q, stored = self.rotated(layer, qkv, placed)
        return placed.attend(q, stored, views, layer.kind, self.shape.scale)

    def rotated(self, layer: Layer, qkv: Tensor, placed: Placed) -> tuple[Tensor, Tensor]:
        """Queries ``[1, heads, n, width]``, and keys, then values, ``[1, 2 kv_heads, n, width]``, rotated in place."""
        shape, n, rotary = self.shape, qkv.shape[0], placed.rotary[layer.kind]
        heads, kv_heads, d = shape.heads, shape.kv_heads, shape.width
        if shape.interleaved and not shape.tuned:
            rows = qkv.view(1, n, heads, 3, d).permute(0, 3, 2, 1, 4).flatten(1, 2)
        else:
            rows = qkv.view(1, n, -1, d).transpose(1, 2)
        qk = rows.narrow(1, 0, heads + kv_heads)
        if shape.tuned:
            if layer.qk_norm is not None:
                qk.copy_(layer.qk_norm(qk))
            qkv.view(rotary.dtype).mul_(rotary)
        else:
            by_token = qk[0].transpose(0, 1)
            turned = torch.bmm(by_token if layer.qk_norm is None else layer.qk_norm(by_token), rotary)
            qk = turned.transpose(0, 1)[None]
            rows.narrow(1, heads, kv_heads).copy_(qk.narrow(1, heads, kv_heads))
        return qk.narrow(1, 0, heads), rows.narrow(1, heads, 2 * kv_heads)


def cos_and_sin(
    rotary: Any, positions: int, dtype: torch.dtype, device: torch.device, rope: str | None
) -> tuple[Tensor, Tensor]:
    """cos and sin of a model's rotation at the first positions, ``[positions, rotated]``; `rope`: see `Kind`."""
    at, named = torch.arange(positions, device=device)[None], {} if rope is None else {"layer_type": rope}
    cos, sin = rotary(torch.empty(0, dtype=dtype, device=device), position_ids=at, **named)
    return cos[0], sin[0]


# -- as a `Model` ------------------------------------------------------------------------------------------------------


def fast_runner(model: PreTrainedModel, *, pack: str = "off", draft: bool = False) -> FastRunner:
    """A runner of a model that `supports` knows; the weights of a draft may be rounded to 16 bits.

    The packing ``auto`` packs large models (`COPIED`) only where float16 holds their weights and memory has room for a
    second copy.
    """
    facts, rotary, config = facts_of(model), model.base_model.rotary_emb, model.config.get_text_config()
    rotated = cos_and_sin(rotary, 1, facts["dtype"], facts["device"], layer_kinds(config)[0][0].rope)[0].shape[-1]
    tuned, large = tunable(model), pack == "auto" and not is_small(model)
    if large and free_memory(model.device) <= ROOM * facts["weight_bytes"]:
        pack = "off"
    # as those of a checkpoint in 16 bits that was loaded in float32
    in_half = (half_scale(p) is not None for p in model.parameters() if p.dim() == 2)
    kept = pack != "off" and not draft and all(in_half)
    if large and not kept:
        pack = "off"
    make = Linears(pack, copies=tuned, half=kept or (draft and pack == "auto"))
    network = FastForward(model_weights(model, rotated, make, tuned=tuned, folded=not kept), rotary)
    saved = make.bytes["in float16"]
    facts |= {"packing": make.sentence(), "weight_bytes": facts["weight_bytes"] - saved}
    return FastRunner(network, facts, rounded=draft and saved > 0)


class RowRunner(Model):
    """A runner whose texts are rows of the cache of `network`, each of them a `row`."""

    network: FastForward
    row: type[Row] = Row

    def new_cache(self) -> Any:
        """See `Model.new_cache`."""
        return self.network.cache.new_row(self.row)

    def reserve(self, rows: int, length: int = 0) -> None:
        """See `Model.reserve`."""
        self.network.cache.reserve(rows, length)

    def keep(self, caches: Sequence[Any], bases: Sequence[int], paths: Sequence[list[int]]) -> None:
        """See `Model.keep`; what moves does so for all texts at once."""
        self.network.cache.gather(caches, bases, paths)
        for cache, base, slots in zip(caches, bases, paths):
            cache.truncate(base + len(slots))


class FastRunner(RowRunner):
    """A model by `FastForward`, equal to its own forward to rounding.

    Where weights are copied (see `decode.models.fast.layout`), later changes to the model are not seen: open it anew.

    Attributes:
        rounded: whether weights were rounded to 16 bits.
        depth: number of layers.
    """

    def __init__(self, network: FastForward, facts: Fields, *, rounded: bool) -> None:
        super().__init__(**facts | {"cache_bytes_per_token": network.cache.bytes_per_token})
        self.network, self.rounded, self.depth = network, rounded, len(network.layers)

    def forward(
        self,
        reads: Sequence[Read],
        *,
        capture: Capture = (),
        last: int | None = None,
        exit_layer: int | None = None,
    ) -> Out:
        """See `Model.forward`.

        With `exit_layer` the first so many layers read the tokens ahead of the text, and logits are those of the final
        norm and the head after them. What they computed is kept, and the next whole forward, which has to begin with
        the same tokens, takes it up. `Cache.truncate` drops it.
        """
        network, tokens, new = self.network, [read.tokens for read in reads], []
        for read in reads:
            cache, tree = read.cache, read.tree
            new.append(NewTokens(cache, cache.length if exit_layer is None else cache.known, read.tokens.shape[0]))
            if tree is not None:
                new[-1].depths, new[-1].seen = [0, *tree.depths()], tree.visible()
        placed, captured = network.place(new), None
        if exit_layer is not None:
            x = self._read_ahead(new, tokens, placed, exit_layer)
        elif any(text.cache.ahead for text in new):
            x = self._catch_up([text.cache for text in new], tokens, placed)
        else:
            x, captured = network.run_tokens(joined(tokens), placed, capture)
        if last is not None and (len(new) > 1 or last < new[0].count):
            several = isinstance(placed, RaggedBatch) and len(new) > 1 and last > 0
            x = x.index_select(0, placed.last) if several else x[len(x) - last :]  # type: ignore[union-attr]
        logits, hidden = network.project(x)
        if exit_layer is None:
            for text in new:
                text.cache.length = text.end
        return Out(logits, hidden, captured)

    def _read_ahead(self, new: Sequence[NewTokens], tokens: Sequence[Tensor], placed: Placed, shared: int) -> Tensor:
        """The states of tokens after the first `shared` layers, which the caches keep for the next whole forward."""
        x = self.network.run(self.network.embed(joined(tokens)), 0, shared, placed)
        for text, states in zip(new, x.split([text.count for text in new])):
            text.cache.shared = shared
            text.cache.ahead.append(states)
        return x

    def _catch_up(self, caches: Sequence[Row], tokens: Sequence[Tensor], placed: Placed) -> Tensor:
        """The last states of tokens of which the first layers have read some ahead."""
        network, shared = self.network, next(cache.shared for cache in caches if cache.ahead)
        rest = [ids[cache.known - cache.length :] for cache, ids in zip(caches, tokens)]
        late = [NewTokens(cache, cache.known, len(ids)) for cache, ids in zip(caches, rest) if len(ids)]
        if late:
            self._read_ahead(late, [ids for ids in rest if len(ids)], network.place(late), shared)
        x = joined([joined(cache.ahead)[: len(ids)] for cache, ids in zip(caches, tokens)])
        for cache in caches:
            cache.ahead = []
        return network.run(x, shared, self.depth, placed)


def self_speculating(runner: Model, exit_layer: int | None = None) -> FastRunner:
    """The target's runner, if its first layers can draft: `exit_layer` of them, or any number if that is None.

    Raises:
        UserError: naming the model and the families that can, or the layers that it has.
    """
    if not isinstance(runner, FastRunner):
        raise UserError(
            f"{runner.name} cannot draft with its own layers: that takes a model of {', '.join(FAMILIES)} on one "
            "device, with plain weights; use another drafter (vanilla with --draft, prompt-lookup)"
        )
    if exit_layer is not None and not 1 <= exit_layer < runner.depth:
        raise UserError(
            f"exit_layer is {exit_layer}; the model has {runner.depth} layers, so it has to be 1 to {runner.depth - 1} "
            "(the number of layers that the draft runs)"
        )
    return runner
