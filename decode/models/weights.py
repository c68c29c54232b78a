"""Which of the products of `linear` serves each shape of a model's weights: what is asked for, or measured fastest."""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from decode.errors import UserError

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


MODES = ("auto", "on", "off")
"""How weights are laid out: as is measured fastest for each shape, packed wherever the kernels take it, or plain."""
ROWS = (1, 8, 16)  # rows of the products that are measured: a step, a check of a draft, and a long one or a prompt
MARGIN = 0.95
"""Other products are taken where they need less than this part of the plain ones' time, summed over a step and a check
of eight tokens."""
TWO = {rows: f"plain, from {rows} rows packed" for rows in ROWS[1:]}
"""Ways that hold a weight in two layouts, by the rows from which on it is packed."""
TWICE = 1 << 22  # most bytes of such a weight
COLD = 1 << 25
"""Bytes of weights that a measurement reads in turn: a model's weights are read from memory, not from the cache."""
TURNS = 5  # measurements of each way, interleaved; the least one counts
FEW = 4
"""Fewer rows are padded to this where that is faster: the kernel for one to three rows takes up to 1.4 times as long as
the one for four with AVX-512, and 0.7 times with AVX2 alone."""

Seconds = dict[str, list[float]]
"""Of each way, at each of `ROWS`."""

_MEASURED: dict[tuple[object, ...], Seconds] = {}  # by what decides them: models of a shape are alike


class Linears:
    """Makes the products of one model, and decides for each shape of a weight how.

    Args:
        pack: of `MODES`.
        layers: how many weights of a shape the model has at least; so many are read in turn when measuring.
        copies: whether plain weights may be copied into a faster layout.
        half: whether weights may be held in float16.

    Attributes:
        bytes: of the weights, by the way that was chosen for them.
    """

    def __init__(self, pack: str = "off", layers: int = 1, *, copies: bool = False, half: bool = False) -> None:
        if pack not in MODES:
            raise UserError(f"pack is {pack!r}; choose one of {', '.join(MODES)}")
        self.pack, self.layers, self.half = pack, layers, half
        self.ways: dict[str, Callable[..., Linear]] = {
            "plain": lambda weight, bias=None: Linear(by_columns(weight) if copies else weight, bias),
            "packed": PackedLinear,
            "padded": partial(PackedLinear, least=FEW),
            "float16": HalfLinear,
        }
        if copies:
            self.ways |= {way: partial(TwoLayouts, border=rows) for rows, way in TWO.items()}
        self.bytes = dict.fromkeys(self.ways, 0)
        self._known = layers, copies
        self._chosen: dict[tuple[int, ...], str] = {}
        self._seconds: dict[tuple[int, ...], Seconds] = {}

    def __call__(self, weight: Tensor, bias: Tensor | None = None) -> Linear:
        """The product with a weight ``[rows, width]`` and a bias ``[rows]``."""
        shape = tuple(weight.shape)
        if shape not in self._chosen:
            self._chosen[shape] = self._choose(weight)
        made = self.ways[self._chosen[shape]](weight, bias)
        self.bytes[self._chosen[shape]] += made.bytes
        return made

    def _choose(self, weight: Tensor) -> str:
        packed = ["packed", "padded"] if self.pack != "off" and packable(weight) else []
        if not packed:
            return "plain"
        ways = packed + ["float16"] * (self.half and halvable(weight)) + ["plain"] * (self.pack == "auto")
        part = weight[: max(1, COLD // (weight.shape[1] * weight.element_size()))] if self.pack == "on" else weight
        seconds = self._measured(ways, part)
        if self.pack == "auto":
            self._seconds[tuple(weight.shape)] = seconds
        total = {way: sum(seconds[way][:2]) * (MARGIN if way == "plain" else 1) for way in ways if way not in packed}
        step = min(packed, key=lambda way: seconds[way][0])  # at more rows nothing is padded
        total[step] = sum(map(min, *(seconds[way][:2] for way in packed)))
        best = min(total, key=lambda way: total[way])
        return self._for_more_rows(weight, seconds) if best == "plain" else best

    def _for_more_rows(self, weight: Tensor, seconds: Seconds) -> str:
        """The way of a weight that is plain for a step: it may be packed for more rows, if it is small."""
        if weight.numel() * weight.element_size() <= TWICE:
            for way, plain, packed in zip(TWO.values(), seconds["plain"][1:], seconds["packed"][1:]):
                if way in self.ways and packed < MARGIN * plain:
                    return way
        return "plain"

    def _measured(self, ways: Sequence[str], weight: Tensor) -> Seconds:
        known = tuple(weight.shape), weight.dtype, *ways, *self._known, torch.get_num_threads()
        if known not in _MEASURED:
            _MEASURED[known] = measure({way: self.ways[way] for way in ways}, weight, self.layers)
        return _MEASURED[known]

    def sentence(self) -> str:
        """What was chosen and why, for the terminal; empty where there was nothing to choose."""
        kinds = {
            "packed": self.bytes["packed"] + self.bytes["padded"],
            "plain and packed": sum(self.bytes.get(way, 0) for way in TWO.values()),
            "in float16": self.bytes["float16"],
        }
        size = ", ".join(f"{bytes / 1e6:.1f} MB {kind}" for kind, bytes in kinds.items() if bytes)
        size = f"weights: {size}" if size else "weights plain" if self._seconds else ""
        shapes = []
        for shape, seconds in self._seconds.items():
            packed = list(map(min, seconds["packed"], seconds["padded"]))
            others = {"packed": packed} | {way: seconds[way] for way in ("float16",) if way in seconds}
            ratios = [
                f"{way} " + ", ".join(f"{plain / other:.1f}" for plain, other in zip(seconds["plain"], times))
                for way, times in others.items()
            ]
            way = self._chosen[shape].replace("padded", "packed")
            shapes.append(f"{shape[0]}×{shape[1]} {way} ({'; '.join(ratios)})")
        if not shapes:
            return size
        threads = torch.get_num_threads()
        return (
            f"{size}; times as fast as plain at {', '.join(map(str, ROWS))} rows on {threads} "
            f"thread{'s' if threads > 1 else ''}: {', '.join(shapes)}"
        )


@torch.inference_mode()
def measure(ways: Mapping[str, Callable[[Tensor], Linear]], weight: Tensor, layers: int) -> Seconds:
    """Seconds of the products that are made in these ways, at each of `ROWS`.

    Args:
        ways: make a product, by name.
        weight: an example of the shape.
        layers: weights of this shape that the model reads in turn.
    """
    size = weight.numel() * weight.element_size()
    count = max(1, min(layers, COLD // size))
    made = {name: [make(weight.detach().clone()) for _ in range(count)] for name, make in ways.items()}
    inputs = [weight.new_ones(rows, weight.shape[1]) for rows in ROWS]
    repeats = max(1, min(64, COLD // size) // count)  # small weights take too little time to be measured once

    def seconds(way: Sequence[Linear], x: Tensor) -> float:
        x.mul_(1)  # FBGEMM leaves wide registers in use, with which other kernels are slow until such an operation
        begun = time.perf_counter()
        for _ in range(repeats):
            for linear in way:
                linear(x)
        return time.perf_counter() - begun

    least = {name: [float("inf")] * len(ROWS) for name in made}
    for _ in range(TURNS):
        for i, x in enumerate(inputs):
            for name, way in made.items():
                least[name][i] = min(least[name][i], seconds(way, x))
    return least


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
