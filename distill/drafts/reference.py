"""The reference's divergence at every label token, which AdaSPEC's selection compares the draft's with."""

from typing import Any

import torch
from torch import Tensor

from distill.data.dataset import REFERENCE, Batch, Examples, Shapes, label_mask
from distill.drafts.block import BlockDraft
from distill.drafts.eagle import FeatureDraft
from distill.drafts.language_model import LanguageModelDraft
from distill.losses.chunked import compare
from distill.losses.divergences import Divergence
from distill.networks.models import forward_precision
from distill.signal.disk import keep_columns
from distill.signal.target import Signal

Draft = LanguageModelDraft | FeatureDraft | BlockDraft


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

    shapes: Shapes = {REFERENCE: ((steps,), "float32")}
    keep_columns(examples, losses, shapes, *where)
