"""The reference's divergence at every label token, which AdaSPEC's selection compares the draft's with."""

import torch
from torch import Tensor

from distill.data.dataset import REFERENCE, Batch, label_mask
from distill.drafts.block import BlockDraft
from distill.drafts.eagle import FeatureDraft
from distill.drafts.language_model import LanguageModelDraft
from distill.kept import Shapes
from distill.losses.chunked import compare
from distill.losses.divergences import Divergence
from distill.networks.models import forward_precision
from distill.signal.kept import Compute
from distill.signal.target import Signal

Draft = LanguageModelDraft | FeatureDraft | BlockDraft


def reference_losses(
    reference: Draft, signal: Signal, divergence: Divergence, precision: str
) -> tuple[Shapes, Compute]:
    """The column of the reference's losses, and what computes it. With it ΔL needs no reference model any more.

    The draft's side of ΔL is computed in the trainer's ``precision``.
    """
    device = next(reference.model.parameters()).device
    steps = reference.depth if reference.blocks else getattr(reference, "steps", 1)
    reference.model.eval()
    signal.to(device)

    @torch.no_grad()
    def losses(batch: Batch) -> dict[str, Tensor]:
        batch = {column: values.to(device) for column, values in batch.items()}
        table = torch.zeros(int(label_mask(batch["labels"]).sum()), steps, device=device)
        with forward_precision(precision, device):
            every = getattr(reference, "every_row", lambda *given: [reference.rows(*given)])
            for rows in every(batch, signal):
                values = compare(rows, divergence).losses.float()
                table[rows.at, rows.step] = values
        return {REFERENCE: table.cpu()}

    return {REFERENCE: ((steps,), "float32")}, losses
