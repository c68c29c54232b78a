"""The reference's divergence at every label token, which AdaSPEC's selection compares the draft's with."""

import torch
from torch import Tensor

from distill.data.dataset import PLACES, REFERENCE, Batch, on_device
from distill.kept import Shapes
from distill.kinds.base import Draft
from distill.losses.chunked import compare
from distill.losses.divergences import Divergence
from distill.networks.models import forward_precision
from distill.signal.kept import Compute
from distill.signal.target import Signal


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
                values = compare(rows, divergence).losses.float()
                table[rows.at, rows.step] = values
        return {REFERENCE: table.cpu()}

    return {REFERENCE: ((steps,), "float32")}, losses
