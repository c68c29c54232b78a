"""What a feature head is compared with, drafting step by drafting step, and the reference head's losses on disk."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

from decode.models.eagle.head import FeatureHead
from distill.data.batch_schedule import EvalBatches
from distill.data.token_dataset import Batch, TokenDataset, label_mask
from distill.eagle.features import FeatureSource, per_example
from distill.models.precision import forward_precision, loss_precision
from distill.teacher.signal_cache import Array, cached


@dataclass
class StepRows:
    """What one drafting step yields at the label tokens it can be asked about, ``[rows]`` each.

    Attributes:
        place: which positions ``[batch, time]`` (bool) the rows are: those whose next token is predicted.
        cross_entropy: −Σ p log q over the head's vocabulary, p renormalised to it; carries the gradient.
        regression: smooth L1 distance of the head's state from the target's; carries the gradient. EAGLE-1 only.
        alpha: Σ min(p, q), with the target's whole p, detached.
        agreement: 1 where both have the same most probable token, detached.
        learnable: whether the target's most probable token is in the head's vocabulary.
    """

    place: Tensor
    cross_entropy: Tensor
    regression: Tensor | None
    alpha: Tensor
    agreement: Tensor
    learnable: Tensor


def drafting_steps(
    head: FeatureHead, source: FeatureSource, batch: Batch, steps: int, noise: float = 0.0
) -> Iterator[StepRows]:
    """Run a head on a batch for several drafting steps and compare it with the target.

    Args:
        head: the feature head.
        source: the target's features, embedding and output head.
        batch: `TokenDataset.batch`, with the target's states unless ``source`` computes them.
        steps: drafting steps; step s drafts token s + 1 of a draft.
        noise: width of the uniform noise on the features, to be scaled by 512 / length.
    """
    features, last = source.states(batch)
    features = features.to(head.fc.weight.dtype)
    if noise:
        features = features + (torch.rand_like(features) - 0.5) * noise * 512 / features.shape[1]
    mask, ids = label_mask(batch["labels"]), head.draft_ids()
    embeds = source.embedding(batch["input_ids"][:, 1:]).detach().to(features.dtype)
    for step, states in enumerate(head.unroll(embeds, features[:, :-1], steps)):
        first = step + 1  # state t predicts what the target's state t + first predicts
        if first >= mask.shape[1]:
            return
        place = mask.clone()
        place[:, :first] = False
        rows, true = states[:, : mask.shape[1] - first][place[:, first:]], last[place]
        with loss_precision(rows.device):
            rows = rows.to(head.fc.weight.dtype)
            log_q = head.logits(rows, source.logits).float().log_softmax(-1)
        with torch.no_grad(), loss_precision(rows.device):
            whole = source.logits(true).float().log_softmax(-1)
            inside = whole if ids is None else whole[:, ids]
            best = whole.argmax(-1)
            drafted = log_q.argmax(-1) if ids is None else ids[log_q.argmax(-1)]
            p = inside.softmax(-1)  # renormalised to the head's vocabulary
        yield StepRows(
            place,
            -(p * log_q).sum(-1),
            functional.smooth_l1_loss(rows.float(), true.float(), reduction="none").mean(-1)
            if head.version == 1
            else None,
            torch.minimum(inside.exp(), log_q.detach().exp()).sum(-1),
            (best == drafted).float(),
            torch.ones_like(best, dtype=torch.bool) if ids is None else head.t2d[best],
        )


def keep_reference(
    head: FeatureHead,
    source: FeatureSource,
    rows: TokenDataset,
    steps: int,
    path: Path,
    fingerprint: str,
    precision: str = "32-true",
) -> Array:
    """The reference head's cross-entropies at every token and drafting step, ``[tokens, steps]``, on disk.

    ``precision`` is the trainer's: the other head's side of ΔL is computed in it, so the reference's has to be.
    """
    return cached(path, fingerprint, (len(rows.ids), steps), _reference_parts(head, source, rows, steps, precision))


@torch.inference_mode()
def _reference_parts(
    head: FeatureHead, source: FeatureSource, rows: TokenDataset, steps: int, precision: str
) -> Iterator[tuple[slice, Array]]:
    device = next(head.parameters()).device
    source.to(device)
    for examples in EvalBatches(rows, 16, pad_id=0).indices():
        batch = {name: values.to(device) for name, values in rows.batch(examples, 0).items()}
        losses = torch.zeros(*batch["input_ids"].shape, steps, device=device)
        with forward_precision(precision, device):
            for step, found in enumerate(drafting_steps(head.eval(), source, batch, steps)):
                losses[..., step][found.place] = found.cross_entropy
        yield from per_example(rows, examples, losses.cpu().numpy())
