"""Weights in few bits: what transformers' quantizers are told, checked before a model is read."""

from typing import Any

import torch
from transformers.quantizers import AutoHfQuantizer, AutoQuantizationConfig

from decode.core.errors import UserError


def quantization_config(wanted: dict[str, Any], device: str | torch.device, key: str, instead: str) -> Any:
    """The configuration for ``from_pretrained``.

    Args:
        wanted: The setting, such as ``{quant_method: bitsandbytes, load_in_4bit: true}``.
        device: Where the weights will be.
        key: Of the setting.
        instead: What to set if it is left out.

    Raises:
        UserError: It is not known, its package is not installed, or the device cannot.
    """
    try:
        config = AutoQuantizationConfig.from_dict(wanted)
        made = AutoHfQuantizer.from_config(config, pre_quantized=False)
        made.validate_environment(device_map={"": device})
    except (ImportError, ValueError, TypeError, KeyError, AssertionError, RuntimeError) as error:
        why = f"{type(error).__name__}: {error}".strip().splitlines()[0]
        raise UserError(
            f"{key} is {wanted}, which cannot be used here ({why}): install what is missing, or leave it out and set "
            f"{instead}"
        ) from error
    return config
