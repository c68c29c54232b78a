"""What a feature head drafts on a batch, drafting step by drafting step, and the reference head's losses on disk."""

from collections.abc import Iterator
from pathlib import Path

import torch
from torch.nn import functional

from decode.models.eagle.head import FeatureHead
from distill.data.batches.batch_schedule import EvalBatches
from distill.data.batches.token_dataset import Batch, TokenDataset, label_mask
from distill.eagle.target_features import INSIDE, FeatureSource
from distill.losses.chunked_kl import LossRequest, TargetRows, fused_loss
from distill.losses.divergences import Divergence
from distill.losses.draft_outputs import Drafted
from distill.models.lm_head import LMHead
from distill.models.precision import forward_precision
from distill.teacher.hidden_state_store import scatter
from distill.teacher.store_shards import label_values
from distill.teacher.stored_arrays import Array, Part
from distill.teacher.target_distribution import HiddenRows, LogProbRows

WHOLE = 1 << 28
"""Bytes of the target's log-probabilities of a batch up to which they are computed once for all drafting steps."""


def drafting_steps(
    head: FeatureHead,
    source: FeatureSource,
    batch: Batch,
    steps: int,
    *,
    temperature: float = 1.0,
    noise: float = 0.0,
    learnable_only: bool = False,
) -> Iterator[Drafted]:
    """Run a head on a batch for several drafting steps; step s is asked about the labels that s + 1 tokens precede.

    Where `Drafted.accepted` is set between two steps, the second is asked only about what follows accepted tokens.

    Args:
        head: the feature head.
        source: the target's features, embedding and output head.
        batch: `TokenDataset.batch`, with the target's values unless ``source`` computes them.
        steps: drafting steps; step s drafts token s + 1 of a draft.
        temperature: of the target's distributions that are computed here.
        noise: width of the uniform noise on the features, to be scaled by 512 / length.
        learnable_only: leave out labels where the target's most probable token is none of the head's ids.
    """
    batch, mask = source.complete(batch), label_mask(batch["labels"])
    true = source.features(batch).to(head.fc.weight.dtype)
    features = true + (torch.rand_like(true) - 0.5) * noise * 512 / true.shape[1] if noise else true
    place = mask.flatten().nonzero()[:, 0]
    position, time = place % mask.shape[1], mask.shape[1]
    rows = torch.zeros_like(mask).flatten()
    for step in range(steps):
        rows[place[position > step] - step - 1] = True
    from_ = rows.nonzero()[:, 0]
    target, inside = source.rows(batch, mask), batch.get(INSIDE)
    if steps > 1:
        target = computed(target, temperature)
    output = LMHead.of(head.lm_head) if head.version == 3 else source.target.head
    embeds = source.embedding(functional.pad(batch["input_ids"][:, 1:], (0, 1))).detach().to(features.dtype)
    reference, labels = batch.get("reference_loss"), batch["labels"].roll(-1, 1)[mask]
    unrolled, going = head.unroll(embeds, features, steps, rows.view_as(mask)), rows
    states = next(unrolled)
    for step in range(steps):
        asked = ((position > step) & going[(place - step - 1).clamp_min(0)]).nonzero()[:, 0]
        found = states.index_select(0, torch.searchsorted(from_, place[asked] - step - 1))
        regression = None
        if head.version == 1:
            state = true.flatten(0, 1).index_select(0, place[asked])
            regression = functional.smooth_l1_loss(found.float(), state.float(), reduction="sum") / (
                max(1, len(asked)) * state.shape[-1]
            )
        if learnable_only and inside is not None:
            kept = inside[asked, 1].nonzero()[:, 0]
            asked, found = asked[kept], found.index_select(0, kept)
        drafted = Drafted(
            found if head.version == 1 else head.norm(found),
            output,
            target.at(asked),
            place[asked] // time,
            labels[asked],
            None if reference is None else reference[asked, step],
            rows=asked,
            mass=None if inside is None else inside[asked, 0],
            learnable=None if inside is None else inside[asked, 1],
            regression=regression,
        )
        yield drafted
        if step + 1 == steps:
            return
        kept = None
        if drafted.accepted is not None:
            starts = place[asked[drafted.accepted]] - step - 1
            kept, from_ = torch.searchsorted(from_, starts), starts
            going = torch.zeros_like(rows).index_fill(0, starts, True)
        states = unrolled.send(kept)


@torch.no_grad()
def computed(target: TargetRows, temperature: float) -> TargetRows:
    """Rows whose log-probabilities every drafting step would compute anew, with these computed, if not too large."""
    if not isinstance(target, HiddenRows) or len(target.hidden) * target.vocab * 4 > WHOLE:
        return target
    wide = torch.promote_types(target.hidden.dtype, torch.float32)
    shape = target.hidden.new_empty(len(target.hidden), target.vocab, device="meta", dtype=wide)
    return LogProbRows(target.log_probs(slice(None), shape, temperature))


def reference_loss(
    head: FeatureHead,
    source: FeatureSource,
    rows: TokenDataset,
    steps: int,
    divergence: Divergence,
    precision: str = "32-true",
    path: Path | None = None,
    fingerprint: str = "",
) -> Array:
    """The reference head's divergences at every label token and drafting step, ``[label tokens, steps]``.

    ``precision`` is the trainer's: the other head's side of ΔL is computed in it, so the reference's has to be. Without
    a path they are kept in memory.
    """
    return label_values(
        rows,
        lambda some: _reference_parts(head, source, some, steps, divergence, precision),
        path,
        fingerprint,
        (steps,),
        model=source.model,
    )


@torch.no_grad()
def _reference_parts(
    head: FeatureHead, source: FeatureSource, rows: TokenDataset, steps: int, divergence: Divergence, precision: str
) -> Iterator[Part]:
    device = next(head.parameters()).device
    source.to(device)
    head.eval()
    for examples in EvalBatches(rows, 16, pad_id=0).indices():
        batch = {name: values.to(device) for name, values in rows.batch(examples, 0).items()}
        losses = torch.zeros(rows.labels_of(examples), steps, device=device)
        with forward_precision(precision, device):
            drafted = drafting_steps(head, source, batch, steps, temperature=divergence.temperature)
            for step, made in enumerate(drafted):
                found = fused_loss(made.hidden, made.head, made.target, LossRequest(divergence, metrics=False))
                losses[made.rows, step] = found.losses.float()
        yield from scatter(rows, examples, losses.cpu().numpy())
