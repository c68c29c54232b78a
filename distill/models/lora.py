"""Low-rank adapters (LoRA) by peft."""

from typing import Any

import torch
from transformers import PreTrainedModel

from decode.core.errors import UserError
from distill.config.language_models import LoraSettings


def add_adapter(model: PreTrainedModel, lora: LoraSettings, seed: int) -> Any:
    """Puts a low-rank adapter into the model; only the adapter is trained. Its first weights depend on the seed."""
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,
        lora_dropout=lora.dropout,
        target_modules=lora.modules or "all-linear",
        task_type="CAUSAL_LM",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        try:
            return get_peft_model(model, config)
        except ValueError as error:
            raise UserError(f"lora.modules is {lora.modules}: {error}") from error
