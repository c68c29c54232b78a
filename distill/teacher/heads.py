"""What a feature head is trained on: examples with the target's features and distributions, the reference's losses."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel

from decode.errors import UserError
from decode.models.families import decoder_layers, final_norm
from decode.models.heads import FeatureHead, RMSNorm, load_head
from decode.models.loading import stop_ids
from decode.progress import working
from distill.config.drafts import Signal
from distill.data.batches import Batch, EvalBatches, TokenDataset, label_mask
from distill.data.context import StageContext
from distill.files import fingerprint
from distill.losses.chunked import LossRequest, TargetRows, fused_loss
from distill.losses.divergences import Divergence
from distill.losses.objective import Drafted, Objective
from distill.models.lm_head import LMHead, check_head
from distill.models.loading import forward_precision, use_attention
from distill.teacher import store as signals
from distill.teacher.features import INSIDE, FeatureSource
from distill.teacher.signals import (
    LOSSES,
    SIGNAL,
    DistillData,
    announced,
    at_work,
    choose_signal,
    fixed_texts,
    open_target,
)
from distill.teacher.store import Array, Part, label_values, scatter
from distill.teacher.target_distribution import HiddenRows, LogProbRows, TargetSignal

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


def prepare_head(
    context: StageContext,
    head: FeatureHead,
    objective: Objective,
    share: float = 0.0,
    first: int | None = None,
) -> DistillData[FeatureSource]:
    """As `distill.teacher.signals.prepare`, for a feature head.

    Args:
        context: settings, data and folder.
        head: which states it reads and which ids it drafts.
        objective: of the draft.
        share: of the examples whose responses the head will write itself.
        first: examples that are wanted, the first ones; None: all.
    """
    settings, run, folder = context.settings, context.run, context.run.work / "signals"
    model = at_work(context, open_target(context))
    check_head(model, LMHead(model))
    ids = head.draft_ids()
    ends = stop_ids(model, context.corpus.tokenizer)
    train, validation, key = fixed_texts(context, model, ends)
    train = train.part(0, min(first or len(train), len(train)))
    fixed = {"validation": validation} if share == 1 else {"validation": validation, "train": train}

    def signal_of(kind: Signal) -> TargetSignal:
        vocab = LMHead(model).vocab if ids is None else len(ids)
        return TargetSignal.of(replace(settings.reference, signal=kind), vocab)

    def size_of(kind: Signal) -> int:
        return sum(map(FeatureSource(model, head, signal_of(kind)).bytes, fixed.values()))

    signal = signal_of(choose_signal(context, size_of, fingerprint(key, head.captured_layers)))
    source = FeatureSource(model, head, signal, stays=settings.target.placed)
    source.to(context.device)
    use_attention(model, settings.trainer.attention)
    if signal.kind != "online":
        tokens, size = sum(rows.label_count for rows in fixed.values()), size_of(signal.kind)
        seconds = partial(signals.seconds_of, model, list(fixed.values()))
        about_signal = fingerprint(key, signal.key, head.captured_layers)
        with announced(context, signal.kind, "hidden states and signal", about_signal, size, tokens, seconds):
            for name, rows in fixed.items():
                told = f"the target's hidden states and signal ({signal.kind}), {name}"
                with working(context.console, told), context.timed(f"{SIGNAL} {name}", len(rows.ids)):
                    source.keep(model, rows, folder, name, key)
    reference, about = None, (settings.eagle.steps, objective.divergence, settings.trainer.precision)
    if objective.selection is not None:
        record = run.record("reference")
        assert record is not None
        reference = load_head(run.path("reference")).to(context.device)
        if "train" in fixed:
            made_from: Any = [
                key,
                record.fingerprint,
                source.signal.key,
                about[0],
                vars(objective.divergence),
                about[2],
            ]
            path = folder / f"reference_{objective.divergence.name}.npy"
            with working(context.console, "the reference's losses"), context.timed(f"{LOSSES} train", len(train.ids)):
                made = reference_loss(reference, source, train, *about, path, fingerprint(*made_from))
                train.signals["reference_loss"] = made

    def add_signals(rows: TokenDataset) -> None:
        if signal.kind != "online":
            source.keep_now(model, rows)
        if reference is not None:
            rows.signals["reference_loss"] = reference_loss(reference, source, rows, *about)

    return DistillData(source, train, validation, ends, add_signals, share)


@torch.no_grad()
def start_from_target(head: FeatureHead, target: PreTrainedModel) -> list[str]:
    """Gives an EAGLE-3 head what fits of its target's last layer, so that it begins as that layer on the last state.

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
    if _same_norm(head.norm, norm):
        head.norm.weight.copy_(norm.weight)  # type: ignore[arg-type]
    last, first, left = dict(layers[-1].named_modules()), dict(layers[0].named_modules()), []
    sources = {"hidden_norm": last.get("input_layernorm"), "input_layernorm": first.get("input_layernorm")}
    for name, module in head.layer.named_modules():
        if not isinstance(module, nn.Linear | RMSNorm):
            continue
        if not _copied(module, sources[name] if name in sources else last.get(name)):
            left.append(name)
    return left


def _copied(module: nn.Linear | RMSNorm, source: nn.Module | None) -> bool:
    """Whether the module could take the source's weights; one that is twice as wide takes them as its last columns."""
    if isinstance(module, RMSNorm):
        if source is None or not _same_norm(module, source):
            return False
        module.weight.copy_(source.weight)  # type: ignore[arg-type]
        return True
    weight = getattr(source, "weight", None)
    if not isinstance(source, nn.Linear) or not isinstance(weight, Tensor) or len(weight) != len(module.weight):
        return False
    extra = module.weight.shape[1] - weight.shape[1]
    if extra not in (0, weight.shape[1]):
        return False
    module.weight[:, extra:] = weight
    return True


def _same_norm(norm: RMSNorm, other: nn.Module) -> bool:
    """Whether another norm with its weights is an `RMSNorm` with the same: some add 1 to them, or a bias."""
    weight = getattr(other, "weight", None)
    if not isinstance(weight, Tensor) or weight.shape != norm.weight.shape:
        return False
    x = torch.linspace(-2, 3, len(weight), dtype=weight.dtype, device=weight.device)[None]
    wanted = functional.rms_norm(x, weight.shape, weight, norm.variance_epsilon)
    found = other(x)
    return isinstance(found, Tensor) and torch.allclose(found, wanted, rtol=1e-3, atol=1e-4)
