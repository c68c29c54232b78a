"""Products with a model's weights, each in the layout that is fastest on this processor.

A layout is here because it saves 5 % or more of a forward. Times of one forward over a cache of 100 to 200 tokens:

| layout | model, rows read | before → after, ms | processor, threads |
| --- | --- | --- | --- |
| rows of q and k sorted, norms folded (`layout`) | quickstart target, 1 | 0.95 → 0.79 | Xeon, AVX2, 1 |
| | quickstart draft, 1 | 0.107 → 0.078 | Xeon, AVX-512, 1 |
| `by_columns` | quickstart target, 8 | 1.33 → 1.18 | Xeon, AVX2, 1 |
| | SmolLM2-135M, 4 | 96 → 70 | Xeon, AVX2, 1 |
| `PackedLinear` | SmolLM2-135M, 8 | 82.6 → 30.9 | EPYC, AVX-512, 2 |
| | SmolLM2-135M, 1 | 57.9 → 47.7 | EPYC, AVX2, 2 |
| `PackedLinear`, padded to four rows | SmolLM2-135M, 1 | 91 → 63 | Xeon, AVX-512, 1 |
| `HalfLinear` | SmolLM2-135M, 1 | 23.8 → 11.9 | EPYC, AVX-512, 2 |
| | quickstart draft, 1 | 0.052 → 0.044 | EPYC, AVX-512, 1 |

`RmsNorm` takes 5 µs for a state of the quickstart's target where `torch.nn.functional.rms_norm` takes 10.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from decode.errors import UserError

WIDE = (torch.float32, torch.float64)
COLUMNS = 1 << 15  # fewest elements of a weight that is laid out column by column
FEW = 4
"""Rows that a packed product of fewer rows is padded to with AVX-512, whose kernel for one to three rows takes up to
1.4 times as long as the one for four; with AVX2 it takes 0.7 times as long."""


class Linear:
    """x·Wᵀ + b with a weight ``[rows, width]`` and a bias ``[rows]``; `bytes` are those of the weight."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.weight, self.bias = weight, bias
        self.rows, self.bytes = len(weight), weight.nbytes

    def __call__(self, x: Tensor) -> Tensor:
        """Maps states ``[.., width]`` to ``[.., rows]``."""
        return F.linear(x, self.weight, self.bias)

    def add_to(self, x: Tensor, y: Tensor) -> Tensor:
        """Returns x + y·Wᵀ + b for states ``x [.., rows]`` and ``y [.., width]``."""
        total = torch.addmm(x.flatten(0, -2), y.flatten(0, -2), self.weight.t()).view_as(x)
        return total if self.bias is None else total.add_(self.bias)


def by_columns(weight: Tensor) -> Tensor:
    """A weight with more rows than columns, stored column by column on CPUs."""
    tall = weight.device.type == "cpu" and weight.shape[0] > weight.shape[1] and weight.numel() >= COLUMNS
    return weight.t().contiguous().t() if tall else weight


class PackedLinear(Linear):
    """x·Wᵀ + b with a copy of the weight in oneDNN's own order; see `Linear`."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        with torch.inference_mode():  # 8: an expected number of rows, which does not change the order
            packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous(), 8)
        super().__init__(packed, None if bias is None else bias.detach())
        self.least = FEW if torch.backends.cpu.get_cpu_capability() == "AVX512" else 1
        self._product = torch.ops.mkldnn._linear_pointwise.default
        self._sum = torch.ops.mkldnn._linear_pointwise.binary

    def __call__(self, x: Tensor) -> Tensor:
        """See `Linear.__call__`."""
        rows = len(x)
        few = x.dim() == 2 and 0 < rows < self.least
        padded = F.pad(x, (0, 0, 0, self.least - rows)) if few else x
        product = self._product(padded, self.weight, self.bias, "none", [], "")
        return product[:rows] if few else product

    def add_to(self, x: Tensor, y: Tensor) -> Tensor:
        """See `Linear.add_to`."""
        if x.dim() == 2 and 0 < len(x) < self.least:
            return x + self(y)
        return self._sum(y, x, self.weight, self.bias, "add")


class HalfLinear(Linear):
    """x·Wᵀ + b of a float16 copy of a float32 weight, widened as it is read (FBGEMM), with float32 arithmetic.

    The copy is rounded where float16 does not hold the weight. It is scaled by `half_scale` where there is one.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        weight, bias = weight.detach(), None if bias is None else bias.detach()
        super().__init__(weight.new_empty(0), bias)
        self.rows, self.bytes = len(weight), weight.numel() * 2
        self._scale = scale = half_scale(weight) or 1.0
        if scale != 1:
            weight, bias = weight * scale, None if bias is None else bias * scale
        self._packed = torch.ops.quantized.linear_prepack_fp16(weight, bias)
        self._product = torch.ops.quantized.linear_dynamic_fp16.default

    def __call__(self, x: Tensor) -> Tensor:
        """See `Linear.__call__`."""
        product = self._product(x, self._packed)
        return product if self._scale == 1 else product.mul_(1 / self._scale)

    def add_to(self, x: Tensor, y: Tensor) -> Tensor:
        """See `Linear.add_to`."""
        return self(y).add_(x)


def packable(weight: Tensor) -> bool:
    """Whether oneDNN's kernels take a weight: on the CPU, in float32 or, where the processor has it, bfloat16."""
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    narrow = weight.dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return narrow or weight.dtype == torch.float32


def halvable(weight: Tensor) -> bool:
    """Whether FBGEMM's kernels take a weight: on an x86 CPU, in float32."""
    x86 = torch.backends.quantized.engine in ("x86", "fbgemm")
    return x86 and weight.device.type == "cpu" and weight.dtype == torch.float32


def half_scale(weight: Tensor) -> float | None:
    """The power of two, 1 if possible, by which a weight is multiplied so that float16 holds it; None without one.

    Elements may be off by 2⁻³⁸ of the largest one, which products in float32 cannot show: bfloat16 holds smaller
    numbers than float16.
    """
    if not halvable(weight):
        return None
    weight = weight.detach()
    largest = float(weight.abs().amax())
    for scale in 1.0, 2.0 ** (15 - math.frexp(largest)[1]):  # the second one brings the largest element to 2¹⁴ or more
        if all(
            ((part * scale).half().float() / scale - part).abs().amax() <= largest * 2**-38
            for part in weight.split(1024)
        ):
            return scale
    return None


# -- which layout ------------------------------------------------------------------------------------------------------

MODES = ("auto", "on", "off")
"""Layouts: packed or in float16 where the weight is large enough for it to pay, wherever the kernels take it, or plain.
"""
LAYOUTS: dict[str, Callable[..., Linear]] = {
    "plain": Linear,
    "columns": lambda weight, bias=None: Linear(by_columns(weight), bias),
    "packed": PackedLinear,
    "in float16": HalfLinear,
}
HALVED = 1 << 19  # fewest bytes of a weight whose product is faster in float16
PACKED = 1 << 21  # the same of a packed one, at eight rows; at one row packing may lose what it gains there


class Linears:
    """Makes the products of one model, each in the layout for its weight.

    `pack` is one of `MODES`. With `copies` plain weights may be copied into a faster layout, with `half` they may be
    held in float16. `bytes` are those of the weights in each of `LAYOUTS`.
    """

    def __init__(self, pack: str = "off", *, copies: bool = False, half: bool = False) -> None:
        if pack not in MODES:
            raise UserError(f"pack is {pack!r}; choose one of {', '.join(MODES)}")
        self.pack, self.copies, self.half = pack, copies, half
        self.bytes = dict.fromkeys(LAYOUTS, 0)

    def __call__(self, weight: Tensor, bias: Tensor | None = None) -> Linear:
        """The product with a weight ``[rows, width]`` and a bias ``[rows]``."""
        layout = self._layout(weight)
        linear = LAYOUTS[layout](weight, bias)
        self.bytes[layout] += linear.bytes
        return linear

    def _layout(self, weight: Tensor) -> str:
        """One of `LAYOUTS`."""
        size = {"on": math.inf, "auto": weight.nbytes, "off": 0}[self.pack]
        if self.half and halvable(weight) and size >= HALVED:
            return "in float16"
        if packable(weight) and size >= PACKED:
            return "packed"
        return "columns" if self.copies else "plain"

    def sentence(self) -> str:
        """Bytes of the weights in each layout but the plain ones; empty if all are plain."""
        sizes = [f"{self.bytes[way] / 1e6:.1f} MB {way}" for way in ("packed", "in float16") if self.bytes[way]]
        return f"weights: {', '.join(sizes)}" if sizes else ""


# -- norms -------------------------------------------------------------------------------------------------------------

Function = Callable[[Tensor], Tensor]


class RmsNorm:
    """x/√(Σx²/d + ε)·w over the last axis, computed as x/hypot(‖x‖, √(dε))·(w√d), which takes fewer operations.

    Where `folded` is set, the projection that follows multiplies by `scale`, which is w√d.
    """

    def __init__(self, weight: Tensor, eps: float) -> None:
        width = weight.shape[-1]
        self.floor, self.scale = weight.new_tensor((eps * width) ** 0.5), weight.detach() * width**0.5
        self.folded = False

    def __call__(self, x: Tensor) -> Tensor:
        """The norm of ``x [.., d]``."""
        y = x / torch.hypot(torch.linalg.vector_norm(x, dim=-1, keepdim=True), self.floor)
        return y if self.folded else y.mul_(self.scale)


def norm(module: Any, weight: Tensor | None = None) -> Function:
    """A layer norm or an RMS norm without the cost of a module's call; `weight`: another one for an RMS norm.

    In 16 bits the weights are multiplied in 16 bits, as transformers does: in one operation with the norm they move the
    logits of SmolLM2-135M in bfloat16 by 0.27 standard deviations from its own, so by 0.06.
    """
    if isinstance(module, nn.LayerNorm):
        weight, bias = module.weight, module.bias
        return partial(F.layer_norm, normalized_shape=weight.shape, weight=weight, bias=bias, eps=module.eps)
    weight = module.weight if weight is None else weight
    # Gemma's adds 1 to its weights
    eps, offset = (module.variance_epsilon, 0.0) if hasattr(module, "variance_epsilon") else (module.eps, 1.0)
    if weight.dtype in WIDE and weight.device.type == "cpu":
        return RmsNorm(weight.detach() + offset if offset else weight, eps)
    width = weight.shape[-1:]

    def scaled(x: Tensor) -> Tensor:
        y = F.rms_norm(x, width, eps=eps)
        return y.addcmul_(y, weight) if offset else y.mul_(weight)  # 1 + a weight would be rounded

    return scaled


class NormedLinear(Linear):
    """A product and the norm of its result, as at the end of Gemma 3's attention and MLP; see `Linear`."""

    def __init__(self, linear: Linear, norm: Function) -> None:
        self.linear, self.norm, self.rows, self.bytes = linear, norm, linear.rows, linear.bytes

    def __call__(self, x: Tensor) -> Tensor:
        """See `Linear.__call__`."""
        return self.norm(self.linear(x))

    def add_to(self, x: Tensor, y: Tensor) -> Tensor:
        """See `Linear.add_to`."""
        return self(y).add_(x)
