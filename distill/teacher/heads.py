"""Feature heads in training: their drafting steps on a batch, and their start from the target's last layer."""

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel

from decode.errors import UserError
from decode.models.families import decoder_layers, final_norm
from decode.models.heads import FeatureHead, RMSNorm
from distill.data.batches import Batch, label_mask
from distill.losses.chunked import TargetRows
from distill.losses.objective import Drafted
from distill.models.lm_head import LMHead
from distill.teacher.signals import INSIDE, HiddenRows, LogProbRows, Teacher

WHOLE = 1 << 28
"""Bytes of the target's log-probabilities of a batch up to which they are computed once for all drafting steps."""


def drafting_steps(
    head: FeatureHead,
    teacher: Teacher,
    batch: Batch,
    steps: int,
    *,
    temperature: float = 1.0,
    noise: float = 0.0,
    learnable_only: bool = False,
) -> Iterator[Drafted]:
    """Runs a head on a batch for several drafting steps; step s gives the labels that s + 1 tokens precede.

    If `Drafted.accepted` is set between two steps, the second one gives only the labels that follow accepted tokens.

    Args:
        head: The feature head.
        teacher: The target's features, embedding and output head.
        batch: `TokenDataset.batch`, with the target's values unless ``teacher`` computes them.
        steps: Number of drafting steps; step s drafts token s + 1 of a draft.
        temperature: Of the target's distributions that are computed here.
        noise: Width of the uniform noise on the features, to be scaled by 512 / length.
        learnable_only: Leave out labels where the target's most probable token is none of the head's ids.
    """
    mask = label_mask(batch["labels"])
    batch = teacher.complete(batch, mask)
    true = teacher.features(batch).to(head.fc.weight.dtype)
    features = true + (torch.rand_like(true) - 0.5) * noise * 512 / true.shape[1] if noise else true
    place = mask.flatten().nonzero()[:, 0]
    position, time = place % mask.shape[1], mask.shape[1]
    rows = torch.zeros_like(mask).flatten()
    for step in range(steps):
        rows[place[position > step] - step - 1] = True
    from_ = rows.nonzero()[:, 0]
    target, inside = teacher.rows(batch, mask), batch.get(INSIDE)
    if steps > 1:
        target = _computed(target, temperature)
    output = LMHead.of(head.lm_head) if head.version == 3 else teacher.head
    embeds = teacher.embedding(functional.pad(batch["input_ids"][:, 1:], (0, 1))).detach().to(features.dtype)
    reference, labels = batch.get("reference_loss"), batch["labels"].roll(-1, 1)[mask]
    unrolled, going = head.unroll(embeds, features, steps, rows.view_as(mask)), rows
    states = next(unrolled)
    for step in range(steps):
        asked = ((position > step) & going[(place - step - 1).clamp_min(0)]).nonzero()[:, 0]
        found = states.index_select(0, torch.searchsorted(from_, place[asked] - step - 1))
        regression = None
        if head.version == 1:
            state = true.flatten(0, 1).index_select(0, place[asked])
            distance = functional.smooth_l1_loss(found.float(), state.float(), reduction="sum")
            regression = distance / (max(1, len(asked)) * state.shape[-1])
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
def _computed(target: TargetRows, temperature: float) -> TargetRows:
    """Rows with their log-probabilities computed once instead of at every drafting step, unless they are too large."""
    if not isinstance(target, HiddenRows) or len(target.hidden) * target.vocab * 4 > WHOLE:
        return target
    wide = torch.promote_types(target.hidden.dtype, torch.float32)
    shape = target.hidden.new_empty(len(target.hidden), target.vocab, device="meta", dtype=wide)
    return LogProbRows(target.log_probs(slice(None), shape, temperature))


@torch.no_grad()
def start_from_target(head: FeatureHead, target: PreTrainedModel) -> list[str]:
    """Copies what fits of the target's last layer into an EAGLE-3 head, so that it begins as that layer.

    ``fc`` passes the last captured state through. Attention reads that state with the target's weights and the
    embedding with its own random ones. The norm is the target's final one, and the output rows are the target's.

    Returns:
        Names of the layer's weights that are not the target's: of other shapes, or of a family built otherwise.
    """
    width = int(head.config.hidden_size)
    head.fc.weight.zero_()
    head.fc.weight[:, -width:] = torch.eye(width)
    ids, output = head.draft_ids(), target.get_output_embeddings().weight
    head.lm_head.weight.copy_(output[: len(head.lm_head.weight)] if ids is None else output[ids])
    try:
        layers, norm = decoder_layers(target), final_norm(target)
    except UserError:
        return [name for name, _ in head.layer.named_parameters()]
    _copied(head.norm, norm)
    last, first = dict(layers[-1].named_modules()), dict(layers[0].named_modules())
    last |= {"hidden_norm": last.get("input_layernorm"), "input_layernorm": first.get("input_layernorm")}
    return [
        name
        for name, module in head.layer.named_modules()
        if isinstance(module, nn.Linear | RMSNorm) and not _copied(module, last.get(name))
    ]


def _copied(module: nn.Linear | RMSNorm, source: nn.Module | None) -> bool:
    """Whether the module could take the source's weights; one that is twice as wide takes them as its last columns.

    A norm is copied only if it computes the same with the weights: some families add 1 to them, or a bias.
    """
    weight = getattr(source, "weight", None)
    if source is None or not isinstance(weight, Tensor):
        return False
    if isinstance(module, RMSNorm):
        if weight.shape != module.weight.shape:
            return False
        x = torch.linspace(-2, 3, len(weight), dtype=weight.dtype, device=weight.device)[None]
        wanted, found = functional.rms_norm(x, weight.shape, weight, module.variance_epsilon), source(x)
        if not isinstance(found, Tensor) or not torch.allclose(found, wanted, rtol=1e-3, atol=1e-4):
            return False
        module.weight.copy_(weight)
        return True
    if not isinstance(source, nn.Linear) or len(weight) != len(module.weight):
        return False
    extra = module.weight.shape[1] - weight.shape[1]
    if extra not in (0, weight.shape[1]):
        return False
    module.weight[:, extra:] = weight
    return True
