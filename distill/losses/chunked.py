"""The losses without the logits of all rows: the distillation loss, its plain twin, and the next token's cross-entropy.

`fused_loss` processes the rows in chunks that fit the processor's cache. The first pass needs no graph and computes the
loss of every row, and α and agreement if wanted. The selection then chooses among all rows exactly. The gradient is
computed in closed form for the chosen rows only, and accumulated in float32, so no tensor of all rows times the
vocabulary exists, neither of logits nor of their gradient. Distributions or gradients that are small enough are kept
from the first pass for the second.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from decode.errors import UserError
from distill.losses.divergences import Divergence, RowIndex, TargetRows, TokenDistributions, pick
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

WHOLE_CPU, WHOLE_CUDA = 1 << 26, 1 << 28
"""Bytes of float32 logits up to which the next token's are computed whole, which takes autograd less time."""


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
        choose: Maps the criterion of all rows and their alpha, ``[rows]`` each, to the indices of the chosen rows,
            ascending. None: all.
        criterion: Divergence that ``choose`` is given. None: the loss.
        metrics: Whether alpha and agreement are computed.
        mass: Probability that the target gives to all ids of the draft together, ``[rows]``, for alpha. None: 1.
        factors: Of the rows' losses in the sum, ``[rows]``. None: 1.
    """

    divergence: Divergence
    choose: Callable[[Tensor, Tensor | None], Tensor] | None = None
    criterion: Divergence | None = None
    metrics: bool = True
    mass: Tensor | None = None
    factors: Tensor | None = None


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
        head: The draft's head.
        target: The target's distributions of the same rows.
        request: What to compute.
        chunk: Rows per chunk. None: chosen from the vocabulary and the device.
        compiled: Compute chunks with kernels of torch.compile, which read and write logits less often.

    Raises:
        UserError: The head is no plain linear layer, whose gradient is known here.
    """
    if not can_fuse(head):
        name = type(head.linear).__name__
        raise UserError(f"the draft's output head is a {name}, expected torch.nn.Linear: choose another student")
    narrow = autocast_to_bfloat16(hidden.device)
    with loss_precision(hidden.device):
        hidden = hidden.to(head.linear.weight.dtype)
        vocab, select = min(head.vocab, target.vocab), request.choose is not None
        size, whole = chunk or chunk_rows(vocab, hidden.device, narrow=narrow), len(hidden) * vocab * 4
        # by row the loss, the criterion if there is one, alpha and agreement if wanted
        count = 1 + (request.criterion is not None) + 2 * request.metrics
        values = hidden.new_empty(count, len(hidden), dtype=torch.promote_types(hidden.dtype, torch.float32))
        chosen: Tensor | None = None
        factors = request.factors
        weight, bias = head.linear.weight[:vocab], None if head.linear.bias is None else head.linear.bias[:vocab]
        evaluate = _evaluate_compiled if compiled else _evaluate

        def part(place: RowIndex) -> tuple[Tensor, TargetRows, LMHead, LossRequest]:
            mass = None if request.mass is None else pick(request.mass, place)
            own = replace(request, choose=None, factors=None, mass=mass)  # torch.compile reads all
            return functional.linear(pick(hidden, place), weight, bias), target.at(place), head, own

        def compute(gradients: HeadGradients | None) -> Tensor:
            nonlocal chosen
            wanted = gradients is not None and (not select or whole <= KEPT)
            late = wanted and select and whole <= LATE and not compiled
            kept: list[Callable[[Tensor], Tensor]] = []  # for each chunk, the gradients of its rows from their indices
            for place in row_slices(len(hidden), size):
                if late:
                    products, rows_of_target, _, own = part(place)
                    pair, slope = _distributions(products, rows_of_target, head)
                    found, gradient = _values(pair, own), None
                    kept.append(partial(_gradient_at, request.divergence, pair, slope))
                else:
                    found, gradient = evaluate(*part(place), gradient=wanted)
                for every, some in zip(values, found, strict=True):
                    every[place] = some
                if gradient is not None and select:
                    kept.append(partial(gradient.index_select, 0))
                elif gradient is not None and gradients is not None:
                    gradients.add(place, gradient if factors is None else gradient * pick(factors, place)[:, None])
            alpha = values[-2] if request.metrics else None
            if request.choose is not None:
                chosen = request.choose(values[0 if request.criterion is None else 1], alpha)
            if gradients is not None and chosen is not None:
                parts: Iterator[tuple[Tensor, Tensor]]
                if kept:
                    counts = torch.bincount(chosen // size, minlength=len(kept)).tolist()
                    numbered = enumerate(zip(chosen.split(counts), kept))
                    parts = ((rows, gradients_at(rows - n * size)) for n, (rows, gradients_at) in numbered)
                else:
                    parts = (
                        (rows, cast(Tensor, evaluate(*part(rows), values=False, gradient=True)[1]))
                        for rows in chosen.split(size)
                    )
                for rows, gradient in parts:
                    gradients.add(rows, gradient if factors is None else gradient * factors[rows, None])
            weighted = values[0] if factors is None else values[0] * factors
            return (weighted if chosen is None else weighted[chosen]).sum()

        total = _with_gradients(hidden, head, vocab, compute, narrow=narrow)
    alpha, agreement = (values[-2], values[-1]) if request.metrics else (None, None)
    return LossRows(total, values[0], chosen, alpha, agreement)


def next_token_loss(hidden: Tensor, head: LMHead, labels: Tensor) -> Tensor:
    """Returns the mean cross-entropy of the rows, or 0 with a graph to every parameter if there are none.

    Args:
        hidden: Last hidden states at the positions whose next token is a label, ``[rows, hidden]``.
        head: The model's output head.
        labels: These tokens, ``[rows]``.
    """
    narrow = autocast_to_bfloat16(hidden.device)
    with loss_precision(hidden.device):
        hidden = hidden.to(head.linear.weight.dtype)
        if not len(labels):
            return head(hidden).sum() * 0.0
        wide = torch.promote_types(hidden.dtype, torch.float32)
        if is_small(hidden, head) or not can_fuse(head):
            return functional.cross_entropy(head(hidden).to(wide), labels)

        def compute(gradients: HeadGradients | None) -> Tensor:
            total = hidden.new_zeros((), dtype=wide)
            for place in row_slices(len(hidden), chunk_rows(head.vocab, hidden.device, narrow=narrow)):
                logits = head(hidden[place]).to(wide)
                log_q = logits.log_softmax(-1)
                own = labels[place][:, None]
                total -= log_q.gather(1, own).sum()
                if gradients is not None:  # softmax minus one-hot
                    gradient = log_q.exp_()
                    gradient.scatter_add_(1, own, gradient.new_full(own.shape, -1.0))
                    gradients.add(place, gradient * head.slope(logits))
            return total

        return _with_gradients(hidden, head, head.vocab, compute, narrow=narrow) / len(labels)


@torch.no_grad()
def next_token_hits(hidden: Tensor, head: LMHead, labels: Tensor) -> Tensor:
    """Returns for how many rows the label is the most probable token, a scalar."""
    with loss_precision(hidden.device):
        hidden = hidden.to(head.linear.weight.dtype)
        size = max(1, len(hidden)) if is_small(hidden, head) else chunk_rows(head.vocab, hidden.device)
        hits = labels.new_zeros(())
        for place in row_slices(len(hidden), size):
            hits += (head(hidden[place]).argmax(-1) == labels[place]).sum()
        return hits


def can_fuse(head: LMHead) -> bool:
    """Returns whether the head is a plain linear layer, whose gradient is known here. One with an adapter is not."""
    return type(head.linear) is nn.Linear


def is_small(hidden: Tensor, head: LMHead) -> bool:
    """Returns whether the logits of all rows may be in memory at once."""
    return len(hidden) * head.vocab * 4 <= (WHOLE_CUDA if hidden.device.type == "cuda" else WHOLE_CPU)


def chunk_rows(vocab: int, device: torch.device, *, narrow: bool = False) -> int:
    """Returns the rows of a chunk. ``narrow``: products are in bfloat16."""
    size = CUDA_CHUNK if device.type == "cuda" else CPU_CHUNK
    return max(FEWEST_NARROW if narrow else FEWEST_ROWS, size // (4 * vocab))


def row_slices(rows: int, chunk: int) -> Iterator[slice]:
    """Yields the rows in chunks."""
    for start in range(0, rows, chunk):
        yield slice(start, min(rows, start + chunk))


# -- a chunk ----------------------------------------------------------------------------------------------------------


def _distributions(products: Tensor, target: TargetRows, head: LMHead) -> tuple[TokenDistributions, Tensor | float]:
    """Returns both distributions of some rows, and the derivative of the logits by the linear layer's output.

    Args:
        products: The linear layer's output, ``[rows, vocab]``.
        target: The target's distributions of these rows.
        head: The draft's head.
    """
    logits = head.finish(products)
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return target.compare(wide), head.slope(wide)


def _values(pair: TokenDistributions, request: LossRequest) -> tuple[Tensor, ...]:
    """Returns by row the loss, the criterion if there is one, and alpha and agreement if wanted."""
    criterion = () if request.criterion is None else (request.criterion.loss(pair),)
    metrics = (pair.accepted(request.mass), pair.agreement()) if request.metrics else ()
    return request.divergence.loss(pair), *criterion, *metrics


def _gradient(divergence: Divergence, pair: TokenDistributions, slope: Tensor | float) -> Tensor:
    """Returns the gradients of the rows' losses with respect to the linear layer's output, ``[rows, vocab]``."""
    gradient = divergence.gradient(pair)
    return gradient if isinstance(slope, float) and slope == 1.0 else gradient * slope


def _gradient_at(divergence: Divergence, pair: TokenDistributions, slope: Tensor | float, rows: Tensor) -> Tensor:
    """Returns the same for some of the rows."""
    return _gradient(divergence, pair.at(rows), slope if isinstance(slope, float) else slope.index_select(0, rows))


def _evaluate(
    products: Tensor, target: TargetRows, head: LMHead, request: LossRequest, *, values: bool = True, gradient: bool
) -> tuple[tuple[Tensor, ...], Tensor | None]:
    """Returns the rows' values and their gradients, where wanted."""
    pair, slope = _distributions(products, target, head)
    found = _values(pair, request) if values else ()
    return found, _gradient(request.divergence, pair, slope) if gradient else None


_kernels: list[Callable[..., tuple[tuple[Tensor, ...], Tensor | None]]] = []  # one, once it is needed


def _evaluate_compiled(*chunk: Any, **wanted: Any) -> tuple[tuple[Tensor, ...], Tensor | None]:
    """Returns what `_evaluate` returns, by compiled kernels, or after a warning without them where that fails."""
    from torch._dynamo.exc import TorchDynamoException

    if not _kernels:
        _kernels.append(torch.compile(_evaluate, dynamic=True, fullgraph=True))
    try:
        return _kernels[0](*chunk, **wanted)
    except (TorchDynamoException, ImportError) as error:
        _kernels[0] = _evaluate
        why = " ".join(str(error).split("\n\n")[0].split()) or type(error).__name__
        warnings.warn(f"the distillation loss is not compiled ({why}), so it takes more time and memory", stacklevel=2)
        return _evaluate(*chunk, **wanted)


# -- gradients that are computed with the loss ------------------------------------------------------------------------


class HeadGradients:
    """Gradients of the hidden states, the head's weight and its bias; those of the head in float32 (float64 stays).

    Args:
        hidden: Hidden states of all rows, ``[rows, hidden]``.
        weight: The head's weight, ``[all ids, hidden]``.
        bias: The head's bias, ``[all ids]``, or None.
        vocab: Number of the first ids, which have logits in the loss.
        columns: Number of the weight's last columns that are trained.
        needed: Which of the three gradients are needed.
        narrow: The factors of their matrix products are rounded to bfloat16.
    """

    def __init__(
        self,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        vocab: int,
        columns: int,
        needed: tuple[bool, ...],
        *,
        narrow: bool,
    ) -> None:
        dtype = torch.bfloat16 if narrow else hidden.dtype
        wide = torch.promote_types(hidden.dtype, torch.float32)
        self.states, self.vocab, self.linear = hidden.to(dtype), vocab, weight[:vocab].to(dtype)
        self.hidden = torch.zeros_like(hidden) if needed[0] else None
        self.columns = columns
        self.weight = hidden.new_empty(len(weight), columns, dtype=wide) if needed[1] else None
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
            self.waiting.append((narrow, rows[:, -self.columns :]))
            if sum(part.nbytes for part, _ in self.waiting) >= max(WAITING, min(MOST_WAITING, self.weight.nbytes)):
                self.update_weight(self.weight)

    def update_weight(self, weight: Tensor) -> None:
        """Adds what is waiting to the weight's gradient."""
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


Compute = Callable[[HeadGradients | None], Tensor]


class _Gradients(torch.autograd.Function):
    """Computes the gradients together with a loss, while the distributions are in the cache."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, trained: Tensor, bias: Tensor | None, head: LMHead, vocab: int, compute: Compute,
        narrow: bool, graph: bool,
    ) -> Tensor:  # fmt: skip
        needed = ctx.needs_input_grad[:3]
        if not graph or not any(needed):
            return compute(None)
        made = HeadGradients(hidden, head.linear.weight, bias, vocab, trained.shape[1], needed, narrow=narrow)
        total = compute(made)
        if made.weight is not None:
            made.update_weight(made.weight)
            made.weight[vocab if made.begun else 0 :] = 0.0
        ctx.save_for_backward(made.hidden, made.weight, made.bias)
        ctx.dtypes = [None if value is None else value.dtype for value in (hidden, trained, bias)]
        return total

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, by: Tensor) -> tuple[Any, ...]:
        made = zip(ctx.saved_tensors, ctx.dtypes)
        return *(None if value is None else (value * by).to(dtype) for value, dtype in made), *[None] * 5


def _with_gradients(hidden: Tensor, head: LMHead, vocab: int, compute: Compute, *, narrow: bool) -> Tensor:
    """Returns the loss that ``compute`` returns, with the gradients that it adds to what it is given."""
    graph = torch.is_grad_enabled()  # inside an autograd function it never is
    trained = head.linear.weight if head.trained is None else head.trained
    loss: Tensor = _Gradients.apply(hidden, trained, head.linear.bias, head, vocab, compute, narrow, graph)
    return loss
