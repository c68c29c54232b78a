"""Several examples in one row of a batch: no padding between texts of different lengths, and no view of each other.

Positions begin anew with every example. Where they do, transformers builds an attention mask in which a token sees the
example that it belongs to only (block-diagonal; FlashAttention is given the lengths instead), so losses and gradients
are those of the examples in rows of their own.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedModel

Rows = list[list[int]]
"""The examples of each row."""


def dealt_to_rows(lengths: Sequence[int], row_length: int) -> Rows:
    """Deals examples to as few rows of about ``row_length`` tokens as hold them, of lengths as equal as can be.

    The longest examples first, each to the row that is shortest so far; a batch is padded to its longest row.
    """
    count = min(len(lengths), max(1, math.ceil(sum(lengths) / row_length)))
    rows: Rows = [[] for _ in range(count)]
    shortest = [(0, row) for row in range(count)]
    for example in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        filled, row = heapq.heappop(shortest)
        rows[row].append(example)
        heapq.heappush(shortest, (filled + int(lengths[example]), row))
    return rows


def positions_in_rows(lengths: Sequence[Sequence[int]], time: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Each token's position in its example, and the number of that example, both ``[rows, time]``.

    Args:
        lengths: Of the examples of each row.
        time: Length of the rows; what fills them up sees itself alone.
    """
    positions = np.zeros((len(lengths), time), dtype=np.int64)
    numbers = np.zeros_like(positions)
    number = 0
    for row, inside in enumerate(lengths):
        start = 0
        for length in inside:
            positions[row, start : start + length] = np.arange(length)
            numbers[row, start : start + length] = number
            start, number = start + length, number + 1
    return positions, numbers


@torch.no_grad()
def keeps_apart(model: PreTrainedModel) -> bool:
    """Whether the model computes for two examples in one row what it computes for each alone.

    FlashAttention is asked on a GPU only (`tests/gpu`); it does so for batches of one row.
    """
    if "flash" in str(getattr(model.config, "_attn_implementation", "")):
        return True
    was_training = model.training
    model.eval()
    device, vocab = model.device, model.get_input_embeddings().num_embeddings
    ids = (torch.arange(1, 13, device=device) * 7 % vocab)[None]
    positions = torch.cat([torch.arange(5), torch.arange(7)])[None].to(device)
    try:
        together = model.base_model(input_ids=ids, position_ids=positions, use_cache=False).last_hidden_state[0]
        parts = (model.base_model(input_ids=part, use_cache=False) for part in ids.split([5, 7], 1))
        wanted = torch.cat([part.last_hidden_state[0] for part in parts])
    except (TypeError, ValueError, RuntimeError):  # a forward without positions
        return False
    finally:
        model.train(was_training)
    tolerance = 1e-4 if model.dtype in (torch.float32, torch.float64) else 5e-2
    return bool((together - wanted).abs().max() <= tolerance * wanted.abs().max().clamp_min(1.0))
