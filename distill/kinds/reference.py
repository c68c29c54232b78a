"""The reference's divergence at every label token, which AdaSPEC's selection compares the draft's with."""

from typing import Any

import torch
from torch import Tensor

from distill.data.dataset import PLACES, REFERENCE, Batch, Examples, Shapes, on_device
from distill.kinds.base import Draft
from distill.losses.chunked import compare
from distill.losses.divergences import Divergence
from distill.networks.models import forward_precision
from distill.signal.disk import keep_columns
from distill.signal.target import Signal


def keep_reference(
    reference: Draft,
    signal: Signal,
    examples: Examples,
    divergence: Divergence,
    precision: str,
    *where: Any,
) -> None:
    """Adds the reference's losses to the examples: see `keep_columns`. With them ΔL needs no reference model any more.

    The draft's side of ΔL is computed in the trainer's ``precision``. ``where`` has folder, name, key and what expects
    the texts.
    """
    device = next(reference.model.parameters()).device
    steps = reference.steps
    reference.model.eval()
    signal.to(device)

    @torch.no_grad()
    def losses(batch: Batch) -> dict[str, Tensor]:
        batch = on_device(reference.indexed(batch), device)
        table = torch.zeros(len(batch[PLACES]), steps, device=device)
        with forward_precision(precision, device):
            for rows in reference.every_row(batch, signal):
                values = compare(rows, divergence).losses.float()
                table[rows.at, rows.step] = values
        return {REFERENCE: table.cpu()}

    shapes: Shapes = {REFERENCE: ((steps,), "float32")}
    keep_columns(examples, losses, shapes, *where)
