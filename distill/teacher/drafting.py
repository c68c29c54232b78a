"""What a draft in training predicts of a batch, beside the target's distributions of the same rows.

A language model predicts every label row in one drafting step. A feature head is unrolled over several.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedModel

from decode.bench.offline_acceptance import DEPTH
from decode.models.heads import FeatureHead
from decode.models.mtp import MtpHead
from distill.data.batches import Batch, example_of_rows, label_mask
from distill.losses.divergences import TargetRows
from distill.losses.objective import Drafted
from distill.models.lm_head import LMHead, last_hidden
from distill.teacher.signals import INSIDE, Teacher

WHOLE = 1 << 28
"""Bytes of the target's log-probabilities of a batch up to which they are computed once for all drafting steps."""


@torch.no_grad()
def whole(target: TargetRows) -> TargetRows:
    """Returns the rows with their log-probabilities computed, where rows are read several times and these are few."""
    if target.head is None or len(target.values) * target.vocab * 4 > WHOLE:
        return target
    wide = torch.promote_types(target.values.dtype, torch.float32)
    shape = target.values.new_empty(len(target.values), target.vocab, device="meta", dtype=wide)
    return TargetRows(target.log_probs(shape), target.vocab, labels=target.labels)


def model_rows(model: PreTrainedModel, teacher: Teacher, batch: Batch) -> Drafted:
    """Returns a language model's label rows of a batch."""
    mask = label_mask(batch["labels"])
    hidden = last_hidden(model, batch["input_ids"], mask, batch.get("position_ids"))
    target, reference = teacher.rows(batch, mask), batch.get("reference_loss")
    return Drafted(hidden, LMHead(model), target, example_of_rows(batch, mask), reference)


def drafting_steps(
    head: FeatureHead | MtpHead,
    teacher: Teacher,
    batch: Batch,
    steps: int,
    *,
    noise: float = 0.0,
    learnable_only: bool = False,
) -> Iterator[Drafted]:
    """Runs a head on a batch for several drafting steps; step s gives the labels that s + 1 tokens precede.

    If `Drafted.accepted` is set between two steps, the second one gives only the labels that follow accepted tokens.
    EAGLE-1's rows have as ``extra`` the mean smooth L1 distance of the states from the target's.

    Args:
        head: The feature head, or next-token layers.
        teacher: The target's features, embedding and output head.
        batch: `TokenDataset.batch`, with the target's values unless ``teacher`` computes them.
        steps: Number of drafting steps, but several layers make one each; step s drafts token s + 1 of a draft.
        noise: Width of the uniform noise on the features, to be scaled by 512 / length.
        learnable_only: Leave out labels where the target's most probable token is none of the head's ids.
    """
    mask, steps = label_mask(batch["labels"]), head.drafts or steps
    batch = teacher.complete(batch, mask)
    true = teacher.features(batch).to(next(head.parameters()).dtype)
    features = true + (torch.rand_like(true) - 0.5) * noise * 512 / true.shape[1] if noise else true
    place = mask.flatten().nonzero()[:, 0]
    position, time = place % mask.shape[1], mask.shape[1]
    rows = torch.zeros_like(mask).flatten()
    for step in range(steps):
        rows[place[position > step] - step - 1] = True
    starts = rows.nonzero()[:, 0]
    target, inside = teacher.rows(batch, mask), batch.get(INSIDE)
    target = whole(target) if steps > 1 else target
    output = LMHead.of(head.lm_head) if isinstance(head, FeatureHead) and head.version == 3 else teacher.head
    embeds = teacher.embedding(functional.pad(batch["input_ids"][:, 1:], (0, 1))).detach().to(features.dtype)
    reference = batch.get("reference_loss")
    unrolled, going = head.unroll(embeds, features, steps, rows.view_as(mask)), rows
    states = next(unrolled)
    for step in range(steps):
        asked = ((position > step) & going[(place - step - 1).clamp_min(0)]).nonzero()[:, 0]
        found = states.index_select(0, torch.searchsorted(starts, place[asked] - step - 1))
        distance: Tensor | None = None
        if head.version == 1:
            state = true.flatten(0, 1).index_select(0, place[asked])
            distance = functional.smooth_l1_loss(found.float(), state.float(), reduction="sum")
            distance = distance / (max(1, len(asked)) * state.shape[-1])
        if learnable_only and inside is not None:
            kept = inside[asked, 1].nonzero()[:, 0]
            asked, found = asked[kept], found.index_select(0, kept)
        drafted = Drafted(
            head.output(found),
            output,
            target.at(asked),
            place[asked] // time,
            None if reference is None else reference[asked, step],
            rows=asked,
            mass=None if inside is None else inside[asked, 0],
            learnable=None if inside is None else inside[asked, 1],
            extra=distance,
        )
        yield drafted
        if step + 1 == steps:
            return
        chain = None
        if drafted.accepted is not None:
            accepted = place[asked[drafted.accepted]] - step - 1
            chain, starts = torch.searchsorted(starts, accepted), accepted
            going = torch.zeros_like(rows).index_fill(0, accepted, True)
        states = unrolled.send(chain)


def acceptance_by_position(
    steps: Sequence[tuple[Tensor | None, Tensor]], place: Tensor, depth: int = DEPTH
) -> tuple[list[Tensor], list[Tensor]]:
    """Returns Σ wᵢ·aᵢ and Σ wᵢ for each position i of a draft, over the drafts that begin at any label row.

    aᵢ is the acceptance of a draft's i-th token and wᵢ the product of those before it, so that their ratio is the
    acceptance of position i given that the draft is accepted up to there. Drafts that a text's end cuts short count
    up to that end.

    Args:
        steps: ``Drafted.rows`` of each drafting step, and the acceptance of these rows, ``[rows]``. The last step
            holds for deeper positions.
        place: Where each of the batch's label rows lies among all its tokens, ``[label rows]``, ascending.
        depth: Positions of a draft.
    """
    reached = torch.ones(int(place[-1:].sum()) + depth, dtype=torch.float64, device=place.device)
    sums, counts = [], []
    for i in range(depth):
        rows, accepted = steps[min(i, len(steps) - 1)]
        starts = (place if rows is None else place[rows]) - i + depth - 1  # shifted, so that none is negative
        weight = reached[starts]
        walked = weight * accepted
        sums.append(walked.sum())
        counts.append(weight.sum())
        reached = torch.zeros_like(reached).index_copy(0, starts, walked)
    return sums, counts
