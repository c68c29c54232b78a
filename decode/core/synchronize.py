"""Waiting for an accelerator, so that clocks mean something."""

import torch


def synchronize(device: torch.device) -> None:
    """Wait for the device, so that a clock read on the host means something."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
