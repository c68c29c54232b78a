"""A few rows of random ids, and settings to train on them."""

from __future__ import annotations

import numpy as np

from distill.config.training import TrainingSettings
from distill.data.batches import TokenDataset
from distill.data.chat import IGNORE

TRAINING = TrainingSettings(steps=4, batch_size=2, lr=1e-2)


def every_token(rows: TokenDataset) -> TokenDataset:
    """The same examples with every token a label; the first one of each is predicted from nothing."""
    return TokenDataset(rows.ids, rows.ids, rows.offsets, rows.offsets - np.arange(len(rows) + 1))


def some_rows(count: int = 6, seed: int = 0) -> TokenDataset:
    rng = np.random.default_rng(seed)
    lengths = rng.integers(5, 12, count)
    ids = [rng.integers(2, 48, n).astype(np.int32) for n in lengths]
    labels = [np.where(np.arange(len(row)) < 3, IGNORE, row).astype(np.int32) for row in ids]
    offsets = np.concatenate([[0], lengths.cumsum()])
    label_offsets = np.concatenate([[0], (lengths - 3).cumsum()])
    return TokenDataset(np.concatenate(ids), np.concatenate(labels), offsets, label_offsets)
