"""Signals of frozen models on fixed data, computed once and kept on disk.

Two arrays hold what AdaSPEC needs of the target p and the reference r, a row a label token:

- ``target_hidden``, the target's last hidden state, whose product with its head are its logits, exactly as recomputed;
  or ``target_topk``, its largest log-probabilities, or ``target_log_probs``, all of them.
- ``reference_loss``: the reference's divergence D(p, r) in float32. With it ΔL = D(p, q) - D(p, r) needs no reference
  model any more.

A file is written beside its place and renamed when complete. The description next to it holds the fingerprint of
what it was made from and a checksum of its bytes; a file that does not agree with it is made again.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel

from decode.core.errors import UserError
from distill.core import ranks
from distill.core.files import checksum, write_json
from distill.data.batch_schedule import EvalBatches
from distill.data.token_dataset import TokenDataset, label_mask
from distill.losses.chunked_kl import LossRequest, fused_loss
from distill.losses.divergences import Divergence
from distill.models.lm_head import LMHead, last_hidden
from distill.models.precision import forward_precision
from distill.teacher.target_distribution import TargetSignal, TargetSource

Array = NDArray[Any]


def cached(
    path: Path, fingerprint: str, shape: tuple[int, ...], parts: Iterator[tuple[slice, Array]], dtype: str = "float32"
) -> Array:
    """An array on disk, memory-mapped; made from ``parts`` unless a sound one of this fingerprint is there.

    Args:
        path: File to keep it in (``.npy``).
        fingerprint: Of everything that the values depend on.
        shape: Rows first.
        parts: Row ranges and their values; consumed only if the array has to be made.
        dtype: Of the values.

    Raises:
        UserError: The disk has not enough room for it.
    """
    found = _load(path, fingerprint, shape, dtype)
    if found is None and not ranks.is_first():
        found = ranks.wait_for(lambda: _load(path, fingerprint, shape, dtype), path.name)
    if found is not None:
        return found
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    path.parent.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(path.parent).free
    if size > free:
        raise UserError(
            f"{path.name} needs {size / 1e9:.2f} GB and {free / 1e9:.2f} GB are free in {path.parent}: free some "
            "space, use fewer reference.examples, or set reference.signal to recompute"
        )
    temporary = path.with_name(f".tmp-{os.getpid()}-{path.name}")
    try:
        array = np.lib.format.open_memmap(temporary, mode="w+", dtype=dtype, shape=shape)
        for place, values in parts:
            array[place] = values
        array.flush()
        del array
        note = {"fingerprint": fingerprint, "crc32": checksum(temporary)}
        os.replace(temporary, path)
        write_json(path.with_suffix(".json"), note)
    finally:
        temporary.unlink(missing_ok=True)
    return np.load(path, mmap_mode="r")


def signal_bytes(target: PreTrainedModel, signal: TargetSignal, tokens: int) -> int:
    """Size on disk of the target's signal for so many label tokens."""
    shape, dtype = signal.layout(LMHead(target))
    return tokens * int(np.prod(shape)) * np.dtype(dtype).itemsize


def target_signal(
    target: PreTrainedModel,
    signal: TargetSignal,
    rows: TokenDataset,
    path: Path,
    fingerprint: str,
    batch_size: int = 16,
) -> Array:
    """What is kept of the target where a label is predicted, ``[label tokens, ...]`` as `TargetSignal.layout` says."""
    shape, dtype = signal.layout(LMHead(target))
    parts = _target_parts(target, signal, rows, batch_size)
    return cached(path, fingerprint, (rows.label_count, *shape), parts, dtype)


def mean_tail(values: Array, block: int = 1 << 16) -> float:
    """Probability that the target's kept top ids leave to all others, on average; bounds the error of α."""
    kept = sum(
        float(np.exp(np.ascontiguousarray(values[i : i + block, 1]).view(np.float32)).sum(dtype=np.float64))
        for i in range(0, len(values), block)
    )
    return max(0.0, 1 - kept / max(1, len(values)))


def reference_loss(
    reference: PreTrainedModel,
    target: TargetSource,
    rows: TokenDataset,
    path: Path,
    fingerprint: str,
    divergence: Divergence | None = None,
    batch_size: int = 16,
    precision: str = "32-true",
) -> Array:
    """D(p, r) of the reference r at every label token, ``[label tokens]`` in float32; D is forward KL by default.

    ``precision`` is the trainer's: the draft's side of ΔL is computed in it, so the reference's has to be.
    """
    parts = _loss_parts(reference, target, rows, divergence or Divergence(), batch_size, precision)
    return cached(path, fingerprint, (rows.label_count,), parts)


def target_signal_now(target: PreTrainedModel, signal: TargetSignal, rows: TokenDataset, batch_size: int = 16) -> Array:
    """As `target_signal`, in memory: for texts that are used for a while only."""
    shape, dtype = signal.layout(LMHead(target))
    return _collected((rows.label_count, *shape), _target_parts(target, signal, rows, batch_size), dtype)


def reference_loss_now(
    reference: PreTrainedModel,
    target: TargetSource,
    rows: TokenDataset,
    divergence: Divergence,
    batch_size: int = 16,
    precision: str = "32-true",
) -> Array:
    """As `reference_loss`, in memory; the target's signal is taken from the rows where it is kept."""
    return _collected((rows.label_count,), _loss_parts(reference, target, rows, divergence, batch_size, precision))


def _collected(shape: tuple[int, ...], parts: Iterator[tuple[slice, Array]], dtype: str = "float32") -> Array:
    values = np.empty(shape, dtype=dtype)
    for place, part in parts:
        values[place] = part
    return values


@torch.inference_mode()
def _target_parts(
    target: PreTrainedModel, signal: TargetSignal, rows: TokenDataset, batch_size: int
) -> Iterator[tuple[slice, Array]]:
    target.eval()
    head, batches = LMHead(target), EvalBatches(rows, batch_size, pad_id=0)
    for examples in batches.indices():
        batch = rows.batch(examples, 0)
        mask = label_mask(batch["labels"])
        hidden = last_hidden(target, batch["input_ids"].to(target.device), mask.to(target.device))
        _check(hidden, "target's hidden states", examples)
        yield from _scatter(rows, examples, signal.encode(hidden, head).cpu().numpy())


@torch.inference_mode()
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
        _check(found.losses, "reference's losses", examples)
        yield from _scatter(rows, examples, found.losses.cpu().numpy())


def _check(values: Tensor, what: str, examples: NDArray[np.int64]) -> None:
    if not values.isfinite().all():
        raise UserError(
            f"the {what} are not finite in a batch of examples {sorted(examples.tolist())}: if target.dtype is "
            "float16, set it to float32 or bfloat16; otherwise the model itself is broken"
        )


def _scatter(rows: TokenDataset, examples: NDArray[np.int64], values: Array) -> Iterator[tuple[slice, Array]]:
    """Values of a batch's label rows, example by example, with the places where they belong."""
    start = 0
    for example in examples:
        first, last = int(rows.label_offsets[example]), int(rows.label_offsets[example + 1])
        yield slice(first, last), values[start : start + last - first]
        start += last - first


def _load(path: Path, fingerprint: str, shape: tuple[int, ...], dtype: str) -> Array | None:
    """The array, if it is there, complete, unaltered and of this fingerprint."""
    try:
        note = json.loads(path.with_suffix(".json").read_text())
        if note["fingerprint"] != fingerprint or note["crc32"] != checksum(path):
            return None
        array: Array = np.load(path, mmap_mode="r")
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return array if array.shape == shape and array.dtype == dtype else None
