"""Losses without the logits of all rows.

`compare` measures rows without a graph, for a selection, for metrics and for validation. `chunked_loss` gives the loss
of the chosen rows with its gradient. Both process the rows in chunks that fit the processor's cache. The gradient is
computed in closed form together with the loss and summed up in float32, so no tensor of all rows times the vocabulary
exists, neither of logits nor of their gradient. Distributions that are small are kept from the first for the second.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from decode.errors import UserError
from distill.lm_head import LMHead
from distill.losses.divergences import Divergence, RowIndex, TargetRows, TokenDistributions, pick
from distill.models import autocast_to_bfloat16, loss_precision

CPU_CHUNK, CUDA_CHUNK = 1 << 18, 1 << 28
"""Bytes of a float32 buffer ``[chunk, vocab]``, a few of which fit a core's second-level cache, or keep a GPU busy."""
FEWEST_ROWS, FEWEST_NARROW = 64, 256
"""Smallest chunk. The head's weights are read once per chunk, and rounded where products are in bfloat16."""
WAITING, MOST_WAITING = 1 << 23, 1 << 26
"""Bytes of row gradients that are collected before the weight's gradient is updated: as many as that has, within these
bounds, since every update reads and writes all of it."""
KEPT = 1 << 22
"""Most bytes of one model's log-probabilities for which `compare` keeps distributions. Beyond it, reading them from
memory again costs as much as computing them again."""
AUTOGRAD_CPU, AUTOGRAD_CUDA = 1 << 26, 1 << 28
"""Bytes of float32 logits up to which autograd takes less time for the next token's loss."""


@dataclass
class Rows:
    """What a draft predicts of a batch, and the target's distributions of the same tokens: one type for all drafts.

    A row is a drafted token: of a language model one for each label token of the batch, of a head one for each label
    token and drafting step that reaches it, of a block head one for each slot.

    Attributes:
        hidden: Last hidden states, ``[rows, width]``.
        head: The output head that they are for.
        target: The target's distributions of the batch's label tokens, over the head's ids.
        count: Number of rows over which the loss is a mean: the batch's label tokens, of a block head its slots.
        at: The label token that each row predicts, ``[rows]``; by default row i is label token i.
        step: Place of each row in its draft, from 0, ``[rows]``; by default 0.
        weight: Factor of each row's loss, ``[rows]``. None: 1.
        reference: The reference's divergence of each row, ``[rows]``, if tokens are selected.
        distance: Smooth L1 distance of the states from the target's, ``[rows]`` (EAGLE-1).
        confidence: Log-odds that the rows' tokens are accepted, as the draft estimates them, ``[rows]`` (DSpark).
    """

    hidden: Tensor
    head: LMHead
    target: TargetRows
    count: int
    at: Tensor = None  # type: ignore[assignment]
    step: Tensor = None  # type: ignore[assignment]
    weight: Tensor | None = None
    reference: Tensor | None = None
    distance: Tensor | None = None
    confidence: Tensor | None = None

    def __post_init__(self) -> None:
        if self.at is None:
            self.at = torch.arange(len(self), device=self.hidden.device)
            self.step = torch.zeros_like(self.at)

    def __len__(self) -> int:
        return len(self.hidden)

    @property
    def vocab(self) -> int:
        """Number of ids that both models know."""
        return min(self.head.vocab, self.target.vocab)


@dataclass
class Compared:
    """Measures of rows, without a graph.

    Attributes:
        losses: Divergence of every row, ``[rows]``.
        alpha: Σ min(p, q), ``[rows]``; not set without ``metrics``.
        agreement: 1 where the draft's most probable token is the target's, ``[rows]``; not set without ``metrics``.
        divergence: Of the losses.
        kept: Distributions of each chunk, for `chunked_loss`; None: too large.
        chunk: Rows of a chunk.
    """

    losses: Tensor
    alpha: Tensor
    agreement: Tensor
    divergence: Divergence | None = None
    kept: list[TokenDistributions] | None = None
    chunk: int = 0


@torch.no_grad()
def compare(
    rows: Rows,
    divergence: Divergence,
    only: Tensor | None = None,
    compared: Compared | None = None,
    gradients: _HeadGradients | None = None,
    *,
    metrics: bool = True,
    keep: bool = False,
    compiled: bool = False,
) -> Compared:
    """Measures rows in chunks.

    Args:
        rows: Of a batch.
        divergence: The loss.
        only: Indices of the rows, ascending; the results are of these alone. None: all.
        compared: Of all rows, whose distributions are used if they were kept.
        gradients: Collects the rows' gradients.
        metrics: Measure alpha and agreement too.
        keep: Keep the distributions for `chunked_loss`, where they are small.
        compiled: Use kernels of torch.compile.
    """
    head, vocab, count = rows.head, rows.vocab, len(rows) if only is None else len(only)
    hidden = rows.hidden.to(head.linear.weight.dtype)
    fewest = FEWEST_NARROW if gradients is not None and gradients.narrow else FEWEST_ROWS
    size = max(fewest, (CUDA_CHUNK if hidden.is_cuda else CPU_CHUNK) // (4 * vocab))
    values = hidden.new_empty(3, count, dtype=torch.promote_types(hidden.dtype, torch.float32))
    wanted = divergence, metrics, gradients is not None
    kept: list[TokenDistributions] | None = [] if keep and count * vocab * 4 <= KEPT else None
    with loss_precision(hidden.device):
        for part, place, pair in _chunks(count, size, only, compared):
            if pair is not None and compared is not None:
                known = compared.losses[place] if compared.divergence == divergence else None
                measures, gradient = _evaluated(pair, wanted, known)
            else:
                given = head.products(pick(hidden, place), vocab), rows.target.at(pick(rows.at, place)), head, wanted
                measures, gradient = _compiled(*given) if compiled else _chunk(*given, kept)
            for every, some in zip(values, measures):
                every[part] = some
            if gradients is not None and gradient is not None:
                gradients.add(place, gradient if rows.weight is None else gradient * pick(rows.weight, place)[:, None])
    return Compared(values[0], values[1], values[2], divergence, kept, size)


def chunked_loss(
    rows: Rows,
    divergence: Divergence,
    chosen: Tensor | None = None,
    compared: Compared | None = None,
    *,
    metrics: bool = True,
    compiled: bool = False,
) -> tuple[Tensor, Compared]:
    """Computes the weighted sum of the chosen rows' losses, and measures these rows on the way: see `compare`.

    Returns:
        The sum, which carries the gradient, and the chosen rows' measures, without.

    Raises:
        UserError: The head is no plain linear layer, whose gradient is known here.
    """
    head, device = rows.head, rows.hidden.device
    if type(head.linear) is not nn.Linear:
        name = type(head.linear).__name__
        raise UserError(f"the draft's output head is a {name}, expected torch.nn.Linear: choose another student")
    gradients = None
    if torch.is_grad_enabled():
        hidden = rows.hidden.to(head.linear.weight.dtype)
        gradients = _HeadGradients(hidden, head, rows.vocab, narrow=autocast_to_bfloat16(device))
    measured = compare(rows, divergence, chosen, compared, gradients, metrics=metrics, compiled=compiled)
    losses = measured.losses
    if rows.weight is not None:
        losses = losses * (rows.weight if chosen is None else pick(rows.weight, chosen))
    total = losses.sum()
    if gradients is not None:
        with loss_precision(device):
            gradients.update_weight()
        total = _WithGradients.apply(total, gradients.sums, *gradients.inputs)
    return total, measured


def next_token_loss(hidden: Tensor, head: LMHead, labels: Tensor) -> Tensor:
    """Returns the mean cross-entropy of the rows, or 0 with a graph to every parameter if there are none.

    Args:
        hidden: Last hidden states at the positions whose next token is a label, ``[rows, hidden]``.
        head: The model's output head.
        labels: These tokens, ``[rows]``.
    """
    with loss_precision(hidden.device):
        hidden = hidden.to(head.linear.weight.dtype)
        if not len(labels):
            return head(hidden).sum() * 0.0
        small = len(hidden) * head.vocab * 4 <= (AUTOGRAD_CUDA if hidden.is_cuda else AUTOGRAD_CPU)
        if small or type(head.linear) is not nn.Linear:  # such as one with an adapter
            wide = torch.promote_types(hidden.dtype, torch.float32)
            return functional.cross_entropy(head(hidden).to(wide), labels)
    return chunked_loss(_label_rows(hidden, head, labels), Divergence("cross_entropy"))[0] / len(labels)


def next_token_hits(hidden: Tensor, head: LMHead, labels: Tensor) -> Tensor:
    """Returns for how many rows the label is the most probable token, a scalar."""
    return compare(_label_rows(hidden, head, labels), Divergence("cross_entropy")).agreement.sum()


def _label_rows(hidden: Tensor, head: LMHead, labels: Tensor) -> Rows:
    return Rows(hidden, head, TargetRows(None, head.vocab, labels=labels), len(labels))


# -- a chunk ----------------------------------------------------------------------------------------------------------

Wanted = tuple[Divergence, bool, bool]
"""The loss, whether alpha and agreement are measured, and whether the gradient is computed."""
Chunk = tuple[list[Tensor], Tensor | None]
"""Losses, with metrics alpha and agreement, each ``[rows]``; and the gradient by the linear layer's output."""


def _chunks(
    count: int, size: int, chosen: Tensor | None, compared: Compared | None
) -> Iterator[tuple[slice, RowIndex, TokenDistributions | None]]:
    """Yields for each chunk its place among the chosen rows, the rows, and their distributions if they were kept."""
    if chosen is None or compared is None or compared.kept is None:
        for start in range(0, count, size):
            part = slice(start, min(count, start + size))
            yield part, part if chosen is None else chosen[part], None
        return
    counts, start = torch.bincount(chosen // compared.chunk, minlength=len(compared.kept)).tolist(), 0
    for number, (place, pair) in enumerate(zip(chosen.split(counts), compared.kept)):
        yield slice(start, start := start + len(place)), place, pair.at(place - number * compared.chunk)


def _chunk(
    products: Tensor,
    target: TargetRows,
    head: LMHead,
    wanted: Wanted,
    kept: list[TokenDistributions] | None = None,
) -> Chunk:
    """Evaluates rows for which the linear layer gave ``products [rows, vocab]``; their distributions go to ``kept``."""
    logits = head.finish(products)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    pair = target.compare(logits)
    pair.slope = head.slope(logits)
    if kept is not None:
        kept.append(pair)
    return _evaluated(pair, wanted)


def _evaluated(pair: TokenDistributions, wanted: Wanted, losses: Tensor | None = None) -> Chunk:
    """Returns the rows' measures and gradients; ``losses`` if these are known."""
    divergence, metrics, gradient = wanted
    measures = [divergence.loss(pair) if losses is None else losses]
    if metrics:
        measures += [pair.accepted(), pair.agreement()]
    if not gradient:
        return measures, None
    slopes = divergence.gradient(pair)
    return measures, slopes if pair.slope is None else slopes * pair.slope


_kernels: list[Callable[..., Chunk]] = []  # the compiled `_chunk`, once it is needed


def _compiled(*chunk: Any) -> Chunk:
    """Returns what `_chunk` returns, by compiled kernels, or after a warning without them where that fails."""
    from torch._dynamo.exc import TorchDynamoException

    if not _kernels:
        _kernels.append(torch.compile(_chunk, dynamic=True, fullgraph=True))
    try:
        return _kernels[0](*chunk)
    except (TorchDynamoException, ImportError) as error:
        _kernels[0] = _chunk
        why = " ".join(str(error).split("\n\n")[0].split()) or type(error).__name__
        warnings.warn(f"the distillation loss is not compiled ({why}), so it takes more time and memory", stacklevel=2)
        return _chunk(*chunk)


# -- gradients that are computed with the loss ------------------------------------------------------------------------


class _HeadGradients:
    """Sums of the gradients of hidden states, head and bias; those of the head in float32 (float64 stays).

    ``narrow``: the factors of their matrix products are rounded to bfloat16. Logits are of the first ``vocab`` ids.
    """

    def __init__(self, hidden: Tensor, head: LMHead, vocab: int, *, narrow: bool) -> None:
        linear, markov, self.vocab, self.narrow = head.linear, head.markov, vocab, narrow
        self.inputs = hidden, linear.weight, linear.bias, markov
        wide = torch.promote_types(hidden.dtype, torch.float32)
        self.sums = tuple(
            None
            if value is None or not value.requires_grad
            else torch.zeros_like(value, dtype=hidden.dtype if value is hidden else wide)
            for value in self.inputs
        )
        self.hidden, self.weight, self.bias, _ = self.sums
        self.states = (hidden.bfloat16() if narrow else hidden).detach()
        self.weights = [w[:vocab].detach().to(self.states.dtype) for w in (linear.weight, markov) if w is not None]
        self.columns = slice(0, None)
        if markov is not None:  # it is trained instead of the linear layer
            self.weight, self.columns = self.sums[3], slice(linear.weight.shape[1], None)
        self.waiting: list[tuple[Tensor, Tensor]] = []  # gradients and states that the weight's gradient lacks

    def add(self, place: RowIndex, gradient: Tensor) -> None:
        """Adds the gradients ``[rows, vocab]`` of some rows with respect to the linear layer's output."""
        narrow = gradient.to(self.states.dtype)
        if self.bias is not None:
            self.bias[: self.vocab] += gradient.sum(0)
        if self.hidden is not None:
            self.hidden[place] = _joined([narrow @ weight for weight in self.weights], 1).to(self.hidden.dtype)
        if self.weight is not None:
            self.waiting.append((narrow, pick(self.states, place)[:, self.columns]))
            if sum(part.nbytes for part, _ in self.waiting) >= max(WAITING, min(MOST_WAITING, self.weight.nbytes)):
                self.update_weight()

    def update_weight(self) -> None:
        """Adds what is waiting to the weight's gradient."""
        if self.weight is None or not self.waiting:
            return
        gradients, rows = (_joined([*parts]) for parts in zip(*self.waiting))
        self.waiting.clear()
        total = self.weight[: self.vocab]
        if rows.dtype == total.dtype:
            total.addmm_(gradients.T, rows)
        else:
            total += gradients.T @ rows


def _joined(parts: list[Tensor], dim: int = 0) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)


class _WithGradients(torch.autograd.Function):
    """Gives a loss the gradients that were computed together with it."""

    @staticmethod
    def forward(ctx: Any, total: Tensor, gradients: tuple[Tensor | None, ...], *inputs: Tensor | None) -> Tensor:
        ctx.save_for_backward(*gradients)
        return total.clone()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, by: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, *(None if value is None else value * by for value in ctx.saved_tensors)
