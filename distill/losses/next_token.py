"""Cross-entropy of the next token from hidden states, without whole logits where they would be large."""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from distill.losses.chunked import HeadGradients, can_fuse, chunk_rows, row_slices
from distill.models.lm_head import LMHead
from distill.models.loading import autocast_to_bfloat16, loss_precision

WHOLE_CPU, WHOLE_CUDA = 1 << 26, 1 << 28
"""Bytes of float32 logits up to which they are computed whole, which takes autograd less time."""


def next_token_loss(hidden: Tensor, head: LMHead, labels: Tensor) -> Tensor:
    """Returns the mean cross-entropy of the rows, or 0 with a graph to every parameter if there are none.

    Args:
        hidden: Last hidden states at the positions whose next token is a label, ``[rows, hidden]``.
        head: The model's output head.
        labels: These tokens, ``[rows]``.
    """
    narrow = torch.bfloat16 if autocast_to_bfloat16(hidden.device) else None
    with loss_precision(hidden.device):
        hidden = hidden.to(head.linear.weight.dtype)
        if not len(labels):
            return head(hidden).sum() * 0.0
        if is_small(hidden, head) or not can_fuse(head):
            logits = head(hidden)
            return functional.cross_entropy(logits.to(torch.promote_types(logits.dtype, torch.float32)), labels)
        linear, graph = head.linear, torch.is_grad_enabled()
        total: Tensor = _Chunked.apply(hidden, linear.weight, linear.bias, head, labels, graph, narrow)
        return total / len(labels)


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


def is_small(hidden: Tensor, head: LMHead) -> bool:
    """Returns whether the logits of all rows may be in memory at once."""
    return len(hidden) * head.vocab * 4 <= (WHOLE_CUDA if hidden.device.type == "cuda" else WHOLE_CPU)


class _Chunked(torch.autograd.Function):
    """Sum of the rows' cross-entropy, chunk by chunk, with its gradient: softmax minus one-hot."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, head: LMHead, labels: Tensor, graph: bool,
        narrow: torch.dtype | None,
    ) -> Tensor:  # fmt: skip
        needed = ctx.needs_input_grad[:3]
        gradients = HeadGradients(hidden, weight, bias, head.vocab, needed, narrow) if graph and any(needed) else None
        total = hidden.new_zeros((), dtype=torch.promote_types(hidden.dtype, torch.float32))
        for place in row_slices(len(hidden), chunk_rows(head.vocab, hidden.device, narrow=narrow is not None)):
            logits = head.finish(functional.linear(hidden[place], weight, bias)).to(total.dtype)
            log_q = logits.log_softmax(-1)
            own = labels[place][:, None]
            total -= log_q.gather(1, own).sum()
            if gradients is not None:
                gradient = log_q.exp_()
                gradient.scatter_add_(1, own, gradient.new_full(own.shape, -1.0))
                gradients.add(place, gradient * head.slope(logits))
        if gradients is not None:
            gradients.save(ctx)
        return total

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, by: Tensor) -> tuple[Any, ...]:
        return *HeadGradients.scaled(ctx, by), None, None, None, None
