"""The number formats of a training, by Lightning's name for them, also for passes outside its trainer.

A reference model whose losses are compared with the draft's has to run as the draft does: under the same autocast, with
weights of the same format. Losses themselves are computed in float32 on both sides (float64 stays).
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from distill.config.run_settings import Settings

AUTOCAST = {"bf16": torch.bfloat16, "bf16-mixed": torch.bfloat16, "16": torch.float16, "16-mixed": torch.float16}
WEIGHTS = {"bf16-true": "bfloat16", "16-true": "float16", "64": "float64", "64-true": "float64"}


def weights_dtype(precision: str) -> str:
    """The format that Lightning gives a model's weights."""
    return WEIGHTS.get(str(precision), "float32")


def multiplies_bfloat16(device: torch.device) -> bool:
    """Whether the device has instructions for products in bfloat16; a CPU without them takes several times as long."""
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    return device.type == "cpu" and (torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())


def choose_number_formats(settings: Settings, device: torch.device) -> None:
    """Replaces ``auto`` in a run's settings: bfloat16 where the device multiplies in it, elsewhere float32."""
    fast, reference = multiplies_bfloat16(device), settings.reference
    for section in (settings.trainer, settings.target, settings.initial):
        if section.precision == "auto":
            section.precision = "bf16-mixed" if fast else "32-true"
    if reference.responses.dtype == "auto":
        reference.responses.dtype = "bfloat16" if fast else None
    if reference.signal_autocast == "auto":
        reference.signal_autocast = fast


@contextmanager
def forward_precision(precision: str, device: torch.device) -> Iterator[None]:
    """Inside, a forward pass computes as a training step of this precision does."""
    dtype = AUTOCAST.get(str(precision))
    with torch.autocast(device.type, dtype, enabled=dtype is not None):
        yield


def autocast_to_bfloat16(device: torch.device) -> bool:
    """Whether matrix products are being computed in bfloat16, as the gradients of the output head may be, too.

    Not in float16: gradients smaller than its range are only scaled up after the loss.
    """
    return torch.is_autocast_enabled(device.type) and torch.get_autocast_dtype(device.type) == torch.bfloat16


@contextmanager
def loss_precision(device: torch.device) -> Iterator[None]:
    """Inside, no autocast: logits and losses are float32 where the weights are.

    The products that give logits may then round their inputs, not their sums or results: on a GPU to TF32, whose
    mantissa is longer than that of the half precision the hidden states were computed in; on a CPU to bfloat16.
    """
    if not torch.is_autocast_enabled(device.type):
        yield
        return
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium" if device.type == "cpu" else "high")
    try:
        with torch.autocast(device.type, enabled=False):
            yield
    finally:
        torch.set_float32_matmul_precision(before)
