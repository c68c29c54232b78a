"""EAGLE-1, EAGLE-3 and a target's own next-token layers (MTP) in training, unrolled over several drafting steps."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedModel

from decode.models.heads import FeatureHead, head_config
from decode.models.mtp import MtpHead
from distill.config import StudentSettings
from distill.data.dataset import Batch, label_mask
from distill.drafts.start import seeded
from distill.lm_head import LMHead
from distill.losses.chunked import Rows
from distill.losses.divergences import TargetRows
from distill.signal.target import Signal, SignalRows

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
        self.divergence_weight = settings.ce_weight if model.version == 1 else 1.0

    def rows(self, batch: Batch, signal: Signal, seed: int | None = None) -> Rows:
        """The rows of all drafting steps, one step after the other: see `LanguageModelDraft.rows`."""
        head, mask = self.model, label_mask(batch["labels"])
        given, time = signal.rows(batch), mask.shape[1]
        assert given.features is not None
        true = given.features.to(next(head.parameters()).dtype)
        features = true
        if self.noise and seed is not None:
            features = true + (torch.rand_like(true) - 0.5) * self.noise * 512 / time
        place = mask.flatten().nonzero()[:, 0]  # of the label tokens
        position = place % time
        begins = torch.zeros_like(mask).flatten()
        for step in range(self.steps):
            begins[place[position > step] - step - 1] = True
        starts = begins.nonzero()[:, 0]
        embeds = signal.embedding(functional.pad(batch["input_ids"][:, 1:], (0, 1))).detach().to(features.dtype)
        states, labels, steps = list[Tensor](), list[Tensor](), list[Tensor]()
        for step, unrolled in enumerate(head.unroll(embeds, features, self.steps, begins.view_as(mask))):
            reached = (position > step).nonzero()[:, 0]
            states.append(unrolled.index_select(0, torch.searchsorted(starts, place[reached] - step - 1)))
            labels.append(reached)
            steps.append(torch.full_like(reached, step))
        state, at, number = torch.cat(states), torch.cat(labels), torch.cat(steps)
        weight = self.divergence_weight * self.decay ** number.to(torch.float32)
        distance = None
        if head.version == 1:
            wanted = true.flatten(0, 1).index_select(0, place[at])
            distance = functional.smooth_l1_loss(state.float(), wanted.float(), reduction="none").mean(-1)
            distance = distance * self.decay ** number.to(torch.float32)
        output = LMHead.of(head.lm_head) if isinstance(head, FeatureHead) and head.version == 3 else signal.head
        if self.steps > 1:
            given.target = computed_once(given.target)
        return head_rows(head.output(state), output, given, batch, len(place), at, number, weight, distance=distance)


def head_rows(
    hidden: Tensor,
    head: LMHead,
    given: SignalRows,
    batch: Batch,
    count: int,
    at: Tensor,
    step: Tensor,
    weight: Tensor,
    **further: Tensor | None,
) -> Rows:
    """Returns the rows of a head, with what signal and reference say of them: see `Rows` for the values."""
    mass, learnable = (None if values is None else values[at] for values in (given.mass, given.learnable))
    weight, reference = weight if learnable is None else weight * learnable, batch.get("reference_loss")
    reference = None if reference is None else reference[at, step]
    return Rows(hidden, head, given.target, count, at, step, weight, reference, mass, learnable, **further)


@torch.no_grad()
def computed_once(target: TargetRows) -> TargetRows:
    """Returns the rows with their log-probabilities computed, where rows are read several times and these are few."""
    if target.head is None or target.values is None or len(target.values) * target.vocab * 4 > KEPT:
        return target
    return TargetRows(target.log_probs(target.vocab), target.vocab, labels=target.labels)


def create(target: PreTrainedModel, version: int, draft_vocab: int | None, seed: int) -> FeatureHead:
    """Returns a head with random weights that depend on the seed alone."""
    config = head_config(target.config.get_text_config(), version, draft_vocab=draft_vocab)
    with seeded(seed):
        return FeatureHead(config)
