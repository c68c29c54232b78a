"""What a block head in training predicts of a batch: the drafted tokens of many blocks of each text, all at once."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from decode.models.block_head import BlockHead
from distill.data.batches import Batch, label_mask
from distill.losses.objective import Drafted
from distill.models.lm_head import LMHead
from distill.teacher.drafting import whole
from distill.teacher.signals import INSIDE, Teacher


def anchors_of(mask: Tensor, count: int | None, generator: torch.Generator | None) -> tuple[Tensor, Tensor]:
    """Chooses positions whose next token is a label.

    Args:
        mask: Where the next token is a label, ``[batch, time]``.
        count: Positions of a text; None: all.
        generator: Draws them. None: they are spread evenly, for validation.

    Returns:
        Positions ``[batch, blocks]``, ascending, and which of them are chosen ones, bool; the others fill up texts that
        have fewer labels.
    """
    labels = mask.sum(1)
    most = int(labels.max()) if count is None else min(count, int(labels.max()))
    if generator is not None:
        order = torch.rand(mask.shape, generator=generator).to(mask.device).masked_fill(~mask, 2.0).sort(1).indices
        chosen = order[:, :most]
        real = torch.arange(most, device=mask.device) < labels[:, None]
    else:
        number = torch.arange(most, device=mask.device)[None]
        wanted = torch.where(labels[:, None] > most, number * labels[:, None] // max(1, most), number)
        real = wanted < labels[:, None]
        place = (~mask).to(torch.int8).sort(dim=1, stable=True).indices  # labels first, in their order
        chosen = place.gather(1, wanted.clamp_max(mask.shape[1] - 1))
    chosen = chosen.masked_fill(~real, mask.shape[1])
    chosen = chosen.sort(1).values
    return chosen.clamp_max(mask.shape[1] - 1), chosen < mask.shape[1]


def block_rows(
    head: BlockHead, teacher: Teacher, batch: Batch, anchors: int | None, generator: torch.Generator | None = None
) -> Drafted:
    """Runs a head on blocks of a batch's texts.

    A block ends before the first token that is no label. The last token that was drafted is the text's own.

    Args:
        head: The block head.
        teacher: The target's features, embedding and output head.
        batch: `TokenDataset.batch`, with the target's values unless ``teacher`` computes them.
        anchors: Blocks of a text; None: one at every label.
        generator: Draws where the blocks begin; None: they are spread evenly.
    """
    mask = label_mask(batch["labels"])
    batch = teacher.complete(batch, mask)
    ids, time, drafts = batch["input_ids"], mask.shape[1], head.drafts
    at, real = anchors_of(mask, anchors, generator)
    after = at[..., None] + torch.arange(drafts, device=at.device)  # the position that each drafted token follows
    inside = (after < time) & real[..., None]
    after = after.clamp_max(time - 1)
    flat = (after + torch.arange(len(ids), device=at.device)[:, None, None] * time).flatten(1)
    live = (mask.flatten()[flat].view(after.shape) & inside).cumprod(2).bool()
    before = ids.flatten()[flat].view(after.shape)
    features = teacher.features(batch).to(head.fc.weight.dtype)
    embeds = functional.embedding(head.tokens(ids.gather(1, at), drafts), cast(Tensor, teacher.embedding.weight))
    states = head(embeds.detach().to(features.dtype), features, at)
    states, confidence = head.conditions(states.flatten(0, 1), before.flatten(0, 1))
    kept = live.flatten().nonzero()[:, 0]
    labels = (mask.flatten().cumsum(0) - 1)[flat.flatten()[kept]]
    inside_ids, reference = batch.get(INSIDE), batch.get("reference_loss")
    slots = (kept % drafts).to(torch.long)
    return Drafted(
        states.flatten(0, 1).index_select(0, kept),
        block_output(head, teacher.head),
        whole(teacher.rows(batch, mask)).at(labels),
        flat.flatten()[kept] // time,
        None if reference is None else reference[labels, slots],
        rows=labels,
        mass=None if inside_ids is None else inside_ids[labels, 0],
        learnable=None if inside_ids is None else inside_ids[labels, 1],
        slots=slots,
        confidence=None if confidence is None else confidence.flatten().index_select(0, kept),
    )


def block_output(head: BlockHead, target_head: LMHead) -> LMHead:
    """Returns the output head of `BlockHead.conditions`: the target's, frozen, and the Markov head's factor."""
    if head.markov_head is None:
        return LMHead.of(target_head.linear)
    weight = head.outputs(target_head.linear).detach()
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    linear.weight = nn.Parameter(weight, requires_grad=False)
    return LMHead.of(linear, trained=head.markov_head.markov_w2.weight)
