"""Block heads in decoding: caches of the target's features, a block of each text in one forward, and its tokens."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from decode.core.draft import upload_all
from decode.core.sampling import argmax
from decode.models.api import PIECE, Out, joined
from decode.models.fast.cache import NewTokens, Views
from decode.models.fast.forward import Placed
from decode.models.fast.layout import Layer
from decode.models.fast.weights import Linear, norm
from decode.models.heads.block import NAMES, BlockHead, convolved
from decode.models.heads.eagle import finish_of, finished
from decode.models.heads.runner import DraftHeadRunner, FeatureRow


@dataclass
class Block(Out):
    """Blocks of texts: logits ``[texts, drafts, draft vocab]`` before any token is known, states ``[.., width]``.

    Slots that a text does not draft are filled up with its last one.
    """

    anchors: Any = None  # the tokens that the blocks follow, ``[texts]``


class BlockRunner(DraftHeadRunner):
    """Drafts blocks after sequences.

    The cache of a sequence holds keys and values that the head made of the target's features; they are never rolled
    back. A feature passes no layer: every layer's keys and values are linear maps of it, computed with the block's own.
    """

    head: BlockHead
    row = FeatureRow

    @torch.no_grad()
    def __init__(self, head: BlockHead, target: PreTrainedModel, pack: str = "off") -> None:
        layers: list[Any] = list(head.layers)
        windows, self.causal = map(list, zip(*head.kinds))
        name = f"the {NAMES[str(head.version)]} head"
        super().__init__(head, target, layers, pack, name, "a block head drafts blocks", windows)
        self.finish, make = finish_of(target), self.make
        self.fuse = make(head.fc.weight)
        self.norm_context = norm(head.hidden_norm)
        self.bias: Linear | None = None
        if head.markov_head is not None:  # of which a selector reads single rows
            self.bias = (Linear if head.candidates else make)(head.markov_head.markov_w2.weight)
        self.convs = [(layer.attention_conv, layer.mlp_conv) for layer in layers]
        self.packing = make.sentence()

    def remaining(self, ids: Sequence[int]) -> int:
        """See `Model.remaining`; no more than a block drafts."""
        return min(self.head.drafts, self.limit - len(ids) + self.head.from_anchor)

    def read(self, cache: FeatureRow, leave: int = 0) -> None:
        """Read the features that wait in pieces, until so many are left."""
        network = self.network
        while len(cache.unread) > leave:
            text = NewTokens(cache, cache.length, min(PIECE, len(cache.unread) - leave), block=True)
            placed, features = network.place([text]), self._features(cache.unread.take(text.count))
            for held, layer in zip(network.cache.tensor, network.layers):
                _, new = network.rotated(layer, layer.qkv(features), placed)
                held[cache.row, :, text.start : text.end] = new[0]
            cache.length = text.end

    def _features(self, features: Tensor) -> Tensor:
        """What the layers read of the target's features, ``[n, width]``."""
        return self.norm_context(self.fuse(features))

    def draft(self, caches: Sequence[FeatureRow], pending: Sequence[int], drafts: Sequence[int]) -> Block:
        """Run a block after each sequence, whose pending token is the anchor, and read the features that wait with it.

        Args:
            caches: one of each sequence, each once; those of the same memory in the order of their rows.
            pending: the anchors.
            drafts: tokens to draft of each.
        """
        network, head, first, most = self.network, self.head, int(not self.head.from_anchor), max(drafts)
        counts = [n + first for n in drafts]
        for cache, n in zip(caches, counts):
            self.read(cache, max(0, PIECE - n))
        waiting = [len(cache.unread) for cache in caches]
        placed = dict[bool, Placed]()
        for causal in set(self.causal):
            texts = zip(caches, waiting, counts)
            new = [NewTokens(cache, cache.length, k + n, block=not causal) for cache, k, n in texts]
            placed[causal] = network.place(new)
        # among the rows of all texts those of features and those of slots; the slots that are read, their places in
        # their blocks, and those that draft
        reads, slots, used, numbers, drafting = (list[int]() for _ in range(5))
        for i, (k, n) in enumerate(zip(waiting, counts)):
            start, slot = len(reads) + len(slots), len(slots)
            reads += range(start, start + k)
            slots += range(start + k, start + k + n)
            used += range(i * (most + first), i * (most + first) + n)
            numbers += range(n)
            drafting += [slot + min(first + j, n - 1) for j in range(most)]
        lists = upload_all([pending, reads, slots, used, numbers, drafting], self.device)
        anchors, of_features, of_slots, places, in_block, drawn = lists
        x = network.embed(head.tokens(anchors, most).flatten().index_select(0, places))
        y = x.new_empty(len(reads) + len(slots), x.shape[1])
        if reads:
            features = [cache.unread.take(k) for cache, k in zip(caches, waiting) if k]
            y.index_copy_(0, of_features, self._features(joined(features)))

        def attention(layer: Layer, causal: bool, views: Views, z: Tensor) -> Tensor:
            y.index_copy_(0, of_slots, z)
            mixed = network.attention(layer, layer.qkv(y), placed[causal], views)
            return layer.out(mixed.index_select(0, of_slots))

        def mlp(layer: Layer, z: Tensor) -> Tensor:
            return layer.down(network.mlp(layer, z))

        layer: Any
        of_layers = next(iter(placed.values())).views(network.cache, 0, len(network.layers))
        for layer, (before, behind), causal, views in zip(network.layers, self.convs, self.causal, of_layers):
            x = x + convolved(before, layer.norm1(x), in_block, partial(attention, layer, causal, views))
            x = x + convolved(behind, layer.norm2(x), in_block, partial(mlp, layer))
        for cache, k in zip(caches, waiting):
            cache.length += k
        logits, hidden = network.project(x.index_select(0, drawn))
        logits = finished(logits, *self.finish) if self.bias is None else logits  # else once the bias is added
        logits, hidden = (part.unflatten(0, (len(counts), most)) for part in (logits, hidden))
        return Block(logits, hidden, anchors=anchors)

    def scores(self, block: Block) -> tuple[Tensor, Tensor]:
        """A selector's candidates, the target's ids ``[texts, drafts, c]``, and their scores given each before.

        Scores are ``[texts, drafts, c, c]``, of each candidate (last axis) given each one of the slot before; in the
        first slot, given the anchor, all are alike.
        """
        markov = self.head.markov_head
        assert markov is not None
        unary, ids = block.logits.topk(self.head.candidates)
        tokens = self.target_ids(ids)
        before = torch.cat([block.anchors[:, None, None].expand_as(tokens[:, :1]), tokens[:, :-1]], 1)
        m = markov(block.hidden[:, :, None], markov.markov_w1.weight[before])
        return tokens, finished(unary[:, :, None] + m @ markov.markov_w2.weight[ids].mT, *self.finish)

    def likeliest(self, block: Block) -> Tensor:
        """The likeliest token of each slot after the anchors, ``[texts, drafts]``, given those chosen before."""
        if not self.head.conditional:
            return self.target_ids(argmax(block.logits))
        tokens, scores = self.scores(block)
        best, chosen = scores.argmax(-1), [block.anchors.new_zeros(len(tokens), 1)]
        for slot in best.unbind(1):
            chosen.append(slot.gather(1, chosen[-1]))
        return tokens.gather(2, torch.stack(chosen[1:], 1))[..., 0]

    def condition(self, block: Block, slot: int, texts: Sequence[int], tokens: Tensor | None) -> Out:
        """A slot of some texts after the tokens before it.

        Args:
            block: of texts.
            slot: of those that draft.
            texts: their numbers.
            tokens: before the slot, one of each text or several, ``[n]`` or ``[n, m]``; None: the anchors.
        """
        head, logits, hidden, anchors = self.head, block.logits[:, slot], block.hidden[:, slot], block.anchors
        if len(texts) < len(logits):
            (at,) = upload_all([texts], self.device)
            logits, hidden, anchors = (x.index_select(0, at) for x in (logits, hidden, anchors))
        tokens = anchors if tokens is None else tokens
        if tokens.dim() > 1:
            logits, hidden = (x.repeat_interleave(tokens.shape[1], 0) for x in (logits, hidden))
        if head.markov_head is not None and self.bias is not None:
            row = head.markov_head.markov_w1.weight.index_select(0, tokens.flatten())
            m = head.markov_head(hidden, row)
            if head.candidates:
                unary, kept = logits.topk(head.candidates)
                chosen = finished(unary + (self.bias.weight[kept] @ m[..., None])[..., 0], *self.finish)
                logits = torch.full_like(logits, -torch.inf).scatter_(1, kept, chosen)
            else:
                logits = finished(self.bias.add_to(logits, m), *self.finish)
        return Out(logits, hidden)
