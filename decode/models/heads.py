"""Feature heads: one decoder layer that continues the target's hidden states (EAGLE 2401.15077, EAGLE-3 2503.01840).

A head reads pairs (feature of token t, embedding of token t + 1), and its state at t predicts token t + 2. That state
then serves as the feature of t + 1. EAGLE-1's feature is the target's last hidden state, and the target's own head
turns states into logits. EAGLE-3 fuses a low, a middle and a high state, and has a norm and a head of its own over a
reduced vocabulary. Parameters are named as in the published checkpoints, so a state dict is a file's content.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from typing import Any, cast

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import LlamaConfig, PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRotaryEmbedding

from decode.errors import UserError

VERSIONS = {"LlamaForCausalLMEagle": 1, "LlamaForCausalLMEagle3": 3}  # names of the two kinds in config.json
VARIANTS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
"""Fields of config.json by which heads of other projects differ from the published EAGLE-3."""
SHARED = "embed_tokens.weight"  # the target's embedding, which files may repeat

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
    """The decoder layer. EAGLE-1's has no norm before its attention; EAGLE-3's attention reads twice the width."""

    def __init__(self, config: LlamaConfig, version: int) -> None:
        super().__init__()
        width, d = config.hidden_size, config.head_dim
        queries, keys = config.num_attention_heads * d, config.num_key_value_heads * d
        self.self_attn = nn.Module()
        for name, rows in (("q_proj", queries), ("k_proj", keys), ("v_proj", keys)):
            setattr(self.self_attn, name, nn.Linear(width if version == 1 else 2 * width, rows, bias=False))
        self.self_attn.o_proj = nn.Linear(queries, width, bias=False)
        self.mlp = LlamaMLP(config)
        if version == 3:
            self.input_layernorm = RMSNorm(width, config.rms_norm_eps)
            self.hidden_norm = RMSNorm(width, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(width, config.rms_norm_eps)


class FeatureHead(nn.Module):
    """An EAGLE-1 or EAGLE-3 head, without what it shares with the target (embedding, EAGLE-1's output head).

    Attributes:
        version: 1 or 3.
        captured_layers: indices into the target's hidden states whose concatenation is the feature: i is the state
            that enters layer i, and the number of layers is the last one, after the final norm.
        embed_tokens: an embedding of the head's own, where its file has one.

    Args:
        config: shape, version and `captured_layers` (see `head_config`).
    """

    d2t: Tensor
    t2d: Tensor

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config = config
        self.version = VERSIONS[config.architectures[0]]
        self.captured_layers: tuple[int, ...] = tuple(config.captured_layers)
        self.embed_tokens: nn.Embedding | None = None
        width = config.hidden_size
        self.rotary = LlamaRotaryEmbedding(config)
        if self.version == 1:
            self.fc = nn.Linear(2 * width, width, bias=bool(getattr(config, "bias", True)))
            self.layers = nn.ModuleList([HeadLayer(config, 1)])
        else:
            self.fc = nn.Linear(self.feature_width, width, bias=False)
            self.midlayer = HeadLayer(config, 3)
            self.norm = RMSNorm(width, config.rms_norm_eps)
            self.lm_head = nn.Linear(width, config.draft_vocab_size, bias=False)
        if self.version == 3 or self.reduced:
            self.register_buffer("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.long))
            self.register_buffer("t2d", torch.arange(config.vocab_size) < config.draft_vocab_size)

    @property
    def reduced(self) -> bool:
        """Whether the head drafts some of the target's tokens only."""
        size = getattr(self.config, "draft_vocab_size", None)
        return size is not None and int(size) < int(self.config.vocab_size)

    @property
    def layer(self) -> Any:
        """The decoder layer."""
        return self.layers[0] if self.version == 1 else self.midlayer

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

    def fuse(self, features: Tensor) -> Tensor:
        """Target features ``[..., feature width]`` as the states that the layer continues, ``[..., hidden]``."""
        return features if self.version == 1 else cast(Tensor, self.fc(features))

    def logits(self, states: Tensor, target_head: Any) -> Tensor:
        """Logits ``[..., draft vocab]`` of states, by the target's head (EAGLE-1) or the head's own."""
        logits: Tensor = target_head(states) if self.version == 1 else self.lm_head(self.norm(states))
        return logits

    def unroll(
        self, embeds: Tensor, features: Tensor, steps: int, rows: Tensor | None = None
    ) -> Generator[Tensor, Tensor | None, None]:
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
            would need tokens past the end they are undefined. Indices that are sent back (ascending) select the rows
            for which the following steps are computed.
        """
        layer, d, grid = self.layer, self.config.head_dim, embeds.shape[:2]
        embeds, hidden = embeds.flatten(0, 1), self.fuse(features).flatten(0, 1)
        position = torch.arange(grid[1], device=embeds.device).repeat(grid[0])
        turns = torch.arange(grid[1] + steps, device=embeds.device)
        cos, sin = (factors[0, :, None] for factors in self.rotary(embeds, position_ids=turns[None]))

        def rotate(x: Tensor, turn: Tensor) -> Tensor:
            """Rotates ``x [rows, heads · d]`` to the rows' positions."""
            x = x.unflatten(-1, (-1, d))
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
                x, y = hidden, torch.cat([layer.input_layernorm(e), layer.hidden_norm(hidden)], -1)
            k, v = rotate(layer.self_attn.k_proj(y), turn), layer.self_attn.v_proj(y).unflatten(-1, (-1, d))
            if len(wanted) < len(x):
                x, y, turn = (values.index_select(0, wanted) for values in (x, y, turn))
            q = rotate(layer.self_attn.q_proj(y), turn)
            if len(wanted):
                seen += [spread(k), spread(v)]
                q = attend(spread(q), *seen).transpose(1, 2).flatten(0, 1)
                q = q.index_select(0, wanted) if len(wanted) < len(q) else q
            x = x + layer.self_attn.o_proj(q.flatten(1))
            hidden = x + layer.mlp(layer.post_attention_layernorm(x))
            kept = yield hidden.unflatten(0, grid) if rows is None else hidden
            if kept is not None:
                wanted, hidden = wanted[kept], hidden[kept]


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


def rows_of_states(
    head: FeatureHead, shared: Any, vocab: int, states: Tensor, text: tuple[Sequence[int], int], depth: int
) -> Tensor:
    """A head's logits at each response position of one text.

    Args:
        head: the feature head.
        shared: EAGLE-1's output head.
        vocab: the target's vocabulary size.
        states: the head's states ``[time, hidden]``; state t predicts token t + 1 + depth.
        text: token ids, and how many of them are the prompt.
        depth: which drafted token the states predict: 1 is drafted from true features, the next ones from the head's
            own states with the text's true tokens.

    Returns:
        Logits ``[response, vocab]`` in the target's vocabulary. Tokens that no pair precedes get an impossible row
        (all −inf except the first id).
    """
    ids, start = text
    first = max(0, start - 1 - depth)  # rows of the text are needed from `start` on
    found, place = head.logits(states[first : max(first, len(ids) - 1 - depth)], shared), head.draft_ids()
    rows = found.new_full((len(ids) - start, vocab), -torch.inf)
    missing = len(rows) - len(found)
    rows[missing:, slice(found.shape[-1]) if place is None else place] = found
    rows[:missing, 0] = 0.0
    return rows


# -- configuration and files ------------------------------------------------------------------------------------------


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


def head_config(
    target: Any, version: int, *, draft_vocab: int | None = None, captured_layers: tuple[int, ...] | None = None
) -> LlamaConfig:
    """The configuration of a head of the target's shape; what is None is the target's.

    Raises:
        UserError: sizes that do not fit.
    """
    width, layers, heads = int(target.hidden_size), int(target.num_hidden_layers), int(target.num_attention_heads)
    head_dim = int(getattr(target, "head_dim", None) or width // heads)
    captured = [layers] if version == 1 else list(captured_layers or default_captured_layers(layers))
    if version == 3 and (len(captured) != 3 or not 0 <= captured[0] < captured[1] < captured[2] <= layers):
        raise UserError(f"captured layers are {captured}; expected three ascending numbers from 0 to {layers}")
    drafted = min(draft_vocab or target.vocab_size, target.vocab_size)
    rope = getattr(target, "rope_parameters", None) or {}
    rope = rope.get("full_attention", rope)
    return LlamaConfig(
        architectures=[name for name, number in VERSIONS.items() if number == version],
        hidden_size=width,
        target_hidden_size=width,
        intermediate_size=getattr(target, "intermediate_size", None) or 4 * width,
        num_hidden_layers=1,
        num_attention_heads=heads,
        num_key_value_heads=int(getattr(target, "num_key_value_heads", None) or heads),
        head_dim=head_dim + head_dim % 2,  # rotation takes pairs of elements
        vocab_size=int(target.vocab_size),
        draft_vocab_size=drafted if version == 3 or drafted < target.vocab_size else None,
        max_position_embeddings=int(getattr(target, "max_position_embeddings", None) or 2048),
        rms_norm_eps=float(getattr(target, "rms_norm_eps", None) or 1e-6),
        rope_parameters={"rope_type": "default", "rope_theta": rope.get("rope_theta") or 10000.0},
        tie_word_embeddings=False,
        captured_layers=captured,
        # no key "bias": EAGLE-1's fc has one in any case, and engines would make biases of the attention for it
        **{name: getattr(target, name, None) for name in ("bos_token_id", "eos_token_id", "pad_token_id")},
    )


def head_version(folder: str | os.PathLike[str]) -> int | None:
    """1 or 3 if a folder's config.json is that of an EAGLE head of this version; else None."""
    try:
        fields = json.loads((Path(folder) / "config.json").read_text(encoding="utf-8"))
        return VERSIONS.get((fields.get("architectures") or [""])[0])
    except (OSError, ValueError, AttributeError):
        return None


def is_head(folder: str | os.PathLike[str]) -> bool:
    """Whether a folder's config.json is that of a feature head."""
    return head_version(folder) is not None


def save_head(head: FeatureHead, folder: str | Path) -> None:
    """Writes config.json and model.safetensors into an existing folder.

    The vocabulary's tables d2t and t2d are written only where the head drafts some of the target's tokens: vLLM makes
    no parameter for them where the vocabularies are equal.
    """
    folder = Path(folder)
    tables = () if head.reduced else ("d2t", "t2d")
    state = {n: tensor.detach().cpu().contiguous() for n, tensor in head.state_dict().items() if n not in tables}
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(head.config.to_dict(), indent=2, default=str) + "\n")


def load_head(folder: str | os.PathLike[str], target: PreTrainedModel | None = None) -> FeatureHead:
    """A head from its folder, ours or a published one in safetensors.

    Args:
        folder: with config.json and model.safetensors.
        target: the model it drafts for, to fill in and check what the file leaves to it; the head takes its number
            format and device.

    Raises:
        UserError: a damaged or unfit head.
    """
    folder = Path(folder)
    try:
        fields = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        state = load_file(folder / "model.safetensors")
        head = FeatureHead(_config_of(fields, target, folder))
        if SHARED in state:
            head.embed_tokens = nn.Embedding.from_pretrained(state[SHARED])
        # files may leave out t2d, which follows from d2t, and both where the head drafts all tokens
        optional = ("t2d",) if head.reduced else ("t2d", "d2t")
        head.load_state_dict({n: table for n, table in head.state_dict().items() if n in optional} | state)
    except UserError:
        raise
    except (OSError, ValueError, KeyError, TypeError, ArithmeticError, RuntimeError, SafetensorError) as error:
        raise UserError(
            f"{folder} holds no feature head that can be read; save it or download it again ({error!r})"
        ) from error
    if head.reduced:
        head.set_vocabulary(cast(Tensor, head.draft_ids()))
    if target is not None:
        device = target.get_input_embeddings().weight.device
        head.to(device=device, dtype=target.dtype)
        head.rotary = LlamaRotaryEmbedding(head.config).to(device)  # frequencies are not to be rounded
    return head.eval()


def _config_of(fields: dict[str, Any], target: PreTrainedModel | None, folder: Path) -> LlamaConfig:
    """The configuration of a folder's config.json, completed from the target where that is known."""
    version, width = VERSIONS.get((fields.get("architectures") or [""])[0]), int(fields.get("hidden_size") or 0)
    if version is None:
        raise UserError(f"{folder} holds no feature head: its architecture is {fields.get('architectures')}")
    if variants := [name for name in VARIANTS if fields.get(name)]:
        raise UserError(
            f"{folder} has {', '.join(variants)} set in its config.json, variants of EAGLE-3 that are not supported"
        )
    if fields.get("target_hidden_size") not in (None, width):
        raise UserError(f"{folder} is {width} wide, its target {fields['target_hidden_size']}; they have to be equal")
    captured = fields.get("captured_layers") or fields.get("eagle_aux_hidden_state_layer_ids")  # ours, the engines'
    if target is None and not captured:
        raise UserError(f"{folder} does not name its feature layers; load it together with its target")
    if target is not None:
        shape = target.config.get_text_config()
        if (shape.hidden_size, int(shape.vocab_size)) != (width, int(fields["vocab_size"])):
            raise UserError(
                f"the head in {folder} is for a target of width {width} and {fields['vocab_size']} tokens; this target "
                f"has width {shape.hidden_size} and {shape.vocab_size} tokens"
            )
        layers = int(shape.num_hidden_layers)
        captured = [layers] if version == 1 else list(captured or default_captured_layers(layers))
    head_dim = fields.get("head_dim") or width // int(fields["num_attention_heads"])
    return LlamaConfig(**(fields | {"head_dim": head_dim, "target_hidden_size": width, "captured_layers": captured}))
