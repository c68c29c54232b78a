"""What a block head in training predicts of a batch: the drafted tokens of many blocks of each text, all at once."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from decode.models.block_head import BlockHead
from distill.data.batches import Batch, TokenDataset, label_mask
from distill.data.loader import EvalBatches
from distill.losses.chunked import LossRequest, fused_loss
from distill.losses.divergences import Divergence
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


# -- the confidence head's calibration --------------------------------------------------------------------------------

BINS = 15  # of the calibration error
GRID = torch.logspace(-2, 2, 81, base=2.0)  # temperatures that are tried


def calibration_error(probability: Tensor, outcome: Tensor) -> float:
    """Returns the expected calibration error of probabilities ``[n]`` against outcomes 0 or 1, in equal bins."""
    place = (probability * BINS).long().clamp_max(BINS - 1)
    gaps = torch.zeros(BINS, dtype=torch.float64).index_add_(0, place, (probability - outcome).double())
    return float(gaps.abs().sum()) / max(1, len(outcome))


@torch.no_grad()
def block_outcomes(head: BlockHead, teacher: Teacher, rows: TokenDataset, device: torch.device) -> tuple[Tensor, ...]:
    """Returns of a block at every label its confidences' log-odds, and whether its greedy tokens are accepted.

    Returns:
        Both ``[blocks, drafts]``, and how many of a block's tokens lie within its text, ``[blocks]``.
    """
    odds, hits, counts = list[Tensor](), list[Tensor](), list[Tensor]()
    request = LossRequest(Divergence("forward_kl"))
    for examples in EvalBatches(rows, 8).indices():
        batch = {name: values.to(device) for name, values in rows.batch(examples).items()}
        drafted = block_rows(head, teacher, batch, None)
        found = fused_loss(drafted.hidden, drafted.head, drafted.target, request)
        assert drafted.slots is not None
        assert drafted.confidence is not None
        assert found.agreement is not None
        agreed = found.agreement if drafted.learnable is None else found.agreement * drafted.learnable
        block = (drafted.slots == 0).cumsum(0) - 1
        tables = [torch.zeros(int(block[-1:].sum()) + 1, head.drafts) for _ in range(2)]
        for table, values in zip(tables, (drafted.confidence, agreed)):
            table[block.cpu(), drafted.slots.cpu()] = values.float().cpu()
        odds.append(tables[0])
        hits.append(tables[1])
        counts.append(torch.bincount(block.cpu()))
    return torch.cat(odds), torch.cat(hits), torch.cat(counts)


def temperatures(odds: Tensor, hits: Tensor, counts: Tensor) -> list[float]:
    """Returns a temperature for each position of a block, from left to right (STS; DSpark, section 3).

    Each one minimises the calibration error of the product of the confidences up to its position, which is the
    probability that the draft is accepted that far.

    Args:
        odds: See `block_outcomes`, whose results these are.
        hits: Whether the tokens are accepted.
        counts: Tokens of each block.
    """
    found, before, whole = list[float](), torch.ones(len(odds)), hits.cumprod(1)
    for slot in range(odds.shape[1]):
        there = counts > slot
        if not there.any():
            found.append(1.0)
            continue
        tried = [calibration_error((before * (odds[:, slot] / t).sigmoid())[there], whole[there, slot]) for t in GRID]
        found.append(float(GRID[min(range(len(GRID)), key=tried.__getitem__)]))
        before = before * (odds[:, slot] / found[-1]).sigmoid()
    return found
