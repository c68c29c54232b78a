"""Block heads: a few decoder layers that draft a whole block in one forward (DFlash 2602.06036, DSpark 2607.05147).

A block is the last verified token, the anchor at position p, followed by mask tokens. Its slots attend to each other in
both directions, and to the target's features of all positions before p. Slot k predicts token p + k + 1 where the head
samples from the anchor, else token p + k, and slot 0 predicts nothing. Embedding and output head are the target's own.
DSpark adds a low-rank bias by the token before (Markov head), and an estimate of each token's acceptance (confidence
head). Parameters are named as in the published checkpoints.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase, Qwen3Config
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from decode.errors import UserError
from decode.models.heads import DraftHead, HeadLayer, RMSNorm, output_head, shape_of

BLOCK_ARCHITECTURES = {"dflash": "DFlashDraftModel", "dspark": "DSparkDraftModel"}
MarkovKind = Literal["vanilla", "gated", "rnn"]
MARKOV_KINDS: tuple[MarkovKind, ...] = ("vanilla", "gated", "rnn")


class MarkovHead(nn.Module):
    """A bias of the logits by the token before: W2·m, with m made of W1's row of that token (DSpark, section 3).

    vanilla: m = W1[x]. gated: m = σ(G[h; W1[x]]) ⊙ W1[x]. rnn: a state s, 0 at the anchor, is updated by gates of
    [s; W1[x]; h], and m = tanh o.
    """

    def __init__(self, config: Any) -> None:
        super().__init__()
        rank, width = config.markov_rank, config.hidden_size
        self.kind: MarkovKind = getattr(config, "markov_head_type", None) or "vanilla"
        self.markov_w1 = nn.Embedding(config.vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, config.draft_vocab_size, bias=False)
        nn.init.zeros_(self.markov_w2.weight)
        if self.kind == "gated":
            self.gate_proj = nn.Linear(width + rank, rank)
        elif self.kind == "rnn":
            self.joint_proj = nn.Linear(2 * rank + width, 3 * rank)

    def step(self, hidden: Tensor, before: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """One slot's m ``[n, rank]`` and the new state, from ``hidden [n, width]`` and W1's ``before [n, rank]``."""
        if self.kind == "vanilla":
            return before, None
        if self.kind == "gated":
            return torch.sigmoid(self.gate_proj(torch.cat([hidden, before], -1))) * before, None
        state = torch.zeros_like(before) if state is None else state
        gate, new, out = self.joint_proj(torch.cat([state, before, hidden], -1)).chunk(3, -1)
        gate = torch.sigmoid(gate)
        return torch.tanh(out), gate * state + (1 - gate) * torch.tanh(new)

    def forward(self, hidden: Tensor, before: Tensor) -> Tensor:
        """m of all slots of blocks, ``[blocks, slots, rank]``, by teacher forcing (see `step`)."""
        if self.kind != "rnn":
            return self.step(hidden, before, None)[0]
        made, state = [], None
        for h, w in zip(hidden.unbind(1), before.unbind(1)):
            m, state = self.step(h, w, state)
            made.append(m)
        return torch.stack(made, 1)


class ConfidenceHead(nn.Module):
    """The log-odds that a drafted token is accepted, from [h; W1[x]] of its slot and the token before."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.proj = nn.Linear(width, 1)

    def forward(self, states: Tensor) -> Tensor:
        """``[.., width]`` to ``[..]``."""
        return self.proj(states).squeeze(-1)


class BlockHead(DraftHead):
    """A DFlash or DSpark head, without the embedding and the output head, which are the target's.

    Attributes:
        version: ``dflash`` or ``dspark``, the format that it is saved in.
        block: slots of a block, the anchor's included.
        from_anchor: slot 0 predicts the token after the anchor.
        drafts: tokens that a block drafts at most.
        mask_id: the token in all slots but the first.
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
        self.version = "dspark" if config.architectures[0] == BLOCK_ARCHITECTURES["dspark"] else "dflash"
        self.block, self.mask_id = int(fields["block_size"]), int(fields["mask_token_id"])
        self.from_anchor = bool(fields["sample_from_anchor"])
        self.drafts = self.block if self.from_anchor else self.block - 1
        self.temperatures: list[float] = list(fields.get("confidence_temperatures") or ())
        self.sampled_temperatures: list[float] = list(
            fields.get("confidence_sampled_temperatures") or self.temperatures
        )
        self.rotary = LlamaRotaryEmbedding(config)
        self.fc = nn.Linear(self.feature_width, width, bias=False)
        self.hidden_norm, self.norm = RMSNorm(width, eps), RMSNorm(width, eps)
        made = [HeadLayer(config, norms=["input_layernorm"], qk_norm=True) for _ in range(config.num_hidden_layers)]
        self.layers = nn.ModuleList(made)
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
        slots = drafts if self.from_anchor else drafts + 1
        block = anchors.new_full((*anchors.shape, slots), self.mask_id)
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
        context, d = self.hidden_norm(self.fc(features)), self.config.head_dim
        shape, time = embeds.shape, features.shape[1]
        places = (anchors[..., None] + torch.arange(shape[2], device=anchors.device)).flatten(1)
        every = torch.cat([torch.arange(time, device=anchors.device).expand(shape[0], -1), places], 1)
        cos, sin = (factors[:, None].to(embeds.dtype) for factors in self.rotary(embeds, position_ids=every))
        attend, x = block_attention(anchors, shape[2], time), embeds.flatten(1, 2)
        layer: Any
        for layer in self.layers:
            attention, y = layer.self_attn, layer.input_layernorm(x)
            both = torch.cat([context, y], 1)
            q, k, v = (
                project(of).unflatten(-1, (-1, d)).transpose(1, 2)
                for project, of in ((attention.q_proj, y), (attention.k_proj, both), (attention.v_proj, both))
            )
            q, k = attention.q_norm(q), attention.k_norm(k)
            q = _rotated(q, cos[:, :, time:], sin[:, :, time:])
            a = attend(q, _rotated(k, cos, sin), v).transpose(1, 2).flatten(2)
            x = x + attention.o_proj(a)
            x = x + layer.mlp(layer.post_attention_layernorm(x))
        return self.drafting(self.norm(x).unflatten(1, shape[1:3]))

    def conditions(self, states: Tensor, before: Tensor) -> tuple[Tensor, Tensor | None]:
        """What the tokens before add to states ``[blocks, drafts, width]``, by teacher forcing.

        Args:
            states: of the slots that draft.
            before: the token before each drafted one, ``[blocks, drafts]``; the first is the anchor.

        Returns:
            The states, with m of the Markov head behind them, to be read by `outputs`; and the confidence's log-odds,
            ``[blocks, drafts]``, where there is a confidence head.
        """
        rows = states if self.markov_head is None else self.markov_head.markov_w1(before)
        inputs = states
        if self.markov_head is not None:
            inputs = torch.cat([states, rows], -1)
            states = torch.cat([states, self.markov_head(states, rows)], -1)
        if self.confidence_head is None:
            return states, None
        return states, self.confidence_head(inputs[..., : self.confidence_head.proj.in_features])

    def outputs(self, head: Any) -> Tensor:
        """The weight ``[draft vocab, ..]`` that maps what `conditions` returns to logits; `head`: the target's."""
        weight: Tensor = head.weight.detach()
        return weight if self.markov_head is None else torch.cat([weight, self.markov_head.markov_w2.weight], 1)

    @torch.no_grad()
    def teacher_forced(self, model: PreTrainedModel, tokens: Tensor, features: Tensor, depth: int) -> list[Tensor]:
        """Logits of the first `depth` drafted tokens of blocks at every position of texts, given the text before each.

        Args:
            model: the target.
            tokens: ``[batch, time]``.
            features: ``[batch, time, feature width]``.
            depth: at most `drafts` of them are returned.

        Returns:
            For each drafted token ``[batch, time, draft vocab]``; row t of the i-th predicts token t + i + 1.
        """
        depth, table = min(depth, self.drafts), model.get_input_embeddings().weight
        weight = self.outputs(output_head(model, self.draft_ids()))
        every, most = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens), 64
        found: list[list[Tensor]] = [[] for _ in range(depth)]
        after = F.pad(tokens, (0, depth))
        for places in every.split(most, 1):  # so that few scores are in memory
            embeds = F.embedding(self.tokens(tokens.gather(1, places), self.drafts), table)
            states = self(embeds, features, places)[:, :, :depth]
            before = torch.stack([after.gather(1, places + i) for i in range(depth)], 2)
            rows, _ = self.conditions(states.flatten(0, 1), before.flatten(0, 1))
            for i, own in enumerate((rows @ weight.T).unflatten(0, places.shape).unbind(2)):
                found[i].append(own)
        return [torch.cat(own, 1) for own in found]


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return x * cos + torch.cat([-b, a], -1) * sin


def seen_by_blocks(anchors: Tensor, slots: int, time: int) -> Any:
    """What a slot of blocks ``[batch, blocks · slots]`` sees of ``time`` positions of context and then of all slots."""
    owner = torch.arange(anchors.shape[1], device=anchors.device).repeat_interleave(slots)
    before = anchors.repeat_interleave(slots, 1)

    def seen(b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
        own = owner[query] == owner[(key - time).clamp_min(0)]
        return torch.where(key < time, key < before[b, query], own)

    return seen


def block_attention(anchors: Tensor, slots: int, time: int) -> Any:
    """Attention of blocks ``[batch, heads, blocks · slots, d]`` to ``time`` positions of context, then the blocks.

    A GPU computes it by flex_attention, which skips what no block sees; a CPU with one mask.
    """
    seen, batch, count = seen_by_blocks(anchors, slots, time), len(anchors), anchors.shape[1] * slots
    if anchors.device.type == "cuda":
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        mask = torch.compile(create_block_mask)(seen, batch, None, count, time + count, device=str(anchors.device))
        return lambda q, k, v: torch.compile(flex_attention)(q, k, v, block_mask=mask, enable_gqa=True)
    at = torch.arange(time + count, device=anchors.device)
    visible = seen(torch.arange(batch)[:, None, None], at, at[None, :count, None], at[None, None])[:, None]
    return lambda q, k, v: F.scaled_dot_product_attention(q, k, v, attn_mask=visible, enable_gqa=True)


# -- configuration -----------------------------------------------------------------------------------------------------


def default_layers(layers: int, count: int) -> tuple[int, ...]:
    """DFlash's target layers, counted from 0 as it counts them: spread evenly from layer 1 to layer N − 3.

    Raises:
        UserError: a target of too few layers.
    """
    if layers < 2:
        raise UserError(f"a block head reads states between the target's layers, and a target of {layers} has none")
    first = min(1, layers - 2)
    last = max(first, layers - 3)
    found = {round(first + i * (last - first) / max(1, count - 1)) for i in range(count)}
    return tuple(sorted(found)) if count > 1 else (layers // 2,)


def block_config(
    target: Any,
    version: str,
    *,
    layers: int,
    block: int,
    mask_id: int,
    target_layers: list[int] | None = None,
    draft_vocab: int | None = None,
    from_anchor: bool | None = None,
    markov_rank: int = 0,
    markov_kind: MarkovKind = "vanilla",
    confidence: bool = False,
) -> Qwen3Config:
    """The configuration of a block head of the target's width; what is None is as published.

    Raises:
        UserError: a number that does not fit the target.
    """
    depth = int(target.num_hidden_layers)
    ids = target_layers or list(default_layers(depth, max(3, layers)))
    if sorted(set(ids)) != list(ids) or ids[0] < 0 or ids[-1] >= depth - 1:
        raise UserError(
            f"the target layers of a block head are {list(ids)}; expected ascending numbers from 0 to {depth - 2} (the "
            f"last layer, {depth - 1}, is left out: its state is normed before heads can read it)"
        )
    if block < 2:
        raise UserError(f"a block has {block} slot, expected 2 or more: the anchor's and those of drafted tokens")
    drafted = min(draft_vocab or target.vocab_size, target.vocab_size)
    anchor_first = version == "dspark" if from_anchor is None else from_anchor
    return Qwen3Config(
        **shape_of(target),
        architectures=[BLOCK_ARCHITECTURES[version]],
        num_target_layers=depth,
        num_hidden_layers=layers,
        layer_types=["full_attention"] * layers,
        draft_vocab_size=drafted,
        captured_layers=[layer + 1 for layer in ids],
        block_size=block,
        mask_token_id=mask_id,
        sample_from_anchor=anchor_first,
        is_causal=False,
        markov_rank=markov_rank,
        markov_head_type=markov_kind,
        enable_confidence_head=confidence,
        confidence_head_with_markov=confidence and markov_rank > 0,
    )


RESERVED = ("reserved", "unused", "extra_token", "placeholder", "<|extra", "[mask]", "<mask>", "<|mask")
"""Parts of the names of tokens that a tokenizer keeps for later use."""
UNWRITTEN = 0xFF  # a byte that no text in UTF-8 holds


def mask_token(tokenizer: PreTrainedTokenizerBase, rows: int) -> int:
    """The id that stands in the slots of a block: one that no text holds, and neither pad nor the end of a text.

    In this order: a mask token of the tokenizer, a reserved token, a row of the embedding behind the tokenizer's ids,
    or the byte 0xFF of a byte-level vocabulary.

    Args:
        tokenizer: the target's.
        rows: of the target's embedding.

    Raises:
        UserError: there is none.
    """
    known: dict[str, int] = tokenizer.get_vocab()
    taken = {tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.bos_token_id}
    special = {token for token in known if token in tokenizer.all_special_tokens or token[:1] in "<["}
    reserved = [i for token, i in known.items() if token in special and any(name in token.lower() for name in RESERVED)]
    byte = [known[name] for name in ("ÿ", f"<0x{UNWRITTEN:X}>") if name in known]
    behind = max(known.values(), default=-1) + 1
    given = [tokenizer.mask_token_id] if getattr(tokenizer, "mask_token_id", None) is not None else []
    for found in (*given, *sorted(reserved), *([behind] if behind < rows else []), *byte):
        if found not in taken and found < rows:
            return int(found)
    raise UserError(
        "the target's vocabulary has no reserved token for the masked slots of a block, no row behind its ids and no "
        "unused byte: add a special token to its tokenizer that no text holds, or set student.kind to eagle3"
    )
