"""The frozen target as a source of distributions for label rows: by a forward pass, or from what was cached of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from transformers import PreTrainedModel

from distill.losses import log_probs
from distill.models import Head, last_hidden

Place = slice | Tensor
"""Which rows: a range, or indices."""


class TargetRows(Protocol):
    """The target's distributions for the rows of one batch, computed when asked for, a few rows at a time."""

    @property
    def vocab(self) -> int:
        """Ids that the target knows."""
        ...

    def log_probs(self, place: Place, log_q: Tensor, temperature: float) -> Tensor:
        """Log-probabilities ``[rows, vocab]`` of the ids that log_q has, for the rows at ``place``.

        Args:
            place: Which rows.
            log_q: The draft's log-probabilities of these rows, for a signal that leaves something open.
            temperature: Divides the logits.
        """
        ...


@dataclass
class HiddenRows:
    """Rows as last hidden states ``[rows, hidden]``; a chunk's logits are the head times them."""

    hidden: Tensor
    head: Head

    @property
    def vocab(self) -> int:
        """Ids that the target knows."""
        return self.head.vocab

    def log_probs(self, place: Place, log_q: Tensor, temperature: float) -> Tensor:
        """Exactly the target's own."""
        vocab = log_q.shape[1]
        rows = self.hidden[place].to(self.head.linear.weight.dtype)
        return log_probs(self.head.first(rows, vocab), vocab, temperature).to(log_q.dtype)


class Target:
    """The frozen target as a source of distributions for label rows.

    Not an ``nn.Module`` on purpose: the target is in no checkpoint, no optimiser and no distributed wrapper.

    Args:
        model: The target. With cached hidden states only its head stays referenced.
        cached: Whether batches carry ``target_hidden``.
    """

    def __init__(self, model: PreTrainedModel, *, cached: bool) -> None:
        model.eval().requires_grad_(False)
        self.head = Head(model)
        self.model = None if cached else model

    def to(self, device: torch.device) -> None:
        """Moves the weights there."""
        self.head.to(device)
        if self.model is not None:
            self.model.to(device)

    @torch.no_grad()
    def rows(self, batch: dict[str, Tensor], mask: Tensor) -> TargetRows:
        """The label rows of a batch, ``mask [batch, time]`` being where they are."""
        if self.model is None:
            return HiddenRows(batch["target_hidden"], self.head)
        return HiddenRows(last_hidden(self.model, batch["input_ids"], mask), self.head)
