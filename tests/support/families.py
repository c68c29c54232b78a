"""Tiny random models of many architectures, in one table; such that also read images; such with next-token layers."""

import copy
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from noise import jitter
from safetensors.torch import load_file, save_file
from torch import Generator, Tensor, nn
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_MULTIMODAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedModel,
)
from transformers.modeling_layers import MtpModel

from decode.models.heads.mtp import MtpHead
from decode.models.open import load_model

VOCAB, WIDTH, CONTEXT, WINDOW = 48, 32, 64, 6

# fmt: off
_LLAMA: dict[str, Any] = {"hidden_size": WIDTH, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": CONTEXT,
    "tie_word_embeddings": False}
_GPT = {"n_embd": WIDTH, "n_layer": 2, "n_head": 4, "n_positions": CONTEXT}
_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
_PARTIAL = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
_GEMMA = {"head_dim": 8, "query_pre_attn_scalar": 8, "tie_word_embeddings": True}
_WINDOWED = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]}
_LONG = {"short_factor": [1.0] * 4, "long_factor": [4.0] * 4, "original_max_position_embeddings": 16}
_LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 16}
_ALTERNATING = ["linear_attention", "full_attention", "linear_attention"]
_SHARED_BLOCK = ["linear_attention", "hybrid", "linear_attention", "hybrid"]
_DELTA = {"head_dim": 8, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8,
    "linear_value_head_dim": 8}
_DELTA_EXPERTS = _DELTA | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16}
_ZAMBA2 = _LLAMA | {"num_hidden_layers": 4, "layers_block_type": _SHARED_BLOCK, "num_key_value_heads": 4,
    "chunk_size": 8, "mamba_d_state": 4, "n_mamba_heads": 4, "num_mem_blocks": 1, "use_mem_rope": True,
    "use_shared_attention_adapter": True, "adapter_rank": 4, "tie_word_embeddings": True}
_NEMOTRON = _LLAMA | {"layers_block_type": ["linear_attention", "moe", "full_attention", "mlp", "linear_attention"],
    "num_hidden_layers": 5, "head_dim": 8, "mamba_num_heads": 4, "mamba_head_dim": 8, "n_groups": 2,
    "ssm_state_size": 4, "chunk_size": 8, "n_routed_experts": 4, "moe_intermediate_size": 16,
    "moe_shared_expert_intermediate_size": 16}
_LATENT = {"num_key_value_heads": 4, "kv_lora_rank": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
_SHARED_EXPERTS = {"moe_intermediate_size": 16, "n_routed_experts": 4, "n_shared_experts": 1,
    "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1}
_INDEXED = _LLAMA | _LATENT | _SHARED_EXPERTS | {"q_lora_rank": 16, "index_topk": 4, "index_head_dim": 16,
    "index_n_heads": 16}
# fmt: on


def _rope(kind: str, **settings: Any) -> dict[str, Any]:
    return _LLAMA | {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0} | settings}


ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama": ("llama", _LLAMA),
    "Llama, biases": ("llama", _LLAMA | {"attention_bias": True, "mlp_bias": True}),
    "Llama, tied head": ("llama", _LLAMA | {"tie_word_embeddings": True}),
    "Llama, rope linear": ("llama", _rope("linear", factor=3.0)),
    "Llama, rope dynamic": ("llama", _rope("dynamic", factor=2.0)),
    "Llama, rope llama3": ("llama", _rope("llama3", **_LLAMA3)),
    "Llama, rope yarn": ("llama", _rope("yarn", factor=2.0, original_max_position_embeddings=32)),
    "Llama 4": ("llama4_text", _LLAMA | _EXPERTS | {"intermediate_size_mlp": 48, "head_dim": 8,
        "attention_chunk_size": 8, "no_rope_layers": [1, 0], "attn_temperature_tuning": False}),
    "Llama 4, temperature tuning": ("llama4_text", _LLAMA | _EXPERTS | {"intermediate_size_mlp": 48, "head_dim": 8,
        "attention_chunk_size": 8, "attn_temperature_tuning": True}),
    "Mistral": ("mistral", _LLAMA | {"sliding_window": WINDOW}),
    "Mixtral": ("mixtral", _LLAMA | _EXPERTS | {"sliding_window": WINDOW}),
    "Qwen2": ("qwen2", _LLAMA | {"tie_word_embeddings": True}),
    "Qwen2, sliding window": ("qwen2", _LLAMA | {"use_sliding_window": True, "sliding_window": WINDOW,
        "max_window_layers": 1}),
    "Qwen3": ("qwen3", _LLAMA | {"head_dim": 16}),
    "Qwen3-MoE": ("qwen3_moe", _LLAMA | {"head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2,
        "moe_intermediate_size": 16}),
    "Gemma": ("gemma", _LLAMA | _GEMMA),
    "Gemma 2": ("gemma2", _LLAMA | _GEMMA | {"sliding_window": WINDOW}),
    "Gemma 3": ("gemma3_text", _LLAMA | _GEMMA | _WINDOWED),
    "Phi": ("phi", _LLAMA | {"rope_parameters": _PARTIAL}),
    "Phi-3": ("phi3", _LLAMA | {"sliding_window": WINDOW}),
    "Phi-3, rope longrope": ("phi3", _rope("longrope", **_LONG) | {"original_max_position_embeddings": 16,
        "sliding_window": None}),
    "StarCoder2": ("starcoder2", _LLAMA | {"sliding_window": WINDOW}),
    "GPT-2": ("gpt2", _GPT),
    "GPT-J": ("gptj", _GPT | {"rotary_dim": 4}),
    "CodeGen": ("codegen", _GPT | {"n_ctx": CONTEXT, "rotary_dim": 4}),
    "GPT-NeoX": ("gpt_neox", _LLAMA | {"rope_parameters": _PARTIAL}),
    "GPT-Neo": ("gpt_neo", {"hidden_size": WIDTH, "num_layers": 2, "num_heads": 4, "intermediate_size": 48,
        "max_position_embeddings": CONTEXT, "attention_types": [[["global", "local"], 1]], "window_size": WINDOW}),
    "OPT": ("opt", {"hidden_size": WIDTH, "ffn_dim": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
        "max_position_embeddings": CONTEXT, "word_embed_proj_dim": WIDTH}),
    "BLOOM": ("bloom", {"hidden_size": WIDTH, "n_layer": 2, "n_head": 4}),
    "MPT": ("mpt", {"d_model": WIDTH, "n_layers": 2, "n_heads": 4, "max_seq_len": CONTEXT, "expansion_ratio": 2}),
    "Falcon": ("falcon", {"hidden_size": WIDTH, "num_hidden_layers": 2, "num_attention_heads": 4, "alibi": False,
        "multi_query": True, "new_decoder_architecture": False, "max_position_embeddings": CONTEXT}),
    "Falcon, ALiBi": ("falcon", {"hidden_size": WIDTH, "num_hidden_layers": 2, "num_attention_heads": 4,
        "alibi": True, "multi_query": False}),
    "StableLM": ("stablelm", _LLAMA | {"rope_parameters": _PARTIAL}),
    "OLMo": ("olmo", _LLAMA),
    "OLMo 2": ("olmo2", _LLAMA),
    "Granite": ("granite", _LLAMA | {"logits_scaling": 2.0, "residual_multiplier": 0.5}),
    "SmolLM3": ("smollm3", _LLAMA | {"no_rope_layers": [1, 0], "use_sliding_window": False}),
    "DeepSeek-V3": ("deepseek_v3", _LLAMA | _LATENT | _SHARED_EXPERTS | {"q_lora_rank": 16}),
    "Cohere": ("cohere", _LLAMA | {"tie_word_embeddings": True}),
    "Cohere 2": ("cohere2", _LLAMA | _WINDOWED | {"tie_word_embeddings": True}),
    "GPT-OSS": ("gpt_oss", _LLAMA | _EXPERTS | _WINDOWED | {"head_dim": 8}),
    "BART decoder": ("bart", {"d_model": WIDTH, "decoder_layers": 2, "decoder_attention_heads": 4,
        "decoder_ffn_dim": 48, "is_decoder": True, "max_position_embeddings": CONTEXT, "is_encoder_decoder": False,
        "num_hidden_layers": 2, "forced_eos_token_id": None}),
    "BERT": ("bert", {"hidden_size": WIDTH, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48,
        "max_position_embeddings": CONTEXT}),
    "Mamba": ("mamba", {"hidden_size": WIDTH, "num_hidden_layers": 2, "state_size": 4}),
    "Mamba-2": ("mamba2", {"hidden_size": WIDTH, "num_hidden_layers": 2, "state_size": 4, "num_heads": 4,
        "head_dim": 16, "n_groups": 1}),
    "FalconMamba": ("falcon_mamba", {"hidden_size": WIDTH, "num_hidden_layers": 2, "state_size": 4}),
    "RWKV": ("rwkv", {"hidden_size": WIDTH, "num_hidden_layers": 2, "context_length": CONTEXT}),
    "RecurrentGemma": ("recurrent_gemma", _LLAMA | {"lru_width": WIDTH, "num_hidden_layers": 3, "head_dim": 8,
        "attention_window_size": 8}),
    "Jamba": ("jamba", _LLAMA | {"attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 2,
        "use_mamba_kernels": False, "mamba_d_state": 4, "mamba_dt_rank": 4}),
    "Bamba": ("bamba", _LLAMA | {"attn_layer_indices": [1], "mamba_n_heads": 4, "mamba_d_head": 16,
        "mamba_d_state": 4, "mamba_n_groups": 1}),
    "LFM2": ("lfm2", _LLAMA | {"layer_types": ["conv", "full_attention"], "block_multiple_of": 16}),
    "MiniMax": ("minimax", _LLAMA | _EXPERTS | {"head_dim": 8, "layer_types": ["linear_attention", "full_attention"],
        "block_size": 8}),
    "Qwen3-Next": ("qwen3_next", _LLAMA | {"layer_types": ["linear_attention", "full_attention"], "num_experts": 2,
        "moe_intermediate_size": 16, "num_experts_per_tok": 1, "head_dim": 8, "linear_num_key_heads": 2,
        "linear_num_value_heads": 2, "shared_expert_intermediate_size": 16, "linear_key_head_dim": 8,
        "linear_value_head_dim": 8}),
    "Qwen3-Next, four layers": ("qwen3_next", _LLAMA | _DELTA_EXPERTS | {"num_hidden_layers": 4,
        "layer_types": [*["linear_attention"] * 3, "full_attention"]}),
    "Qwen3.5": ("qwen3_5_text", _LLAMA | _DELTA | {"num_hidden_layers": 3, "layer_types": _ALTERNATING}),
    "Qwen3.5-MoE": ("qwen3_5_moe_text", _LLAMA | _DELTA_EXPERTS | {"num_hidden_layers": 3,
        "layer_types": _ALTERNATING}),
    "Kimi-Linear": ("kimi_linear", _LLAMA | _LATENT | _SHARED_EXPERTS | {"num_hidden_layers": 3,
        "layer_types": _ALTERNATING, "linear_head_dim": 8, "linear_num_heads": 4}),
    "Bailing hybrid": ("bailing_hybrid", _LLAMA | _LATENT | _SHARED_EXPERTS | {"num_hidden_layers": 3,
        "layer_types": _ALTERNATING, "head_dim": 8}),
    "Nemotron-H": ("nemotron_h", _NEMOTRON | {"time_step_min": 1e-09}),
    "Nemotron-H, clamped time steps": ("nemotron_h", _NEMOTRON),
    "LFM2-MoE": ("lfm2_moe", _LLAMA | {"num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "conv"],
        "num_dense_layers": 1, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}),
    "LFM3": ("lfm3", _LLAMA | {"num_hidden_layers": 4, "layer_types": ["conv", "full_attention", "conv",
        "sliding_attention"], "sliding_window": WINDOW, "head_dim": 8, "tie_word_embeddings": True}),
    "Granite 4 hybrid": ("granitemoehybrid", _LLAMA | _EXPERTS | {"num_hidden_layers": 3, "layer_types": _ALTERNATING,
        "shared_intermediate_size": 16, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 4,
        "mamba_chunk_size": 8}),
    "Falcon-H1": ("falcon_h1", _LLAMA | {"mamba_d_ssm": WIDTH, "mamba_n_heads": 4, "mamba_d_head": 8,
        "mamba_d_state": 4, "mamba_chunk_size": 8}),
    "OLMo hybrid": ("olmo_hybrid", _LLAMA | {"num_hidden_layers": 3, "layer_types": _ALTERNATING,
        "linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 8,
        "linear_value_head_dim": 8}),
    "Zamba": ("zamba", _LLAMA | {"num_hidden_layers": 4, "layers_block_type": _SHARED_BLOCK, "num_key_value_heads": 4,
        "mamba_d_state": 4, "tie_word_embeddings": True}),
    "Zamba 2": ("zamba2", _ZAMBA2 | {"time_step_min": 1e-09}),
    "Zamba 2, clamped time steps": ("zamba2", _ZAMBA2),
    "xLSTM": ("xlstm", {"hidden_size": 64, "num_hidden_layers": 2, "num_heads": 4, "chunk_size": 8,
        "qk_dim_factor": 1.0}),
    "DeepSeek-V4": ("deepseek_v4", {"hidden_size": WIDTH, "num_hidden_layers": 3, "num_attention_heads": 4,
        "num_key_value_heads": 1, "head_dim": 8, "q_lora_rank": 16, "o_groups": 2, "o_lora_rank": 8,
        "moe_intermediate_size": 16, "n_routed_experts": 4, "num_experts_per_tok": 2, "sliding_window": WINDOW,
        "partial_rotary_factor": 0.5, "layer_types": ["sliding_attention", "compressed_sparse_attention",
        "heavily_compressed_attention"], "mlp_layer_types": ["hash_moe", "moe", "moe"], "index_n_heads": 16,
        "index_head_dim": 8, "index_topk": 2, "compress_rates": {"compressed_sparse_attention": 2,
        "heavily_compressed_attention": 4}, "max_position_embeddings": CONTEXT, "hc_mult": 2,
        "hc_sinkhorn_iters": 4}),
    "DeepSeek-V3.2": ("deepseek_v32", _INDEXED),
    "GLM-MoE-DSA": ("glm_moe_dsa", _INDEXED | {"num_hidden_layers": 3, "indexer_types": ["full", "shared", "full"]}),
    "HY-V4": ("hy_v4", _INDEXED | {"num_hidden_layers": 3, "indexer_types": ["full", "shared", "full"], "hc_mult": 2}),
    "A.X-K2": ("axk2", _INDEXED | {"gated_norm_rank": 4}),
    "dots3-note": ("dots3_note_text", _INDEXED | {"sliding_window": WINDOW,
        "layer_types": ["sliding_attention", "indexed_attention"], "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 4, "swa_q_lora_rank": 16, "swa_kv_lora_rank": 8, "swa_head_dim": 16,
        "swa_qk_nope_head_dim": 8, "swa_v_head_dim": 8}),
    "Gemma 3n": ("gemma3n_text", _LLAMA | {"num_hidden_layers": 4, "num_kv_shared_layers": 2,
        "sliding_window": WINDOW, "head_dim": 8, "layer_types": ["sliding_attention", "full_attention"] * 2,
        "vocab_size_per_layer_input": VOCAB, "hidden_size_per_layer_input": 8, "altup_num_inputs": 2,
        "laurel_rank": 4}),
    "Gemma 4": ("gemma4_text", _LLAMA | {"num_hidden_layers": 4, "num_kv_shared_layers": 2, "sliding_window": WINDOW,
        "head_dim": 8, "layer_types": ["sliding_attention", "full_attention"] * 2,
        "vocab_size_per_layer_input": VOCAB, "hidden_size_per_layer_input": 8, "global_head_dim": 16}),
    "GLM-4 MoE": ("glm4_moe", _LLAMA | _SHARED_EXPERTS | {"head_dim": 8, "use_qk_norm": True}),
    "Ministral": ("ministral", _LLAMA | _WINDOWED | {"head_dim": 8}),
    "Ministral 3": ("ministral3", _rope("yarn", factor=4.0, original_max_position_embeddings=16,
        llama_4_scaling_beta=0.1) | {"head_dim": 8}),
    "ModernBERT decoder": ("modernbert-decoder", _LLAMA | {"local_attention": 2 * WINDOW, "pad_token_id": 0,
        "bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 1, "sep_token_id": 2, "global_attn_every_n_layers": 2}),
    "LongCat-Flash": ("longcat_flash", _LLAMA | _LATENT | {"num_layers": 2, "num_hidden_layers": 4, "head_dim": 8,
        "q_lora_rank": 16, "ffn_hidden_size": 48, "expert_ffn_hidden_size": 16, "n_routed_experts": 4, "moe_topk": 2,
        "zero_expert_num": 2}),
    "MiniMax-M2": ("minimax_m2", _LLAMA | _EXPERTS | {"head_dim": 8}),
    "MiMo-V2-Flash": ("mimo_v2_flash", _LLAMA | _SHARED_EXPERTS | _WINDOWED | {"head_dim": 8, "v_head_dim": 8}),
}  # fmt: skip
"""Architecture (and what is special about the model) → model type and configuration."""


def _like(name: str, **settings: Any) -> tuple[str, dict[str, Any]]:
    kind, config = ARCHITECTURES[name]
    return kind, config | settings


FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": _like("Llama"),
    "llama-mha": _like("Llama, biases", num_key_value_heads=4),
    "llama-tied": _like("Llama, tied head"),
    "mistral": _like("Mistral"),
    "qwen2": _like("Qwen2"),
    "qwen2-sliding": _like("Qwen2, sliding window"),
    "qwen3": _like("Qwen3"),
    "gemma2": _like("Gemma 2"),
    "gemma3": ("gemma3_text", _LLAMA | _GEMMA | {"sliding_window": 6, "query_pre_attn_scalar": 5, "sliding_window_pattern": 2}),
    "phi": _like("Phi"),
    "gpt_neox": _like("GPT-NeoX", use_parallel_residual=True),
    "gpt_neox-sequential": _like("GPT-NeoX", use_parallel_residual=False),
    "codegen": _like("CodeGen"),
    "gpt2": _like("GPT-2"),
    "opt": _like("OPT"),
}  # fmt: skip
"""What most tests decode with."""

# -- models that read images or audio too, with two text and two vision layers each --------------------------------

_TEXT: dict[str, Any] = _LLAMA | {"head_dim": 8, "max_position_embeddings": 256, "eos_token_id": None}
_VISION: dict[str, Any] = {"hidden_size": WIDTH, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "image_size": 28, "patch_size": 14}  # fmt: skip
_QWEN_VISION = {"hidden_size": WIDTH, "intermediate_size": 48, "depth": 2, "num_heads": 4, "out_hidden_size": WIDTH}
_ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]}}
_QWEN_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "norm_topk_prob": True}

WRAPPERS: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "gemma3": (_TEXT | _WINDOWED, _VISION, "Gemma3ForCausalLM"),
    "gemma4": (_TEXT | _WINDOWED | {"global_head_dim": 16, "hidden_size_per_layer_input": 8, "pad_token_id": 0}, _VISION | {"head_dim": 8}, "Gemma4ForCausalLM"),
    "qwen2_5_vl": (_TEXT | _ROPE, _QWEN_VISION | {"fullatt_block_indexes": [1]}, "Qwen2ForCausalLM"),
    "qwen3_vl": (_TEXT | _ROPE, _QWEN_VISION | {"deepstack_visual_indexes": [0]}, "Qwen3ForCausalLM"),
    "qwen3_vl_moe": (_TEXT | _ROPE | _QWEN_EXPERTS, _QWEN_VISION | {"deepstack_visual_indexes": [0]}, "Qwen3MoeForCausalLM"),
    "glm4v": (_TEXT | {"rope_parameters": _ROPE["rope_parameters"] | {"partial_rotary_factor": 0.5, "mrope_section": [1, 1, 0]}}, _QWEN_VISION,
              "Glm4ForCausalLM"),
    "llama4": (_TEXT | {"num_local_experts": 2, "intermediate_size_mlp": 48, "attention_chunk_size": 8, "no_rope_layers":
               [1, 0], "attn_temperature_tuning": False}, _VISION | {"intermediate_size": 128, "vision_output_dim": WIDTH,
               "projector_input_dim": WIDTH, "projector_output_dim": WIDTH}, "Llama4ForCausalLM"),
    "mistral3": (_TEXT | {"sliding_window": None}, _VISION, "MistralForCausalLM"),
    "smolvlm": (_TEXT, _VISION, "LlamaForCausalLM"),
    "llava": (_TEXT, _VISION, "LlamaForCausalLM"),
    "internvl": (_TEXT, _VISION, "Qwen2ForCausalLM"),
    "qwen2_audio": (_TEXT, {}, "Qwen2ForCausalLM"),
    "aya_vision": (_TEXT | _WINDOWED, _VISION, ""),
}  # fmt: skip
"""Model type → fields of its text, fields of its vision tower, and the class that its language model is opened as."""

# -- targets whose files hold next-token layers (MTP) -----------------------------------------------------------------

_MOE = {"n_routed_experts": 4, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 8}
_GLM = {"n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "n_shared_experts": 1}
_WINDOW = {"sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"]}
OTHERS = {
    "GLM-4.5": ("glm4_moe", ARCHITECTURES["Llama"][1] | _MOE | _GLM),
    "Mellum": ("mellum", ARCHITECTURES["Llama"][1] | _MOE | _WINDOW),
}
NEEDED = pytest.mark.skipif(
    not hasattr(MtpModel, "forward_layer"), reason="this transformers runs all next-token layers together"
)
LAYERED = "DeepSeek-V3", "GLM-4.5"  # their files number next-token layers behind the others


@torch.no_grad()
def randomise(model: PreTrainedModel, spread: float, generator: Generator | None = None, *, ones: bool = False) -> None:
    """Gives a model large weights, so that its output is varied."""
    for name, weight in model.named_parameters():
        noise = torch.randn(weight.shape, generator=generator)
        if weight.ndim == 1:
            weight.copy_((float("bias" not in name) if ones else weight) + 0.1 * noise)
        else:
            weight.copy_(noise * (0.1 if "emb" in name or "wte" in name else spread))
    jitter(model)


def _made(kind: str, settings: dict[str, Any]) -> PreTrainedModel:
    if kind not in CONFIG_MAPPING:
        pytest.skip(f"this transformers has no {kind}")
    settings = {"vocab_size": VOCAB, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None} | settings
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **settings)).eval()


@torch.inference_mode(False)
def build_tiny(family: str, *, seed: int = 1, dtype: torch.dtype = torch.float32, **config: Any) -> PreTrainedModel:
    """A random two-layer model of a family of `FAMILIES`, with these changes to its configuration."""
    kind, settings = FAMILIES[family]
    model = _made(kind, settings | config)
    randomise(model, 0.6, torch.Generator().manual_seed(seed), ones=True)
    return model.to(dtype)


@torch.inference_mode(False)
def build_architecture(name: str, *, dtype: torch.dtype = torch.float32, **changes: Any) -> PreTrainedModel:
    """A random model of an architecture of `ARCHITECTURES`."""
    kind, settings = ARCHITECTURES[name]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        model = _made(kind, settings | changes)
        randomise(model, 0.4)
    model.generation_config.eos_token_id = model.generation_config.pad_token_id = None
    if model.base_model is model:
        model.base_model_prefix = "model"  # as loading does for Llama 4
    return model.to(dtype)


def in_double(model: PreTrainedModel) -> PreTrainedModel:
    """Transformers computes RMS norms in float32 whatever the model; their rounding would blur the distribution."""

    def norm(self: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)

    def gemma(self: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return (1 + self.weight) * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)

    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm"):
            module.forward = types.MethodType(norm if hasattr(module, "variance_epsilon") else gemma, module)
    return model


def resembling(model: PreTrainedModel, noise: float, seed: int = 0) -> PreTrainedModel:
    """A draft that agrees with the model: about half of the time at a noise of 0.15."""
    draft = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in draft.parameters():
            weight += (
                noise * weight.std().nan_to_num() * torch.randn(weight.shape, generator=generator, dtype=weight.dtype)
            )
    return draft


def build_wrapper(kind: str, *, vocab: int = VOCAB, **changes: Any) -> PreTrainedModel:
    """A random model of a kind of `WRAPPERS`."""
    text, vision, _ = WRAPPERS[kind]
    parts: dict[str, Any] = {"text_config": {"vocab_size": vocab, "vocab_size_per_layer_input": vocab} | text | changes}
    base = AutoConfig.for_model(kind)
    seen = getattr(base, "vision_config", None)
    parts["vision_config"] = {"model_type": seen.model_type if seen else f"{kind}_vision"} | vision
    if kind == "qwen2_audio":
        parts["audio_config"] = {"d_model": WIDTH, "encoder_layers": 1, "encoder_attention_heads": 4,
                                 "encoder_ffn_dim": 48, "max_source_positions": 32, "num_mel_bins": 16}  # fmt: skip
        del parts["vision_config"]
    parts["text_config"]["model_type"] = base.get_text_config().model_type
    config = AutoConfig.for_model(kind, **parts)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        model: PreTrainedModel = MODEL_FOR_MULTIMODAL_LM_MAPPING[type(config)](config).eval()
        randomise(model, 0.4)
    for key in ("eos_token_id", "pad_token_id", "bos_token_id"):
        setattr(model.generation_config, key, None)
    return model


def written(head: MtpHead) -> dict[str, Tensor]:
    """The layers' tensors as a file takes them."""
    return {name: tensor.clone() for name, tensor in head.tensors().items()}


OUTER = {"eh_proj": "fc", "enorm": "pre_fc_norm_embedding", "hnorm": "pre_fc_norm_hidden", "post_norm": "norm"}


def published(mtp: MtpModel, depth: int) -> dict[str, Tensor]:
    """The layers' tensors as files name them, of a target of so many layers."""
    family, tensors = mtp.config.model_type, {}
    for name, tensor in mtp.layers.state_dict().items():
        layer, part, rest = name.split(".", 2)
        if family.startswith(("mellum", "qwen3")):
            name = f"mtp.layers.{layer}.{rest}" if part == "mtp_block" else f"mtp.{OUTER[part]}.{rest}"
        else:  # numbered behind the target's own
            part = {"mtp_block": "", "post_norm": "shared_head.norm."}.get(part, f"{part}.")
            name = f"model.layers.{depth + int(layer)}.{part}{rest}"
        base, _, fused = name.rpartition(".")
        if not base.endswith(".experts"):
            tensors[name] = tensor.clone()
            continue
        parts = ("gate_proj", "up_proj") if fused == "gate_up_proj" else (fused,)
        for expert, weight in enumerate(tensor):
            for part, rows in zip(parts, weight.chunk(len(parts)), strict=True):
                tensors[f"{base}.{expert}.{part}.weight"] = rows.clone()
    return tensors


def with_layers(
    folder: Path, monkeypatch: pytest.MonkeyPatch, kind: str, layers: int = 1, dtype: str = "float32", **changes: int
) -> PreTrainedModel:
    """A random target whose file holds next-token layers, opened from it."""
    if kind in OTHERS:
        monkeypatch.setitem(ARCHITECTURES, kind, OTHERS[kind])
    own = {"num_mtp_layers": layers, "mtp_layer_types": ["full_attention"] if kind == "Qwen3-Next" else None}
    main = build_architecture(kind, **own, **changes)
    main.save_pretrained(folder)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(4)
        mtp = MtpModel(main, layers)
        for name, weight in mtp.layers.named_parameters():
            weight.copy_(torch.randn(weight.shape) * 0.4 + ("norm" in name and kind != "Qwen3-Next"))
    file = folder / "model.safetensors"
    depth = main.config.num_hidden_layers
    save_file(load_file(file) | published(mtp, depth), file, metadata={"format": "pt"})
    if kind in LAYERED:  # its class names the layer of the published depth
        patterns = [rf"model\.layers\.{depth + i}\..*" for i in range(layers)]
        monkeypatch.setattr(type(main), "_keys_to_ignore_on_load_unexpected", patterns)
    return load_model(folder, device="cpu", dtype=dtype)
