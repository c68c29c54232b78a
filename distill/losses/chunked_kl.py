"""The distillation loss without the logits of all rows, and its plain twin.

`fused_loss` works through the rows in chunks that stay in the processor's cache. The first pass needs no graph: it
yields every row's loss and, since it is at it, α and agreement. The selection chooses among all rows exactly. Gradient
is then taken on the chosen rows only, in closed form, and summed up in float32 in place, so no tensor of all rows
times the vocabulary ever exists, neither of logits nor of their gradient. Where the distributions are small enough
to be kept until the choice is made, the second pass does not compute them again.

`plain_loss` does the same by autograd on whole logits. Tests hold the two together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

from distill.losses.divergences import Divergence, Pair
from distill.losses.rows import log_probs
from distill.models.lm_head import LMHead

CPU_CHUNK, CUDA_CHUNK = 1 << 21, 1 << 28
"""Bytes of one ``[chunk, vocab]`` float32 buffer: a few of them fit a CPU's cache, or keep a GPU busy."""

FEWEST_ROWS = 64
"""Rows of a chunk at least: the head's weights are read once a chunk."""

KEPT = 1 << 26
"""Bytes of row gradients that are kept between the passes at most; above, they are computed again."""

LATE = 1 << 22
"""Bytes of one model's log-probabilities up to which distributions are kept instead, and gradients computed for the
chosen rows only: with more, reading them from memory again costs what that saves."""

Choose = Callable[[Tensor], Tensor]

RowIndex = slice | Tensor
"""Which rows: a range, or indices."""


class TargetRows(Protocol):
    """The target's distributions for the rows of one batch, computed when asked for, a few rows at a time."""

    @property
    def vocab(self) -> int:
        """Ids that the target knows."""
        ...

    def log_probs(self, place: RowIndex, log_q: Tensor, temperature: float) -> Tensor:
        """Log-probabilities ``[rows, vocab]`` of the ids that log_q has, for the rows at ``place``.

        Args:
            place: Which rows.
            log_q: The draft's log-probabilities of these rows, for a signal that leaves something open.
            temperature: Divides the logits.
        """
        ...


@dataclass
class LossRows:
    """What a batch's rows yielded.

    Attributes:
        total: Sum of the chosen rows' losses, a scalar that carries the gradient.
        losses: Every row's loss, ``[rows]``, detached.
        chosen: Indices of the chosen rows, ascending; None: all.
        alpha: Σ min(p, q) of every row, ``[rows]``; None if not asked for.
        agreement: 1 where both have the same most probable token, ``[rows]``; None if not asked for.
    """

    total: Tensor
    losses: Tensor
    chosen: Tensor | None
    alpha: Tensor | None
    agreement: Tensor | None


@dataclass(frozen=True)
class LossRequest:
    """What is wanted of the rows.

    Attributes:
        divergence: The loss.
        choose: Indices of the rows that count, ascending, from the criterion of all rows ``[rows]``; None: all.
        criterion: The divergence that ``choose`` is given; None: the loss.
        metrics: Whether alpha and agreement are wanted; the loss alone costs less.
    """

    divergence: Divergence
    choose: Choose | None = None
    criterion: Divergence | None = None
    metrics: bool = True


def can_fuse(head: LMHead) -> bool:
    """Whether the head is a plain linear layer, whose gradient is known here; with an adapter on it it is not."""
    return type(head.linear) is nn.Linear


def fused_loss(
    hidden: Tensor, head: LMHead, target: TargetRows, task: LossRequest, chunk: int | None = None
) -> LossRows:
    """The loss of a batch's rows, in chunks.

    Args:
        hidden: The draft's last hidden states at the label positions, ``[rows, hidden]``.
        head: The draft's head, for which `can_fuse` holds.
        target: The target's distributions of the same rows.
        task: What is wanted.
        chunk: Rows at a time; None: chosen from the vocabulary and the device.
    """
    work = _Work(hidden, head, target, task, chunk)
    total = _Fused.apply(hidden, head.linear.weight, head.linear.bias, work)
    return LossRows(total, work.losses, work.chosen, work.alpha, work.agreement)


def plain_loss(hidden: Tensor, head: LMHead, target: TargetRows, task: LossRequest) -> LossRows:
    """The same by autograd, with the logits of all rows in memory."""
    vocab = min(head.vocab, target.vocab)
    log_q = log_probs(head.first(hidden, vocab), vocab, task.divergence.temperature)
    with torch.no_grad():
        log_p = target.log_probs(slice(None), log_q.detach(), task.divergence.temperature)
    losses, detached = task.divergence.loss(Pair(log_p, log_q)), Pair(log_p, log_q.detach())
    chosen = None
    if task.choose is not None:
        ranked = losses.detach() if task.criterion is None else task.criterion.loss(detached)
        chosen = task.choose(ranked)
    return LossRows(
        (losses if chosen is None else losses[chosen]).sum(),
        losses.detach(),
        chosen,
        detached.alpha if task.metrics else None,
        detached.agreement() if task.metrics else None,
    )


def chunk_rows(vocab: int, device: torch.device) -> int:
    """Rows of a chunk."""
    size = CUDA_CHUNK if device.type == "cuda" else CPU_CHUNK
    return max(FEWEST_ROWS, size // (4 * vocab))


class _Work:
    """Both passes over one batch, and what they found."""

    def __init__(self, hidden: Tensor, head: LMHead, target: TargetRows, task: LossRequest, chunk: int | None) -> None:
        self.hidden, self.head, self.target, self.task = hidden.detach(), head, target, task
        self.vocab = min(head.vocab, target.vocab)
        self.rows = len(hidden)
        self.chunk = chunk or chunk_rows(self.vocab, hidden.device)
        self.dtype = torch.promote_types(hidden.dtype, torch.float32)
        self.graph = torch.is_grad_enabled()  # inside the function below it never is
        empty = hidden.new_empty(self.rows, dtype=self.dtype)
        self.losses: Tensor = empty
        self.chosen: Tensor | None = None
        self.ranked = empty.clone() if task.criterion is not None else self.losses
        self.alpha: Tensor | None = empty.clone() if task.metrics else None
        self.agreement: Tensor | None = empty.clone() if task.metrics else None

    def pair(self, place: RowIndex, weight: Tensor, bias: Tensor | None) -> tuple[Pair, Tensor | float]:
        """Both distributions of some rows, and the derivative of the draft's logits by the linear layer's output."""
        products = functional.linear(
            self.hidden[place], weight[: self.vocab], None if bias is None else bias[: self.vocab]
        )
        logits = self.head.finish(products)
        temperature = self.task.divergence.temperature
        log_q = log_probs(logits, self.vocab, temperature).to(self.dtype)
        slope = self.head.slope(logits.to(self.dtype))
        return Pair(self.target.log_probs(place, log_q, temperature), log_q), slope / temperature

    def run(self, weight: Tensor, bias: Tensor | None, gradients: _Gradients | None) -> Tensor:
        """The loss; adds the gradient to ``gradients`` if it is wanted."""
        task = self.task
        kept: list[_Part | Tensor] = []
        size = self.rows * self.vocab * 4
        for place in _slices(self.rows, self.chunk):
            pair, slope = self.pair(place, weight, bias)
            self.note(place, pair)
            if gradients is None or (task.choose is not None and size > KEPT):
                continue
            part = _Part(task.divergence, pair, slope)
            if task.choose is None:
                gradients.add(place, part.gradient())
            else:
                kept.append(part if size <= LATE else part.gradient())
        if task.choose is None:
            return self.losses.sum()
        self.chosen = task.choose(self.ranked)
        if gradients is not None:
            for rows, gradient in self.again(kept, weight, bias):
                gradients.add(rows, gradient)
        return self.losses[self.chosen].sum()

    def note(self, place: slice, pair: Pair) -> None:
        """Writes down what a chunk says of its rows."""
        task = self.task
        self.losses[place] = task.divergence.loss(pair)
        if task.criterion is not None:
            self.ranked[place] = task.criterion.loss(pair)
        if self.alpha is not None and self.agreement is not None:
            self.alpha[place], self.agreement[place] = pair.alpha, pair.agreement()

    def again(self, kept: list[_Part | Tensor], weight: Tensor, bias: Tensor | None) -> Iterator[tuple[Tensor, Tensor]]:
        """The chosen rows' gradients, a chunk at a time: from what was kept, or computed once more."""
        assert self.chosen is not None
        if not kept:
            for place in self.chosen.split(self.chunk):
                yield place, _Part(self.task.divergence, *self.pair(place, weight, bias)).gradient()
            return
        counts = torch.bincount(self.chosen // self.chunk, minlength=len(kept)).tolist()
        for number, (place, part) in enumerate(zip(self.chosen.split(counts), kept)):
            rows = place - number * self.chunk
            yield place, part.index_select(0, rows) if isinstance(part, Tensor) else part.gradient(rows)


@dataclass(frozen=True)
class _Part:
    """A chunk's distributions, and the derivative of the draft's logits by the linear layer's output."""

    divergence: Divergence
    pair: Pair
    slope: Tensor | float

    def gradient(self, rows: Tensor | None = None) -> Tensor:
        """Of each row's loss (of ``rows`` only) with respect to the linear layer's output, ``[rows, vocab]``."""
        pair, slope = self.pair, self.slope
        if rows is not None:
            pair, slope = pair.at(rows), slope if isinstance(slope, float) else slope.index_select(0, rows)
        gradient = self.divergence.gradient(pair)
        return gradient if isinstance(slope, float) and slope == 1.0 else gradient * slope


class _Gradients:
    """Gradients of the hidden states and the head, summed up row chunk by row chunk in float32."""

    def __init__(self, work: _Work, weight: Tensor, bias: Tensor | None, needed: tuple[bool, ...]) -> None:
        self.work, self.vocab = work, work.vocab
        like = work.hidden
        self.linear = weight[: self.vocab]
        self.hidden = torch.zeros_like(like) if needed[0] else None
        self.weight = like.new_zeros(weight.shape, dtype=work.dtype) if needed[1] else None
        self.bias = like.new_zeros(bias.shape, dtype=work.dtype) if bias is not None and needed[2] else None

    def add(self, place: RowIndex, gradient: Tensor) -> None:
        """Rows' gradients ``[rows, vocab]`` with respect to the linear layer's output."""
        rows = self.work.hidden[place] if isinstance(place, slice) else self.work.hidden.index_select(0, place)
        if self.bias is not None:
            self.bias[: self.vocab] += gradient.sum(0)
        narrow = gradient.to(rows.dtype)
        if self.hidden is not None:
            self.hidden[place] = (narrow @ self.linear.to(rows.dtype)).to(self.hidden.dtype)
        if self.weight is not None:
            if rows.dtype == self.weight.dtype:
                self.weight[: self.vocab].addmm_(narrow.T, rows)
            else:
                self.weight[: self.vocab] += narrow.T @ rows


class _Fused(torch.autograd.Function):
    """Computes the gradient together with the loss, while the distributions are at hand."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, work: _Work) -> Tensor:
        needed = ctx.needs_input_grad[:3]
        gradients = _Gradients(work, weight, bias, needed) if work.graph and any(needed) else None
        total = work.run(weight, bias, gradients)
        if gradients is not None:
            found = gradients.hidden, gradients.weight, gradients.bias
            ctx.save_for_backward(*found)
            ctx.dtypes = [None if value is None else value.dtype for value in (hidden, weight, bias)]
        return total

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, by: Tensor) -> tuple[Any, ...]:
        scaled = [
            None if value is None else (value * by).to(dtype) for value, dtype in zip(ctx.saved_tensors, ctx.dtypes)
        ]
        return *scaled, None


def _slices(rows: int, chunk: int) -> Iterator[slice]:
    for start in range(0, rows, chunk):
        yield slice(start, min(rows, start + chunk))
