"""Configurations of models from a shape, in terms that hold for every model family."""

from collections.abc import Mapping
from typing import Any

from transformers import AutoConfig, PretrainedConfig, PreTrainedTokenizerBase

from decode.errors import UserError
from decode.models.loading import gguf_config, gguf_file

FAMILIES = {
    "pythia": "gpt_neox",
    "phi-3": "phi3",
    "phi-4": "phi3",
    "phi": "phi",
    "codegen": "codegen",
    "gpt2": "gpt2",
    "opt-": "opt",
    "qwen3": "qwen3",
    "qwen": "qwen2",
    "mixtral": "mixtral",
    "mistral": "mistral",
    "gemma-2": "gemma2",
    "gemma": "gemma",
}
"""Family by a part of a model's name, the first that fits, for models that are not on this machine; others: llama."""

GROUPED = ("llama-3", "llama3", "qwen", "mistral", "mixtral", "smollm", "gemma-2", "phi-4", "llama-2-70b")
"""Parts of the names of models with grouped-query attention."""


def family_of(model: str) -> tuple[str, bool, str]:
    """The family of a model, from its configuration if it is on this machine, otherwise from its name.

    Returns:
        ``model_type``, whether several query heads share a key head, and a note where the name decided.
    """
    try:
        packed = gguf_file(model)
        config = gguf_config(packed) if packed else AutoConfig.from_pretrained(model, local_files_only=True)
        config = config.get_text_config()
        heads = int(config.num_attention_heads)
        return str(config.model_type), heads > int(getattr(config, "num_key_value_heads", None) or heads), ""
    except (OSError, ValueError):
        name = model.lower()
    family = next((family for part, family in FAMILIES.items() if part in name), "llama")
    note = f"{model} is not on this machine; a tiny {family} stands for it"
    return family, any(part in name for part in GROUPED), note


def config_for(
    model_type: str,
    *,
    hidden_size: int,
    layers: int,
    heads: int,
    vocab: int,
    kv_heads: int | None = None,
    intermediate_size: int | None = None,
    positions: int = 512,
    tie_embeddings: bool = True,
    tokenizer: PreTrainedTokenizerBase | None = None,
    extra: Mapping[str, Any] | None = None,
) -> PretrainedConfig:
    """The configuration of a model of this shape.

    Args:
        model_type: family as transformers names it.
        hidden_size: width of the hidden states.
        layers: depth.
        heads: attention heads.
        vocab: tokens.
        kv_heads: key and value heads; None: as many as heads.
        intermediate_size: width inside the MLP; None: 8/3 of the width, rounded up to a multiple of 32.
        positions: longest text, in tokens.
        tie_embeddings: one matrix for embedding and head.
        tokenizer: gives the special tokens.
        extra: further fields of the family's configuration class.

    Raises:
        UserError: a family that transformers does not know, or fields that it refuses.
    """
    values: dict[str, Any] = {
        "hidden_size": hidden_size,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads or heads,
        "intermediate_size": intermediate_size or -(-hidden_size * 8 // 96) * 32,
        "max_position_embeddings": positions,
        "tie_word_embeddings": tie_embeddings,
        "vocab_size": vocab,
        **{name: getattr(tokenizer, name, None) for name in ("bos_token_id", "eos_token_id", "pad_token_id")},
    }
    if model_type in ("gpt2", "codegen", "gptj"):  # the other names are mapped by transformers
        values["n_inner"] = values.pop("intermediate_size")
        del values["num_key_value_heads"]
        if model_type != "gpt2":
            values["rotary_dim"] = hidden_size // heads
    elif model_type.startswith(("qwen3", "gemma")):
        values["head_dim"] = hidden_size // heads
    try:
        return AutoConfig.for_model(model_type, **(values | dict(extra or {})))
    except (ValueError, TypeError) as error:
        first = str(error).strip().splitlines()[0]
        raise UserError(f"architecture.model_type {model_type!r} cannot be built: {first}") from error
