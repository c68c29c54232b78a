"""Feature heads: one decoder layer that continues the target's hidden states (EAGLE 2401.15077, EAGLE-3 2503.01840).

A head reads pairs (feature of token t, embedding of token t + 1), and its state at t predicts token t + 2. That state
then serves as the feature of t + 1. EAGLE-1's feature is the target's last hidden state, and the target's own head
turns states into logits. EAGLE-3 fuses a low, a middle and a high state, and has a norm and a head of its own over a
reduced vocabulary. Parameters are named as in the published checkpoints, so a state dict is a file's content.

Heads of other projects have more norms: before the fusion one of the concatenated states (``norm_before_fc`` in
config.json) or one of each (``fc_norm``), and of queries and keys (``qk_norm``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaConfig, PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRotaryEmbedding

from decode.errors import UserError

ARCHITECTURES = {1: "LlamaForCausalLMEagle", 3: "LlamaForCausalLMEagle3"}  # names in config.json, by version

# -- the network -------------------------------------------------------------------------------------------------------


class RMSNorm(nn.Module):
    """x / √(mean x² + ε) · w, in the input's own precision or better."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.variance_epsilon = eps

    def forward(self, x: Tensor) -> Tensor:
        """``[..., width]``."""
        return F.rms_norm(x, self.weight.shape, self.weight.to(x.dtype), self.variance_epsilon)


class HeadLayer(nn.Module):
    """A decoder layer of a head, whose attention reads `inputs` states side by side.

    EAGLE-1's has no norm before its attention; EAGLE-3's norms the embedding and the state apart.
    """

    def __init__(self, config: Any, inputs: int = 1, norms: Sequence[str] = (), *, qk_norm: bool = False) -> None:
        super().__init__()
        width, d = config.hidden_size, config.head_dim
        queries, keys = config.num_attention_heads * d, config.num_key_value_heads * d
        self.self_attn = nn.Module()
        for name, rows in (("q_proj", queries), ("k_proj", keys), ("v_proj", keys)):
            setattr(self.self_attn, name, nn.Linear(inputs * width, rows, bias=False))
        self.self_attn.o_proj = nn.Linear(queries, width, bias=False)
        for name in ("q_norm", "k_norm") if qk_norm else ():
            setattr(self.self_attn, name, RMSNorm(d, config.rms_norm_eps))
        self.mlp = LlamaMLP(config)
        for name in (*norms, "post_attention_layernorm"):
            setattr(self, name, RMSNorm(width, config.rms_norm_eps))


class DraftHead(nn.Module):
    """What all heads on a target's hidden states have: which states they read, and which tokens they draft.

    Attributes:
        config: shape and `captured_layers`.
        version: 1 or 3 of EAGLE, ``dflash``, ``dspark``, or ``mtp`` of a target's own next-token layers.
        drafts: most tokens of a draft; None: any number.
        captured_layers: indices into the target's hidden states whose concatenation is the feature: i is the state
            that enters layer i, and the number of layers is the last one, after the final norm.
    """

    d2t: Tensor
    t2d: Tensor
    version: int | str
    drafts: int | None = None
    method = "eagle"  # the name in `decode.methods` of drafting a chain with it

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = config
        self.captured_layers: tuple[int, ...] = tuple(config.captured_layers)

    def _add_tables(self) -> None:
        """Tables of a reduced vocabulary, which drafts the first ids until `set_vocabulary` is called."""
        config = self.config
        self.register_buffer("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.long))
        self.register_buffer("t2d", torch.arange(config.vocab_size) < config.draft_vocab_size)

    @property
    def reduced(self) -> bool:
        """Whether the head drafts some of the target's tokens only."""
        size = getattr(self.config, "draft_vocab_size", None)
        return size is not None and size < self.config.vocab_size

    @property
    def feature_width(self) -> int:
        """Width of the concatenated target states."""
        return len(self.captured_layers) * int(self.config.target_hidden_size)

    def draft_ids(self) -> Tensor | None:
        """The target's ids of the head's logits, ``[draft vocab]``, or None if they are the same."""
        return torch.arange(len(self.d2t), device=self.d2t.device) + self.d2t if self.reduced else None

    def set_vocabulary(self, ids: Tensor) -> None:
        """Draft these target ids only (long, ascending, as many as the head has logits)."""
        self.d2t.copy_(ids - torch.arange(len(ids)))
        self.t2d.zero_()[ids] = True


class FeatureHead(DraftHead):
    """An EAGLE-1 or EAGLE-3 head, without what it shares with the target (embedding, EAGLE-1's output head).

    Attributes:
        version: 1 or 3.
        normed_states: whether states are normed before the next step reads them, not only before the output head.
        normed_residual: whether the residual of EAGLE-3's layer is its normed input.
        embed_tokens: an embedding of the head's own, where its file has one.

    Args:
        config: shape, version and `captured_layers` (see `head_config`).
    """

    version: int

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config)
        self.version = 3 if config.architectures[0] == ARCHITECTURES[3] else 1
        self.embed_tokens: nn.Embedding | None = None
        self.normed_states: bool = getattr(config, "norm_output", False)
        self.normed_residual: bool = getattr(config, "norm_before_residual", False)
        width, eps = config.hidden_size, config.rms_norm_eps
        self.rotary, qk_norm = LlamaRotaryEmbedding(config), bool(getattr(config, "qk_norm", False))
        if self.version == 1:
            self.fc = nn.Linear(2 * width, width, bias=getattr(config, "bias", True))
            self.layers = nn.ModuleList([HeadLayer(config, qk_norm=qk_norm)])
        else:
            if getattr(config, "norm_before_fc", False):
                self.input_norm = RMSNorm(self.feature_width, eps)
            if getattr(config, "fc_norm", False):
                self.fc_norm = nn.ModuleList(RMSNorm(config.target_hidden_size, eps) for _ in self.captured_layers)
            self.fc = nn.Linear(self.feature_width, width, bias=False)
            self.midlayer = HeadLayer(config, 2, ("input_layernorm", "hidden_norm"), qk_norm=qk_norm)
            self.norm = RMSNorm(width, eps)
            self.lm_head = nn.Linear(width, config.draft_vocab_size, bias=False)
        if self.version == 3 or self.reduced:
            self._add_tables()

    @property
    def layer(self) -> Any:
        """The decoder layer."""
        return self.layers[0] if self.version == 1 else self.midlayer

    def normed(self, features: Tensor) -> Tensor:
        """Target features ``[..., feature width]`` as EAGLE-3's fusion reads them."""
        if hasattr(self, "input_norm"):
            features = self.input_norm(features)
        if hasattr(self, "fc_norm"):
            parts = features.chunk(len(self.fc_norm), -1)
            features = torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts)], -1)
        return features

    def fuse(self, features: Tensor) -> Tensor:
        """Target features ``[..., feature width]`` as the states that the layer continues, ``[..., hidden]``."""
        return features if self.version == 1 else cast(Tensor, self.fc(self.normed(features)))

    def output(self, states: Tensor) -> Tensor:
        """States as the output head reads them."""
        return states if self.version == 1 or self.normed_states else cast(Tensor, self.norm(states))

    def logits(self, states: Tensor, target_head: Any) -> Tensor:
        """Logits ``[..., draft vocab]`` of states, by the target's head (EAGLE-1) or the head's own."""
        logits: Tensor = (target_head if self.version == 1 else self.lm_head)(self.output(states))
        return logits

    def unroll(self, embeds: Tensor, features: Tensor, steps: int, rows: Tensor | None = None) -> Iterator[Tensor]:
        """States of several drafting steps from every position of texts (EAGLE-3's training-time test).

        Step s at position t predicts token t + 2 + s. It attends to the text's pairs up to t, and to the pairs of its
        own steps.

        Args:
            embeds: embedding of token t + 1, ``[batch, time, width]``.
            features: feature of token t, ``[batch, time, feature width]``.
            steps: drafting steps; 1 is teacher forcing with true features.
            rows: the positions to start from, bool ``[batch, time]``; None: all.

        Yields:
            For each step the states ``[rows, hidden]``, or ``[batch, time, hidden]`` without `rows`. Where position t
            would need tokens past the end they are undefined.
        """
        layer, d, grid = self.layer, self.config.head_dim, embeds.shape[:2]
        embeds, hidden = embeds.flatten(0, 1), self.fuse(features).flatten(0, 1)
        position = torch.arange(grid[1], device=embeds.device).repeat(grid[0])
        turns = torch.arange(grid[1] + steps, device=embeds.device)
        cos, sin = (factors[0, :, None] for factors in self.rotary(embeds, position_ids=turns[None]))

        def rotate(x: Tensor, turn: Tensor, norm: str) -> Tensor:
            """Rotates ``x [rows, heads · d]`` to the rows' positions, behind a norm where the head has one."""
            x = x.unflatten(-1, (-1, d))
            x = getattr(layer.self_attn, norm)(x) if hasattr(layer.self_attn, norm) else x
            a, b = x.chunk(2, -1)
            return (x * cos[turn] + torch.cat([-b, a], -1) * sin[turn]).to(x.dtype)

        def spread(values: Tensor) -> Tensor:
            """Puts ``values [rows, heads, d]`` at their places in ``[batch, heads, time, d]``, with zeros elsewhere."""
            if len(values) < len(embeds):
                values = values.new_zeros(len(embeds), *values.shape[1:]).index_copy(0, wanted, values)
            return values.unflatten(0, grid).transpose(1, 2)

        wanted = torch.arange(len(embeds), device=embeds.device) if rows is None else rows.flatten().nonzero()[:, 0]
        seen: list[Tensor] = []  # keys and values in turn: the text's, then those of each step
        for step in range(steps):
            turn = position[wanted] + step if step else position  # the first step reads all pairs of the text
            e = embeds.index_select(0, (wanted + step).clamp_max(len(embeds) - 1)) if step else embeds
            if self.version == 1:
                x = y = self.fc(torch.cat([e, hidden], -1))
            else:
                normed = layer.hidden_norm(hidden)
                x, y = normed if self.normed_residual else hidden, torch.cat([layer.input_layernorm(e), normed], -1)
            k, v = rotate(layer.self_attn.k_proj(y), turn, "k_norm"), layer.self_attn.v_proj(y).unflatten(-1, (-1, d))
            if len(wanted) < len(x):
                x, y, turn = (values.index_select(0, wanted) for values in (x, y, turn))
            q = rotate(layer.self_attn.q_proj(y), turn, "q_norm")
            if len(wanted):
                seen += [spread(k), spread(v)]
                q = attend(spread(q), *seen).transpose(1, 2).flatten(0, 1)
                q = q.index_select(0, wanted) if len(wanted) < len(q) else q
            x = x + layer.self_attn.o_proj(q.flatten(1))
            hidden = x + layer.mlp(layer.post_attention_layernorm(x))
            hidden = self.norm(hidden) if self.normed_states else hidden
            yield hidden.unflatten(0, grid) if rows is None else hidden


# -- its attention -----------------------------------------------------------------------------------------------------


class _ChainAttention(torch.autograd.Function):
    """Flash attention to the text, merged with scores of the query's own steps by their log-sum-exps."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, *chain: Tensor) -> Tensor:
        given, d = _for_kernel(q, k, v), q.shape[-1]
        if q.device.type == "cuda":
            kernel = torch.ops.aten._scaled_dot_product_efficient_attention
            out, sums, *_ = kernel(*given, None, True, 0.0, True, scale=d**-0.5)
        else:
            kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
            out, sums = kernel(*given, 0.0, True, scale=d**-0.5)
        sums = sums[..., : q.shape[2]]
        wide = q.to(sums.dtype)
        every = torch.stack([sums, *((wide * _repeated(q, key)).sum(-1) * d**-0.5 for key in chain[::2])])
        whole = every.logsumexp(0)
        weights = (every - whole).exp()[..., None]
        out = weights[0] * out[..., :d]
        for weight, value in zip(weights[1:], chain[1::2], strict=True):
            out.addcmul_(weight, _repeated(q, value).to(out.dtype))
        out = out.to(q.dtype)
        ctx.save_for_backward(q, out, whole, weights[1:], k, v, *chain)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
        """The text's kernel gets the output and the log-sum-exp of the whole, as in ring attention."""
        q, out, whole, weights, k, v, *chain = ctx.saved_tensors
        given, (wanted, made), d = _for_kernel(q, k, v), _for_kernel(grad, out), q.shape[-1]
        if q.device.type == "cuda":
            sums = F.pad(whole, (0, -whole.shape[-1] % 32), value=torch.inf)  # as its kernel lays them out
            seed = torch.zeros((), dtype=torch.long)  # of dropout, which is 0
            kernel = torch.ops.aten._scaled_dot_product_efficient_attention_backward
            rest = seed, seed, 0.0, [True] * 3 + [False], True
            found = kernel(wanted, *given, None, made, sums, *rest, scale=d**-0.5)
        else:
            kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
            found = kernel(wanted, *given, made, whole, 0.0, True, scale=d**-0.5)
        to_q, to_k, to_v = (values[..., :d] for values in found[:3])
        wide, grad = q.to(whole.dtype), grad.to(whole.dtype)
        to_q, to_chain = to_q.to(wide.dtype), [to_k, to_v]
        mean = (grad * out).sum(-1, keepdim=True)
        for weight, key, value in zip(weights, chain[::2], chain[1::2], strict=True):
            score = weight * ((grad * _repeated(q, value)).sum(-1, keepdim=True) - mean) * d**-0.5
            to_q.addcmul_(score, _repeated(q, key).to(to_q.dtype))
            to_chain += [score * wide, weight * grad]
        # heads that share a key head add their gradients
        return to_q.to(q.dtype), *(values.unflatten(1, (k.shape[1], -1)).sum(2).to(k.dtype) for values in to_chain)


attend: Callable[..., Tensor] = _ChainAttention.apply
"""Attention of every position to the text up to itself, and to keys of its own.

Args:
    q: ``[batch, heads, time, d]``.
    k: the text's keys, ``[batch, kv heads, time, d]``.
    v: its values.
    chain: keys and values in turn, ``[batch, kv heads, time, d]``: one of each for every query.

Returns:
    ``[batch, heads, time, d]``.
"""


def _repeated(q: Tensor, values: Tensor) -> Tensor:
    """Key or value heads, repeated for the heads that share them."""
    group = q.shape[1] // values.shape[1]
    return values.repeat_interleave(group, 1) if group > 1 else values


def _for_kernel(q: Tensor, *others: Tensor) -> list[Tensor]:
    """One head for every query head, of a width that is a multiple of eight, which CUDA's kernel needs."""
    every, missing = [q, *(_repeated(q, values) for values in others)], -q.shape[-1] % 8
    return [F.pad(values, (0, missing)) for values in every] if missing else every


# -- its output --------------------------------------------------------------------------------------------------------


def output_head(model: PreTrainedModel, ids: Tensor | None = None) -> Any:
    """The target's output head, which EAGLE-1 shares, restricted to these ids (None: all).

    Raises:
        UserError: a head that is more than a linear layer.
    """
    config, head = model.config.get_text_config(), model.get_output_embeddings()
    extra = [n for n in ("logit_scale", "logits_scaling", "final_logit_softcapping") if getattr(config, n, None)]
    if extra or type(head) is not nn.Linear:
        raise UserError(
            f"{type(model).__name__} changes its logits after the head ({', '.join(extra) or type(head).__name__}), "
            "so an EAGLE-1 head cannot share it; use EAGLE-3"
        )
    return head if ids is None else some_outputs(head, ids)


@torch.no_grad()
def some_outputs(linear: nn.Linear, ids: Tensor) -> nn.Linear:
    """A frozen linear layer with copies of these outputs of another one."""
    part = nn.Linear(linear.in_features, len(ids), linear.bias is not None, device="meta")
    for name, values in linear.named_parameters():
        setattr(part, name, nn.Parameter(values[ids.to(values.device)], requires_grad=False))
    return part


def rows_of(head: DraftHead, logits: Tensor, vocab: int, text: tuple[Sequence[int], int]) -> Tensor:
    """A head's logits at each response position of one text.

    Args:
        head: the head.
        logits: of the last tokens of the text, over the head's own vocabulary ``[rows, draft vocab]``.
        vocab: the target's vocabulary size.
        text: token ids, and how many of them are the prompt.

    Returns:
        Logits ``[response, vocab]`` in the target's vocabulary. Tokens that no row is of get an impossible one (all
        −inf except the first id).
    """
    ids, start = text
    found, place = logits, head.draft_ids()
    rows = found.new_full((len(ids) - start, vocab), -torch.inf)
    missing = len(rows) - len(found)
    rows[missing:, slice(found.shape[-1]) if place is None else place] = found
    rows[:missing, 0] = 0.0
    return rows


# -- configuration ----------------------------------------------------------------------------------------------------


def default_captured_layers(layers: int) -> tuple[int, int, int]:
    """EAGLE-3's low, middle and high states: those that enter layers 2, L/2 and L − 3, as the engines take them.

    Targets in which these are not three different ones get the first, the middle and the last state between layers.

    Raises:
        UserError: a target of one layer.
    """
    if layers < 2:
        raise UserError(f"EAGLE-3 reads three different hidden states, and a target of {layers} layer has only two")
    if layers > 6:
        return 2, layers // 2, layers - 3
    return (1, layers // 2, layers - 1) if layers > 3 else (0, 1, 2)


def shape_of(target: Any) -> dict[str, Any]:
    """What the configurations of all heads take from a target's.

    Where its layers differ it is the last one's; a target without attention gets heads of 64 elements.
    """
    layer, width = target.per_layer_config[-1], target.hidden_size
    heads = getattr(layer, "num_attention_heads", None) or max(1, width // 64)
    head_dim = getattr(layer, "head_dim", None) or width // heads
    rope = getattr(target, "rope_parameters", None) or {}
    rope = rope.get("full_attention", rope)
    return {
        "hidden_size": width,
        "target_hidden_size": width,
        "intermediate_size": getattr(layer, "intermediate_size", None) or 4 * width,
        "num_attention_heads": heads,
        "num_key_value_heads": getattr(layer, "num_key_value_heads", None) or heads,
        "head_dim": head_dim + head_dim % 2,  # rotation takes pairs of elements
        "vocab_size": target.vocab_size,
        "max_position_embeddings": getattr(target, "max_position_embeddings", None) or 2048,
        "rms_norm_eps": getattr(target, "rms_norm_eps", None) or 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": rope.get("rope_theta") or 10000.0},
        "tie_word_embeddings": False,
        **{name: getattr(target, name, None) for name in ("bos_token_id", "eos_token_id", "pad_token_id")},
    }


def head_config(
    target: Any, version: int, *, draft_vocab: int | None = None, captured_layers: tuple[int, ...] | None = None
) -> LlamaConfig:
    """The configuration of a head of the target's shape; what is None is the target's.

    Raises:
        UserError: sizes that do not fit.
    """
    layers = target.num_hidden_layers
    captured = [layers] if version == 1 else list(captured_layers or default_captured_layers(layers))
    if version == 3 and (len(captured) != 3 or not 0 <= captured[0] < captured[1] < captured[2] <= layers):
        raise UserError(f"captured layers are {captured}; expected three ascending numbers from 0 to {layers}")
    drafted = min(draft_vocab or target.vocab_size, target.vocab_size)
    return LlamaConfig(
        **shape_of(target),
        architectures=[ARCHITECTURES[version]],
        num_hidden_layers=1,
        draft_vocab_size=drafted if version == 3 or drafted < target.vocab_size else None,
        captured_layers=captured,
        # no key "bias": EAGLE-1's fc has one in any case, and engines would make biases of the attention for it
    )
