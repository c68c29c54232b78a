"""Signals of frozen models on fixed data, computed once and kept on disk.

Two arrays hold what AdaSPEC needs of the target p and the reference r, a row a label token:

- ``target_hidden``, the target's last hidden state, whose product with its head are its logits, exactly as recomputed;
  or ``target_topk``, its largest log-probabilities, or ``target_log_probs``, all of them.
- ``reference_loss``: the reference's divergence D(p, r) in float32. With it ΔL = D(p, q) - D(p, r) needs no reference
  model any more.

Values of many examples are several files, which all processes write at once (`distill.teacher.store_shards`).
"""

import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel

from decode.core.errors import UserError
from distill.data.batches.batch_schedule import EvalBatches
from distill.data.batches.token_dataset import TokenDataset, label_mask
from distill.losses.chunked_kl import LossRequest, fused_loss
from distill.losses.divergences import Divergence
from distill.models.lm_head import LMHead, last_hidden
from distill.models.precision import forward_precision
from distill.teacher.store_shards import label_values
from distill.teacher.stored_arrays import Array
from distill.teacher.target_distribution import TargetSignal, TargetSource


def signal_bytes(target: PreTrainedModel, signal: TargetSignal, tokens: int) -> int:
    """Size on disk of the target's signal for so many label tokens."""
    shape, dtype = signal.layout(LMHead(target))
    return tokens * int(np.prod(shape)) * np.dtype(dtype).itemsize


@torch.no_grad()
def seconds_of(target: PreTrainedModel, sets: Sequence[TokenDataset], count: int = 4) -> float:
    """About how long the target takes to read all examples: from a few of middling length, measured."""
    total = sum(len(rows.ids) for rows in sets)
    rows = max(sets, key=len)
    middle = np.argsort(rows.lengths, kind="stable")[max(0, (len(rows) - count) // 2) :][:count]
    batch = rows.batch(middle, 0)
    started = time.perf_counter()
    last_hidden(target, batch["input_ids"].to(target.device), label_mask(batch["labels"]).to(target.device)).cpu()
    return (time.perf_counter() - started) * total / max(1, int(rows.lengths[middle].sum()))


def target_signal(
    target: PreTrainedModel,
    signal: TargetSignal,
    rows: TokenDataset,
    path: Path | None = None,
    fingerprint: str = "",
    batch_size: int = 16,
) -> Array:
    """What is kept of the target where a label is predicted, ``[label tokens, ...]`` as `TargetSignal.layout` says.

    Without a path it is kept in memory: for texts that are used for a while only.
    """
    shape, dtype = signal.layout(LMHead(target))
    return label_values(
        rows, lambda some: _target_parts(target, signal, some, batch_size), path, fingerprint, shape, dtype, target
    )


def mean_tail(values: Array, block: int = 1 << 16) -> float:
    """Probability that the target's kept top ids leave to all others, on average; bounds the error of α."""
    kept = sum(
        float(np.exp(np.ascontiguousarray(values[i : i + block][:, 1]).view(np.float32)).sum(dtype=np.float64))
        for i in range(0, len(values), block)
    )
    return max(0.0, 1 - kept / max(1, len(values)))


def reference_loss(
    reference: PreTrainedModel,
    target: TargetSource,
    rows: TokenDataset,
    path: Path | None = None,
    fingerprint: str = "",
    divergence: Divergence | None = None,
    batch_size: int = 16,
    precision: str = "32-true",
) -> Array:
    """D(p, r) of the reference r at every label token, ``[label tokens]`` in float32; D is forward KL by default.

    ``precision`` is the trainer's: the draft's side of ΔL is computed in it, so the reference's has to be. Without a
    path the losses are kept in memory; the target's signal is taken from the rows where it is kept.
    """
    divergence = divergence or Divergence()
    return label_values(
        rows,
        lambda some: _loss_parts(reference, target, some, divergence, batch_size, precision),
        path,
        fingerprint,
        model=target.model,
    )


@torch.no_grad()
def _target_parts(
    target: PreTrainedModel, signal: TargetSignal, rows: TokenDataset, batch_size: int
) -> Iterator[tuple[slice, Array]]:
    target.eval()
    head, batches = LMHead(target), EvalBatches(rows, batch_size, pad_id=0)
    for examples in batches.indices():
        batch = rows.batch(examples, 0)
        mask = label_mask(batch["labels"])
        with signal.forward_precision(target.device):
            hidden = last_hidden(target, batch["input_ids"].to(target.device), mask.to(target.device))
        check_finite(hidden, "target's hidden states", examples)
        yield from scatter(rows, examples, signal.encode(hidden, head).cpu().numpy())


@torch.no_grad()
def _loss_parts(
    reference: PreTrainedModel,
    target: TargetSource,
    rows: TokenDataset,
    divergence: Divergence,
    batch_size: int,
    precision: str,
) -> Iterator[tuple[slice, Array]]:
    reference.eval()
    head, device = LMHead(reference), reference.device
    target.to(device)
    for examples in EvalBatches(rows, batch_size, pad_id=0).indices():
        batch = {name: values.to(device) for name, values in rows.batch(examples, 0).items()}
        mask = label_mask(batch["labels"])
        with forward_precision(precision, device):
            hidden = last_hidden(reference, batch["input_ids"], mask)
            found = fused_loss(hidden, head, target.rows(batch, mask), LossRequest(divergence, metrics=False))
        check_finite(found.losses, "reference's losses", examples)
        yield from scatter(rows, examples, found.losses.cpu().numpy())


def check_finite(values: Tensor, what: str, examples: NDArray[np.int64]) -> None:
    """Refuses values that are not numbers."""
    if not values.isfinite().all():
        raise UserError(
            f"the {what} are not finite in a batch of examples {sorted(examples.tolist())}: if target.dtype is "
            "float16, set it to float32 or bfloat16; otherwise the model itself is broken"
        )


def scatter(rows: TokenDataset, examples: NDArray[np.int64], values: Array) -> Iterator[tuple[slice, Array]]:
    """Values of a batch's label rows, example by example, with the places where they belong."""
    start = 0
    for example in examples:
        first, last = int(rows.label_offsets[example]), int(rows.label_offsets[example + 1])
        yield slice(first, last), values[start : start + last - first]
        start += last - first
