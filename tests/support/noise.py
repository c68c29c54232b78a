"""Tiny models whose weights are a rounding away from what a seed gives: ``pytest --noise 1``, or DRAFTSMITH_NOISE=1.

No test may depend on how a processor rounds, and with such weights each one stands for another processor.
"""

import os
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from decode.models.heads.block import BlockHead
from decode.models.heads.eagle import FeatureHead

VARIABLE = "DRAFTSMITH_NOISE"


@torch.no_grad()
def jitter(module: nn.Module) -> None:
    """Multiplies each weight by 1 + 1e-7 · noise, which depends on the seed and the weights' shapes alone."""
    seed = int(os.environ.get(VARIABLE) or 0)
    if not seed or torch.get_default_device().type == "meta":  # what is made there is loaded from a file
        return
    generator = torch.Generator().manual_seed(seed)
    for weight in module.parameters():
        if not weight.is_meta and weight.is_floating_point():
            noise = torch.randn(weight.shape, generator=generator, dtype=torch.float64)
            weight.copy_(weight.double() * (1 + 1e-7 * noise))


def _jittering(make: Callable[..., None]) -> Callable[..., None]:
    def made(self: Any, *arguments: Any, **options: Any) -> None:
        make(self, *arguments, **options)
        jitter(self)

    return made


def install() -> None:
    """From here on every model and head that is made, not loaded, has such weights, where the variable is set."""
    if os.environ.get(VARIABLE):
        PreTrainedModel.post_init = _jittering(PreTrainedModel.post_init)  # type: ignore[method-assign]
        for head in (FeatureHead, BlockHead):
            head.__init__ = _jittering(head.__init__)  # type: ignore[method-assign,misc]
