"""A block head in the role of a drafter's network: `FastForward` layers over a cache of the target's features."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from decode.models.block_head import BlockHead
from decode.models.families import Kind, Shape, Weights, decoder_layer, tunable
from decode.models.fast_forward import FastForward
from decode.models.head_runner import DraftHeadRunner
from decode.models.heads import output_head
from decode.models.ragged_batch import KVCache, NewTokens, Row
from decode.models.runner import Output, joined
from decode.models.weights import Linears, norm


class BlockCache(Row):
    """Keys and values that the head made of the target's features of one sequence. They are never rolled back.

    Attributes:
        length: tokens whose features were read.
        unread: features ``[n, feature width]`` of the tokens after these.
    """

    def __init__(self, memory: KVCache, row: int, unread: Tensor) -> None:
        super().__init__(memory, row)
        self.unread = unread

    def settle(self, features: Tensor) -> None:
        """Queue the target's features ``[n, feature width]`` of tokens that the sequence will keep."""
        self.unread = torch.cat([self.unread, features]) if len(self.unread) else features

    def truncate(self, length: int) -> None:
        """Hold the first `length` positions only; 0 forgets the queued features too."""
        super().truncate(length)
        if not length:
            self.unread = self.unread.new_empty(0, self.unread.shape[1])  # a view would keep all features


class BlockRunner(DraftHeadRunner):
    """Drafts blocks after sequences.

    A feature passes no layer: every layer's keys and values are linear maps of it, all computed by one product.

    Args:
        head: the block head.
        target: the model whose embedding and output head it uses.
        pack: see `decode.models.choose_runner.open_runner`.

    Attributes:
        head: the block head.
    """

    def __init__(self, head: BlockHead, target: PreTrainedModel, pack: str = "off") -> None:
        config, table, linear = head.config, target.get_input_embeddings(), output_head(target, head.draft_ids())
        tuned, heads, d = tunable(head), config.num_attention_heads, config.head_dim
        shape = Shape(heads, config.num_key_value_heads, d, d, tuned=tuned, folded=tuned)
        make = Linears(pack, len(head.layers), copies=tuned, half=pack == "auto")
        weights = Weights(
            shape,
            [decoder_layer("llama", layer, shape, make) for layer in head.layers],
            F.silu,
            gated=True,
            parallel=False,
            kinds=[Kind()],
            embedding=table.weight,
            final_norm=norm(head.norm),
            head=make(linear.weight, linear.bias),
        )
        network, self.fuse = FastForward(weights, head.rotary), make(head.fc.weight)
        name = f"the {'DSpark' if head.version == 'dspark' else 'DFlash'} head"
        super().__init__(name, network, head, target, make, "a block head drafts blocks")
        self.head, self.tuned = head, tuned
        attentions: list[Any] = [layer.self_attn for layer in head.layers]
        self.norms = torch.stack([self._paired(one.k_norm.weight.detach()) for one in attentions])
        parts = [weight for one in attentions for weight in self._keys_and_values(one)]
        self.context, self.norm_context = make(torch.cat(parts)), norm(head.hidden_norm)
        self.eps, self.shape = config.rms_norm_eps, shape
        self.bias = None if head.markov_head is None else make(head.markov_head.markov_w2.weight)
        # a block reads the layers and the output head; features, and the row of one token, read the rest
        read = sum(p.numel() for layer in head.layers for p in layer.parameters()) + linear.weight.numel()
        self.weight_bytes = read * self.dtype.itemsize - make.bytes["in float16"]

    def _paired(self, heads: Tensor) -> Tensor:
        """Elements of a head ``[d, ..]`` in the order of `FastForward`'s rotation."""
        return heads.unflatten(0, (2, -1)).transpose(0, 1).flatten(0, 1) if self.tuned else heads

    def _keys_and_values(self, attention: Any) -> tuple[Tensor, Tensor]:
        keys = attention.k_proj.weight.detach().unflatten(0, (-1, self.model.config.head_dim))
        return torch.stack([self._paired(one) for one in keys]).flatten(0, 1), attention.v_proj.weight.detach()

    def new_cache(self) -> BlockCache:
        """See `Runner.new_cache`."""
        unread = self.network.weights.embedding.new_zeros(0, self.head.feature_width)
        made: BlockCache = self.network.cache.new_row(BlockCache, unread)
        return made

    def read(self, caches: Sequence[BlockCache]) -> None:
        """Read the features that wait."""
        network = self.network
        new = [NewTokens(cache, cache.length, len(cache.unread)) for cache in caches if len(cache.unread)]
        if not new:
            return
        placed = network.place(new)
        counts = [one.count for one in new]
        made = self.context(self.norm_context(self.fuse(joined([one.cache.unread for one in new]))))
        shape, layers, d = self.shape, len(network.layers), self.shape.width
        made = made.view(len(made), layers, 2 * shape.kv_heads, d)
        keys, factors = made[:, :, : shape.kv_heads], placed.rotary[0]
        keys = F.rms_norm(keys, (d,), eps=self.eps) * self.norms[:, None]
        if self.tuned:
            turned = torch.view_as_complex(keys.unflatten(-1, (-1, 2))) * factors[:, None, None, : d // 2]
            keys = torch.view_as_real(turned).flatten(-2)
        else:
            keys = keys * factors[:, 0][:, None, None] + keys.roll(d // 2, -1) * factors[:, 1][:, None, None]
        made[:, :, : shape.kv_heads] = keys
        for one, own in zip(new, made.permute(1, 2, 0, 3).split(counts, 2)):
            network.cache.tensor[:, one.cache.row, :, one.start : one.end] = own
            one.cache.length, one.cache.unread = one.end, one.cache.unread[:0]

    def draft(self, caches: Sequence[BlockCache], pending: Sequence[int], drafts: Sequence[int]) -> list[Output]:
        """Run a block after each sequence, whose pending token is the anchor.

        Args:
            caches: one of each sequence, each once; those of the same memory in the order of their rows.
            pending: the anchors.
            drafts: tokens to draft of each.

        Returns:
            Of each the logits ``[drafts, draft vocab]`` without a Markov head's bias, and the states that give them.
        """
        self.read(caches)
        network, head = self.network, self.head
        first = 0 if head.from_anchor else 1
        counts = [count + first for count in drafts]
        whole = [torch.ones(n, n, dtype=torch.bool) for n in counts]
        new = [NewTokens(cache, cache.length, n, None, seen) for cache, n, seen in zip(caches, counts, whole)]
        placed = network.place(new)
        blocks = [head.tokens(torch.tensor(one), n) for one, n in zip(pending, drafts)]
        x = network.run(network.embed(joined(blocks).to(self.device)), 0, len(network.layers), placed)
        if first:
            x = joined([own[1:] for own in x.split(counts)])
        logits, hidden = network.project(x)
        return Output(logits, hidden).split(list(drafts))
