"""Block heads in decoding: caches of the target's features, a block of each text in one forward, and its tokens."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from decode.core.sampling import argmax
from decode.core.stop import probability
from decode.models.api import PIECE, Out, joined
from decode.models.fast.cache import NewTokens, Views
from decode.models.fast.forward import FastForward, Placed
from decode.models.fast.layout import Kind, Layer
from decode.models.fast.weights import Linear, norm
from decode.models.heads.block import NAMES, BlockHead, Slots
from decode.models.heads.block_parts import convolved
from decode.models.heads.eagle import finish_of, finished
from decode.models.heads.runner import DraftHeadRunner, FeatureRow


@dataclass
class Block(Out):
    """The output of a text's block: logits ``[drafts, draft vocab]`` before any token is known, and their states.

    Attributes:
        anchor: the token that the block follows.
        context: the last token's normed features ``[1, width]``, which a lattice reads; None: there are none.
        scores: of a selector and a lattice candidates as the target's ids, ``[drafts, k]``, and as the draft's, and the
            scores given each candidate of the slot before, ``[drafts, k, k]``; made when they are asked for.
    """

    anchor: int = 0
    context: Tensor | None = None
    scores: tuple[Tensor, Tensor, Tensor] | None = None


class BlockRow(FeatureRow):
    """The cache of a block head's sequence, and the last token's normed features ``[1, width]``, once they are read."""

    last: Tensor | None = None


class BlockRunner(DraftHeadRunner):
    """Drafts blocks after sequences.

    The cache of a sequence holds keys and values that the head made of the target's features; they are never rolled
    back. A feature passes no layer: every layer's keys and values are linear maps of it, all computed by one product.
    """

    head: BlockHead

    @torch.no_grad()
    def __init__(self, head: BlockHead, target: PreTrainedModel, pack: str = "off") -> None:
        layers: list[Any] = list(head.layers)
        name = f"the {NAMES[str(head.version)]} head"
        super().__init__(head, target, layers, pack, name, "a block head drafts blocks")
        self.finish = finish_of(target)
        make, kv_heads, d = self.make, self.shape.kv_heads, self.shape.width
        attention: list[Any] = [layer.self_attn for layer in layers]
        # elements of a head in the order of `FastForward`'s rotation
        order = torch.arange(d).view(2, -1).T.flatten() if self.shape.tuned else torch.arange(d)
        rows = torch.arange(kv_heads * d).view(-1, d)[:, order].flatten()
        parts = [weight for layer in attention for weight in (layer.k_proj.weight[rows], layer.v_proj.weight)]
        self.norms = torch.stack([layer.k_norm.weight[order] for layer in attention])
        self.fuse = make(head.fc.weight)
        self.norm_context = norm(head.hidden_norm)
        self.context = make(torch.cat(parts))
        self.bias: Linear | None = None
        if head.markov_head is not None:  # of which a selector reads single rows
            self.bias = (Linear if head.candidates else make)(head.markov_head.markov_w2.weight)
        self.convs = [
            tuple(map(self._conv, (layer.attention_conv, layer.mlp_conv), (read.norm1, read.norm2)))
            for layer, read in zip(layers, self.network.layers)
        ]
        of_layers, self.causal = map(list, zip(*head.kinds))
        windows, weights = [*dict.fromkeys(of_layers)], self.network.weights
        if windows != [None]:
            weights.kinds = list(map(Kind, windows))
            for window, read in zip(of_layers, weights.layers):
                read.kind = windows.index(window)
            self.network = FastForward(weights, head.rotary)
        self.packing = make.sentence()

    def _conv(self, conv: Any, before: Any) -> Any:
        """A convolution as `convolved` reads it, after a norm whose scale the following projections may hold."""
        if conv is None:
            return None
        weight = conv.kernel_projection.weight * (before.scale if getattr(before, "folded", False) else 1)
        return SimpleNamespace(base_kernel=conv.base_kernel, group=conv.group, kernel_projection=self.make(weight))

    def new_cache(self) -> BlockRow:
        """See `Model.new_cache`."""
        made: BlockRow = self.network.cache.new_row(BlockRow)
        return made

    def remaining(self, ids: Sequence[int]) -> int:
        """See `Model.remaining`; no more than a block drafts."""
        return min(self.head.drafts, self.limit - len(ids) + self.head.from_anchor)

    def read(self, caches: Sequence[BlockRow]) -> None:
        """Read the features that wait, a piece of each sequence at a time."""
        network, shape = self.network, self.shape
        kv_heads, d = shape.kv_heads, shape.width
        while waiting := [cache for cache in caches if len(cache.unread)]:
            new = [NewTokens(cache, cache.length, min(PIECE, len(cache.unread))) for cache in waiting]
            factors = network.place(new).rotary[0]
            features = joined([text.cache.unread.take(text.count) for text in new])
            context = self.norm_context(self.fuse(features))
            made = self.context(context)
            made = made.view(len(made), len(network.layers), 2 * kv_heads, d)
            keys = made[:, :, :kv_heads]
            keys.copy_(F.rms_norm(keys, (d,), eps=self.head.config.rms_norm_eps) * self.norms[:, None])
            if shape.tuned:  # the factors of values are 1
                torch.view_as_complex(made.view(*made.shape[:2], -1, 2)).mul_(factors[:, None, -kv_heads * d :])
            else:
                keys.copy_(torch.bmm(keys.flatten(1, 2), factors).view_as(keys))
            for text, values in zip(new, made.permute(1, 2, 0, 3).split([text.count for text in new], 2)):
                network.cache.tensor[:, text.cache.row, :, text.start : text.end] = values
                text.cache.length = text.end
            for text, rows in zip(new, context.split([text.count for text in new]) if self.head.lilicorr else ()):
                text.cache.last = rows[-1:].clone()

    def draft(self, caches: Sequence[BlockRow], pending: Sequence[int], drafts: Sequence[int]) -> list[Block]:
        """Run a block after each sequence, whose pending token is the anchor.

        Args:
            caches: one of each sequence, each once; those of the same memory in the order of their rows.
            pending: the anchors.
            drafts: tokens to draft of each.
        """
        self.read(caches)
        network, head = self.network, self.head
        blocks = [head.tokens(torch.tensor(anchor), count) for anchor, count in zip(pending, drafts)]
        counts, placed = list(map(len, blocks)), dict[bool, Placed]()
        for causal in set(self.causal):
            new = [NewTokens(cache, cache.length, n, block=not causal) for cache, n in zip(caches, counts)]
            placed[causal] = network.place(new)
        x = self._run(network.embed(joined(blocks).to(self.device)), placed, counts)
        logits, hidden = network.project(joined([head.drafting(states) for states in x.split(counts)]))
        logits = finished(logits, *self.finish) if self.bias is None else logits  # else once the bias is added
        texts = zip(logits.split(list(drafts)), hidden.split(list(drafts)), pending, caches)
        return [Block(row, states, anchor=anchor, context=cache.last) for row, states, anchor, cache in texts]

    def _run(self, x: Tensor, placed: dict[bool, Placed], counts: Sequence[int]) -> Tensor:
        """All layers on the slots of blocks, which see each other as `placed` has it for causal layers and others."""
        network, count, where = self.network, len(self.causal), next(iter(placed.values()))
        if len(placed) == 1 and self.convs[0][0] is None:
            return network.run(x, 0, count, where)
        slots = None if len(counts) == 1 else torch.tensor([i for n in counts for i in range(n)], device=self.device)

        def attention(layer: Layer, causal: bool, views: Views, y: Tensor) -> Tensor:
            return layer.out(network.attention(layer, layer.qkv(y), placed[causal], views))

        def mlp(layer: Layer, z: Tensor) -> Tensor:
            return layer.down(network.mlp(layer, z))

        layer: Any
        of_layers = network.layers, self.convs, self.causal, where.views(network.cache, 0, count)
        for layer, (first, second), causal, views in zip(*of_layers):
            x = x + convolved(first, layer.norm1(x), slots, partial(attention, layer, causal, views))
            x = x + convolved(second, layer.norm2(x), slots, partial(mlp, layer))
        return x

    def _scores(self, block: Block) -> tuple[Tensor, Tensor, Tensor]:
        """A block's `Block.scores`."""
        head, markov = self.head, self.head.markov_head
        if block.scores is None and markov is None:
            states, there = block.hidden[None], torch.tensor([block.context is not None], device=self.device)
            context = states.new_zeros(1, states.shape[-1]) if block.context is None else block.context
            kept, scores = head.pairs(block.logits[None], Slots(states, context, there), self.network.weights.embedding)
            block.scores = self.target_ids(kept[0]), kept[0], scores[0].to(states.dtype)
        if block.scores is None and markov is not None:  # of all pairs of neighbours at once
            unary, ids = block.logits.topk(head.candidates)
            tokens = self.target_ids(ids)
            anchor = tokens.new_full((1, tokens.shape[1]), block.anchor)
            m = markov(block.hidden[:, None], markov.markov_w1.weight[torch.cat([anchor, tokens[:-1]])])
            block.scores = tokens, ids, unary[:, None] + m @ markov.markov_w2.weight[ids].mT
        assert block.scores is not None
        return block.scores

    def likeliest(self, block: Block) -> Tensor:
        """The likeliest token of each slot after the anchor, ``[drafts]``, given those that were chosen before."""
        head = self.head
        if not head.conditional:
            return self.target_ids(argmax(block.logits))
        tokens, _, scores = self._scores(block)
        best, chosen = scores.argmax(-1).tolist(), [0]
        for row in best:
            chosen.append(row[chosen[-1]])
        return tokens.gather(1, torch.tensor(chosen[1:], device=tokens.device)[:, None])[:, 0]

    def condition(self, block: Block, slot: int, token: Tensor, *, greedy: bool | None = None) -> Out:
        """A slot after the token before it.

        Args:
            block: of a text.
            slot: of those that draft.
            token: before it, of one element; before the first the anchor.
            greedy: whether the confidence head's estimate is calibrated for greedy decoding; None: it is not asked. It
                does not look at the token that is drafted.
        """
        head, logits, hidden = self.head, block.logits[slot : slot + 1], block.hidden[slot : slot + 1]
        inputs, accepted, m, chosen = hidden, None, None, None
        if head.markov_head is not None:
            row = head.markov_head.markov_w1.weight.index_select(0, token.view(1))
            m, inputs = head.markov_head(hidden, row), torch.cat([hidden, row], -1)
        if head.lilicorr is not None:
            tokens, ids, scores = self._scores(block)
            at = (tokens[slot - 1] == token).int().argmax() if slot else 0
            kept, chosen = ids[slot][None], scores[slot, at][None]
        elif m is not None and self.bias is not None and head.candidates:
            unary, kept = logits.topk(head.candidates)
            chosen = finished(unary + m @ self.bias.weight[kept[0]].T, *self.finish)
        elif m is not None and self.bias is not None:
            logits = finished(self.bias.add_to(logits, m), *self.finish)
        if chosen is not None:
            logits = torch.full_like(logits, -torch.inf).scatter_(1, kept, chosen)
        if greedy is not None and head.confidence_head is not None:
            temperatures = head.temperatures if greedy else head.sampled_temperatures
            odds = head.confidence_head(inputs).item() / (temperatures[slot] if slot < len(temperatures) else 1.0)
            accepted = probability(odds)
        return Out(logits, hidden, accepted=accepted)
