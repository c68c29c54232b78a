"""Tiny random models that read images or audio too, with two text and two vision layers each."""

from __future__ import annotations

from typing import Any

import torch
from families import _LLAMA, _WINDOWED, VOCAB, WIDTH, randomise
from transformers import MODEL_FOR_MULTIMODAL_LM_MAPPING, AutoConfig, PreTrainedModel

_TEXT: dict[str, Any] = _LLAMA | {"head_dim": 8, "max_position_embeddings": 256, "eos_token_id": None}
_VISION: dict[str, Any] = {
    "hidden_size": WIDTH,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 28,
    "patch_size": 14,
}
_QWEN_VISION = {"hidden_size": WIDTH, "intermediate_size": 48, "depth": 2, "num_heads": 4, "out_hidden_size": WIDTH}
_ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]}}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "norm_topk_prob": True}

WRAPPERS: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "gemma3": (_TEXT | _WINDOWED, _VISION, "Gemma3ForCausalLM"),
    "gemma4": (_TEXT | _WINDOWED | {"global_head_dim": 16, "hidden_size_per_layer_input": 8, "pad_token_id": 0}, _VISION | {"head_dim": 8}, "Gemma4ForCausalLM"),
    "qwen2_5_vl": (_TEXT | _ROPE, _QWEN_VISION | {"fullatt_block_indexes": [1]}, "Qwen2ForCausalLM"),
    "qwen3_vl": (_TEXT | _ROPE, _QWEN_VISION | {"deepstack_visual_indexes": [0]}, "Qwen3ForCausalLM"),
    "qwen3_vl_moe": (_TEXT | _ROPE | _EXPERTS, _QWEN_VISION | {"deepstack_visual_indexes": [0]}, "Qwen3MoeForCausalLM"),
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
