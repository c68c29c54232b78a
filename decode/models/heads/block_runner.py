"""Block heads in decoding: caches of the target's features, a block of each text in one forward, and its tokens."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from decode.core.draft import upload
from decode.core.sampling import argmax
from decode.models.api import PIECE, Out, joined
from decode.models.fast.cache import NewTokens, Views
from decode.models.fast.forward import FastForward, Placed
from decode.models.fast.layout import Kind, Layer
from decode.models.fast.weights import Linear, norm
from decode.models.heads.block import NAMES, BlockHead
from decode.models.heads.block_parts import convolved
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

    def new_cache(self) -> FeatureRow:
        """See `Model.new_cache`."""
        row: FeatureRow = self.network.cache.new_row(FeatureRow)
        return row

    def remaining(self, ids: Sequence[int]) -> int:
        """See `Model.remaining`; no more than a block drafts."""
        return min(self.head.drafts, self.limit - len(ids) + self.head.from_anchor)

    def read(self, caches: Sequence[FeatureRow]) -> None:
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

    def draft(self, caches: Sequence[FeatureRow], pending: Sequence[int], drafts: Sequence[int]) -> Block:
        """Run a block after each sequence, whose pending token is the anchor.

        Args:
            caches: one of each sequence, each once; those of the same memory in the order of their rows.
            pending: the anchors.
            drafts: tokens to draft of each.
        """
        self.read(caches)
        network, head, anchors = self.network, self.head, upload(pending, self.device)
        counts, first = [n + (not head.from_anchor) for n in drafts], int(not head.from_anchor)
        placed = dict[bool, Placed]()
        for causal in set(self.causal):
            new = [NewTokens(cache, cache.length, n, block=not causal) for cache, n in zip(caches, counts)]
            placed[causal] = network.place(new)
        blocks, starts = head.tokens(anchors, max(drafts)), [*accumulate(counts, initial=0)]
        equal = min(counts) == max(counts)
        places = [at * max(counts) + i for at, n in enumerate(counts) for i in range(n)]
        tokens = blocks.flatten() if equal else blocks.flatten().index_select(0, upload(places, self.device))
        x = self._run(network.embed(tokens), placed, counts)
        if equal:
            x = x.unflatten(0, (len(counts), -1))[:, first:]
        else:
            rows = [[start + first + min(i, n - 1) for i in range(max(drafts))] for start, n in zip(starts, drafts)]
            x = x[upload(rows, self.device)]
        logits, hidden = network.project(x.flatten(0, 1))
        logits = finished(logits, *self.finish) if self.bias is None else logits  # else once the bias is added
        logits, hidden = (part.unflatten(0, x.shape[:2]) for part in (logits, hidden))
        return Block(logits, hidden, anchors=anchors)

    def _run(self, x: Tensor, placed: dict[bool, Placed], counts: Sequence[int]) -> Tensor:
        """All layers on the slots of blocks, which see each other as `placed` has it for causal layers and others."""
        network, count, where = self.network, len(self.causal), next(iter(placed.values()))
        if len(placed) == 1 and self.convs[0][0] is None:
            return network.run(x, 0, count, where)
        slots = None if len(counts) == 1 else upload([i for n in counts for i in range(n)], self.device)

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

    def condition(
        self,
        block: Block,
        slot: int,
        texts: Sequence[int],
        tokens: Tensor | None,
        *,
        greedy: bool | None = None,
    ) -> Out:
        """A slot of some texts after the tokens before it, with logits over the target's vocabulary.

        Args:
            block: of texts.
            slot: of those that draft.
            texts: their numbers.
            tokens: before the slot, one of each text or several, ``[n]`` or ``[n, m]``; None: the anchors.
            greedy: whether the confidence head's estimate is calibrated for greedy decoding; None: it is not asked. It
                does not look at the token that is drafted.
        """
        head, logits, hidden, accepted = self.head, block.logits[:, slot], block.hidden[:, slot], None
        anchors = block.anchors
        if len(texts) < len(logits):
            at = upload(texts, self.device)
            logits, hidden, anchors = (x.index_select(0, at) for x in (logits, hidden, anchors))
        tokens = anchors if tokens is None else tokens
        if tokens.dim() > 1:
            logits, hidden = (x.repeat_interleave(tokens.shape[1], 0) for x in (logits, hidden))
        inputs = hidden
        if head.markov_head is not None and self.bias is not None:
            row = head.markov_head.markov_w1.weight.index_select(0, tokens.flatten())
            m, inputs = head.markov_head(hidden, row), torch.cat([hidden, row], -1)
            if head.candidates:
                unary, kept = logits.topk(head.candidates)
                chosen = finished(unary + (self.bias.weight[kept] @ m[..., None])[..., 0], *self.finish)
                logits = torch.full_like(logits, -torch.inf).scatter_(1, kept, chosen)
            else:
                logits = finished(self.bias.add_to(logits, m), *self.finish)
        if greedy is not None and head.confidence_head is not None:
            temperatures = head.temperatures if greedy else head.sampled_temperatures
            odds = head.confidence_head(inputs).float()
            accepted = torch.sigmoid(odds / (temperatures[slot] if slot < len(temperatures) else 1.0))
        return Out(self.expand(logits), hidden, accepted=accepted)
