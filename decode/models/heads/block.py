"""Block heads: a few decoder layers that draft a whole block in one forward (DFlash 2602.06036, DSpark 2607.05147).

A block is the last verified token, the anchor at position p, followed by mask tokens. Its slots attend to each other in
both directions, in causal layers to those before them, and to the target's features of all positions before p, in
sliding layers of those within the window. Slot k predicts token p + k + 1 where the head samples from the anchor, else
token p + k, and slot 0 predicts nothing. Embedding and output head are the target's own. DSpark adds a low-rank bias by
the token before (Markov head), and an estimate of each token's acceptance (confidence head). DFlash 2 adds convolutions
over the slots, and a bias like DSpark's for the likeliest ids of each slot, which alone can be drafted (selector).
Parameters are named as in the published checkpoints, but that the selector is a kind of Markov head here.

`BlockHead` is the network; its `forward` reads many blocks of texts in training, `BlockRunner` one a text in decoding.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel, Qwen3Config
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from decode.core.sampling import argmax
from decode.core.stop import probability
from decode.errors import UserError
from decode.models.api import PIECE, Out, joined
from decode.models.fast.cache import NewTokens, Views
from decode.models.fast.forward import FastForward, Placed
from decode.models.fast.layout import Kind, Layer
from decode.models.fast.weights import Function, Linear, norm
from decode.models.heads.block_config import BLOCK_ARCHITECTURES
from decode.models.heads.eagle import DraftHead, HeadLayer, RMSNorm, Rotation, output_head
from decode.models.heads.runner import DraftHeadRunner, FeatureRow

NAMES = {"dflash": "DFlash", "dspark": "DSpark", "dflash2": "DFlash 2"}

# -- the network -------------------------------------------------------------------------------------------------------


class MarkovHead(nn.Module):
    """A bias of the logits by the token before: W2·m, with m = W1[x] (DSpark, section 3), of a selector P h ⊙ W1[x]."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        rank = config.markov_rank
        self.markov_w1 = nn.Embedding(config.vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, config.draft_vocab_size, bias=False)
        nn.init.zeros_(self.markov_w2.weight)
        selects = getattr(config, "candidates", 0)
        self.hidden_projection = nn.Linear(config.hidden_size, rank, bias=False) if selects else None

    def forward(self, hidden: Tensor, before: Tensor) -> Tensor:
        """m ``[.., rank]`` from states ``[.., width]`` and W1's rows ``[.., rank]`` of the tokens before."""
        return before if self.hidden_projection is None else self.hidden_projection(hidden) * before


class ConfidenceHead(nn.Module):
    """The log-odds that a drafted token is accepted, from h or [h; W1[x]] of its slot and the token before."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.proj = nn.Linear(width, 1)

    def forward(self, states: Tensor) -> Tensor:
        """``[.., width]``, or more elements of which only these are read, to ``[..]``."""
        return self.proj(states[..., : self.proj.in_features]).squeeze(-1)


class BlockConv(nn.Module):
    """Convolutions over the slots of a block, before and after a sublayer; new ones change nothing (DFlash 2).

    In slot k, channel c of the slot i before it is weighed by base[side, i, c] + (W x_k)[side, i, ⌊c / group⌋], with x
    what the sublayer would read.
    """

    def __init__(self, config: Any) -> None:
        super().__init__()
        taps, width, self.group = config.conv_kernel_size, config.hidden_size, config.conv_group_size
        base = torch.zeros(2, taps, width)
        base[:, 0] = 1
        self.base_kernel = nn.Parameter(base)
        self.kernel_projection = nn.Linear(width, 2 * taps * (width // self.group), bias=False)
        nn.init.zeros_(self.kernel_projection.weight)


def convolved(conv: Any, x: Tensor, slots: Tensor | None, sublayer: Function) -> Tensor:
    """A sublayer (attention or MLP, without the residual) of ``x [.., n, width]`` between its convolutions, if any.

    ``slots [n]`` is the place of each row in its block; None: the rows are one block.
    """
    if conv is None:
        return sublayer(x)
    made = conv.kernel_projection(x).unflatten(-1, (*conv.base_kernel.shape[:2], -1, 1))
    before, after = (conv.base_kernel.unflatten(-1, (-1, conv.group)) + made).flatten(-2).unbind(-3)
    return _convolve(sublayer(_convolve(x, before, slots)), after, slots)


def _convolve(x: Tensor, kernel: Tensor, slots: Tensor | None) -> Tensor:
    """The sum of the slots before each of ``x [.., n, width]``, weighed by a kernel ``[.., n, taps, width]``."""
    first, *rest = kernel.unbind(-2)
    total = first * x
    for i, weight in enumerate(rest[: x.shape[-2] - 1], 1):
        before = F.pad(x, (0, 0, i, -i))
        total = torch.addcmul(total, weight, before if slots is None else before * (slots >= i)[:, None])
    return total


class BlockLayer(HeadLayer):
    """A decoder layer of a block head.

    Attributes:
        window: tokens that a slot sees, itself included, of the text and the block together. None: all.
        causal: whether a slot sees those slots alone that stand before it.
    """

    def __init__(self, config: Any, number: int) -> None:
        super().__init__(config, norms=["input_layernorm"], qk_norm=True)
        slides, causal = config.layer_types[number] == "sliding_attention", config.is_causal
        self.window: int | None = config.sliding_window if slides else None
        self.causal: bool = slides if causal is None else causal  # as vLLM reads a file that does not say it
        taps = getattr(config, "conv_kernel_size", None)
        self.attention_conv, self.mlp_conv = (BlockConv(config) if taps else None for _ in range(2))

    def forward(
        self, x: Tensor, context: Tensor, rotation: Rotation, attend: Callable[..., Tensor], slots: Tensor
    ) -> Tensor:
        """States of blocks ``x [batch, n, width]`` that read ``context [batch, time, width]``, too: see `convolved`."""
        turns = [factors[:, context.shape[1] :] for factors in rotation]

        def attention(y: Tensor) -> Tensor:
            both = torch.cat([context, y], 1)
            heads = self.heads("q", y, turns), self.heads("k", both, rotation), self.heads("v", both)
            mixed = attend(*(part.transpose(1, 2) for part in heads)).transpose(1, 2)
            return cast(Tensor, self.self_attn.o_proj(mixed.flatten(-2)))

        norms: Any = (self.input_layernorm, self.post_attention_layernorm)
        x = x + convolved(self.attention_conv, norms[0](x), slots, attention)
        return x + convolved(self.mlp_conv, norms[1](x), slots, self.mlp)


class BlockHead(DraftHead):
    """A DFlash, DSpark or DFlash 2 head, without the embedding and the output head, which are the target's.

    Attributes:
        version: ``dflash``, ``dspark`` or ``dflash2``, the format that it is saved in.
        block: slots of a block, the anchor's included.
        from_anchor: slot 0 predicts the token after the anchor.
        drafts: tokens that a block drafts at most.
        mask_id: the token in all slots but the first.
        kinds: window and causality of each layer: see `BlockLayer`.
        candidates: the likeliest ids of a slot, among which its token is chosen. 0: all ids.
        temperatures: by which the confidence's log-odds at each position are divided in greedy decoding (STS); empty:
            not calibrated.
        sampled_temperatures: the same at temperature 1.
    """

    drafts: int
    method = "block"

    def __init__(self, config: Qwen3Config) -> None:
        config.mlp_bias = False  # LlamaMLP reads it, Qwen3Config has none
        super().__init__(config)
        width, eps, fields = config.hidden_size, config.rms_norm_eps, vars(config)
        self.version = next(name for name, known in BLOCK_ARCHITECTURES.items() if known == config.architectures[0])
        self.block, self.mask_id = int(fields["block_size"]), int(fields["mask_token_id"])
        self.from_anchor = bool(fields["sample_from_anchor"])
        self.drafts = self.block - (not self.from_anchor)
        self.candidates = min(int(fields.get("candidates") or 0), config.draft_vocab_size)
        self.temperatures: list[float] = list(fields.get("confidence_temperatures") or ())
        self.sampled_temperatures: list[float] = list(
            fields.get("confidence_sampled_temperatures") or self.temperatures
        )
        self.rotary = LlamaRotaryEmbedding(config)
        self.fc = nn.Linear(self.feature_width, width, bias=False)
        self.hidden_norm, self.norm = RMSNorm(width, eps), RMSNorm(width, eps)
        layers = [BlockLayer(config, i) for i in range(config.num_hidden_layers)]
        self.layers, self.kinds = nn.ModuleList(layers), [(layer.window, layer.causal) for layer in layers]
        if (window := config.sliding_window or self.block) < self.block:  # which engines read in different ways
            raise UserError(f"a window of {window} tokens is shorter than a block of {self.block} slots: widen it")
        self.markov_head = MarkovHead(config) if fields.get("markov_rank") else None
        self.confidence_head: ConfidenceHead | None = None
        if fields.get("enable_confidence_head"):
            extra = config.markov_rank if fields.get("confidence_head_with_markov") else 0
            self.confidence_head = ConfidenceHead(width + extra)
        if self.reduced:
            self._add_tables()

    def get_output_embeddings(self) -> nn.Module | None:
        """The weight that makes logits, which optimisers treat as they do output heads."""
        return None if self.markov_head is None else self.markov_head.markov_w2

    def tokens(self, anchors: Tensor, drafts: int) -> Tensor:
        """Blocks ``[.., slots]`` that draft so many tokens after these anchors ``[..]``."""
        block = anchors.new_full((*anchors.shape, drafts + (not self.from_anchor)), self.mask_id)
        block[..., 0] = anchors
        return block

    def drafting(self, states: Tensor) -> Tensor:
        """Of the slots of blocks ``[.., slots, width]`` those that draft."""
        return states if self.from_anchor else states[..., 1:, :]

    def forward(self, embeds: Tensor, features: Tensor, anchors: Tensor) -> Tensor:
        """States of blocks at any positions of texts, each as if it were alone.

        Args:
            embeds: of the blocks' tokens, ``[batch, blocks, slots, width]``.
            features: the target's, of the texts' tokens, ``[batch, time, feature width]``.
            anchors: positions of the blocks, ``[batch, blocks]``; a block sees the features before it.

        Returns:
            ``[batch, blocks, drafts, width]``, after the final norm.
        """
        (batch, blocks, slots), time, device = embeds.shape[:3], features.shape[1], anchors.device
        places = (anchors[..., None] + torch.arange(slots, device=device)).flatten(1)
        every = torch.cat([torch.arange(time, device=device).expand(batch, -1), places], 1)
        rotation, number = self.rotary(embeds, position_ids=every), torch.arange(slots, device=device).repeat(blocks)
        context, x = self.hidden_norm(self.fc(features)), embeds.flatten(1, 2)
        attend = {kind: block_attention(anchors, slots, time, *kind) for kind in set(self.kinds)}
        for layer, kind in zip(self.layers, self.kinds):
            x = layer(x, context, rotation, attend[kind], number)
        return self.drafting(self.norm(x).unflatten(1, (blocks, slots)))

    def conditions(self, states: Tensor, before: Tensor) -> tuple[Tensor, Tensor | None]:
        """What the tokens before add to states ``[blocks, drafts, width]``, by teacher forcing.

        Args:
            states: of the slots that draft.
            before: the token before each drafted one, ``[blocks, drafts]``; the first is the anchor.

        Returns:
            The states, with m of the Markov head behind them, to be read by `logits`; and the confidence's log-odds,
            ``[blocks, drafts]``, where there is a confidence head.
        """
        inputs = states
        if self.markov_head is not None:
            rows = self.markov_head.markov_w1(before)
            inputs = torch.cat([states, rows], -1)
            states = torch.cat([states, self.markov_head(states, rows)], -1)
        return states, None if self.confidence_head is None else self.confidence_head(inputs)

    def outputs(self, head: Any) -> Tensor:
        """The weight ``[draft vocab, ..]`` that `logits` takes; `head`: the target's."""
        weight: Tensor = head.weight.detach()
        return weight if self.markov_head is None else torch.cat([weight, self.markov_head.markov_w2.weight], 1)

    def logits(self, rows: Tensor, weight: Tensor) -> Tensor:
        """Logits ``[.., draft vocab]`` of what `conditions` returns, −∞ of ids that are no candidates."""
        logits, width = rows @ weight.T, self.config.hidden_size
        if not self.candidates:
            return logits
        kept = (rows[..., :width] @ weight[:, :width].T).topk(self.candidates, -1).indices
        return torch.full_like(logits, -torch.inf).scatter(-1, kept, logits.gather(-1, kept))

    @torch.no_grad()
    def teacher_forced(self, model: PreTrainedModel, tokens: Tensor, features: Tensor, depth: int) -> list[Tensor]:
        """Logits of blocks of `depth` drafted tokens at every position of texts, given the text before each token.

        Args:
            model: the target.
            tokens: ``[batch, time]``.
            features: ``[batch, time, feature width]``.
            depth: at most `drafts`; the slots see each other, so that a shorter block drafts other tokens.

        Returns:
            For each drafted token ``[batch, time, draft vocab]``; row t of the i-th predicts token t + i + 1.
        """
        depth, table = min(depth, self.drafts), model.get_input_embeddings().weight
        weight, parts = self.outputs(output_head(model, self.draft_ids())), []
        every = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
        before = F.pad(tokens, (0, depth)).unfold(1, depth, 1)[:, :-1]
        for places, anchors, known in zip(*(x.split(64, 1) for x in (every, tokens, before))):  # few scores in memory
            states = self(F.embedding(self.tokens(anchors, depth), table), features, places)
            rows, _ = self.conditions(states.flatten(0, 1), known.flatten(0, 1))
            parts.append(self.logits(rows, weight).unflatten(0, places.shape))
        return list(torch.cat(parts, 1).unbind(2))


def seen_by_blocks(anchors: Tensor, slots: int, time: int, window: int | None = None, causal: bool = False) -> Any:
    """What a slot of blocks ``[batch, blocks · slots]`` sees of ``time`` positions of context and then of all slots.

    `window` and `causal` are of `BlockLayer`; no block is longer than a window.
    """
    owner = torch.arange(anchors.shape[1], device=anchors.device).repeat_interleave(slots)
    before = anchors.repeat_interleave(slots, 1)
    place = torch.arange(slots, device=anchors.device).repeat(anchors.shape[1])
    oldest = torch.zeros_like(before) if window is None else before + place + 1 - window  # that each slot sees

    def seen(b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
        slot = (key - time).clamp_min(0)
        inside = (owner[query] == owner[slot]) & ((slot <= query) if causal else (slot >= 0))
        return torch.where(key < time, (key < before[b, query]) & (key >= oldest[b, query]), inside)

    return seen


def block_attention(anchors: Tensor, slots: int, time: int, window: int | None = None, causal: bool = False) -> Any:
    """Attention of blocks ``[batch, heads, blocks · slots, d]`` to ``time`` positions of context, then the blocks.

    A GPU computes it by flex_attention, which skips what no block sees; a CPU with one mask. See `seen_by_blocks`.
    """
    seen, batch = seen_by_blocks(anchors, slots, time, window, causal), len(anchors)
    count = anchors.shape[1] * slots
    if anchors.device.type == "cuda":
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        mask = torch.compile(create_block_mask)(seen, batch, None, count, time + count, device=str(anchors.device))
        return lambda q, k, v: torch.compile(flex_attention)(q, k, v, block_mask=mask, enable_gqa=True)
    at = torch.arange(time + count, device=anchors.device)
    visible = seen(torch.arange(batch)[:, None, None], at, at[None, :count, None], at[None, None])[:, None]
    return lambda q, k, v: F.scaled_dot_product_attention(q, k, v, attn_mask=visible, enable_gqa=True)


# -- decoding ----------------------------------------------------------------------------------------------------------


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
        made: FeatureRow = self.network.cache.new_row(FeatureRow, self.queue())
        return made

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
            made = self.context(self.norm_context(self.fuse(features)))
            made = made.view(len(made), len(network.layers), 2 * kv_heads, d)
            keys = made[:, :, :kv_heads]
            keys.copy_(F.rms_norm(keys, (d,), eps=self.head.config.rms_norm_eps) * self.norms[:, None])
            if shape.tuned:  # the factors of values are 1
                torch.view_as_complex(made.view(*made.shape[:2], -1, 2)).mul_(factors[:, None, -kv_heads * d :])
            else:
                rolled = keys.roll(d // 2, -1)
                cos, sin = factors[:, None, None].unbind(3)
                keys.mul_(cos).add_(rolled.mul_(sin))
            for text, values in zip(new, made.permute(1, 2, 0, 3).split([text.count for text in new], 2)):
                network.cache.tensor[:, text.cache.row, :, text.start : text.end] = values
                text.cache.length = text.end

    def draft(self, caches: Sequence[FeatureRow], pending: Sequence[int], drafts: Sequence[int]) -> list[Out]:
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
        blocks = [head.tokens(torch.tensor(anchor), count) for anchor, count in zip(pending, drafts)]
        counts, placed = list(map(len, blocks)), dict[bool, Placed]()
        for causal in set(self.causal):
            new = [NewTokens(cache, cache.length, n) for cache, n in zip(caches, counts)]  # seen as in any text: causal
            for text in () if causal else new:
                text.seen = torch.ones(text.count, text.count, dtype=torch.bool)
            placed[causal] = network.place(new)
        x = self._run(network.embed(joined(blocks).to(self.device)), placed, counts)
        logits, hidden = network.project(joined([head.drafting(states) for states in x.split(counts)]))
        return Out(logits, hidden).split(list(drafts))

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

    def likeliest(self, out: Out, anchor: int) -> Tensor:
        """The likeliest token of each slot after the anchor, ``[drafts]``, with a selector given its choice before."""
        markov, k = self.head.markov_head, self.head.candidates
        if markov is None:
            return self.target_ids(argmax(out.logits))
        unary, ids = out.logits.topk(k)
        tokens = self.target_ids(ids)  # of all pairs of neighbours the scores are computed at once: [slots, k, k]
        before = markov.markov_w1.weight[torch.cat([tokens.new_full((1, k), anchor), tokens[:-1]])]
        m = markov(out.hidden[:, None], before)
        best, chosen = (unary[:, None] + m @ markov.markov_w2.weight[ids].mT).argmax(-1).tolist(), [0]
        for row in best:
            chosen.append(row[chosen[-1]])
        return tokens.gather(1, torch.tensor(chosen[1:], device=tokens.device)[:, None])[:, 0]

    def condition(self, out: Out, slot: int, token: Tensor, *, greedy: bool | None = None) -> Out:
        """A slot after the token before it.

        Args:
            out: of the block.
            slot: of those that draft.
            token: before it, of one element.
            greedy: whether the confidence head's estimate is calibrated for greedy decoding; None: it is not asked. It
                does not look at the token that is drafted.
        """
        head, logits, hidden = self.head, out.logits[slot : slot + 1], out.hidden[slot : slot + 1]
        inputs, accepted = hidden, None
        if head.markov_head is not None and self.bias is not None:
            row = head.markov_head.markov_w1.weight.index_select(0, token.view(1))
            m = head.markov_head(hidden, row)
            inputs = torch.cat([hidden, row], -1)
            if head.candidates:
                unary, kept = logits.topk(head.candidates)
                chosen = unary + m @ self.bias.weight[kept[0]].T
                logits = torch.full_like(logits, -torch.inf).scatter_(1, kept, chosen)
            else:
                logits = self.bias.add_to(logits, m)
        if greedy is not None and head.confidence_head is not None:
            temperatures = head.temperatures if greedy else head.sampled_temperatures
            odds = head.confidence_head(inputs).item() / (temperatures[slot] if slot < len(temperatures) else 1.0)
            accepted = probability(odds)
        return Out(logits, hidden, accepted=accepted)
