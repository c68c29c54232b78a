"""The distillation loss without the logits of all rows, and its plain twin.

`fused_loss` works through the rows in chunks that stay in the processor's cache. The first pass needs no graph: it
yields every row's loss and, since it is at it, α and agreement. The selection chooses among all rows exactly. Gradient
is then taken on the chosen rows only, in closed form, and summed up in float32 in place, so no tensor of all rows
times the vocabulary ever exists, neither of logits nor of their gradient. Where the distributions are small enough
to be kept until the choice is made, the second pass does not compute them again.

`plain_loss` does the same by autograd on whole logits. Tests hold the two together.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, ParamSpec, Protocol, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from distill.losses.divergences import Divergence, TokenDistributions, log_probs
from distill.models.lm_head import LMHead
from distill.models.loading import autocast_to_bfloat16, loss_precision

CPU_CHUNK, CUDA_CHUNK = 1 << 21, 1 << 28
"""Bytes of one ``[chunk, vocab]`` float32 buffer: a few of them fit a CPU's cache, or keep a GPU busy."""

FEWEST_ROWS, FEWEST_NARROW = 64, 256
"""Rows of a chunk at least: the head's weights are read once a chunk, and rounded where products are in bfloat16."""

WAITING, MOST_WAITING = 1 << 23, 1 << 26
"""Bytes of gradients whose share of the weight's is added at once: as many as that has, within these bounds, since all
of it is read and written each time."""

RowIndex = slice | Tensor  # which rows: a range, or indices


def can_fuse(head: LMHead) -> bool:
    """Whether the head is a plain linear layer, whose gradient is known here; with an adapter on it it is not."""
    return type(head.linear) is nn.Linear


def chunk_rows(vocab: int, device: torch.device, *, narrow: bool = False) -> int:
    """Rows of a chunk; ``narrow``: its products are in bfloat16."""
    size = CUDA_CHUNK if device.type == "cuda" else CPU_CHUNK
    return max(FEWEST_NARROW if narrow else FEWEST_ROWS, size // (4 * vocab))


def row_slices(rows: int, chunk: int) -> Iterator[slice]:
    """The rows in chunks."""
    for start in range(0, rows, chunk):
        yield slice(start, min(rows, start + chunk))


def pick(values: Tensor, place: RowIndex) -> Tensor:
    """Some of the rows: a view of a range, a copy of others."""
    return values[place] if isinstance(place, slice) else values.index_select(0, place)


class HeadGradients:
    """Gradients of the hidden states, the head's weight and its bias; those of the head in float32 (float64 stays).

    Args:
        hidden: Hidden states of all rows, ``[rows, hidden]``.
        weight: Of the head, ``[all ids, hidden]``.
        bias: Of the head, ``[all ids]``, or None.
        vocab: The first ids, which have logits in the loss.
        needed: Which of the three gradients are.
        dtype: Of the factors of their matrix products; None: that of the hidden states.
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
        dtype = dtype or hidden.dtype
        self.states, self.vocab, self.linear = hidden.to(dtype), vocab, weight[:vocab].to(dtype)
        wide = torch.promote_types(hidden.dtype, torch.float32)
        self.dtypes = [None if value is None else value.dtype for value in (hidden, weight, bias)]
        self.hidden = torch.zeros_like(hidden) if needed[0] else None
        self.weight = hidden.new_empty(weight.shape, dtype=wide) if needed[1] else None
        self.begun = False  # whether there is anything in the weight's
        self.waiting: list[tuple[Tensor, Tensor]] = []  # gradients and rows that the weight's lacks
        self.bias = hidden.new_zeros(bias.shape, dtype=wide) if bias is not None and needed[2] else None

    def add(self, place: RowIndex, gradient: Tensor) -> None:
        """Adds rows' gradients ``[rows, vocab]`` with respect to the linear layer's output."""
        rows = pick(self.states, place)
        if self.bias is not None:
            self.bias[: self.vocab] += gradient.sum(0)
        narrow = gradient.to(rows.dtype)
        if self.hidden is not None:
            self.hidden[place] = (narrow @ self.linear).to(self.hidden.dtype)
        if self.weight is not None:
            self.waiting.append((narrow, rows))
            if sum(part.nbytes for part, _ in self.waiting) >= max(WAITING, min(MOST_WAITING, self.weight.nbytes)):
                self._add_to_weight(self.weight)

    def _add_to_weight(self, weight: Tensor) -> None:
        """Adds the share of the rows that wait for it."""
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
        """Keeps them for an autograd function's backward pass."""
        if self.weight is not None:
            self._add_to_weight(self.weight)
            self.weight[self.vocab if self.begun else 0 :] = 0.0
        ctx.save_for_backward(self.hidden, self.weight, self.bias)
        ctx.dtypes = self.dtypes

    @staticmethod
    def scaled(ctx: Any, by: Tensor) -> list[Tensor | None]:
        """The three that were kept, times the gradient of the sum, in the formats of what they belong to."""
        return [
            None if value is None else (value * by).to(dtype) for value, dtype in zip(ctx.saved_tensors, ctx.dtypes)
        ]


P = ParamSpec("P")
R = TypeVar("R")


class Compiled(Generic[P, R]):
    """A function, compiled when it is first called; as it is, after a warning, where that fails.

    Args:
        function: Pure, of tensors whose first dimension may change from call to call.
        name: What it computes, for the warning.
    """

    def __init__(self, function: Callable[P, R], name: str) -> None:
        self.function, self.name = function, name
        self._made: Callable[P, R] | None = None

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """See ``function``."""
        from torch._dynamo.exc import TorchDynamoException

        if self._made is None:
            self._made = torch.compile(self.function, dynamic=True, fullgraph=True)
        try:
            return self._made(*args, **kwargs)
        except (TorchDynamoException, ImportError) as error:
            self._made = self.function
            why = " ".join(str(error).split("\n\n")[0].split()) or type(error).__name__
            warnings.warn(f"{self.name} is not compiled here ({why}) and takes more time and memory", stacklevel=2)
            return self._made(*args, **kwargs)


KEPT = 1 << 26  # bytes of row gradients that are kept between the passes at most; above, they are computed again

LATE = 1 << 22
"""Bytes of one model's log-probabilities up to which distributions are kept instead, and gradients computed for the
chosen rows only: with more, reading them from memory again costs what that saves."""

Choose = Callable[[Tensor], Tensor]


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

    def compare(self, place: RowIndex, logits: Tensor, temperature: float) -> TokenDistributions:
        """Both distributions of the rows at ``place``, from the draft's logits ``[rows, vocab]`` over the temperature.

        The cheapest form in which the divergences are exactly those of `log_probs`.
        """
        ...

    def at(self, rows: RowIndex) -> TargetRows:
        """Some of the rows."""
        ...


class LossRows(NamedTuple):
    """What a batch's rows yielded."""

    total: Tensor  # Sum of the chosen rows' losses, weighted if asked for, a scalar that carries the gradient
    losses: Tensor  # Every row's loss, ``[rows]``, detached
    chosen: Tensor | None  # Indices of the chosen rows, ascending; None: all
    alpha: Tensor | None  # Σ min(p, q) of every row, ``[rows]``; None if not asked for
    agreement: Tensor | None  # 1 where both have the same most probable token, ``[rows]``; None if not asked for


@dataclass(frozen=True)
class LossRequest:
    """What to compute of a batch's rows."""

    divergence: Divergence  # The loss
    # Indices of the rows that count, ascending, from the criterion of all rows ``[rows]``; None: all
    choose: Choose | None = None
    criterion: Divergence | None = None  # The divergence that ``choose`` is given; None: the loss
    metrics: bool = True  # Whether alpha and agreement are wanted; the loss alone costs less
    weights: Tensor | None = None  # Factors of the rows' losses in their sum, ``[rows]``; None: 1
    # Probability that the target gives to all ids of the draft together, ``[rows]``, which alpha counts with; None: 1
    mass: Tensor | None = None


def fused_loss(
    hidden: Tensor,
    head: LMHead,
    target: TargetRows,
    request: LossRequest,
    chunk: int | None = None,
    *,
    compiled: bool = False,
) -> LossRows:
    """The loss of a batch's rows, in chunks.

    Args:
        hidden: The draft's last hidden states at the label positions, ``[rows, hidden]``.
        head: The draft's head, for which `can_fuse` holds.
        target: The target's distributions of the same rows.
        request: What to compute of them.
        chunk: Rows at a time; None: chosen from the vocabulary and the device.
        compiled: Compute chunks by torch.compile's kernels, which read and write logits less often.
    """
    narrow = autocast_to_bfloat16(hidden.device)
    with loss_precision(hidden.device):
        hidden = hidden.to(head.linear.weight.dtype)
        work = _Work(hidden, head, target, request, chunk, torch.bfloat16 if narrow else None, compiled=compiled)
        total = _Fused.apply(hidden, head.linear.weight, head.linear.bias, work)
    return LossRows(total, work.losses, work.chosen, work.alpha, work.agreement)


def plain_loss(hidden: Tensor, head: LMHead, target: TargetRows, request: LossRequest) -> LossRows:
    """The same by autograd, with the logits of all rows in memory."""
    with loss_precision(hidden.device):
        return _plain_loss(hidden.to(head.linear.weight.dtype), head, target, request)


def _plain_loss(hidden: Tensor, head: LMHead, target: TargetRows, request: LossRequest) -> LossRows:
    vocab = min(head.vocab, target.vocab)
    log_q = log_probs(head.first(hidden, vocab), vocab, request.divergence.temperature)
    with torch.no_grad():
        log_p = target.log_probs(slice(None), log_q.detach(), request.divergence.temperature)
    losses, detached = (
        request.divergence.loss(TokenDistributions(log_p, log_q)),
        TokenDistributions(log_p, log_q.detach()),
    )
    chosen = None
    if request.choose is not None:
        ranked = losses.detach() if request.criterion is None else request.criterion.loss(detached)
        chosen = request.choose(ranked)
    return LossRows(
        _total(losses, chosen, request.weights),
        losses.detach(),
        chosen,
        detached.accepted(request.mass) if request.metrics else None,
        detached.agreement() if request.metrics else None,
    )


def _total(losses: Tensor, chosen: Tensor | None, weights: Tensor | None) -> Tensor:
    """The chosen rows' weighted sum."""
    weighted = losses if weights is None else losses * weights
    return (weighted if chosen is None else weighted[chosen]).sum()


@dataclass(frozen=True)
class _Chunk:
    """Some rows of a batch: the linear layer's output, and what a loss is made of there."""

    products: Tensor  # ``[rows, vocab]``
    target: TargetRows
    head: LMHead
    divergence: Divergence
    criterion: Divergence | None
    metrics: bool
    mass: Tensor | None
    weights: Tensor | None

    def distributions(self) -> tuple[TokenDistributions, Tensor | float]:
        """Both distributions, and the derivative of the weighted logits by the linear layer's output."""
        logits = self.head.finish(self.products)
        temperature = self.divergence.temperature
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
        slope = self.head.slope(wide) / temperature
        if self.weights is not None:
            slope = slope * self.weights[:, None]
        wide = wide if temperature == 1.0 else wide / temperature
        return self.target.compare(slice(None), wide, temperature), slope

    def values(self, pair: TokenDistributions) -> tuple[Tensor, ...]:
        """Of every row the loss, the criterion if there is one, and alpha and agreement if wanted, ``[rows]`` each."""
        criterion = () if self.criterion is None else (self.criterion.loss(pair),)
        metrics = (pair.accepted(self.mass), pair.agreement()) if self.metrics else ()
        return self.divergence.loss(pair), *criterion, *metrics


def _evaluate(chunk: _Chunk, gradient: bool) -> tuple[tuple[Tensor, ...], Tensor | None]:
    """A chunk's values, and its rows' gradients if wanted."""
    pair, slope = chunk.distributions()
    return chunk.values(pair), _gradient(chunk.divergence, pair, slope) if gradient else None


def _gradient(divergence: Divergence, pair: TokenDistributions, slope: Tensor | float) -> Tensor:
    """Of each row's loss with respect to the linear layer's output, ``[rows, vocab]``."""
    gradient = pair.spread(divergence.gradient(pair))
    return gradient if isinstance(slope, float) and slope == 1.0 else gradient * slope


_evaluate_compiled = Compiled(_evaluate, "the distillation loss")


class _Work:
    """Both passes over one batch, and what they found."""

    def __init__(
        self, hidden: Tensor, head: LMHead, target: TargetRows, request: LossRequest, chunk: int | None,
        gradient_dtype: torch.dtype | None = None, *, compiled: bool = False,
    ) -> None:  # fmt: skip
        self.hidden, self.head, self.target, self.request = hidden.detach(), head, target, request
        self.gradient_dtype, self.compiled = gradient_dtype, compiled
        self.vocab = min(head.vocab, target.vocab)
        self.rows = len(hidden)
        self.chunk = chunk or chunk_rows(self.vocab, hidden.device, narrow=gradient_dtype is not None)
        self.graph = torch.is_grad_enabled()  # inside the function below it never is
        empty = hidden.new_empty(self.rows, dtype=torch.promote_types(hidden.dtype, torch.float32))
        self.losses: Tensor = empty
        self.chosen: Tensor | None = None
        self.ranked = empty.clone() if request.criterion is not None else self.losses
        self.alpha: Tensor | None = empty.clone() if request.metrics else None
        self.agreement: Tensor | None = empty.clone() if request.metrics else None

    def part(self, place: RowIndex, weight: Tensor, bias: Tensor | None, *, values: bool = True) -> _Chunk:
        """Some of the rows; without ``values`` for their gradient only."""
        request = self.request
        products = functional.linear(
            pick(self.hidden, place), weight[: self.vocab], None if bias is None else bias[: self.vocab]
        )
        mass, weights = (None if given is None else pick(given, place) for given in (request.mass, request.weights))
        return _Chunk(
            products, self.target.at(place), self.head, request.divergence, request.criterion if values else None,
            request.metrics and values, mass, weights,
        )  # fmt: skip

    def run(self, weight: Tensor, bias: Tensor | None, gradients: HeadGradients | None) -> Tensor:
        """The loss; adds the gradient to ``gradients`` if it is wanted."""
        request, evaluate = self.request, _evaluate_compiled if self.compiled else _evaluate
        kept: list[_Late | Tensor] = []
        size = self.rows * self.vocab * 4
        wanted = gradients is not None and (request.choose is None or size <= KEPT)
        late = wanted and request.choose is not None and size <= LATE and not self.compiled
        for place in row_slices(self.rows, self.chunk):
            part = self.part(place, weight, bias)
            if late:
                waiting = _Late(part.divergence, *part.distributions())
                kept.append(waiting)
                self.note(place, part.values(waiting.pair))
                continue
            values, gradient = evaluate(part, wanted)
            self.note(place, values)
            if gradients is None or gradient is None:
                continue
            if request.choose is None:
                gradients.add(place, gradient)
            else:
                kept.append(gradient)
        if request.choose is None:
            return _total(self.losses, None, request.weights)
        self.chosen = request.choose(self.ranked)
        if gradients is not None:
            for rows, gradient in self.again(kept, weight, bias):
                gradients.add(rows, gradient)
        return _total(self.losses, self.chosen, request.weights)

    def note(self, place: slice, values: tuple[Tensor, ...]) -> None:
        """Writes down what a chunk says of its rows."""
        ranked = () if self.request.criterion is None else (self.ranked,)
        metrics = () if self.alpha is None or self.agreement is None else (self.alpha, self.agreement)
        for whole, found in zip((self.losses, *ranked, *metrics), values, strict=True):
            whole[place] = found

    def again(self, kept: list[_Late | Tensor], weight: Tensor, bias: Tensor | None) -> Iterator[tuple[Tensor, Tensor]]:
        """The chosen rows' gradients, a chunk at a time: from what was kept, or computed once more."""
        assert self.chosen is not None
        if not kept:
            evaluate = _evaluate_compiled if self.compiled else _evaluate
            for place in self.chosen.split(self.chunk):
                _, gradient = evaluate(self.part(place, weight, bias, values=False), True)
                assert gradient is not None
                yield place, gradient
            return
        counts = torch.bincount(self.chosen // self.chunk, minlength=len(kept)).tolist()
        for number, (place, part) in enumerate(zip(self.chosen.split(counts), kept)):
            rows = place - number * self.chunk
            yield place, part.index_select(0, rows) if isinstance(part, Tensor) else part.gradient(rows)


@dataclass(frozen=True)
class _Late:
    """A chunk's distributions, kept until its rows are chosen."""

    divergence: Divergence
    pair: TokenDistributions
    slope: Tensor | float

    def gradient(self, rows: Tensor) -> Tensor:
        """Of these rows."""
        slope = self.slope if isinstance(self.slope, float) else self.slope.index_select(0, rows)
        return _gradient(self.divergence, self.pair.at(rows), slope)


class _Fused(torch.autograd.Function):
    """Computes the gradient together with the loss, while the distributions are at hand."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, work: _Work) -> Tensor:
        needed = ctx.needs_input_grad[:3]
        gradients = None
        if work.graph and any(needed):
            gradients = HeadGradients(hidden, weight, bias, work.vocab, needed, work.gradient_dtype)
        total = work.run(weight, bias, gradients)
        if gradients is not None:
            gradients.save(ctx)
        return total

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, by: Tensor) -> tuple[Any, ...]:
        return *HeadGradients.scaled(ctx, by), None
