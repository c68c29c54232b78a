"""Drafts of every kind on a tiny target, from which nothing is drawn by chance."""

from __future__ import annotations

from typing import Any

import torch
from blocks import make_block_head
from families import build_tiny, in_double
from heads import make_head

from distill.config import StudentSettings
from distill.drafts.block import BlockDraft
from distill.drafts.eagle import FeatureDraft
from distill.drafts.language_model import LanguageModelDraft
from distill.drafts.reference import Draft
from distill.signal.target import Signal


def draft_of(kind: str, target: Any, steps: int = 2) -> tuple[Draft, Signal]:
    """A draft in training, and what the target in float64 says beside it."""
    if kind == "language model":
        model = in_double(build_tiny("llama", seed=7, dtype=torch.float64))
        return LanguageModelDraft(model.train(), 5), Signal(target)
    if kind == "dspark":
        block: Any = make_block_head(target, layers=1, block=3)
        return BlockDraft(block.train(), 99), Signal(target, reader=block)  # a block at every label token
    settings = StudentSettings(kind=kind, unroll=steps)  # type: ignore[arg-type]
    head = make_head(target, int(settings.version or 0))
    draft = FeatureDraft(head.train(), settings, 5, settings.decay)
    draft.noise = 0.0
    return draft, Signal(target, reader=head)
