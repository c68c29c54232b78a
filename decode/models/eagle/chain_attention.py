"""Attention to a text and to a chain of one's own: fused kernels for the text, a product a key for the chain.

Softmax over several sets of keys is the sum of each set's own, weighed by exp(its log-sum-exp less that of all).
Kernels return a set's log-sum-exp; their backward passes, given the output and the log-sum-exp of all sets, yield this
set's part of the gradients. So no scores are kept, and memory grows with the length, not with its square.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

aten = torch.ops.aten


def attend(q: Tensor, start: int, k: Tensor, v: Tensor, *chain: Tensor) -> Tensor:
    """What queries find in the text up to their own position, and in their own chain.

    Args:
        q: ``[batch, heads, queries, d]``, of the positions from ``start`` on.
        start: Position of the first query.
        k: The text's keys, ``[batch, kv heads, start + queries, d]``.
        v: Its values.
        chain: Keys and values in turn, ``[batch, kv heads, queries, d]``: one of each for every query.

    Returns:
        ``[batch, heads, queries, d]``.
    """
    found: Tensor = _Attend.apply(q, start, k, v, *chain)
    return found


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, start: int, k: Tensor, v: Tensor, *chain: Tensor) -> Tensor:
        group = q.shape[1] // k.shape[1]
        found = [_kernel(q, *part) for part in _parts(start, k, v)]
        parts = [out for out, _ in found]
        sums = [own for _, own in found]
        wide = q.to(sums[0].dtype)
        scores = [(wide * key.repeat_interleave(group, 1)).sum(-1) * q.shape[-1] ** -0.5 for key in chain[::2]]
        every = torch.stack([*sums, *scores])
        whole = every.logsumexp(0)
        weights = (every - whole).exp()[..., None]
        parts += [value.repeat_interleave(group, 1) for value in chain[1::2]]
        out = weights[0] * parts[0]
        for weight, part in zip(weights[1:], parts[1:], strict=True):
            out.addcmul_(weight, part.to(out.dtype))
        out = out.to(q.dtype)
        ctx.start = start
        ctx.save_for_backward(q, out, whole, weights[len(sums) :], k, v, *chain)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, out, whole, weights, k, v, *chain = ctx.saved_tensors
        parts = _parts(ctx.start, k, v)
        of_q, *of_text = zip(*(_kernel_backward(grad, q, out, whole, *part) for part in parts), strict=True)
        wide, grad = q.to(whole.dtype), grad.to(whole.dtype)
        mean, to_q = (grad * out).sum(-1, keepdim=True), sum(values.to(whole.dtype) for values in of_q)
        to_chain: list[Tensor] = []
        for weight, key, value in zip(weights, chain[::2], chain[1::2], strict=True):
            key, value = (values.repeat_interleave(q.shape[1] // k.shape[1], 1) for values in (key, value))
            score = weight * ((grad * value).sum(-1, keepdim=True) - mean) * q.shape[-1] ** -0.5
            to_q.addcmul_(score, key.to(to_q.dtype))
            to_chain += [_shared(score * wide, k), _shared(weight * grad, k)]
        return to_q.to(q.dtype), None, *(torch.cat(values, 2) for values in of_text), *to_chain


def _parts(start: int, k: Tensor, v: Tensor) -> list[tuple[Tensor, Tensor, bool]]:
    """Keys and values of the text before the queries, which all see, and of the queries' own positions (causal)."""
    before = [(k[:, :, :start], v[:, :, :start], False)] if start else []
    return [*before, (k[:, :, start:], v[:, :, start:], True)]


def _shared(values: Tensor, k: Tensor) -> Tensor:
    """The gradients of the heads that share a key head, summed."""
    return values.unflatten(1, (k.shape[1], -1)).sum(2).to(k.dtype)


def _kernel(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp ``[batch, heads, queries]``."""
    d, (q, k, v) = q.shape[-1], _as_wanted(q, k, v)
    if q.device.type == "cuda":
        out, sums, *_ = aten._scaled_dot_product_efficient_attention(q, k, v, None, True, 0.0, causal, scale=d**-0.5)
    else:
        out, sums = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, scale=d**-0.5)
    return out[..., :d], sums[..., : q.shape[2]]


def _kernel_backward(
    grad: Tensor, q: Tensor, out: Tensor, sums: Tensor, k: Tensor, v: Tensor, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of ``q``, ``k`` and ``v``."""
    d, given = q.shape[-1], _as_wanted(q, k, v)
    grad, out = _as_wanted(grad, out)
    if q.device.type == "cuda":
        sums = F.pad(sums, (0, -sums.shape[-1] % 32), value=torch.inf)  # as its kernel lays them out
        seed = torch.zeros((), dtype=torch.long)  # of dropout, which there is none
        backward, rest = aten._scaled_dot_product_efficient_attention_backward, (seed, seed, 0.0, [True] * 3 + [False])
        found = backward(grad, *given, None, out, sums, *rest, causal, scale=d**-0.5)
    else:
        backward = aten._scaled_dot_product_flash_attention_for_cpu_backward
        found = backward(grad, *given, out, sums, 0.0, causal, scale=d**-0.5)
    to_q, to_k, to_v = (values[..., :d] for values in found[:3])
    return to_q, _shared(to_k, k), _shared(to_v, v)


def _as_wanted(q: Tensor, *others: Tensor) -> list[Tensor]:
    """With a key head for every head, and a width that is a multiple of eight, which CUDA's kernel needs."""
    group, missing = q.shape[1] // others[-1].shape[1], -q.shape[-1] % 8
    every = [q, *(values.repeat_interleave(group, 1) if group > 1 else values for values in others)]
    return [F.pad(values, (0, missing)) for values in every] if missing else every
