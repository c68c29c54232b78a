"""Feature heads: one decoder layer that continues the target's hidden states (EAGLE 2401.15077, EAGLE-3 2503.01840).

A head reads pairs (feature of token t, embedding of token t + 1), and its state at t predicts token t + 2; fed back as
the feature of t + 1 it predicts on. EAGLE-1's feature is the target's last hidden state, and the target's own head
turns states into logits. EAGLE-3 fuses a low, a middle and a high state, and has a norm and a head of its own over a
reduced vocabulary. Parameters are named as in the published checkpoints, so a state dict is a file's content.
"""

from collections.abc import Generator, Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaConfig, PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from decode.core.errors import UserError
from decode.models.eagle.unrolled_drafting import unroll

VERSIONS = {"LlamaForCausalLMEagle": 1, "LlamaForCausalLMEagle3": 3}  # what config.json calls the two kinds


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
        width, inner, d = config.hidden_size, config.intermediate_size, config.head_dim
        into, eps = width if version == 1 else 2 * width, config.rms_norm_eps
        self.self_attn, self.mlp = nn.Module(), nn.Module()
        self.self_attn.q_proj = nn.Linear(into, config.num_attention_heads * d, bias=False)
        self.self_attn.k_proj = nn.Linear(into, config.num_key_value_heads * d, bias=False)
        self.self_attn.v_proj = nn.Linear(into, config.num_key_value_heads * d, bias=False)
        self.self_attn.o_proj = nn.Linear(config.num_attention_heads * d, width, bias=False)
        self.mlp.gate_proj = nn.Linear(width, inner, bias=False)
        self.mlp.up_proj = nn.Linear(width, inner, bias=False)
        self.mlp.down_proj = nn.Linear(inner, width, bias=False)
        if version == 3:
            self.input_layernorm, self.hidden_norm = RMSNorm(width, eps), RMSNorm(width, eps)
        self.post_attention_layernorm = RMSNorm(width, eps)


class FeatureHead(nn.Module):
    """An EAGLE-1 or EAGLE-3 head; what it shares with the target (embedding, EAGLE-1's output head) is not in it.

    Attributes:
        captured_layers: indices into the target's hidden states whose concatenation is the feature: i is the state
            that enters layer i, and the number of layers stands for the last one, after the final norm.

    Args:
        config: shape, `version` and `captured_layers` (see `head_config`).
    """

    d2t: Tensor
    t2d: Tensor

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config = config
        self.version = VERSIONS[config.architectures[0]]  # 1 or 3
        self.captured_layers: tuple[int, ...] = tuple(config.captured_layers)
        self.embed_tokens: nn.Embedding | None = None  # an embedding of the head's own, where its file brought one
        width = config.hidden_size
        self.rotary = LlamaRotaryEmbedding(config)
        if self.version == 1:
            self.fc = nn.Linear(2 * width, width, bias=bool(getattr(config, "bias", True)))
            self.layers = nn.ModuleList([HeadLayer(config, 1)])
            if self.reduced:
                self._add_vocabulary()
            return
        self.fc = nn.Linear(len(self.captured_layers) * config.target_hidden_size, width, bias=False)
        self.midlayer = HeadLayer(config, 3)
        self.norm = RMSNorm(width, config.rms_norm_eps)
        self.lm_head = nn.Linear(width, config.draft_vocab_size, bias=False)
        self._add_vocabulary()

    def _add_vocabulary(self) -> None:
        self.register_buffer("d2t", torch.zeros(self.config.draft_vocab_size, dtype=torch.long))
        self.register_buffer("t2d", torch.arange(self.config.vocab_size) < self.config.draft_vocab_size)

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
        if not self.reduced:
            return None
        return torch.arange(len(self.d2t), device=self.d2t.device) + self.d2t

    def set_vocabulary(self, ids: Tensor) -> None:
        """Draft these target ids only (long, ascending, as many as the head has logits)."""
        self.d2t.copy_(ids - torch.arange(len(ids)))
        self.t2d.zero_()[ids] = True

    # -- training ------------------------------------------------------------------------------------------------

    def fuse(self, features: Tensor) -> Tensor:
        """Target features ``[..., feature width]`` as the states that the layer continues, ``[..., hidden]``."""
        return features if self.version == 1 else cast(Tensor, self.fc(features))

    def enter(self, embeds: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """What the layer adds to, and what its attention reads, of pairs ``[rows, width]`` each."""
        if self.version == 1:
            x = self.fc(torch.cat([embeds, hidden], -1))
            return x, x
        layer = self.layer
        return hidden, torch.cat([layer.input_layernorm(embeds), layer.hidden_norm(hidden)], -1)

    def leave(self, x: Tensor, attended: Tensor) -> Tensor:
        """The layer's states ``[rows, hidden]`` from what its attention found, ``[rows, heads · d]``."""
        layer = self.layer
        x = x + layer.self_attn.o_proj(attended)
        m, z = layer.mlp, layer.post_attention_layernorm(x)
        return x + m.down_proj(F.silu(m.gate_proj(z)) * m.up_proj(z))

    def unroll(
        self, embeds: Tensor, features: Tensor, steps: int, rows: Tensor | None = None
    ) -> Generator[Tensor, Tensor | None, None]:
        """See `unrolled_drafting.unroll`; without ``rows`` from every position, ``[batch, time, hidden]``."""
        if rows is not None:
            yield from unroll(self, embeds, features, steps, rows)
            return
        whole = torch.ones(embeds.shape[:2], dtype=torch.bool, device=embeds.device)
        for states in unroll(self, embeds, features, steps, whole):
            yield states.unflatten(0, embeds.shape[:2])

    def logits(self, states: Tensor, target_head: Any) -> Tensor:
        """Logits ``[..., draft vocab]`` of states, by the target's head (EAGLE-1) or the head's own."""
        logits: Tensor = target_head(states) if self.version == 1 else self.lm_head(self.norm(states))
        return logits


def output_head(model: PreTrainedModel, ids: Tensor | None = None) -> Any:
    """The target's head, which EAGLE-1 shares, with the logits of these ids only (None: of all).

    Raises:
        UserError: a head that is more than a linear layer.
    """
    config, head = model.config.get_text_config(), model.get_output_embeddings()
    extra = [n for n in ("logit_scale", "logits_scaling", "final_logit_softcapping") if getattr(config, n, None)]
    if extra or type(head) is not nn.Linear:
        raise UserError(
            f"{type(model).__name__} changes its logits behind the head ({', '.join(extra) or type(head).__name__}), "
            "so an EAGLE-1 head cannot share it; use EAGLE-3"
        )
    return head if ids is None else some_outputs(head, ids)


@torch.no_grad()
def some_outputs(linear: nn.Linear, ids: Tensor) -> nn.Linear:
    """A frozen linear layer that has copies of these outputs of another one alone."""
    part = nn.Linear(1, 1, bias=linear.bias is not None)
    part.in_features, part.out_features = linear.in_features, len(ids)
    part.weight = nn.Parameter(linear.weight[ids.to(linear.weight.device)], requires_grad=False)
    if linear.bias is not None:
        part.bias = nn.Parameter(linear.bias[ids.to(linear.bias.device)], requires_grad=False)
    return part


def rows_of_states(
    head: FeatureHead, shared: Any, vocab: int, states: Tensor, text: tuple[Sequence[int], int], depth: int
) -> Tensor:
    """What a head drafts at each response position of one text, from its states there.

    Args:
        head: the feature head.
        shared: EAGLE-1's output head.
        vocab: the target's vocabulary size.
        states: at each token of the text, ``[time, hidden]``; state t predicts token t + 1 + depth.
        text: token ids, and how many of them are the prompt.
        depth: the drafted token asked about: 1 is drafted from true features, the next ones from the head's own
            states with the text's true tokens.

    Returns:
        Logits ``[response, vocab]`` in the target's vocabulary. The first tokens of a text, which no pair precedes, get
        an impossible row (all −inf but the first id).
    """
    ids, start = text
    first = max(0, start - 1 - depth)  # rows of the text are needed from `start` on
    found = head.logits(states[first : max(first, len(ids) - 1 - depth)], shared)
    rows = found.new_full((len(ids) - start, vocab), -torch.inf)
    place = head.draft_ids()
    place = torch.arange(found.shape[-1], device=found.device) if place is None else place
    missing = len(rows) - len(found)
    rows[missing:] = rows[missing:].index_copy(1, place, found)
    rows[:missing, 0] = 0.0
    return rows
