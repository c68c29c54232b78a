"""Products with a model's weights: plain, or on CPUs in the order that oneDNN's kernels read, or in 16 bits.

A product of few rows takes as long as its weight takes to be read, if the kernel reads it in one go; stored row by row,
a weight is read with strides, or reordered in each call. Freezing in torch.compile packs weights by the same operators.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

COLUMNS = 1 << 15  # smallest weight (elements) that is laid out column by column
_BATCH = 8  # rows that oneDNN is told to expect; the order of the weight is the same for others


class Linear:
    """x·Wᵀ + b.

    Args:
        weight: ``[rows, width]``.
        bias: ``[rows]``.

    Attributes:
        rows: of the weight, the width of the results.
        bytes: of the weight.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.weight, self.bias = weight, bias
        self.rows, self.bytes = len(weight), weight.numel() * weight.element_size()

    def __call__(self, x: Tensor) -> Tensor:
        """``[.., rows]`` of states ``[.., width]``."""
        return F.linear(x, self.weight, self.bias)

    def add_to(self, x: Tensor, y: Tensor) -> Tensor:
        """x + y·Wᵀ + b of states ``x [.., rows]`` and ``y [.., width]``, in as few operations as it takes."""
        sum = torch.addmm(x.flatten(0, -2), y.flatten(0, -2), self.weight.t()).view_as(x)
        return sum if self.bias is None else sum.add_(self.bias)


def by_columns(weight: Tensor) -> Tensor:
    """The weight laid out so that x·Wᵀ of few rows is fastest: measured up to 1.5 times on CPUs where W is tall."""
    tall = weight.device.type == "cpu" and weight.shape[0] > weight.shape[1] and weight.numel() >= COLUMNS
    return weight.t().contiguous().t() if tall else weight


class PackedLinear(Linear):
    """x·Wᵀ + b with a packed weight.

    Args:
        weight: ``[rows, width]``; it is copied.
        bias: ``[rows]``.
        least: fewer rows of states are padded to so many.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None, least: int = 1) -> None:
        with torch.inference_mode():
            packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous(), _BATCH)
        super().__init__(packed, None if bias is None else bias.detach())
        self.least = least
        self._product = torch.ops.mkldnn._linear_pointwise.default
        self._sum = torch.ops.mkldnn._linear_pointwise.binary

    def __call__(self, x: Tensor) -> Tensor:
        """See `Linear.__call__`."""
        rows = x.shape[0]
        few = x.dim() == 2 and 0 < rows < self.least
        product: Tensor = self._product(
            F.pad(x, (0, 0, 0, self.least - rows)) if few else x, self.weight, self.bias, "none", [], ""
        )
        return product[:rows] if few else product

    def add_to(self, x: Tensor, y: Tensor) -> Tensor:
        """See `Linear.add_to`."""
        if x.dim() == 2 and 0 < x.shape[0] < self.least:
            return x + self(y)
        sum: Tensor = self._sum(y, x, self.weight, self.bias, "add")
        return sum


class TwoLayouts(Linear):
    """x·Wᵀ + b of a small weight that is held twice: plain for few rows, packed for more.

    Args:
        weight: ``[rows, width]``.
        bias: ``[rows]``.
        border: rows of states from which on the packed weight is taken.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None, border: int = 1) -> None:
        super().__init__(by_columns(weight), bias)
        self.border, self._packed = border, PackedLinear(weight, bias)

    def __call__(self, x: Tensor) -> Tensor:
        """See `Linear.__call__`."""
        return F.linear(x, self.weight, self.bias) if len(x) < self.border else self._packed(x)

    def add_to(self, x: Tensor, y: Tensor) -> Tensor:
        """See `Linear.add_to`."""
        return super().add_to(x, y) if len(x) < self.border else self._packed.add_to(x, y)


def packable(weight: Tensor) -> bool:
    """Whether oneDNN's kernels take a weight: on the CPU, in float32 or, where the processor has it, bfloat16."""
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    narrow = weight.dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return weight.dtype == torch.float32 or narrow


class HalfLinear(Linear):
    """x·Wᵀ + b of a weight in float16, made float32 as it is read (FBGEMM): half of the bytes, the same arithmetic.

    A weight that float16 holds only times a power of two is held so, which its products are divided by.

    Args:
        weight: ``[rows, width]``, float32; it is copied, and rounded where float16 does not hold it.
        bias: ``[rows]``.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        weight, bias = weight.detach(), None if bias is None else bias.detach()
        super().__init__(weight.new_empty(0), bias)
        self.rows, self.bytes = len(weight), weight.numel() * 2
        self._scale = half_scale(weight) or 1.0
        if self._scale != 1:
            weight, bias = weight * self._scale, None if bias is None else bias * self._scale
        self._packed = torch.ops.quantized.linear_prepack_fp16(weight, bias)
        self._product = torch.ops.quantized.linear_dynamic_fp16.default

    def __call__(self, x: Tensor) -> Tensor:
        """See `Linear.__call__`."""
        product: Tensor = self._product(x, self._packed)
        return product if self._scale == 1 else product.mul_(1 / self._scale)

    def add_to(self, x: Tensor, y: Tensor) -> Tensor:
        """See `Linear.add_to`."""
        return self(y).add_(x)


def halvable(weight: Tensor) -> bool:
    """Whether FBGEMM's kernels take a weight: on an x86 CPU, in float32."""
    x86 = (
        torch.backends.quantized.engine in ("x86", "fbgemm") and "fbgemm" in torch.backends.quantized.supported_engines
    )
    return x86 and weight.device.type == "cpu" and weight.dtype == torch.float32


def half_scale(weight: Tensor) -> float | None:
    """The power of two times which float16 holds a weight, 1 if it can be; None where none does.

    Elements may be off by 2⁻³⁸ of the largest one, which products in float32 cannot show: bfloat16 reaches further down
    than float16.
    """
    if not halvable(weight):
        return None
    weight = weight.detach()
    largest = max(float(weight.amax()), -float(weight.amin()))
    scales = 1.0, 2.0 ** (15 - math.frexp(largest)[1])  # the second one brings the largest element to 2¹⁴ or more

    def holds(scale: float, part: Tensor) -> bool:
        return bool((((part * scale).half().float() / scale - part).abs().amax() <= largest * 2**-38).item())

    return next((scale for scale in scales if all(holds(scale, part) for part in weight.split(1024))), None)
