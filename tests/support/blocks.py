"""Block heads with random weights, and the plain twin of their forward: one block of one text, position by position."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from decode.models.block_head import BlockHead, block_config


def make_block_head(target: PreTrainedModel, version: str = "dspark", seed: int = 3, **shape: Any) -> BlockHead:
    """A random head on the target, whose vocabulary is the whole one unless `shape` says otherwise."""
    spark = version == "dspark"
    given = {"layers": 2, "block": 4, "mask_id": 0, "markov_rank": 3 * spark, "confidence": spark} | shape
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        head = BlockHead(block_config(target.config.get_text_config(), version, **given))
        for name, weight in head.named_parameters():  # norms and the bias by the token before are no identity
            weight += (1.0 if "markov_w2" in name else 0.2) * torch.randn_like(weight)
        if head.reduced:
            head.set_vocabulary(torch.arange(0, 2 * head.config.draft_vocab_size, 2))
    return head.to(target.dtype).eval()


def _norm(x: Tensor, module: Any) -> Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + module.variance_epsilon).sqrt() * module.weight


@torch.no_grad()
def plain_block(head: BlockHead, target: PreTrainedModel, ids: list[int], drafts: int) -> tuple[Tensor, Tensor]:
    """Logits ``[drafts, draft vocab]`` without a bias, and states ``[drafts, width]``, of a block after a text.

    The last id is the anchor; attention is written out, one slot and one head at a time.
    """
    states = target(input_ids=torch.tensor([ids]), output_hidden_states=True).hidden_states
    p, d, config = len(ids) - 1, head.config.head_dim, head.config
    features = torch.cat([states[layer][0, :p] for layer in head.captured_layers], -1)
    slots = drafts if head.from_anchor else drafts + 1
    tokens = [ids[-1]] + [head.mask_id] * (slots - 1)
    x = target.get_input_embeddings().weight[torch.tensor(tokens)]
    context = _norm(features @ head.fc.weight.T, head.hidden_norm)
    theta = config.rope_parameters["rope_theta"] ** (-torch.arange(0, d, 2, dtype=x.dtype) / d)

    def turned(vector: Tensor, at: int) -> Tensor:
        a, b = vector[: d // 2], vector[d // 2 :]
        cos, sin = (at * theta).cos(), (at * theta).sin()
        return torch.cat([a * cos - b * sin, b * cos + a * sin])

    layer: Any
    for layer in head.layers:
        attention, y = layer.self_attn, _norm(x, layer.input_layernorm)
        both, out = torch.cat([context, y]), torch.zeros(slots, config.num_attention_heads * d, dtype=x.dtype)
        group = config.num_attention_heads // config.num_key_value_heads
        for slot in range(slots):
            for i in range(config.num_attention_heads):
                rows = slice(i // group * d, (i // group + 1) * d)
                q = turned(_norm(attention.q_proj.weight[i * d : (i + 1) * d] @ y[slot], attention.q_norm), p + slot)
                keys = [
                    turned(_norm(attention.k_proj.weight[rows] @ one, attention.k_norm), at)
                    for at, one in enumerate(both)
                ]
                weights = (torch.stack(keys) @ q / d**0.5).softmax(0)
                out[slot, i * d : (i + 1) * d] = weights @ (both @ attention.v_proj.weight[rows].T)
        x = x + out @ attention.o_proj.weight.T
        z = _norm(x, layer.post_attention_layernorm)
        gate = z @ layer.mlp.gate_proj.weight.T
        x = x + (gate * gate.sigmoid() * (z @ layer.mlp.up_proj.weight.T)) @ layer.mlp.down_proj.weight.T
    hidden = _norm(x, head.norm)[0 if head.from_anchor else 1 :]
    output, kept = target.get_output_embeddings().weight, head.draft_ids()
    return hidden @ (output if kept is None else output[kept]).T, hidden
