"""EAGLE-1, EAGLE-3 and a target's own next-token layers (MTP) in training, unrolled over several drafting steps."""

from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedModel

from decode.models.heads.eagle import FeatureHead, head_config
from decode.models.heads.mtp import MtpHead
from distill.config.models import StudentSettings
from distill.data.dataset import REFERENCE, Batch, label_mask
from distill.losses.chunked import Rows
from distill.losses.divergences import TargetRows
from distill.networks.lm_head import LMHead, places
from distill.networks.models import seeded
from distill.signal.target import Signal

KEPT = 1 << 28
"""Bytes of the target's log-probabilities of a batch up to which they are computed once for all drafting steps."""


class FeatureDraft:
    """A head in training-time test: step s predicts the label tokens that s + 1 tokens of the text precede.

    EAGLE-1's loss is the smooth L1 distance of its states from the target's and a tenth of the divergence.

    Attributes:
        model: Is trained.
        steps: Drafting steps; of several next-token layers each makes one.
        decay: Weight of each further drafting step's loss against the one before.
        noise: Width of the uniform noise on EAGLE-1's features, times 512 / length, as published.
    """

    monitor = "validation_accepted_length"
    blocks = False

    def __init__(self, model: FeatureHead | MtpHead, settings: StudentSettings, depth: int, decay: float) -> None:
        self.model, self.steps, self.decay = model, model.drafts or settings.steps, decay
        self.depth = model.drafts or depth
        self.noise = settings.noise if model.version == 1 else 0.0
        self.divergence_weight = settings.ce_weight  # of EAGLE-1

    def rows(self, batch: Batch, signal: Signal, seed: int | None = None) -> Rows:
        """The rows of all drafting steps, one step after the other: see `LanguageModelDraft.rows`."""
        head, mask = self.model, label_mask(batch["labels"])
        (target, states), time = signal.rows(batch), mask.shape[1]
        true = states.to(next(head.parameters()).dtype)
        features = true
        if self.noise and seed is not None:
            features = true + (torch.rand_like(true) - 0.5) * self.noise * 512 / time
        place = places(mask)
        position = place % time
        begins = torch.zeros_like(mask).flatten()
        for step in range(self.steps):
            begins[place[position > step] - step - 1] = True
        starts = places(begins)
        embeds = signal.embedding(functional.pad(batch["input_ids"][:, 1:], (0, 1))).detach().to(features.dtype)
        parts = list[tuple[Tensor, ...]]()
        for step, unrolled in enumerate(head.unroll(embeds, features, self.steps, begins.view_as(mask))):
            reached = places(position > step)
            states = unrolled.index_select(0, torch.searchsorted(starts, place[reached] - step - 1))
            parts.append((states, reached, torch.full_like(reached, step)))
        state, at, number = map(torch.cat, zip(*parts))
        weight, distance = self.decay ** number.to(torch.float32), None
        if head.version == 1:
            wanted = true.flatten(0, 1).index_select(0, place[at])
            distance = functional.smooth_l1_loss(state.float(), wanted.float(), reduction="none").mean(-1) * weight
            weight = weight * self.divergence_weight
        output = LMHead.of(head.lm_head) if isinstance(head, FeatureHead) and head.version == 3 else signal.head
        return head_rows(head.output(state), output, target, batch, len(place), at, number, weight, distance=distance)


def head_rows(
    hidden: Tensor,
    head: LMHead,
    target: TargetRows,
    batch: Batch,
    count: int,
    at: Tensor,
    step: Tensor,
    weight: Tensor,
    **beside: Tensor | None,
) -> Rows:
    """Returns the rows of a head, with what signal and reference say of them: see `Rows` for the values."""
    if target.head is not None and target.values is not None and len(target.values) * target.vocab * 4 <= KEPT:
        with torch.no_grad():
            target = replace(target, values=target.log_probs(target.vocab), head=None)
    weight = weight if target.learnable is None else weight * target.learnable[at]
    reference = batch[REFERENCE][at, step] if REFERENCE in batch else None
    return Rows(hidden, head, target, count, at, step, weight, reference, **beside)


def create(target: PreTrainedModel, version: int, draft_vocab: int | None, seed: int) -> FeatureHead:
    """Returns a head with random weights that depend on the seed alone."""
    config = head_config(target.config.get_text_config(), version, draft_vocab=draft_vocab)
    with seeded(seed):
        return FeatureHead(config)
