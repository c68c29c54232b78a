"""Logits to probabilities, the same way for the target and for the draft."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol, SupportsInt

import numpy as np
import torch
from jsonargparse.typing import ClosedUnitInterval, NonNegativeInt, PositiveFloat
from torch import Tensor
from transformers.generation.logits_process import (
    LogitsProcessor,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from decode.errors import UserError
from decode.options import Checked, Share, Temperature

Prefixes = Sequence[Sequence[int] | Tensor]
"""The tokens before each row of logits."""


@dataclass
class LogitsWarper(Checked):
    """Processors, then temperature, top-k, top-p and min-p: what transformers computes, in its own order.

    At temperature 0 the result is one-hot at the argmax, so that greedy decoding is no special case anywhere.
    """

    temperature: Temperature = 0.0  # 0 is greedy; otherwise logits are divided by it
    top_k: NonNegativeInt = 0  # keep the k most probable tokens; 0 keeps all (transformers' own default is 50)
    top_p: Share = 1.0  # keep the smallest set of tokens whose probability reaches this
    min_p: ClosedUnitInterval = 0.0  # keep tokens at least this fraction as probable as the most probable one
    repetition_penalty: PositiveFloat = 1.0  # divide (multiply, if negative) the logits of tokens in the prefix
    # more processors that look at the prefix; they run before temperature, on drafted prefixes too
    processors: list[LogitsProcessor] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.temperature == float("inf"):
            raise UserError("temperature is inf; expected a finite number, or 0 for greedy decoding")
        self._context: list[LogitsProcessor] = list(self.processors)
        if self.repetition_penalty != 1:
            self._context.insert(0, RepetitionPenaltyLogitsProcessor(self.repetition_penalty))
        self._cut: list[LogitsProcessor] = []
        if self.top_k:
            self._cut.append(TopKLogitsWarper(self.top_k))
        if self.top_p < 1:
            self._cut.append(TopP(self.top_p))
        if self.min_p:
            self._cut.append(MinPLogitsWarper(self.min_p))

    @property
    def greedy(self) -> bool:
        """Whether the result is one-hot."""
        return self.temperature == 0

    @property
    def needs_prefix(self) -> bool:
        """Whether the probabilities depend on the text before them otherwise than through the model."""
        return bool(self._context)

    def top(self, logits: Tensor, prefixes: Prefixes | None = None) -> Tensor:
        """The most probable token of each row, ``[rows]``; arguments as in a call."""
        return argmax(self.process(_wide(logits), prefixes) if self._context else logits)

    def __call__(self, logits: Tensor, prefixes: Prefixes | None = None) -> Tensor:
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

    def process(self, logits: Tensor, prefixes: Prefixes | None) -> Tensor:
        """Logits ``[rows, vocab]`` after the processors that look at the prefix; neither temperature nor cuts."""
        if prefixes is None or len(prefixes) != len(logits):
            raise ValueError("this warp depends on the prefix: give the tokens before every row")
        rows = []
        for row, prefix in zip(logits.split(1), prefixes):
            ids = torch.as_tensor(prefix, dtype=torch.long, device=logits.device)[None]
            for process in self._context:
                row = process(ids, row)
            rows.append(row)
        return torch.cat(rows)


class WarpedRows:
    """Rows of `LogitsWarper.__call__`, each computed when first read: verification of a tree reads few of them."""

    def __init__(self, warp: LogitsWarper, logits: Tensor, prefixes: Prefixes | None = None) -> None:
        self._warp, self._logits, self._prefixes = warp, logits, prefixes
        self._rows: dict[int, Tensor] = {}

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
        probs, cut = scores.softmax(-1).numpy(), scores.numpy().copy()
        for p, row in zip(probs, cut):
            likely = np.sort(p[p >= (1 - self.top_p) / len(p)])
            if len(likely):  # empty where logits are not numbers
                mass = likely.cumsum()
                first = min(int(np.searchsorted(mass, mass[-1] - self.top_p, side="right")), len(likely) - 1)
                least = likely[first]  # the least probability in the nucleus; some tokens that have it may be outside
                row[p < least] = self.filter_value
                row[(p == least).nonzero()[0][: first - np.searchsorted(likely, least)]] = self.filter_value
        return torch.from_numpy(cut)


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
        """Token ids ``[...]`` (long) from non-negative weights ``[..., vocab]``, normalised or not."""
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
            self._ready = torch.rand(BLOCK, generator=self.generator, dtype=torch.float64).tolist()
        return self._ready.pop()

    def uniforms(self, count: int) -> list[float]:
        """The next `count` numbers from [0, 1) of a CPU's generator, as `draw` would take them."""
        return [self._uniform() for _ in range(count)]

    def draw(self, weights: Tensor) -> Tensor:
        """See `Rng.draw`."""
        if not weights.is_cpu or weights.dim() > 1:
            u = torch.rand(
                (*weights.shape[:-1], 1), generator=self.generator, dtype=torch.float64, device=weights.device
            )
            return inverse(weights, u)
        # as `inverse`, in half of its time on the host
        cdf = weights.cumsum(-1, dtype=torch.float64).numpy()
        token = int(cdf.searchsorted(self._uniform() * cdf.item(-1), side="right"))
        return torch.full((), min(token, len(cdf) - 1))

    def first_reject(self, accept: Tensor) -> SupportsInt:
        """See `Rng.first_reject`; accepts where u < a, so that a = 0 is never accepted."""
        if not accept.is_cpu:
            u = torch.rand(len(accept), generator=self.generator, dtype=accept.dtype, device=accept.device)
            return (u < accept).cumprod(0).sum()
        rates = accept.tolist()
        return next((i for i, a in enumerate(rates) if not self._uniform() < a), len(rates))
