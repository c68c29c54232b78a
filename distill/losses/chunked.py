"""The distillation loss without the logits of all rows, and its plain twin.

`fused_loss` processes the rows in chunks that fit the processor's cache. The first pass needs no graph and computes the
loss of every row, and α and agreement if wanted. The selection then chooses among all rows exactly. The gradient is
computed in closed form for the chosen rows only, and accumulated in float32, so no tensor of all rows times the
vocabulary exists, neither of logits nor of their gradient. Distributions or gradients that are small enough are kept
from the first pass for the second.

`plain_loss` computes the same by autograd on whole logits. Tests compare the two.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

from distill.losses.divergences import Divergence, TokenDistributions, log_probs
from distill.models.lm_head import LMHead
from distill.models.loading import autocast_to_bfloat16, loss_precision

CPU_CHUNK, CUDA_CHUNK = 1 << 21, 1 << 28
"""Bytes of a float32 buffer ``[chunk, vocab]``, a few of which fit a CPU's cache, or keep a GPU busy."""

FEWEST_ROWS, FEWEST_NARROW = 64, 256
"""Smallest chunk. The head's weights are read once per chunk, and rounded where products are in bfloat16."""

WAITING, MOST_WAITING = 1 << 23, 1 << 26
"""Bytes of row gradients that are collected before the weight's gradient is updated: as many as that has, within these
bounds, since every update reads and writes all of it."""

KEPT = 1 << 26
"""Most bytes of row gradients that are kept between the passes. Beyond it they are computed again."""

LATE = 1 << 22
"""Most bytes of one model's log-probabilities for which distributions are kept between the passes, and gradients are
computed for the chosen rows only. Beyond it, reading them from memory again costs as much as that saves."""

RowIndex = slice | Tensor  # a range of rows, or indices


def can_fuse(head: LMHead) -> bool:
    """Returns whether the head is a plain linear layer, whose gradient is known here. One with an adapter is not."""
    return type(head.linear) is nn.Linear


def chunk_rows(vocab: int, device: torch.device, *, narrow: bool = False) -> int:
    """Returns the rows of a chunk. ``narrow``: products are in bfloat16."""
    size = CUDA_CHUNK if device.type == "cuda" else CPU_CHUNK
    return max(FEWEST_NARROW if narrow else FEWEST_ROWS, size // (4 * vocab))


def row_slices(rows: int, chunk: int) -> Iterator[slice]:
    """Yields the rows in chunks."""
    for start in range(0, rows, chunk):
        yield slice(start, min(rows, start + chunk))


def pick(values: Tensor, place: RowIndex) -> Tensor:
    """Returns some of the rows: a view of a range, a copy of indexed ones."""
    return values[place] if isinstance(place, slice) else values.index_select(0, place)


class HeadGradients:
    """Gradients of the hidden states, the head's weight and its bias; those of the head in float32 (float64 stays).

    Args:
        hidden: Hidden states of all rows, ``[rows, hidden]``.
        weight: The head's weight, ``[all ids, hidden]``.
        bias: The head's bias, ``[all ids]``, or None.
        vocab: Number of the first ids, which have logits in the loss.
        needed: Which of the three gradients are needed.
        dtype: Type of the factors of their matrix products. None: that of the hidden states.
    """

    def __init__(
        self,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        vocab: int,
        needed: tuple[bool, ...],
        dtype: torch.dtype | None = None,
    ) -> None:
        dtype, wide = dtype or hidden.dtype, torch.promote_types(hidden.dtype, torch.float32)
        self.states, self.vocab, self.linear = hidden.to(dtype), vocab, weight[:vocab].to(dtype)
        self.dtypes = [None if value is None else value.dtype for value in (hidden, weight, bias)]
        self.hidden = torch.zeros_like(hidden) if needed[0] else None
        self.weight = hidden.new_empty(weight.shape, dtype=wide) if needed[1] else None
        self.bias = hidden.new_zeros(bias.shape, dtype=wide) if bias is not None and needed[2] else None
        self.begun = False  # whether the weight's gradient holds anything
        self.waiting: list[tuple[Tensor, Tensor]] = []  # gradients and states that it lacks

    def add(self, place: RowIndex, gradient: Tensor) -> None:
        """Adds the gradients ``[rows, vocab]`` of some rows with respect to the linear layer's output."""
        rows = pick(self.states, place)
        if self.bias is not None:
            self.bias[: self.vocab] += gradient.sum(0)
        narrow = gradient.to(rows.dtype)
        if self.hidden is not None:
            self.hidden[place] = (narrow @ self.linear).to(self.hidden.dtype)
        if self.weight is not None:
            self.waiting.append((narrow, rows))
            if sum(part.nbytes for part, _ in self.waiting) >= max(WAITING, min(MOST_WAITING, self.weight.nbytes)):
                self._update_weight(self.weight)

    def _update_weight(self, weight: Tensor) -> None:
        if not self.waiting:
            return
        gradients, rows = (parts[0] if len(parts) == 1 else torch.cat(parts) for parts in zip(*self.waiting))
        self.waiting.clear()
        total = weight[: self.vocab]
        if rows.dtype == total.dtype:
            total.addmm_(gradients.T, rows, beta=int(self.begun))
        elif self.begun:
            total += gradients.T @ rows
        else:
            total.copy_(gradients.T @ rows)
        self.begun = True

    def save(self, ctx: Any) -> None:
        """Stores the gradients for an autograd function's backward pass."""
        if self.weight is not None:
            self._update_weight(self.weight)
            self.weight[self.vocab if self.begun else 0 :] = 0.0
        ctx.save_for_backward(self.hidden, self.weight, self.bias)
        ctx.dtypes = self.dtypes

    @staticmethod
    def scaled(ctx: Any, by: Tensor) -> list[Tensor | None]:
        """Returns the three stored gradients times that of the sum, in the types of what they belong to."""
        return [
            None if value is None else (value * by).to(dtype) for value, dtype in zip(ctx.saved_tensors, ctx.dtypes)
        ]


class TargetRows(Protocol):
    """The target's distributions for the rows of one batch, computed a few rows at a time."""

    @property
    def vocab(self) -> int:
        """Number of ids that the target knows."""
        ...

    def log_probs(self, place: RowIndex, log_q: Tensor, temperature: float) -> Tensor:
        """Returns log-probabilities ``[rows, vocab]`` of the ids that ``log_q`` has, for the rows at ``place``.

        Args:
            place: The rows.
            log_q: The draft's log-probabilities of these rows, for a signal that is not complete.
            temperature: Divides the logits.
        """
        ...

    def compare(self, place: RowIndex, logits: Tensor, temperature: float) -> TokenDistributions:
        """Returns both distributions of the rows at ``place``, in the cheapest form with the same divergences.

        Args:
            place: The rows.
            logits: The draft's logits ``[rows, vocab]``, divided by the temperature.
            temperature: Divides the target's logits.
        """
        ...

    def at(self, rows: RowIndex) -> TargetRows:
        """Returns some of the rows."""
        ...


class LossRows(NamedTuple):
    """The loss of a batch's rows.

    Attributes:
        total: Weighted sum of the chosen rows' losses, a scalar that carries the gradient.
        losses: Loss of every row, ``[rows]``, detached.
        chosen: Indices of the chosen rows, ascending. None: all.
        alpha: Σ min(p, q) of every row, ``[rows]``. None: not asked for.
        agreement: 1 where both have the same most probable token, ``[rows]``. None: not asked for.
    """

    total: Tensor
    losses: Tensor
    chosen: Tensor | None
    alpha: Tensor | None
    agreement: Tensor | None


@dataclass(frozen=True)
class LossRequest:
    """What to compute for a batch's rows.

    Attributes:
        divergence: The loss.
        choose: Maps the criterion of all rows, ``[rows]``, to the indices of the chosen rows, ascending. None: all.
        criterion: Divergence that ``choose`` is given. None: the loss.
        metrics: Whether alpha and agreement are computed.
        weights: Factors of the rows' losses in their sum, ``[rows]``. None: 1.
        mass: Probability that the target gives to all ids of the draft together, ``[rows]``, for alpha. None: 1.
    """

    divergence: Divergence
    choose: Callable[[Tensor], Tensor] | None = None
    criterion: Divergence | None = None
    metrics: bool = True
    weights: Tensor | None = None
    mass: Tensor | None = None


def plain_loss(hidden: Tensor, head: LMHead, target: TargetRows, request: LossRequest) -> LossRows:
    """Computes the loss by autograd, with the logits of all rows in memory; see `fused_loss`."""
    divergence = request.divergence
    with loss_precision(hidden.device):
        vocab = min(head.vocab, target.vocab)
        logits = head.first(hidden.to(head.linear.weight.dtype), vocab)
        log_q = log_probs(logits, vocab, divergence.temperature)
        with torch.no_grad():
            log_p = target.log_probs(slice(None), log_q.detach(), divergence.temperature)
        losses, detached = divergence.loss(TokenDistributions(log_p, log_q)), TokenDistributions(log_p, log_q.detach())
        chosen = None
        if request.choose is not None:
            chosen = request.choose((request.criterion or divergence).loss(detached))
        return LossRows(
            _total(losses, chosen, request.weights),
            losses.detach(),
            chosen,
            detached.accepted(request.mass) if request.metrics else None,
            detached.agreement() if request.metrics else None,
        )


def fused_loss(
    hidden: Tensor,
    head: LMHead,
    target: TargetRows,
    request: LossRequest,
    chunk: int | None = None,
    *,
    compiled: bool = False,
) -> LossRows:
    """Computes the loss of a batch's rows in chunks.

    Args:
        hidden: The draft's last hidden states at the label positions, ``[rows, hidden]``.
        head: The draft's head, for which `can_fuse` holds.
        target: The target's distributions of the same rows.
        request: What to compute.
        chunk: Rows per chunk. None: chosen from the vocabulary and the device.
        compiled: Compute chunks with kernels of torch.compile, which read and write logits less often.
    """
    narrow = torch.bfloat16 if autocast_to_bfloat16(hidden.device) else None
    with loss_precision(hidden.device):
        hidden = hidden.to(head.linear.weight.dtype)
        work = _Work(hidden, head, target, request, chunk, narrow, compiled=compiled)
        total = _Fused.apply(hidden, head.linear.weight, head.linear.bias, work)
    alpha, agreement = (work.values[-2], work.values[-1]) if request.metrics else (None, None)
    return LossRows(total, work.values[0], work.chosen, alpha, agreement)


class _Fused(torch.autograd.Function):
    """Computes the gradient together with the loss, while the distributions are in the cache."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, work: _Work) -> Tensor:
        needed, gradients = ctx.needs_input_grad[:3], None
        if work.graph and any(needed):
            gradients = HeadGradients(hidden, weight, bias, work.vocab, needed, work.narrow)
        total = work.run(weight, bias, gradients)
        if gradients is not None:
            gradients.save(ctx)
        return total

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, by: Tensor) -> tuple[Any, ...]:
        return *HeadGradients.scaled(ctx, by), None


class _Work:
    """Both passes over one batch, and their results.

    Attributes:
        values: By row the loss, the criterion if there is one, alpha and agreement if wanted, ``[values, rows]``.
        chosen: Indices of the chosen rows. None: all.
    """

    def __init__(
        self, hidden: Tensor, head: LMHead, target: TargetRows, request: LossRequest, chunk: int | None,
        narrow: torch.dtype | None, *, compiled: bool,
    ) -> None:  # fmt: skip
        self.hidden, self.head, self.target, self.request = hidden.detach(), head, target, request
        self.narrow, self.compiled = narrow, compiled
        self.vocab = min(head.vocab, target.vocab)
        self.chunk = chunk or chunk_rows(self.vocab, hidden.device, narrow=narrow is not None)
        self.graph = torch.is_grad_enabled()  # inside an autograd function it never is
        count = 1 + (request.criterion is not None) + 2 * request.metrics
        self.values = hidden.new_empty(count, len(hidden), dtype=torch.promote_types(hidden.dtype, torch.float32))
        self.chosen: Tensor | None = None

    def run(self, weight: Tensor, bias: Tensor | None, gradients: HeadGradients | None) -> Tensor:
        """Returns the loss, and adds the gradient to ``gradients`` unless it is None."""
        request, evaluate = self.request, _evaluate_compiled if self.compiled else _evaluate
        select, size = request.choose is not None, self.hidden.shape[0] * self.vocab * 4
        wanted = gradients is not None and (not select or size <= KEPT)
        late = wanted and select and size <= LATE and not self.compiled
        kept: list[Callable[[Tensor], Tensor]] = []  # for each chunk, the gradients of its rows from their indices
        for place in row_slices(len(self.hidden), self.chunk):
            part = self.part(place, weight, bias)
            if late:
                pair, slope = part.distributions()
                values, gradient = part.values(pair), None
                kept.append(partial(_gradient_at, request.divergence, pair, slope))
            else:
                values, gradient = evaluate(part, wanted)
            for whole, found in zip(self.values, values, strict=True):
                whole[place] = found
            if gradient is not None and gradients is not None:
                if select:
                    kept.append(partial(gradient.index_select, 0))
                else:
                    gradients.add(place, gradient)
        if request.choose is not None:
            self.chosen = request.choose(self.values[0 if request.criterion is None else 1])
            if gradients is not None and kept:
                counts = torch.bincount(self.chosen // self.chunk, minlength=len(kept)).tolist()
                for number, (rows, gradients_at) in enumerate(zip(self.chosen.split(counts), kept)):
                    gradients.add(rows, gradients_at(rows - number * self.chunk))
            elif gradients is not None:
                for rows in self.chosen.split(self.chunk):
                    _, gradient = evaluate(self.part(rows, weight, bias, values=False), True)
                    assert gradient is not None
                    gradients.add(rows, gradient)
        return _total(self.values[0], self.chosen, request.weights)

    def part(self, place: RowIndex, weight: Tensor, bias: Tensor | None, *, values: bool = True) -> _Chunk:
        """Returns some of the rows; without ``values`` for their gradient only."""
        request, bias = self.request, None if bias is None else bias[: self.vocab]
        mass, weights = (None if given is None else pick(given, place) for given in (request.mass, request.weights))
        return _Chunk(
            functional.linear(pick(self.hidden, place), weight[: self.vocab], bias), self.target.at(place), self.head,
            request.divergence, request.criterion if values else None, request.metrics and values, mass, weights,
        )  # fmt: skip


@dataclass(frozen=True)
class _Chunk:
    """Some rows of a batch: the linear layer's output ``[rows, vocab]``, and what the loss is computed from."""

    products: Tensor
    target: TargetRows
    head: LMHead
    divergence: Divergence
    criterion: Divergence | None
    metrics: bool
    mass: Tensor | None
    weights: Tensor | None

    def distributions(self) -> tuple[TokenDistributions, Tensor | float]:
        """Returns both distributions, and the derivative of the weighted logits by the linear layer's output."""
        logits, temperature = self.head.finish(self.products), self.divergence.temperature
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
        slope = self.head.slope(wide) / temperature
        if self.weights is not None:
            slope = slope * self.weights[:, None]
        return self.target.compare(slice(None), wide if temperature == 1.0 else wide / temperature, temperature), slope

    def values(self, pair: TokenDistributions) -> tuple[Tensor, ...]:
        """Returns by row the loss, the criterion if there is one, and alpha and agreement if wanted."""
        criterion = () if self.criterion is None else (self.criterion.loss(pair),)
        metrics = (pair.accepted(self.mass), pair.agreement()) if self.metrics else ()
        return self.divergence.loss(pair), *criterion, *metrics


def _evaluate(chunk: _Chunk, gradient: bool) -> tuple[tuple[Tensor, ...], Tensor | None]:
    """Returns a chunk's values, and the gradients of its rows if wanted."""
    pair, slope = chunk.distributions()
    return chunk.values(pair), _gradient(chunk.divergence, pair, slope) if gradient else None


def _gradient(divergence: Divergence, pair: TokenDistributions, slope: Tensor | float) -> Tensor:
    """Returns the gradients of the rows' losses with respect to the linear layer's output, ``[rows, vocab]``."""
    gradient = pair.spread(divergence.gradient(pair))
    return gradient if isinstance(slope, float) and slope == 1.0 else gradient * slope


def _gradient_at(divergence: Divergence, pair: TokenDistributions, slope: Tensor | float, rows: Tensor) -> Tensor:
    """Returns the same for some of the rows."""
    return _gradient(divergence, pair.at(rows), slope if isinstance(slope, float) else slope.index_select(0, rows))


_kernels: list[Callable[[_Chunk, bool], tuple[tuple[Tensor, ...], Tensor | None]]] = []  # one, once it is needed


def _evaluate_compiled(chunk: _Chunk, gradient: bool) -> tuple[tuple[Tensor, ...], Tensor | None]:
    """Returns what `_evaluate` returns, by compiled kernels, or after a warning without them where that fails."""
    from torch._dynamo.exc import TorchDynamoException

    if not _kernels:
        _kernels.append(torch.compile(_evaluate, dynamic=True, fullgraph=True))
    try:
        return _kernels[0](chunk, gradient)
    except (TorchDynamoException, ImportError) as error:
        _kernels[0] = _evaluate
        why = " ".join(str(error).split("\n\n")[0].split()) or type(error).__name__
        warnings.warn(f"the distillation loss is not compiled ({why}), so it takes more time and memory", stacklevel=2)
        return _evaluate(chunk, gradient)


def _total(losses: Tensor, chosen: Tensor | None, weights: Tensor | None) -> Tensor:
    """Returns the weighted sum of the chosen rows' losses."""
    weighted = losses if weights is None else losses * weights
    return (weighted if chosen is None else weighted[chosen]).sum()
