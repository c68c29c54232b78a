"""Gradients of a loss on chunks of logits with respect to the hidden states and the head, summed up in place."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from distill.models.lm_head import LMHead

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
