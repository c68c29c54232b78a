"""Block heads: a few decoder layers that draft a whole block in one forward (DFlash 2602.06036, DSpark 2607.05147).

A block is the last verified token, the anchor at position p, followed by mask tokens. Its slots attend to each other in
both directions, in causal layers to those before them, and to the target's features of all positions before p, in
sliding layers of those within the window. Slot k predicts token p + k + 1 where the head samples from the anchor, else
token p + k, and slot 0 predicts nothing. Embedding and output head are the target's own. DSpark adds a low-rank bias by
the token before (Markov head), and an estimate of each token's acceptance (confidence head). DFlash 2 adds convolutions
over the slots, and a bias like DSpark's for the likeliest ids of each slot, which alone can be drafted (selector).
Parameters are named as in the published checkpoints, but that the selector is a kind of Markov head here.

`BlockHead.forward` reads many blocks of texts in training; `decode.models.heads.block_runner` one a text in decoding.
"""

from collections.abc import Callable
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel, Qwen3Config
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from decode.errors import UserError
from decode.files import Fields
from decode.models.fast.weights import Function
from decode.models.heads.block_config import BLOCK_ARCHITECTURES
from decode.models.heads.eagle import DraftHead, HeadLayer, RMSNorm, Rotation, finish_of, finished, output_head

SELECTOR = {
    "markov_head.markov_w1.weight": "candidate_selector.predecessor_codebook",
    "markov_head.markov_w2.weight": "candidate_selector.successor_codebook",
    "markov_head.hidden_projection.weight": "candidate_selector.hidden_projection.weight",
}
"""Our names of DFlash 2's selector, and those in files."""
SLOTS = (
    "target_layer_ids", "mask_token_id", "sample_from_anchor", "conv_kernel_size", "conv_group_size", "selector_rank",
    "selector_top_k",
)  # fmt: skip
"""Keys that engines read in ``dflash_config``."""
NAMES = {"dflash": "DFlash", "dspark": "DSpark", "dflash2": "DFlash 2"}

# -- beside the layers: what scores a slot's tokens, the confidence head, convolutions ---------------------------------


class MarkovHead(nn.Module):
    """A bias of the logits by the token before: W2·m, with m = W1[x] (DSpark, section 3), of a selector P h ⊙ W1[x]."""

    def __init__(self, config: Any, rank: int, *, selects: bool) -> None:
        super().__init__()
        self.markov_w1 = nn.Embedding(config.vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, config.draft_vocab_size, bias=False)
        nn.init.zeros_(self.markov_w2.weight)
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


def convolved(conv: Any, x: Tensor, slots: Tensor, sublayer: Function) -> Tensor:
    """A sublayer (attention or MLP, without the residual) of ``x [.., n, width]`` between its convolutions, if any.

    ``slots [n]`` is the place of each row in its block.
    """
    if conv is None:
        return sublayer(x)
    made = conv.kernel_projection(x).unflatten(-1, (*conv.base_kernel.shape[:2], -1, 1))
    before, after = (conv.base_kernel.unflatten(-1, (-1, conv.group)) + made).flatten(-2).unbind(-3)
    return _convolve(sublayer(_convolve(x, before, slots)), after, slots)


def _convolve(x: Tensor, kernel: Tensor, slots: Tensor) -> Tensor:
    """The sum of the slots before each of ``x [.., n, width]``, weighed by a kernel ``[.., n, taps, width]``."""
    first, *rest = kernel.unbind(-2)
    total = first * x
    for i, weight in enumerate(rest[: x.shape[-2] - 1], 1):
        before, weight = x[..., :-i, :], weight[..., i:, :]
        total[..., i:, :].addcmul_(weight * (slots[i:] >= i)[:, None], before)
    return total


# -- the network -------------------------------------------------------------------------------------------------------


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
    """A block head, without the embedding and the output head, which are the target's.

    Attributes:
        version: of `BLOCK_ARCHITECTURES`, the format that it is saved in.
        block: slots of a block, the anchor's included.
        rank: of the scorer; 0: it has none.
        from_anchor: slot 0 predicts the token after the anchor.
        drafts: tokens that a block drafts at most.
        mask_id: the token in all slots but the first.
        kinds: window and causality of each layer: see `BlockLayer`.
        candidates: the likeliest ids of a slot, among which its token is chosen. 0: all ids.
    """

    drafts: int
    kind = "block"

    def __init__(self, config: Qwen3Config) -> None:
        config.mlp_bias = False  # LlamaMLP reads it, Qwen3Config has none
        super().__init__(config)
        width, eps, fields = config.hidden_size, config.rms_norm_eps, vars(config)
        self.version = next(name for name, known in BLOCK_ARCHITECTURES.items() if known == config.architectures[0])
        self.block, self.mask_id = int(fields["block_size"]), int(fields["mask_token_id"])
        self.from_anchor = bool(fields["sample_from_anchor"])
        self.drafts = self.block - (not self.from_anchor)
        selects = self.version == "dflash2"
        self.rank = int(fields.get("selector_rank" if selects else "markov_rank") or 0)
        self.candidates = min(fields["selector_top_k"], config.draft_vocab_size) if selects else 0
        self.rotary = LlamaRotaryEmbedding(config)
        self.fc = nn.Linear(self.feature_width, width, bias=False)
        self.hidden_norm, self.norm = RMSNorm(width, eps), RMSNorm(width, eps)
        layers = [BlockLayer(config, i) for i in range(config.num_hidden_layers)]
        self.layers, self.kinds = nn.ModuleList(layers), [(layer.window, layer.causal) for layer in layers]
        if (window := config.sliding_window or self.block) < self.block:  # which engines read in different ways
            raise UserError(f"a window of {window} tokens is shorter than a block of {self.block} slots: widen it")
        self.markov_head = MarkovHead(config, self.rank, selects=selects) if self.rank else None
        self.confidence_head: ConfidenceHead | None = None
        if fields.get("enable_confidence_head"):
            self.confidence_head = ConfidenceHead(width + self.rank * config.confidence_head_with_markov)
        if self.reduced:
            self._add_table()

    @property
    def conditional(self) -> bool:
        """Whether the logits of a slot depend on the tokens before it."""
        return self.markov_head is not None

    def tensors(self) -> dict[str, Tensor]:
        """See `DraftHead.tensors`."""
        names = SELECTOR if self.candidates else {}
        return {names.get(name, name): tensor for name, tensor in super().tensors().items()}

    def fields(self) -> Fields:
        """See `DraftHead.fields`."""
        fields = super().fields()
        if fields["is_causal"] is None:  # readers take a key that is there for an answer
            del fields["is_causal"]
        if self.version == "dspark":  # the architecture that vLLM and SGLang know in all their versions
            fields["architectures"] = ["Qwen3DSparkModel"]
        fields["dflash_config"] = {key: fields[key] for key in SLOTS if key in fields}
        fields["dflash_config"]["input_embedding_scale"] = 1.0  # llama.cpp takes Gemma's for a target of that family
        return fields

    def tokens(self, anchors: Tensor, drafts: int) -> Tensor:
        """Blocks ``[.., slots]`` that draft so many tokens after these anchors ``[..]``."""
        block = anchors.new_full((*anchors.shape, drafts + (not self.from_anchor)), self.mask_id)
        block[..., 0] = anchors
        return block

    def drafting(self, states: Tensor) -> Tensor:
        """Of the slots of blocks ``[.., slots, width]`` those that draft."""
        return states if self.from_anchor else states[..., 1:, :]

    def forward(self, embeds: Tensor, features: Tensor, anchors: Tensor) -> Tensor:
        """Blocks at any positions of texts, each as if it were alone.

        Args:
            embeds: of the blocks' tokens, ``[batch, blocks, slots, width]``.
            features: the target's, of the texts' tokens, ``[batch, time, feature width]``.
            anchors: positions of the blocks, ``[batch, blocks]``; a block sees the features before it.

        Returns:
            States of the slots that draft, after the final norm, ``[batch · blocks, drafts, width]``.
        """
        (batch, blocks, slots), time, device = embeds.shape[:3], features.shape[1], anchors.device
        places = (anchors[..., None] + torch.arange(slots, device=device)).flatten(1)
        every = torch.cat([torch.arange(time, device=device).expand(batch, -1), places], 1)
        rotation, number = self.rotary(embeds, position_ids=every), torch.arange(slots, device=device).repeat(blocks)
        context, x = self.hidden_norm(self.fc(features)), embeds.flatten(1, 2)
        attend = {kind: block_attention(anchors, slots, time, *kind) for kind in set(self.kinds)}
        for layer, kind in zip(self.layers, self.kinds):
            x = layer(x, context, rotation, attend[kind], number)
        return self.drafting(self.norm(x).unflatten(1, (blocks, slots)).flatten(0, 1))

    def conditions(self, states: Tensor, before: Tensor) -> tuple[Tensor, Tensor | None]:
        """What the tokens before add to the states of the slots that draft, by teacher forcing.

        Args:
            states: of `forward`.
            before: the token before each drafted one, ``[blocks, drafts]``; the first is the anchor.

        Returns:
            The states ``[blocks, drafts, width]``, and behind them m of the Markov head, to be read by `logits`;
            and the confidence's log-odds, ``[blocks, drafts]``, where there is a confidence head.
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

    def logits(self, states: Tensor, before: Tensor, weight: Tensor, finish: tuple[float, float | None]) -> Tensor:
        """What is drafted by teacher forcing.

        Args:
            states: of `forward`.
            before: see `conditions`.
            weight: of `outputs`.
            finish: the target's `decode.models.heads.eagle.finish_of`.

        Returns:
            Logits ``[blocks, drafts, draft vocab]``, −∞ of ids that are no candidates.
        """
        (rows, _), width = self.conditions(states, before), self.config.hidden_size
        logits = finished(rows @ weight.T, *finish)
        if not self.candidates:
            return logits
        kept = (rows[..., :width] @ weight[:, :width].T).topk(self.candidates, -1).indices
        return torch.full_like(logits, -torch.inf).scatter(-1, kept, logits.gather(-1, kept))

    @torch.no_grad()
    def teacher_forced(
        self, model: PreTrainedModel, tokens: Tensor, features: Tensor, depth: int, first: int = 0,
        end: int | None = None,
    ) -> list[Tensor]:  # fmt: skip
        """Logits of blocks of `depth` drafted tokens at every position of texts, given the text before each token.

        Args:
            model: the target.
            tokens: ``[batch, time]``.
            features: ``[batch, time, feature width]``.
            depth: at most `drafts`; the slots see each other, so that a shorter block drafts other tokens.
            first: position of the first block.
            end: the position behind that of the last block; None: the texts' end.

        Returns:
            For each drafted token ``[batch, end - first, draft vocab]``; row t of the i-th predicts token
            first + t + i + 1.
        """
        depth, table, finish = min(depth, self.drafts), model.get_input_embeddings().weight, finish_of(model)
        weight, parts = self.outputs(output_head(model, self.draft_ids(), block=True)), []
        every = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
        before = F.pad(tokens, (0, depth)).unfold(1, depth, 1)[:, :-1]
        blocks = (x[:, first:end].split(64, 1) for x in (every, tokens, before))  # few scores in memory
        for places, anchors, known in zip(*blocks):
            states = self(F.embedding(self.tokens(anchors, depth), table), features, places)
            parts.append(self.logits(states, known.flatten(0, 1), weight, finish).unflatten(0, places.shape))
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
