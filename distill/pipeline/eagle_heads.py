"""Feature heads as drafts: a random initial head, and its training by EAGLE or by EAGLE + AdaSPEC."""

from __future__ import annotations

import numpy as np
import torch

from decode.core.errors import UserError
from decode.models.eagle.files import head_config, load_head
from decode.models.eagle.head import FeatureHead
from decode.models.open import load_model, stop_ids
from distill.config.settings import AdaSpecSettings, ComparisonSettings, TrainingSettings
from distill.core.files import fingerprint
from distill.core.run_dir import StageRecord
from distill.data.stage_context import StageContext
from distill.data.token_dataset import TokenDataset
from distill.eagle.drafting_steps import keep_reference
from distill.eagle.features import REFERENCE, STATES, FeatureSource, keep_states
from distill.losses.token_selection import Selection
from distill.models.lm_head import LMHead, check_head
from distill.pipeline.stages import Distillation, StageResult
from distill.teacher.prepare import fixed_texts
from distill.training.eagle_head import EagleModule

KINDS = {"eagle": "EAGLE-1", "eagle3": "EAGLE-3"}
"""Settings' names for the heads, as people write them."""


def initial(context: StageContext, key: str) -> StageResult:
    """A random head for the target, its vocabulary chosen."""
    settings = context.settings.eagle
    trust = context.settings.target.trust_remote_code
    target = load_model(context.run.target, device="cpu", dtype="float32", trust_remote_code=trust)
    config = head_config(
        target.config.get_text_config(),
        settings.version,
        intermediate_size=settings.intermediate_size,
        heads=settings.heads,
        kv_heads=settings.kv_heads,
        draft_vocab=settings.draft_vocab,
        captured_layers=tuple(settings.layers) or None,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(context.settings.seed)
        head = FeatureHead(config)
    if settings.version == 3:
        ids = frequent(context.examples, int(config.draft_vocab_size), int(config.vocab_size))
        head.set_vocabulary(ids)
        with torch.no_grad():  # the target's own directions are where the head's will end
            head.lm_head.weight.copy_(target.get_output_embeddings().weight[ids])
    parameters = sum(p.numel() for p in head.parameters())
    context.console.print(f"  {parameters:,} parameters", highlight=False)
    if parameters >= target.num_parameters():
        raise UserError(
            f"the head has {parameters:,} parameters and the target {target.num_parameters():,}: a draft has to be "
            "smaller; lower eagle.intermediate_size or eagle.draft_vocab"
        )
    return StageResult(StageRecord(key, parameters=parameters), head, context.corpus.tokenizer)


def frequent(rows: TokenDataset, count: int, vocab: int) -> torch.Tensor:
    """The most frequent label tokens, ascending; ties and tokens that never occur by their ids."""
    counts = np.bincount(rows.labels[rows.labels >= 0], minlength=vocab)
    return torch.from_numpy(np.sort(np.argsort(-counts, kind="stable")[:count]))


def begin(
    context: StageContext, adaspec: AdaSpecSettings | None, training: TrainingSettings, steps: int, seed: int
) -> Distillation:
    """The training of a head that starts from the initial one (see `distill.pipeline.stages.Begin`)."""
    settings = context.settings
    selection = None
    if adaspec is not None and not (isinstance(adaspec, ComparisonSettings) and adaspec.method == "distillspec"):
        selection = Selection(adaspec.k, adaspec.scope, adaspec.normalisation)
    head = load_head(context.run.path("initial")).train()
    source, train, validation = _signals(context, head, with_reference=selection is not None)
    module = EagleModule(
        head,
        training,
        steps,
        source=source,
        settings=settings.eagle,
        selection=selection,
        seed=seed,
    )
    parameters = sum(p.numel() for p in head.parameters())
    return Distillation(module, train, validation, parameters, lambda: head.eval().cpu())


def _signals(
    context: StageContext, head: FeatureHead, *, with_reference: bool
) -> tuple[FeatureSource, TokenDataset, TokenDataset]:
    """The target, and train and validation examples with its states and the reference's losses."""
    settings, run = context.settings, context.run
    cached, folder = settings.reference.signal == "hidden", run.work / "signals"
    wanted = settings.target
    model = load_model(
        run.target, device=context.device, dtype=wanted.dtype, trust_remote_code=wanted.trust_remote_code
    )
    check_head(model, LMHead(model))
    source = FeatureSource(model, head, cached=cached)
    train, validation, made_from = fixed_texts(context, model, stop_ids(model, context.corpus.tokenizer))
    key = [made_from, list(source.captured_layers)]
    size, limit = (
        (len(train.ids) + len(validation.ids)) * source.state_width * 4 / 1e9,
        settings.reference.signal_limit_gb,
    )
    if cached and size > limit:
        raise UserError(
            f"the target's hidden states at all tokens need {size:.2f} GB and reference.signal_limit_gb is "
            f"{limit:g}: raise it, use fewer reference.examples, or set reference.signal to recompute"
        )
    for name, rows in (("train", train), ("validation", validation)) if cached else ():
        with context.console.status(f"  the target's hidden states, {name}"):
            place = folder / f"{STATES}_{name}.npy"
            rows.tokens[STATES] = keep_states(source, model, rows, place, fingerprint(*key, name, len(rows)))
    if with_reference:
        record, steps, precision = run.record("reference"), settings.eagle.steps, settings.trainer.precision
        assert record is not None
        with context.console.status("  the reference's cross-entropies"):
            reference = load_head(run.path("reference")).to(context.device)
            place = folder / f"{REFERENCE}_head.npy"
            train.tokens[REFERENCE] = keep_reference(
                reference, source, train, steps, place, fingerprint(*key, record.fingerprint, steps), precision
            )
    return source, train, validation
