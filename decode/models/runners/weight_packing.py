"""Products with a model's weights: plain, or in the order that oneDNN's kernels read (CPU) where that is faster.

A product of few rows takes as long as its weight takes to be read, if the kernel reads it in one go; stored row by row,
a weight is read with strides, or reordered in each call. Freezing in torch.compile packs weights by the same operators.
"""

import copy
import time
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from decode.core.errors import UserError

COLUMNS = 1 << 15  # smallest weight (elements) that is laid out column by column

_MEASURED: dict[tuple[object, ...], list[list[float]]] = {}  # seconds by what decides them: models of a shape are alike


class Linear:
    """x·Wᵀ + b.

    Args:
        weight: ``[rows, width]``.
        bias: ``[rows]``.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.weight, self.bias = weight, bias

    @property
    def rows(self) -> int:
        """Of the weight: width of the results."""
        return int(self.weight.shape[0])

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


MODES = ("auto", "on", "off")  # packing: where it is measured to pay, wherever the kernels take it, nowhere
ROWS = (1, 8)  # rows of the products that are measured: a step, and a check of a draft
MARGIN = 0.95
"""Packed products are taken where they need less than this part of the plain ones' time, summed over `ROWS`."""
COLD = 1 << 25
"""Bytes of weights that a measurement reads in turn: a model's weights are read from memory, not from the cache."""
TURNS = 5  # measurements of each way, interleaved; the least one counts
FEW = 4
"""Fewer rows are padded to this where that is faster: the kernel for one to three rows takes up to 1.4 times as long as
the one for four with AVX-512, and 0.7 times with AVX2 alone."""
_BATCH = 8  # rows that oneDNN is told to expect; the order of the weight is the same for others


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


class Linears:
    """Makes the products of one model, and decides for each shape of a weight how.

    Args:
        mode: of `MODES`.
        layers: how many weights of a shape the model has at least; so many are read in turn when measuring.
        copies: whether plain weights may be copied into a faster layout.

    Attributes:
        packed: bytes of packed weights.
    """

    def __init__(self, mode: str = "off", layers: int = 1, *, copies: bool = False) -> None:
        check_pack(mode)
        self.mode, self.layers, self.copies, self.packed = mode, layers, copies, 0
        self._chosen: dict[tuple[int, ...], int] = {}  # least rows of a packed product; 0: plain
        self._seconds: dict[tuple[int, ...], list[list[float]]] = {}

    def __call__(self, weight: Tensor, bias: Tensor | None = None) -> Linear:
        """The product with a weight ``[rows, width]`` and a bias ``[rows]``."""
        shape = tuple(weight.shape)
        if shape not in self._chosen:
            self._chosen[shape] = self._least(weight)
        if self._chosen[shape]:
            self.packed += weight.numel() * weight.element_size()
            return PackedLinear(weight, bias, self._chosen[shape])
        return self._plain(weight, bias)

    def _plain(self, weight: Tensor, bias: Tensor | None = None) -> Linear:
        return Linear(by_columns(weight) if self.copies else weight, bias)

    def _least(self, weight: Tensor) -> int:
        if self.mode == "off" or not packable(weight):
            return 0
        if self.mode == "on":  # perhaps of a large model
            weight = weight[: max(1, COLD // (weight.shape[1] * weight.element_size()))]
        shape = tuple(weight.shape)
        known = shape, weight.dtype, self.layers, self.copies, torch.get_num_threads()
        if known not in _MEASURED:
            _MEASURED[known] = measure(self._plain, weight, self.layers)
        seconds = _MEASURED[known]
        if self.mode == "auto":
            self._seconds[shape] = [[plain, min(packed)] for plain, *packed in seconds]
            plain, packed = map(sum, zip(*self._seconds[shape]))
            if packed >= MARGIN * plain:
                return 0
        step = seconds[0]  # at more rows nothing is padded
        return 1 if step[1] <= step[2] else FEW

    def sentence(self) -> str:
        """What was chosen and why, for the terminal; empty where there was nothing to choose."""
        size = f"{self.packed / 1e6:.0f} MB of weights packed" if self.packed else "weights plain"
        if not self._seconds:
            return size if self.packed else ""
        parts = []
        for shape, seconds in self._seconds.items():
            speed = " and ".join(f"{plain / packed:.1f}" for plain, packed in seconds)
            parts.append(f"{shape[0]}×{shape[1]} {'packed' if self._chosen[shape] else 'plain'} ({speed})")
        threads = torch.get_num_threads()
        return (
            f"{size}, by how many times as fast that is at {' and '.join(map(str, ROWS))} rows on {threads} "
            f"thread{'s' if threads > 1 else ''}: {', '.join(parts)}"
        )


def check_pack(mode: str) -> None:
    """Refuse what is no mode."""
    if mode not in MODES:
        raise UserError(f"pack is {mode!r}; choose one of {', '.join(MODES)}")


def packable(weight: Tensor) -> bool:
    """Whether oneDNN's kernels take a weight: on the CPU, in float32 or, where the processor has it, bfloat16."""
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    narrow = weight.dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return weight.dtype == torch.float32 or narrow


@torch.inference_mode()
def measure(plain: Callable[[Tensor], Linear], weight: Tensor, layers: int) -> list[list[float]]:
    """Seconds of plain, packed, and padded packed products, at each of `ROWS`.

    Args:
        plain: makes a plain product.
        weight: an example of the shape.
        layers: weights of this shape that the model reads in turn.
    """
    size = weight.numel() * weight.element_size()
    count = max(1, min(layers, COLD // size))
    packed = [PackedLinear(weight) for _ in range(count)]
    padded = [copy.copy(linear) for linear in packed]
    for linear in padded:
        linear.least = FEW
    ways: list[Sequence[Linear]] = [[plain(weight.detach().clone()) for _ in range(count)], packed, padded]
    inputs = [weight.new_ones(rows, weight.shape[1]) for rows in ROWS]
    repeats = max(1, min(64, COLD // size) // count)  # small weights take too little time to be measured once

    def seconds(way: Sequence[Linear], x: Tensor) -> float:
        begun = time.perf_counter()
        for _ in range(repeats):
            for linear in way:
                linear(x)
        return time.perf_counter() - begun

    least = [[float("inf")] * len(ways) for _ in ROWS]
    for _ in range(TURNS):
        for row, x in zip(least, inputs):
            row[:] = [min(best, seconds(way, x)) for best, way in zip(row, ways)]
    return least
