"""A draft in training: how a batch and what the target says of it become rows for the loss."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from distill.data.chat import IGNORE
from distill.data.dataset import PLACES, REFERENCE, Batch, Chance, on_device
from distill.kept import Shapes
from distill.losses.chunked import Compared, Rows, compare
from distill.losses.divergences import Divergence, TargetRows
from distill.losses.selection import top_k
from distill.networks.lm_head import LMHead
from distill.networks.models import forward_precision, room
from distill.signal.kept import Compute
from distill.signal.target import Signal

GROUPS = "groups"
"""How many rows each drafting step of a batch has; rows are in the order of the steps. Plain numbers."""


class Draft:
    """A draft in training.

    Attributes:
        model: Is trained.
        depth: Tokens of a draft at which validation measures acceptance.
        steps: Most rows of a label token.
        monitor: The validation metric by which checkpoints are compared.
        accepted: Of `distill.losses.chunked.Compared`, by which the accepted length counts: how its tokens are drafted
            above temperature 0.
    """

    monitor, accepted = "validation_accepted_length", "alpha"

    def __init__(self, model: Any, depth: int, steps: int = 1) -> None:
        self.model, self.depth, self.steps = model, depth, steps

    def index(self, batch: Batch, chance: Chance | None) -> Batch:
        """Which rows a batch has, as tensors and plain numbers that are found on the host and added to it.

        Args:
            batch: Of `distill.data.dataset.completed`.
            chance: What each text draws from; empty where nothing is drawn. None: for validation, which measures
                ``depth`` drafting steps in place of ``steps``, and draws nothing either.
        """
        raise NotImplementedError

    def share(self, labels: NDArray[Any], chance: np.random.Generator) -> float:
        """The weight of a text in the loss of a step: its label tokens; ``labels`` are its own, not shifted."""
        return float((labels[1:] != IGNORE).sum())

    def rows(self, batch: Batch, signal: Signal, *, training: bool = False) -> Rows:
        """The rows of a batch that has its index; in ``training`` with what is drawn then alone."""
        raise NotImplementedError

    def every_row(self, batch: Batch, signal: Signal) -> Iterator[Rows]:
        """All rows that a training may ever draw, in parts."""
        yield self.rows(batch, signal)

    def indexed(self, batch: Batch, chance: Chance | None = None) -> Batch:
        """The batch with its index."""
        return batch if GROUPS in batch else batch | self.index(batch, chance)

    def chosen(self, rows: Rows, compared: Compared, k: float) -> Tensor:
        """AdaSPEC's rows, ascending: the share k with the largest ΔL, of each drafting step.

        ΔL is −∞ of those whose token the draft cannot draft.
        """
        assert rows.reference is not None, "batches carry no reference_loss, and the module has no reference"
        delta, learnable = compared.losses - rows.reference, rows.target.learnable
        delta = delta if learnable is None else delta.where(learnable[rows.at] > 0, -torch.inf)
        return top_k(delta, k, rows.groups)

    def confidence_loss(self, rows: Rows, alpha: Tensor) -> Tensor:
        """The loss of a head's estimates that rows are accepted, whose rate is ``alpha``."""
        raise NotImplementedError


def head_rows(
    hidden: Tensor,
    head: LMHead,
    target: TargetRows,
    batch: Batch,
    mass: float,
    at: Tensor,
    step: Tensor,
    weight: Tensor,
    **beside: Any,
) -> Rows:
    """Returns the rows of a head, with what signal and reference say of them: see `Rows` for the values."""
    logits = 0 if target.head is None or target.values is None else len(target.values) * target.vocab
    if 0 < 4 * logits <= room(hidden.device):  # once for all drafting steps
        with torch.no_grad():
            target = replace(target, values=target.log_probs(target.vocab), head=None)
    weight = weight if target.learnable is None else weight * target.learnable[at]
    reference = batch[REFERENCE][at, step] if REFERENCE in batch else None
    return Rows(hidden, head, target, mass, batch[GROUPS], at, step, weight, reference, **beside)


def reference_losses(
    reference: Draft, signal: Signal, divergence: Divergence, precision: str
) -> tuple[Shapes, Compute]:
    """The column of the reference's losses, and what computes it. With it ΔL needs no reference model any more.

    The draft's side of ΔL is computed in the trainer's ``precision``.
    """
    device = next(reference.model.parameters()).device
    steps = reference.steps
    reference.model.eval()
    signal.to(device)

    @torch.no_grad()
    def losses(batch: Batch) -> dict[str, Tensor]:
        batch = on_device(reference.indexed(batch, []), device)
        table = torch.zeros(len(batch[PLACES]), steps, device=device)
        with forward_precision(precision, device):
            for rows in reference.every_row(batch, signal):
                table[rows.at, rows.step] = compare(rows, divergence).losses.float()
        return {REFERENCE: table.cpu()}

    return {REFERENCE: ((steps,), "float32")}, losses
