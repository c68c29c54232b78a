"""Norms of the hand-written forward: a few operations each, without the cost of a module's call."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Function = Callable[[Tensor], Tensor]

WIDE = (torch.float32, torch.float64)


@dataclass(eq=False)
class RmsNorm:
    """x/√(Σx²/d + ε)·w over the last axis, as x/hypot(‖x‖, √(dε))·(w√d): fewer operations, the same to rounding."""

    floor: Tensor  # √(dε)
    scale: Tensor | None  # w√d; None where the projection behind it holds it

    def __call__(self, x: Tensor) -> Tensor:
        """The norm of ``x [.., d]``."""
        y = x / torch.hypot(torch.linalg.vector_norm(x, dim=-1, keepdim=True), self.floor)
        return y if self.scale is None else y.mul_(self.scale)


@dataclass(eq=False)
class NarrowRmsNorm:
    """The same for weights of 16 bits, rounded where transformers rounds."""

    weight: Tensor
    eps: float

    def __call__(self, x: Tensor) -> Tensor:
        """The norm of ``x [.., d]``."""
        y = x.float()
        y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * y.to(x.dtype)


@dataclass(eq=False)
class LayerNorm:
    """A layer norm without the cost of a module's call."""

    weight: Tensor
    bias: Tensor | None
    eps: float

    def __call__(self, x: Tensor) -> Tensor:
        """The norm of ``x [.., d]``."""
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)


def rms_norm(weight: Tensor, eps: float) -> RmsNorm | NarrowRmsNorm:
    """An RMS norm with these weights ``[.., d]``."""
    if weight.dtype not in WIDE:
        return NarrowRmsNorm(weight, eps)
    width = weight.shape[-1]
    return RmsNorm(weight.new_tensor((eps * width) ** 0.5), weight.detach() * width**0.5)


def norm(module: Any) -> Function:
    """A layer norm or an RMS norm."""
    if isinstance(module, nn.LayerNorm):
        return LayerNorm(module.weight, module.bias, module.eps)
    return rms_norm(module.weight, module.variance_epsilon)
