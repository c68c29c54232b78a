"""Logits to probabilities, the same way for the target and for the draft, and the random choices made by them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, Self

import numpy as np
import torch
from jsonargparse.typing import ClosedUnitInterval, NonNegativeInt, PositiveFloat
from torch import Tensor
from transformers.generation.logits_process import (
    LogitsProcessor,
    MinPLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)
from typing_extensions import override

from decode.core.draft import upload
from decode.errors import UserError
from decode.options import Share, Temperature, check, with_plain_numbers


class History:
    """The ids of a text that grows, as warps that look at it read them: see `Prefixes`."""

    def __init__(self, ids: list[int]) -> None:
        self.ids = ids  # the list that the text grows in
        self.counted = 0  # ids that `present` holds
        self.present: Tensor | None = None  # bool ``[vocab]``


class Prefixes:
    """The tokens before each row of logits: the ids of a text, and the drafted tokens from it down to the row.

    Args:
        texts: what rows belong to.
        counts: rows of each text.
        paths: drafted tokens of each row, long ``[rows, d]``; a shorter path is filled up with a token of the text.
            None: there are none.
        lengths: of the paths; None: none is filled up.
    """

    def __init__(
        self,
        texts: Sequence[History],
        counts: Sequence[int] | None = None,
        paths: Tensor | None = None,
        lengths: Sequence[int] | None = None,
    ) -> None:
        self.texts, self.counts, self.paths, self.lengths = texts, counts or [1] * len(texts), paths, lengths

    @classmethod
    def of(cls, texts: Iterable[Sequence[int]]) -> Self:
        """Those of rows that each have a text of their own."""
        return cls([History(list(ids)) for ids in texts])

    def __len__(self) -> int:
        return sum(self.counts)

    def present(self, vocab: int, device: torch.device) -> Tensor:
        """Which ids occur before each row, bool ``[rows, vocab]``; costs what the texts have grown by since."""
        texts, blank = self.texts, torch.zeros(vocab, dtype=torch.bool, device=device)
        held = torch.stack([blank if text.present is None else text.present for text in texts])
        grown = [text.ids[text.counted :] for text in texts]
        if any(grown):
            at = [i for i, new in enumerate(grown) for _ in new], [token for new in grown for token in new]
            held[tuple(upload(at, device))] = True
            for text, row in zip(texts, held):
                text.present, text.counted = row, len(text.ids)
        if len(self) > len(texts):
            rows = [i for i, count in enumerate(self.counts) for _ in range(count)]
            held = held.expand(len(self), -1).clone() if len(texts) == 1 else held.index_select(0, upload(rows, device))
        elif any(grown) and self.paths is not None:
            held = held.clone()
        return held if self.paths is None else held.scatter_(1, self.paths, True)

    def ids(self, device: torch.device) -> Iterator[Tensor]:
        """The prefix of each row, long ``[n]``; takes time that grows with the texts."""
        row = 0
        for text, count in zip(self.texts, self.counts):
            before = torch.tensor(text.ids, device=device)
            for _ in range(count):
                path = before[:0] if self.paths is None else self.paths[row]
                yield torch.cat([before, path if self.lengths is None else path[: self.lengths[row]]])
                row += 1


@dataclass
class LogitsWarper:
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
        plain = {name: value for name, value in vars(self).items() if name != "processors"}
        numbers = with_plain_numbers(vars(check(LogitsWarper, plain)))
        vars(self).update({name: numbers[name] for name in plain})
        if self.temperature == float("inf"):
            raise UserError("temperature is inf; expected a finite number, or 0 for greedy decoding")
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
        return bool(self.processors) or self.repetition_penalty != 1

    def top(self, logits: Tensor, prefixes: Prefixes | None = None) -> Tensor:
        """The most probable token of each row, ``[rows]``; arguments as in a call."""
        return argmax(self.process(_wide(logits), prefixes) if self.needs_prefix else logits)

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
        if self.needs_prefix:
            logits = self.process(logits, prefixes)
        if self.temperature != 1:
            logits = logits / self.temperature
        for cut in self._cut:
            logits = cut(None, logits)
        return logits.softmax(-1)

    def process(self, logits: Tensor, prefixes: Prefixes | None) -> Tensor:
        """Logits ``[rows, vocab]`` after the processors that look at the prefix; neither temperature nor cuts.

        The repetition penalty is transformers' own, by a table of the ids that occur; other processors take time that
        grows with the text.
        """
        if prefixes is None or len(prefixes) != len(logits):
            raise ValueError("this warp depends on the prefix: give the tokens before every row")
        if self.repetition_penalty != 1:
            by = self.repetition_penalty
            penalised = torch.where(logits < 0, logits * by, logits / by)
            logits = torch.where(prefixes.present(logits.shape[-1], logits.device), penalised, logits)
        if not self.processors:
            return logits
        rows = []
        for row, ids in zip(logits.split(1), prefixes.ids(logits.device)):
            for process in self.processors:
                row = process(ids[None], row)
            rows.append(row)
        return torch.cat(rows)


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


class Numbers(Protocol):
    """The random choices of several texts in a round; the choices of a text depend on its own `Rng` alone."""

    def draw(self, weights: Tensor, step: int | Sequence[int] = 0, rows: Sequence[int] | None = None) -> Tensor:
        """Token ids ``[n]`` (long) from weights ``[n, vocab]``, not negative, normalised or not.

        Args:
            weights: of the choices.
            step: number of the choice among those of its text, of all or of each; none is made twice.
            rows: the texts that choose; None: all, in their order.
        """
        ...

    def accepted(self, rates: Tensor, lengths: Sequence[int], step: int = 0) -> Tensor:
        """How many of each text's first tokens pass ``[n]``, each with its rate ``[n, k]``, up to the first that fails.

        No more than `lengths` of them pass. The choices are those from number `step` on.
        """
        ...


class Rng(Protocol):
    """Source of every random choice of a text."""

    @staticmethod
    def together(rngs: Sequence[Any], counts: Sequence[int], device: torch.device) -> Numbers:
        """The next choices of several texts, so many of each."""
        ...


BLOCK = 256  # uniform numbers drawn at once


def inverse(weights: Tensor, u: Tensor) -> Tensor:
    """The token of each row at which the cumulative weights pass the share ``u`` of their sum.

    Args:
        weights: ``[n, vocab]``, not negative, normalised or not.
        u: ``[n, 1]`` in float64, from [0, 1).

    Returns:
        Token ids ``[n]`` (long); never one of zero weight.
    """
    cdf = weights.cumsum(-1, dtype=torch.float64)
    # right: the first index whose cdf exceeds the share
    return torch.searchsorted(cdf, u * cdf[:, -1:], right=True)[:, 0].clamp_(max=weights.shape[-1] - 1)


class TorchRng(Rng):
    """Uniform numbers of a text from torch's generator on the CPU, the same whatever device decodes it."""

    def __init__(self, seed: int | None = None) -> None:
        self.generator = torch.Generator()
        self._ready: list[float] = []
        if seed is None:
            self.generator.seed()
        else:
            self.generator.manual_seed(seed)

    def uniforms(self, count: int) -> list[float]:
        """The next `count` numbers from [0, 1)."""
        while len(self._ready) < count:
            block = torch.rand(BLOCK, generator=self.generator, dtype=torch.float64).tolist()
            self._ready = block + self._ready
        return [self._ready.pop() for _ in range(count)]

    @staticmethod
    @override
    def together(rngs: Sequence[TorchRng], counts: Sequence[int], device: torch.device) -> Numbers:
        return Uniform([rng.uniforms(count) for rng, count in zip(rngs, counts, strict=True)], device)


class Uniform(Numbers):
    """Choices by uniform numbers of each text, uploaded at once: inverse-transform sampling in float64."""

    def __init__(self, numbers: Sequence[Sequence[float]], device: torch.device) -> None:
        longest = max(map(len, numbers))
        self._u = upload([[*row, *[0.0] * (longest - len(row))] for row in numbers], device, torch.float64)

    @override
    def draw(self, weights: Tensor, step: int | Sequence[int] = 0, rows: Sequence[int] | None = None) -> Tensor:
        count = weights.shape[0]
        if isinstance(step, int) and count == self._u.shape[0]:
            return inverse(weights, self._u[:, step, None])
        steps = [step] * count if isinstance(step, int) else step
        texts, choices = upload([list(range(count) if rows is None else rows), list(steps)], weights.device)
        return inverse(weights, self._u[texts, choices, None])

    @override
    def accepted(self, rates: Tensor, lengths: Sequence[int], step: int = 0) -> Tensor:
        k = rates.shape[1]
        passed = self._u[:, step : step + k] < rates  # so that a token of rate 0 never passes
        passed &= torch.arange(k, device=rates.device) < upload(lengths, rates.device)[:, None]
        return passed.cumprod(1).sum(1)
