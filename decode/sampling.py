"""Logits to probabilities, the same way for the target and for the draft."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, SupportsInt

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers.generation.logits_process import (
    LogitsProcessor,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from decode.errors import UserError
from decode.method_options import COLDEST


@dataclass
class LogitsWarper:
    """Processors, then temperature, top-k, top-p and min-p: what transformers computes, in its own order.

    At temperature 0 the result is one-hot at the argmax, so that greedy decoding is no special case anywhere.
    """

    temperature: float = 0.0  # 0 is greedy; otherwise logits are divided by it
    top_k: int = 0  # keep the k most probable tokens; 0 keeps all (transformers' own default is 50)
    top_p: float = 1.0  # keep the smallest set of tokens whose probability reaches this
    min_p: float = 0.0  # keep tokens at least this fraction as probable as the most probable one
    repetition_penalty: float = 1.0  # divide (multiply, if negative) the logits of tokens in the prefix; 1: no change
    # more processors that look at the prefix; they run before temperature, on drafted prefixes too
    processors: list[LogitsProcessor] = field(default_factory=list)

    def __post_init__(self) -> None:
        limits = {
            "temperature": (
                self.temperature == 0 or COLDEST <= self.temperature < math.inf,
                f"0 (greedy) or at least {COLDEST:g}: below, logits divided by it overflow",
            ),
            "top_k": (self.top_k >= 0, "at least 0 (0 keeps all tokens)"),
            "top_p": (0 < self.top_p <= 1, "in (0, 1]"),
            "min_p": (0 <= self.min_p <= 1, "in [0, 1]"),
            "repetition_penalty": (self.repetition_penalty > 0, "positive (1 changes nothing)"),
        }
        for name, (valid, expected) in limits.items():
            if not valid:
                raise UserError(f"{name} is {getattr(self, name)}; it has to be {expected}")
        self._context: list[LogitsProcessor] = list(self.processors)
        if self.repetition_penalty != 1.0:
            self._context.insert(0, RepetitionPenaltyLogitsProcessor(self.repetition_penalty))
        self._cut: list[LogitsProcessor] = []
        if self.temperature > 0:
            if self.top_k:
                self._cut.append(TopKLogitsWarper(self.top_k))
            if self.top_p < 1:
                self._cut.append(TopP(self.top_p))
            if self.min_p > 0:
                self._cut.append(MinPLogitsWarper(self.min_p))

    @property
    def greedy(self) -> bool:
        """Whether the result is one-hot."""
        return self.temperature == 0

    @property
    def needs_prefix(self) -> bool:
        """Whether the probabilities depend on the text before them otherwise than through the model."""
        return bool(self._context)

    def top(self, logits: Tensor, prefixes: Sequence[Sequence[int]] | None = None) -> Tensor:
        """The most probable token of each row, ``[rows]``; arguments as in a call."""
        return argmax(self.process(_wide(logits), prefixes) if self._context else logits)

    def __call__(self, logits: Tensor, prefixes: Sequence[Sequence[int]] | None = None) -> Tensor:
        """Warp rows of logits.

        Args:
            logits: ``[rows, vocab]``, any float dtype.
            prefixes: the tokens before each row; needed only where `needs_prefix`.

        Returns:
            Probabilities ``[rows, vocab]`` in float32 (float64 stays float64).
        """
        if self.temperature == 0:
            return one_hot(self.top(logits, prefixes), logits)
        logits = _wide(logits)
        if self._context:
            logits = self.process(logits, prefixes)
        if self.temperature != 1:
            logits = logits / self.temperature
        for cut in self._cut:
            logits = cut(None, logits)
        return logits.softmax(-1)

    def process(self, logits: Tensor, prefixes: Sequence[Sequence[int]] | None) -> Tensor:
        """Logits ``[rows, vocab]`` after the processors that look at the prefix; neither temperature nor cuts."""
        if prefixes is None or len(prefixes) != len(logits):
            raise ValueError("this warp depends on the prefix: give the tokens before every row")
        rows = []
        for row, prefix in zip(logits.split(1), prefixes):
            ids = torch.tensor([list(prefix)], dtype=torch.long, device=logits.device)
            for process in self._context:
                row = process(ids, row)
            rows.append(row)
        return torch.cat(rows)


class WarpedRows:
    """Rows of `LogitsWarper.__call__`, each computed when first read: verification of a tree reads few of them."""

    def __init__(self, warp: LogitsWarper, logits: Tensor, prefixes: Sequence[Sequence[int]] | None = None) -> None:
        self._warp, self._logits, self._prefixes = warp, logits, prefixes
        self._rows: dict[int, Tensor] = {}

    def __len__(self) -> int:
        return len(self._logits)

    def __getitem__(self, row: int) -> Tensor:
        if row not in self._rows:
            prefix = None if self._prefixes is None else self._prefixes[row : row + 1]
            self._rows[row] = self._warp(self._logits[row : row + 1], prefix)[0]
        return self._rows[row]


Rows = Tensor | WarpedRows
"""Probabilities ``[rows, vocab]`` of which single rows are read."""


class TopP(TopPLogitsWarper):
    """As transformers', without sorting the vocabulary on CPUs, which takes longer than a small model's forward.

    Tokens below (1 - top_p) / vocab are outside the nucleus together, so only those above have to be sorted: a few
    dozen of a language model's row. Of equally probable tokens at its edge the last ones are inside; which ones
    are in transformers' depends on the order that its sort happens to leave them in.
    """

    def __call__(self, input_ids: Tensor | None, scores: Tensor) -> Tensor:
        """Logits ``[rows, vocab]`` with -inf outside the nucleus."""
        if not scores.is_cpu or scores.requires_grad:
            return super().__call__(input_ids, scores)
        p = scores.softmax(-1)
        borders = [self._border(row) for row in p.numpy()]
        found = scores.masked_fill(p < p.new_tensor([lowest for lowest, _ in borders])[:, None], self.filter_value)
        for row, (lowest, outside) in enumerate(borders):
            if outside:
                found[row, (p[row] == lowest).nonzero()[:outside, 0]] = self.filter_value
        return found

    def _border(self, p: NDArray[Any]) -> tuple[float, int]:
        """The least probability in the nucleus, and how many tokens that have it are outside."""
        likely = p[p >= (1 - self.top_p) / len(p)]
        if not len(likely):  # not a number
            return 0.0, 0
        likely.sort()
        mass = likely.cumsum()
        first = min(int(np.searchsorted(mass, mass[-1] - self.top_p, side="right")), len(likely) - 1)
        return float(likely[first]), first - int(np.searchsorted(likely, likely[first]))


def _wide(logits: Tensor) -> Tensor:
    return logits if logits.dtype == torch.float64 else logits.float()


def argmax(rows: Tensor) -> Tensor:
    """Index of the first largest element of each row, ``[..]`` from ``[.., vocab]``.

    On CPUs by NumPy, which was measured 1.5 (one row of 1,024) to 12 times (12 rows of 32,000) as fast as torch.
    """
    if rows.is_cpu and not rows.requires_grad:
        return torch.from_numpy(np.asarray(_wide(rows).numpy().argmax(-1)))
    return rows.argmax(-1)


def one_hot(tokens: Tensor, like: Tensor) -> Tensor:
    """Probabilities ``[k, vocab]``, 1 at ``tokens [k]``, over the vocabulary of the logits ``like [.., vocab]``."""
    dtype = torch.float64 if like.dtype == torch.float64 else torch.float32
    probs = torch.zeros(tokens.shape[0], like.shape[-1], dtype=dtype, device=like.device)
    return probs.scatter_(-1, tokens[:, None], 1.0)


class Rng(Protocol):
    """Source of every random choice in decoding."""

    def draw(self, weights: Tensor) -> Tensor:
        """One token id (0-d long) from non-negative weights ``[vocab]``, normalised or not."""
        ...

    def draw_rows(self, weights: Rows) -> Sequence[int]:
        """One token id for each row of ``[rows, vocab]``; rows that are not read need not be drawn."""
        ...

    def first_reject(self, accept: Tensor) -> SupportsInt:
        """Index of the first rejection given acceptance probabilities ``[k]``; k if there is none."""
        ...


BLOCK = 256  # uniform numbers drawn at once on the CPU


def inverse(weights: Tensor, u: Tensor) -> Tensor:
    """The token at which the cumulative weights pass the share ``u`` of their sum.

    Args:
        weights: ``[..., vocab]``, not negative, normalised or not.
        u: ``[..., 1]`` in float64, from [0, 1).

    Returns:
        Token ids ``[...]`` (long); never one of zero weight.
    """
    cdf = weights.cumsum(-1, dtype=torch.float64)
    # right=True: the first index whose cdf exceeds u·total
    index = torch.searchsorted(cdf, u * cdf[..., -1:], right=True)
    return index.clamp_(max=weights.shape[-1] - 1).squeeze(-1)


class TorchRng:
    """Inverse-transform sampling in float64; no draw makes the host wait for an accelerator."""

    def __init__(self, seed: int | None = None, device: torch.device | str = "cpu"):
        self.generator = torch.Generator(device=device)
        self._ready: list[float] = []
        if seed is None:
            self.generator.seed()
        else:
            self.generator.manual_seed(seed)

    def _uniform(self) -> float:
        """The next number from [0, 1) of a CPU's generator, which gives a block of them in the time of one."""
        if not self._ready:
            self._ready = torch.rand(
                BLOCK, generator=self.generator, dtype=torch.float64, device=self.generator.device
            ).tolist()
        return self._ready.pop()

    def uniforms(self, count: int) -> list[float]:
        """The next `count` numbers from [0, 1) of a CPU's generator, as `draw` would take them."""
        return [self._uniform() for _ in range(count)]

    def _inverse(self, weights: Tensor) -> Tensor:
        u = torch.rand((*weights.shape[:-1], 1), generator=self.generator, dtype=torch.float64, device=weights.device)
        return inverse(weights, u)

    def draw(self, weights: Tensor) -> Tensor:
        """See `Rng.draw`."""
        if not weights.is_cpu:
            return self._inverse(weights)
        # as `inverse`, in half of its time on the host
        cdf = weights.cumsum(-1, dtype=torch.float64).numpy()
        token = int(cdf.searchsorted(self._uniform() * cdf.item(-1), side="right"))
        return torch.full((), min(token, len(cdf) - 1))

    def draw_rows(self, weights: Rows) -> Sequence[int]:
        """See `Rng.draw_rows`; on an accelerator one draw for all rows and one transfer to the host."""
        if isinstance(weights, Tensor) and not weights.is_cpu:
            return self._inverse(weights).tolist()
        return _Draws(self, weights)

    def first_reject(self, accept: Tensor) -> SupportsInt:
        """See `Rng.first_reject`; accepts where u < a, so that a = 0 is never accepted."""
        if not accept.is_cpu:
            u = torch.rand(len(accept), generator=self.generator, dtype=accept.dtype, device=accept.device)
            return (u < accept).cumprod(0).sum()
        rates = accept.tolist()
        return next((i for i, a in enumerate(rates) if not self._uniform() < a), len(rates))

    def for_greedy(self) -> TorchRng:
        """The same source for one-hot weights only, whose draw is their argmax whatever the uniform."""
        greedy = object.__new__(_OneHotRng)
        greedy.generator, greedy._ready = self.generator, self._ready
        return greedy


class _Draws(Sequence[int]):
    """A draw of each row, made when it is read."""

    def __init__(self, rng: TorchRng, weights: Rows) -> None:
        self._rng, self._weights = rng, weights

    def __len__(self) -> int:
        return len(self._weights)

    def __getitem__(self, row: Any) -> Any:
        return int(self._rng.draw(self._weights[row]))


class _OneHotRng(TorchRng):
    def _inverse(self, weights: Tensor) -> Tensor:
        return argmax(weights)

    draw = _inverse
