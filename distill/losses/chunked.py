"""Losses without the logits of all rows.

`compare` measures rows without a graph, for a selection, for metrics and for validation. `chunked_loss` gives the loss
of the chosen rows with its gradient. Both process the rows in chunks that fit the processor's cache. Each chunk's
gradient is computed together with its loss and summed up in float32, so that no tensor of all rows times the vocabulary
exists, neither of logits nor of their gradient, and no product with the head's weights is computed again.
"""

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from decode.errors import UserError
from decode.models.api import joined
from distill.losses.divergences import Divergence, TargetRows
from distill.networks.lm_head import LMHead
from distill.networks.models import autocast_to_bfloat16, loss_precision

CPU_CHUNK, CUDA_CHUNK = 1 << 18, 1 << 28
"""Bytes of a float32 buffer ``[chunk, vocab]``, a few of which fit a core's second-level cache, or keep a GPU busy."""
FEWEST_ROWS, FEWEST_NARROW = 64, 256
"""Smallest chunk. The head's weights are read once per chunk, and rounded where products are in bfloat16."""
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
        mass: Sum of weights by which the loss is divided: the batch's label tokens, of a block head its slots' weights.
        groups: How many rows each drafting step has, in the order of the rows. None: there is one.
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
    mass: float
    groups: list[int] | None = None
    at: Tensor = None  # type: ignore[assignment]
    step: Tensor = None  # type: ignore[assignment]
    weight: Tensor | None = None
    reference: Tensor | None = None
    distance: Tensor | None = None
    confidence: Tensor | None = None

    def __post_init__(self) -> None:
        if self.at is None:
            self.at = torch.arange(len(self), device=self.hidden.device)
        if self.step is None:
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
        likeliest: p of the draft's most probable token, ``[rows]``; not set without ``metrics``.
        agreement: 1 where the draft's most probable token is the target's, ``[rows]``; not set without ``metrics``.
    """

    losses: Tensor
    alpha: Tensor
    likeliest: Tensor
    agreement: Tensor


@torch.no_grad()
def compare(
    rows: Rows,
    divergence: Divergence,
    only: Tensor | None = None,
    gradients: "_HeadGradients | None" = None,
    *,
    metrics: bool = True,
    compiled: bool = False,
) -> Compared:
    """Measures rows in chunks.

    Args:
        rows: Of a batch.
        divergence: The loss.
        only: Indices of the rows, ascending; the results are of these alone. None: all.
        gradients: Collects the rows' gradients.
        metrics: Measure acceptance too.
        compiled: Use kernels of torch.compile.
    """
    head, vocab, count = rows.head, rows.vocab, len(rows) if only is None else len(only)
    hidden = rows.hidden.to(head.linear.weight.dtype)
    fewest = FEWEST_NARROW if gradients is not None and gradients.narrow else FEWEST_ROWS
    size = max(fewest, (CUDA_CHUNK if hidden.is_cuda else CPU_CHUNK) // (4 * vocab))
    values = hidden.new_empty(4, count, dtype=torch.promote_types(hidden.dtype, torch.float32))
    evaluate = _compiled if compiled else _chunk
    with loss_precision(hidden.device):
        for start in range(0, count, size):
            part = slice(start, start + size)
            place = part if only is None else only[part]
            products, target = head.products(hidden[place], vocab), rows.target.at(rows.at[place])
            with torch.set_grad_enabled(gradients is not None):
                if gradients is not None:
                    products.requires_grad_()
                measures = evaluate(products, target, head, divergence, metrics)
            if gradients is not None:
                losses = measures[0]
                by = torch.ones_like(losses) if rows.weight is None else rows.weight[place].to(losses.dtype)
                gradients.add(place, *torch.autograd.grad(losses, products, by))
            for every, some in zip(values, measures):
                every[part] = some.detach()
    return Compared(*values)


def chunked_loss(
    rows: Rows,
    divergence: Divergence,
    chosen: Tensor | None = None,
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
    head = rows.head
    if type(head.linear) is not nn.Linear:
        name = type(head.linear).__name__
        raise UserError(f"the draft's output head is a {name}, expected torch.nn.Linear: choose another student")
    gradients = None
    if torch.is_grad_enabled():
        hidden = rows.hidden.to(head.linear.weight.dtype)
        gradients = _HeadGradients(hidden, head, rows.vocab)
    measured = compare(rows, divergence, chosen, gradients, metrics=metrics, compiled=compiled)
    losses = measured.losses
    if rows.weight is not None:
        losses = losses * (rows.weight if chosen is None else rows.weight[chosen])
    total = losses.sum()
    if gradients is not None:
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
    return chunked_loss(_label_rows(hidden, head, labels), Divergence("cross_entropy"), metrics=False)[0] / len(labels)


def next_token_hits(hidden: Tensor, head: LMHead, labels: Tensor) -> Tensor:
    """Returns for how many rows the label is the most probable token, a scalar."""
    return compare(_label_rows(hidden, head, labels), Divergence("cross_entropy")).agreement.sum()


def _label_rows(hidden: Tensor, head: LMHead, labels: Tensor) -> Rows:
    return Rows(hidden, head, TargetRows(None, head.vocab, labels=labels), len(labels))


# -- a chunk ----------------------------------------------------------------------------------------------------------


def _chunk(products: Tensor, target: TargetRows, head: LMHead, divergence: Divergence, metrics: bool) -> list[Tensor]:
    """Returns losses, with metrics acceptance too, each ``[rows]``, of the linear layer's ``products``."""
    logits = head.finish(products)
    pair = target.compare(logits.to(torch.promote_types(logits.dtype, torch.float32)))
    measures = [divergence.loss(pair)]
    if metrics:
        with torch.no_grad():
            measures += pair.accepted()
    return measures


KERNELS = 256  # most that are compiled: one for each divergence, with and without metrics and gradient, and of one row


_kernels: list[Callable[..., list[Tensor]]] = []  # the compiled `_chunk`, once it is needed


def _compiled(*chunk: Any) -> list[Tensor]:
    """Returns what `_chunk` returns, by compiled kernels, or after a warning without them where that fails."""
    from torch._dynamo import config
    from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException

    if not _kernels:
        _kernels.append(torch.compile(_chunk, dynamic=True, fullgraph=True))
    try:
        with config.patch(recompile_limit=KERNELS):
            return _kernels[0](*chunk)
    except (TorchDynamoException, FailOnRecompileLimitHit, ImportError) as error:
        _kernels[0] = _chunk
        why = " ".join(str(error).split("\n\n")[0].split()) or type(error).__name__
        warnings.warn(f"the distillation loss is not compiled ({why}), so it takes more time and memory", stacklevel=2)
        return _chunk(*chunk)


# -- gradients that are computed with the loss ------------------------------------------------------------------------


class _HeadGradients:
    """Sums of the gradients of hidden states, head and bias; those of the head in float32 (float64 stays).

    ``narrow``: the factors of their matrix products are rounded to bfloat16, as those of the training's autocast are,
    so that this is made outside of `loss_precision`. Logits are of the first ``vocab`` ids.
    """

    def __init__(self, hidden: Tensor, head: LMHead, vocab: int) -> None:
        linear, markov, self.vocab = head.linear, head.markov, vocab
        self.narrow = autocast_to_bfloat16(hidden.device)
        self.inputs = hidden, linear.weight, linear.bias, markov
        wide = torch.promote_types(hidden.dtype, torch.float32)
        self.sums = tuple(
            None
            if value is None or not value.requires_grad
            else torch.zeros_like(value, dtype=hidden.dtype if value is hidden else wide)
            for value in self.inputs
        )
        weights = [linear.weight] if markov is None else [linear.weight, markov]
        states = (hidden.bfloat16() if self.narrow else hidden).detach()
        self.states = states.split([weight.shape[1] for weight in weights], 1)
        self.weights = [weight[:vocab].detach().to(states.dtype) for weight in weights]

    def add(self, place: slice | Tensor, gradient: Tensor) -> None:
        """Adds the gradients ``[rows, vocab]`` of some rows with respect to the linear layer's output."""
        narrow = gradient.to(self.states[0].dtype)
        hidden, weight, bias, markov = self.sums
        if bias is not None:
            bias[: self.vocab] += gradient.sum(0)
        if hidden is not None:
            hidden[place] = joined([narrow @ each for each in self.weights], 1).to(hidden.dtype)
        for total, states in zip((weight, markov), self.states):
            if total is not None and narrow.dtype == total.dtype:
                total[: self.vocab].addmm_(narrow.T, states[place])
            elif total is not None:
                total[: self.vocab] += narrow.T @ states[place]


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
