"""Tiny random models of every family that tests decode with."""

from __future__ import annotations

import copy
import types
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, PreTrainedModel

VOCAB, WIDTH, CONTEXT = 48, 32, 64

_LLAMA: dict[str, Any] = {
    "hidden_size": WIDTH,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": CONTEXT,
    "tie_word_embeddings": False,
}
_ROTARY = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", _LLAMA),
    "llama-mha": ("llama", _LLAMA | {"num_key_value_heads": 4, "attention_bias": True, "mlp_bias": True}),
    "llama-tied": ("llama", _LLAMA | {"tie_word_embeddings": True}),
    "mistral": ("mistral", _LLAMA | {"sliding_window": 6}),
    "qwen2": ("qwen2", _LLAMA | {"tie_word_embeddings": True}),
    "qwen2-sliding": (
        "qwen2",
        _LLAMA | {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1},
    ),
    "qwen3": ("qwen3", _LLAMA | {"head_dim": 16}),
    "gemma2": (
        "gemma2",
        _LLAMA | {"head_dim": 8, "sliding_window": 6, "query_pre_attn_scalar": 8, "tie_word_embeddings": True},
    ),
    "gemma3": (
        "gemma3_text",
        _LLAMA
        | {"head_dim": 8, "sliding_window": 6, "query_pre_attn_scalar": 5, "tie_word_embeddings": True}
        | {"sliding_window_pattern": 2},
    ),
    "phi": ("phi", _LLAMA | {"rope_parameters": _ROTARY}),
    "gpt_neox": ("gpt_neox", _LLAMA | {"use_parallel_residual": True, "rope_parameters": _ROTARY}),
    "gpt_neox-sequential": ("gpt_neox", _LLAMA | {"use_parallel_residual": False, "rope_parameters": _ROTARY}),
    "codegen": (
        "codegen",
        {"n_embd": WIDTH, "n_layer": 2, "n_head": 4, "n_positions": CONTEXT, "n_ctx": CONTEXT, "rotary_dim": 4},
    ),
    "gpt2": ("gpt2", {"n_embd": WIDTH, "n_layer": 2, "n_head": 4, "n_positions": CONTEXT}),
    "opt": (
        "opt",
        {
            "hidden_size": WIDTH,
            "ffn_dim": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "max_position_embeddings": CONTEXT,
            "word_embed_proj_dim": WIDTH,
        },
    ),
}

NOT_REPRODUCED = {"gemma2", "codegen", "gpt2", "opt"}
"""Families without a hand-written forward."""
RUNNER_PATHS = [(f, fast) for f in FAMILIES for fast in (True, False) if not (fast and f in NOT_REPRODUCED)]
"""Every family through every runner that serves it."""


@torch.inference_mode(False)
def build_tiny(family: str, *, seed: int = 1, dtype: torch.dtype = torch.float32, **config: Any) -> PreTrainedModel:
    """A random two-layer model of a family of `FAMILIES`; weights are large, so that its output is varied.

    Args:
        family: key of `FAMILIES`.
        seed: of the weights.
        dtype: of the weights.
        config: changes to the configuration, ``vocab_size`` among them.
    """
    kind, settings = FAMILIES[family]
    settings = {"vocab_size": VOCAB, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None} | settings
    generator = torch.Generator().manual_seed(seed)
    model = AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(kind, **settings | config)).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            noise = torch.randn(weight.shape, generator=generator)
            if weight.ndim == 1:  # biases around 0, norms around 1
                weight.copy_(("bias" not in name) + 0.1 * noise)
            else:  # small embeddings, so that tied heads do not simply repeat the last token
                weight.copy_(noise * (0.1 if "emb" in name or "wte" in name else 0.6))
    return model.to(dtype)


def in_double(model: PreTrainedModel) -> PreTrainedModel:
    """Transformers computes RMS norms in float32 whatever the model; their rounding would blur the distribution."""

    def norm(self: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
        return self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)

    def gemma(self: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
        return (1 + self.weight) * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)

    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm"):
            module.forward = types.MethodType(norm if hasattr(module, "variance_epsilon") else gemma, module)
    return model


def resembling(model: PreTrainedModel, noise: float) -> PreTrainedModel:
    """A draft that agrees with the model: about half of the time at a noise of 0.15."""
    draft = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in draft.parameters():
            weight += (
                noise * weight.std().nan_to_num() * torch.randn(weight.shape, generator=generator, dtype=weight.dtype)
            )
    return draft
