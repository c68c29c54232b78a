"""How models compute attention: one of transformers' implementations, by its name."""

from __future__ import annotations

import torch
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from decode.core.errors import UserError
from distill.config.training import Attention


def use_attention(model: PreTrainedModel, name: Attention) -> None:
    """Has the model compute attention so; ``auto`` leaves it as it was loaded.

    Raises:
        UserError: It cannot, or what that needs is not installed.
    """
    if name == "auto":
        return
    before = model.config._attn_implementation
    try:
        model.set_attn_implementation(name)
    except (ImportError, ValueError) as error:
        raise _refusal(type(model).__name__, name, error) from error
    if model.config._attn_implementation == before != name:  # some models only warn
        raise _refusal(type(model).__name__, name, ValueError(f"it stays with {before}"))


def check_attention(config: PretrainedConfig, name: Attention) -> None:
    """The same for a model that is not loaded yet.

    Raises:
        UserError: See `use_attention`.
    """
    if name == "auto":
        return
    try:
        with torch.device("meta"):
            AutoModelForCausalLM.from_config(config, attn_implementation=name)
    except (ImportError, ValueError) as error:
        raise _refusal(str(config.model_type), name, error) from error


def _refusal(model: str, name: str, error: Exception) -> UserError:
    why = str(error).strip().splitlines()[0]
    return UserError(f"trainer.attention is {name}, which {model} cannot use here ({why}): choose auto or sdpa")
