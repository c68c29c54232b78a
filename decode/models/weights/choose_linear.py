"""Which of the products of `linear` serves each shape of a model's weights: what is asked for, or measured fastest."""

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from decode.core.errors import UserError
from decode.models.weights.linear import HalfLinear, Linear, PackedLinear, TwoLayouts, by_columns, halvable, packable

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
