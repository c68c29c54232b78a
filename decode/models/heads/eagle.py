"""Feature heads: one decoder layer that continues the target's hidden states (EAGLE 2401.15077, EAGLE-3 2503.01840).

A head reads pairs (feature of token t, embedding of token t + 1), and its state at t predicts token t + 2. That state
then serves as the feature of t + 1. EAGLE-1's feature is the target's last hidden state, and the target's own head
turns states into logits. EAGLE-3 fuses a low, a middle and a high state, and has a norm and a head of its own over a
reduced vocabulary. Parameters are named as in the published checkpoints, so a state dict is a file's content.

Heads of other projects have more norms: before the fusion one of the concatenated states (``norm_before_fc`` in
config.json) or one of each (``fc_norm``), and of queries and keys (``qk_norm``).

`FeatureHead` is the network; `unroll` runs it for training, `decode.models.heads.runner` for decoding.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaConfig, PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRotaryEmbedding, rotate_half

from decode.errors import UserError
from decode.files import Fields
from decode.models.fast.weights import Function

ARCHITECTURES = {1: "LlamaForCausalLMEagle", 3: "LlamaForCausalLMEagle3"}  # names in config.json, by version
NORMS = ("fc_norm", "norm_output")  # what EAGLE-3.1 adds

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


Rotation = Sequence[Tensor]  # cos and sin of positions, ``[.., n, d]`` each


class HeadLayer(nn.Module):
    """A decoder layer of a head, whose attention reads `inputs` states side by side.

    EAGLE-1's has no norm before its attention; EAGLE-3's norms the embedding and the state apart.
    """

    post_attention_layernorm: Any

    def __init__(self, config: Any, inputs: int = 1, norms: Sequence[str] = (), *, qk_norm: bool = False) -> None:
        super().__init__()
        width, self.head_dim, eps = config.hidden_size, config.head_dim, config.rms_norm_eps
        queries, keys = (count * self.head_dim for count in (config.num_attention_heads, config.num_key_value_heads))
        shapes = {"q_proj": queries, "k_proj": keys, "v_proj": keys}
        modules: Fields = {name: nn.Linear(inputs * width, rows, bias=False) for name, rows in shapes.items()}
        modules["o_proj"] = nn.Linear(queries, width, bias=False)
        modules |= {name: RMSNorm(self.head_dim, eps) for name in (("q_norm", "k_norm") if qk_norm else ())}
        self.self_attn: Any = nn.ModuleDict(modules)
        self.mlp: Any = LlamaMLP(config)
        for name in (*norms, "post_attention_layernorm"):
            setattr(self, name, RMSNorm(width, eps))

    def heads(self, name: str, x: Tensor, rotation: Rotation = ()) -> Tensor:
        """The queries, keys or values (``q``, ``k`` or ``v``) of states, ``[.., n, heads, d]``."""
        heads = self.self_attn[f"{name}_proj"](x).unflatten(-1, (-1, self.head_dim))
        if f"{name}_norm" in self.self_attn:
            heads = self.self_attn[f"{name}_norm"](heads)
        if not rotation:
            return heads
        cos, sin = (factors[..., None, :] for factors in rotation)
        return (heads * cos + rotate_half(heads) * sin).to(heads.dtype)

    def finish(self, x: Tensor, attended: Tensor) -> Tensor:
        """The layer's states, from those that it adds to and what its heads have attended to, ``[.., n, heads, d]``."""
        x = x + self.self_attn.o_proj(attended.flatten(-2))
        return x + self.mlp(self.post_attention_layernorm(x))


def captured_layers(config: Any) -> tuple[int, ...]:
    """The target's states that a head of this configuration reads.

    i is the state that enters layer i, and the number of layers is the last one, after the final norm, which is read
    where no others are named. Block heads name the layers that the states leave, as engines do.
    """
    if left := getattr(config, "target_layer_ids", None):
        return tuple(layer + 1 for layer in left)
    return tuple(getattr(config, "eagle_aux_hidden_state_layer_ids", None) or [config.num_target_layers])


class DraftHead(nn.Module):
    """What all heads on a target's hidden states have: which states they read, and which tokens they draft.

    Attributes:
        config: shape, and the states that are read: see `captured_layers`.
        version: 1 or 3 of EAGLE, ``dflash``, ``dspark``, or ``mtp`` of a target's own next-token layers.
        drafts: most tokens of a draft; None: any number.
        captured_layers: the target's states whose concatenation is the feature.
    """

    d2t: Tensor  # of a reduced vocabulary: how much is added to an id of the head
    version: int | str
    drafts: int | None = None
    kind = "eagle"  # by which methods choose it (`decode.methods.DRAFTS`)

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = config
        self.captured_layers = captured_layers(config)

    def _add_table(self) -> None:
        """The table of a reduced vocabulary, which drafts the first ids until `set_vocabulary` is called."""
        self.register_buffer("d2t", torch.zeros(self.config.draft_vocab_size, dtype=torch.long))

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

    def tensors(self) -> dict[str, Tensor]:
        """The head's tensors as they are named in files.

        The vocabulary's tables are among them only where the head drafts some of the target's tokens: vLLM makes no
        parameter for them where the vocabularies are equal. ``t2d`` says which ids are drafted.
        """
        ids, state = self.draft_ids(), self.state_dict()
        if ids is None:
            return state
        return state | {"t2d": torch.zeros(self.config.vocab_size, dtype=torch.bool).index_fill(0, ids.cpu(), True)}

    def fields(self) -> Fields:
        """The head's config.json, as vLLM and SGLang read it."""
        return self.config.to_dict()


class FeatureHead(DraftHead):
    """An EAGLE-1 or EAGLE-3 head, without what it shares with the target (embedding, EAGLE-1's output head).

    Attributes:
        version: 1 or 3.
        normed_states: whether states are normed before the next step reads them, not only before the output head.
        normed_residual: whether the residual of EAGLE-3's layer is its normed input.
        embed_tokens: an embedding of the head's own, where its file has one.
        owns_embedding: whether that is another one than the target's.
    """

    version: int
    owns_embedding = False

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config)
        self.version = 3 if config.architectures[0] == ARCHITECTURES[3] else 1
        self.embed_tokens: nn.Embedding | None = None
        self.normed_states = getattr(config, "norm_output", False)
        self.normed_residual = getattr(config, "norm_before_residual", False)
        width, eps = config.hidden_size, config.rms_norm_eps
        self.rotary, qk_norm = LlamaRotaryEmbedding(config), bool(getattr(config, "qk_norm", False))
        if self.version == 1:
            self.fc = nn.Linear(2 * width, width)
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
        if self.reduced:
            self._add_table()

    @property
    def layer(self) -> Any:
        """The decoder layer."""
        return self.layers[0] if self.version == 1 else self.midlayer

    def fuse(self, features: Tensor, fc: Function) -> Tensor:
        """Target features ``[..., feature width]`` as the states that the layer continues, ``[..., hidden]``.

        `fc` is the module of this name, or a runner's product with its weight; so are the `parts` of `pairs`.
        """
        if self.version == 1:
            return features
        if hasattr(self, "input_norm"):
            features = self.input_norm(features)
        if hasattr(self, "fc_norm"):
            parts = features.chunk(len(self.fc_norm), -1)
            features = torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts)], -1)
        return fc(features)

    @property
    def parts(self) -> tuple[Any, ...]:
        """The modules that `pairs` reads: EAGLE-1's ``fc``, or EAGLE-3's norms of embedding and state."""
        return (self.fc,) if self.version == 1 else (self.layer.input_layernorm, self.layer.hidden_norm)

    def pairs(self, embeds: Tensor, states: Tensor, parts: Sequence[Function]) -> tuple[Tensor, Tensor]:
        """What the layer adds to, and what its attention reads, from embeddings of tokens and states before them."""
        if self.version == 1:
            x = parts[0](torch.cat([embeds, states], -1))
            return x, x
        normed = parts[1](states)
        return normed if self.normed_residual else states, torch.cat([parts[0](embeds), normed], -1)

    def fields(self) -> Fields:
        """See `DraftHead.fields`."""
        fields = super().fields()
        if entered := fields.get("eagle_aux_hidden_state_layer_ids"):
            left = [layer - 1 for layer in entered]  # as SGLang counts them
            fields["eagle_config"] = {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": left}
        return fields

    def output(self, states: Tensor) -> Tensor:
        """States as the output head reads them."""
        return states if self.version == 1 or self.normed_states else self.norm(states)

    def logits(self, states: Tensor, target_head: Any) -> Tensor:
        """Logits ``[..., draft vocab]`` of states, by the target's head (EAGLE-1) or the head's own."""
        return (target_head if self.version == 1 else self.lm_head)(self.output(states))

    def unroll(self, embeds: Tensor, features: Tensor, steps: int, rows: Tensor | None = None) -> Iterator[Tensor]:
        """States of several drafting steps from every position of texts (EAGLE-3's training-time test).

        Step s at position t predicts token t + 2 + s. It attends to the text's pairs up to t, and to the pairs of its
        own steps.

        Args:
            embeds: embedding of token t + 1, ``[batch, time, width]``.
            features: feature of token t, ``[batch, time, feature width]``.
            steps: drafting steps; 1 is teacher forcing with true features.
            rows: the positions to start from, among all of the batch's, ascending, ``[rows]``; None: all.

        Yields:
            For each step the states ``[rows, hidden]``, or ``[batch, time, hidden]`` without `rows`. Where position t
            would need tokens past the end they are undefined.
        """
        layer, grid, count = self.layer, embeds.shape[:2], embeds.shape[:2].numel()
        embeds, hidden = embeds.flatten(0, 1), self.fuse(features, self.fc).flatten(0, 1)
        every = torch.arange(count, device=embeds.device)
        wanted = every if rows is None else rows

        def spread(values: Tensor) -> Tensor:
            """Puts ``values [rows, heads, d]`` at their places in ``[batch, heads, time, d]``, with zeros elsewhere.

            Key heads are repeated for the query heads that share them.
            """
            if len(values) < count:
                values = values.new_zeros(count, *values.shape[1:]).index_copy(0, wanted, values)
            group = self.config.num_attention_heads // values.shape[1]
            values = values.repeat_interleave(group, 1) if group > 1 else values
            return values.unflatten(0, grid).transpose(1, 2)

        seen = []  # keys and values in turn: the text's, then those of each step
        for step in range(steps):
            places = wanted if step else every  # the first step reads all pairs of the text
            e = embeds.index_select(0, (places + step).clamp_max(count - 1)) if step else embeds
            x, y = self.pairs(e, hidden, self.parts)
            turn = [factors[0] for factors in self.rotary(x, position_ids=(places % grid[1] + step)[None])]
            seen += [spread(layer.heads("k", y, turn)), spread(layer.heads("v", y))]
            if len(wanted) < len(x):
                x, y, *turn = (values.index_select(0, wanted) for values in (x, y, *turn))
            attended = attend(spread(layer.heads("q", y, turn)), *seen).transpose(1, 2).flatten(0, 1)
            hidden = layer.finish(x, attended if len(wanted) == count else attended.index_select(0, wanted))
            hidden = self.norm(hidden) if self.normed_states else hidden
            yield hidden.unflatten(0, grid) if rows is None else hidden


# -- its attention in training -----------------------------------------------------------------------------------------


class _TextAttention(torch.autograd.Function):
    """Causal flash attention ``[batch, heads, time, d]`` and its log-sum-exps ``[batch, heads, time]``."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        if q.is_cuda:
            kernel = torch.ops.aten._scaled_dot_product_efficient_attention
            out, sums, *_ = kernel(q, k, v, None, True, 0.0, True, scale=scale)
        else:
            out, sums = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, True, scale=scale)
        ctx.save_for_backward(q, k, v, out, sums)
        ctx.scale = scale
        return out, sums[..., : q.shape[2]]

    @staticmethod
    def backward(ctx: Any, grad: Tensor, of_sums: Tensor) -> tuple[Tensor | None, ...]:
        """The kernels subtract grad · out from the gradient of scores, to which that of a log-sum-exp is to be added.

        So they get an output that is moved along the gradient by as much.
        """
        q, k, v, out, sums = ctx.saved_tensors
        moved = of_sums / grad.to(of_sums.dtype).square().sum(-1).clamp_min(torch.finfo(of_sums.dtype).tiny)
        out = out - moved[..., None].to(grad.dtype) * grad
        if q.is_cuda:
            seed = torch.zeros((), dtype=torch.long)  # of dropout, which is 0
            kernel, rest = torch.ops.aten._scaled_dot_product_efficient_attention_backward, [[True] * 3 + [False], True]
            grads = kernel(grad, q, k, v, None, out, sums, seed, seed, 0.0, *rest, scale=ctx.scale)
        else:
            kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
            grads = kernel(grad, q, k, v, out, sums, 0.0, True, scale=ctx.scale)
        return *grads[:3], None


def attend(q: Tensor, k: Tensor, v: Tensor, *chain: Tensor) -> Tensor:
    """Attention of every position to the text up to itself, and to keys of its own, ``[batch, heads, time, d]``.

    Masked attention over all keys takes 1.4 to 1.8 times as long a training step of seven steps (CPU, 256 to 1,024
    tokens). All arguments have the shape of the queries; `chain` has keys and values in turn, one of each for every
    query.
    """
    d, scale = q.shape[-1], q.shape[-1] ** -0.5
    # of a width that is a multiple of eight, which CUDA's kernel needs
    out, sums = _TextAttention.apply(*(F.pad(x, (0, -d % 8)) if d % 8 else x for x in (q, k, v)), scale)
    wide = q.to(sums.dtype)
    scores = torch.stack([sums, *((wide * key).sum(-1) * scale for key in chain[::2])])
    weights = scores.softmax(0)[..., None]
    out = weights[0] * out[..., :d]
    for weight, value in zip(weights[1:], chain[1::2], strict=True):
        out = out + weight * value
    return out.to(q.dtype)


# -- its output --------------------------------------------------------------------------------------------------------


def finish_of(model: PreTrainedModel) -> tuple[float, float | None]:
    """The factor (Cohere, Granite) and the soft cap (Gemma) that follow a target's output head."""
    fields = vars(model.config.get_text_config())
    factor = float(fields.get("logit_scale") or 1.0) / float(fields.get("logits_scaling") or 1.0)
    return factor, fields.get("final_logit_softcapping")


def finished(products: Tensor, factor: float = 1.0, cap: float | None = None) -> Tensor:
    """The logits that products with an output head become; they have the same order."""
    logits = products if factor == 1.0 else products * factor
    return torch.tanh(logits / cap) * cap if cap else logits


def output_head(model: PreTrainedModel, ids: Tensor | None = None, *, block: bool = False) -> Any:
    """The target's output head, which EAGLE-1 and block heads share, restricted to these ids (None: all).

    Raises:
        UserError: a head that is more than a linear layer; for an EAGLE-1 head also one that `finished` follows.
    """
    head = model.get_output_embeddings()
    if type(head) is not nn.Linear or not (block or finish_of(model) == (1.0, None)):
        kind, other = ("a block head", "EAGLE-3") if block else ("an EAGLE-1 head", "EAGLE-3 or a block head")
        raise UserError(
            f"{type(model).__name__} changes its logits after the head, so {kind} cannot share it; use {other}"
        )
    return head if ids is None else some_outputs(head, ids)


@torch.no_grad()
def some_outputs(linear: nn.Linear, ids: Tensor) -> nn.Linear:
    """A frozen linear layer with copies of these outputs of another one."""
    part = nn.Linear(linear.in_features, len(ids), linear.bias is not None, device="meta")
    for name, values in linear.named_parameters():
        setattr(part, name, nn.Parameter(values[ids.to(values.device)], requires_grad=False))
    return part


def draft_ids(draft: PreTrainedModel | DraftHead) -> Tensor | None:
    """The target's ids that a draft drafts, ascending, of a draft model by its configuration; None: all of them."""
    if isinstance(draft, DraftHead):
        return draft.draft_ids()
    ids = getattr(draft.config, "draft_ids", None)
    return ids and torch.tensor(ids, device=draft.device)


# -- configuration ----------------------------------------------------------------------------------------------------


def default_captured_layers(layers: int) -> tuple[int, ...]:
    """EAGLE-3's low, middle and high states: those that enter layers 2, L/2 and L − 3, as the engines take them.

    Targets in which these are not three different ones get the first, the middle and the last state between layers.

    Raises:
        UserError: a target of one layer.
    """
    if layers < 2:
        raise UserError(f"EAGLE-3 reads states between layers, and a target of {layers} layer has none")
    if layers > 6:
        return 2, layers // 2, layers - 3
    return (1, layers // 2, layers - 1) if layers > 3 else tuple(range(layers))


TAKEN = (
    "intermediate_size", "num_attention_heads", "num_key_value_heads", "vocab_size", "max_position_embeddings",
    "rms_norm_eps", "bos_token_id", "eos_token_id", "pad_token_id",
)  # fmt: skip


def shape_of(target: Any) -> Fields:
    """What the configurations of all heads take from a target's.

    Where its layers differ it is the last one's; a target without attention gets heads of 64 elements.
    """
    layer, width = target.per_layer_config[-1], target.hidden_size
    given = {name: getattr(layer, name, None) for name in TAKEN}
    heads = given["num_attention_heads"] or max(1, width // 64)
    head_dim = getattr(layer, "head_dim", None) or width // heads
    rope = getattr(target, "rope_parameters", None) or {}
    return given | {
        "hidden_size": width,
        "target_hidden_size": width,
        "intermediate_size": given["intermediate_size"] or 4 * width,
        "num_attention_heads": heads,
        "num_key_value_heads": given["num_key_value_heads"] or heads,
        "head_dim": head_dim + head_dim % 2,  # rotation takes pairs of elements
        "max_position_embeddings": given["max_position_embeddings"] or 2048,
        "rms_norm_eps": given["rms_norm_eps"] or 1e-6,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": rope.get("full_attention", rope).get("rope_theta") or 10000.0,
        },
        "tie_word_embeddings": False,
    }


def head_config(
    target: Any, version: int, *, draft_vocab: int | None = None, captured_layers: Sequence[int] = (),
    norms: bool = False,
) -> LlamaConfig:  # fmt: skip
    """The configuration of a head of the target's shape; what is not given is the target's, or as published.

    `norms`: EAGLE-3.1's switches (2605.09992).
    """
    layers = target.num_hidden_layers
    drafted = min(draft_vocab or target.vocab_size, target.vocab_size)
    entered = list(captured_layers or default_captured_layers(layers)) if version == 3 else None
    return LlamaConfig(
        **shape_of(target),
        architectures=[ARCHITECTURES[version]],
        num_hidden_layers=1,
        num_target_layers=layers,
        draft_vocab_size=drafted if version == 3 else None,
        eagle_aux_hidden_state_layer_ids=entered,
        **(dict.fromkeys(NORMS, True) if norms and version == 3 else {}),
        # no key "bias": EAGLE-1's fc has one in any case, and engines would make biases of the attention for it
    )
