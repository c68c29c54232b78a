"""The stages of a run that trains feature heads: a random head, EAGLE, EAGLE + AdaSPEC, all under the usual names."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from decode.core.errors import UserError
from decode.models.eagle.files import head_config, load_head, save_head
from decode.models.eagle.head import FeatureHead
from decode.models.open import load_model, stop_ids
from distill.config.settings import AdaSpecSettings, ComparisonSettings
from distill.core.files import fingerprint
from distill.core.run_dir import StageRecord, account_of
from distill.data.token_dataset import TokenDataset
from distill.eagle.drafting_steps import keep_reference
from distill.eagle.features import REFERENCE, STATES, FeatureSource, keep_states
from distill.losses.token_selection import Selection
from distill.models.lm_head import LMHead, check_head
from distill.pipeline.stages import StageContext, StageResult
from distill.pipeline.training_budget import account, label_tokens
from distill.teacher.prepare import fixed_texts
from distill.training.eagle_head import EagleModule

KINDS = {"eagle": "EAGLE-1", "eagle3": "EAGLE-3"}
"""Settings' names for the heads, as people write them."""


@dataclass
class HeadResult(StageResult):
    """A finished head."""

    head: FeatureHead | None = None

    def save(self, folder: Path) -> None:
        """Writes config.json, model.safetensors and the tokenizer."""
        assert self.head is not None
        assert self.tokenizer is not None
        folder.mkdir(parents=True)
        save_head(self.head, folder)
        self.tokenizer.save_pretrained(folder)


def initial(context: StageContext, key: str) -> StageResult:
    """A random head for the target, its vocabulary chosen."""
    settings = context.settings.eagle
    target = load_model(context.run.target)
    config = head_config(
        target.config.get_text_config(),
        settings.version,
        intermediate_size=settings.intermediate_size,
        heads=settings.heads,
        kv_heads=settings.kv_heads,
        draft_vocab=settings.draft_vocab,
        taps=tuple(settings.layers) or None,
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
    return HeadResult(StageRecord(key, parameters=parameters), tokenizer=context.corpus.tokenizer, head=head)


def frequent(rows: TokenDataset, count: int, vocab: int) -> torch.Tensor:
    """The most frequent label tokens, ascending; ties and tokens that never occur by their ids."""
    counts = np.bincount(rows.labels[rows.labels >= 0], minlength=vocab)
    return torch.from_numpy(np.sort(np.argsort(-counts, kind="stable")[:count]))


def distil(context: StageContext, stage: str, key: str, adaspec: AdaSpecSettings | None) -> StageResult:
    """A head, from the initial one: EAGLE (``adaspec`` is None), EAGLE + AdaSPEC, or one for comparison."""
    started = time.monotonic()
    settings, run, seed = context.settings, context.run, context.seed_of(adaspec)
    training, plan = context.plan(adaspec)
    selection = None
    if adaspec is not None and not (isinstance(adaspec, ComparisonSettings) and adaspec.method == "distillspec"):
        selection = Selection(adaspec.k, adaspec.scope, adaspec.normalisation)
    head = load_head(run.path("initial")).train()
    source, train, validation = _signals(context, head, with_reference=selection is not None)
    module = EagleModule(
        head,
        training,
        plan.steps,
        source=source,
        settings=settings.eagle,
        selection=selection,
        seed=seed,
        log_every=settings.trainer.log_every,
    )
    schedule = context.schedule(train, plan, training, seed * 10 + 2)
    prepared = time.monotonic() - started
    history, seconds = context.fit(stage, key, module, train, validation, schedule, plan, training)
    chosen = None if module.selected is None else int(module.selected.sum())
    reference = run.record("reference") if selection is not None else None
    used = account(plan, label_tokens(plan, train, schedule), chosen, account_of(reference) if reference else None)
    record = StageRecord(
        key,
        parameters=sum(p.numel() for p in head.parameters()),
        seconds=prepared + seconds,
        account=used.row(),
        history=history,
        selected=context.most_selected(module.selected),
    )
    return HeadResult(record, tokenizer=context.corpus.tokenizer, head=head.eval().cpu())


def _signals(
    context: StageContext, head: FeatureHead, *, with_reference: bool
) -> tuple[FeatureSource, TokenDataset, TokenDataset]:
    """The target, and train and validation examples with its states and the reference's losses."""
    settings, run = context.settings, context.run
    cached, folder = settings.reference.signal == "hidden", run.work / "signals"
    model = load_model(run.target, dtype=settings.target.dtype).to(context.device())
    check_head(model, LMHead(model))
    source = FeatureSource(model, head, cached=cached)
    train, validation, made_from = fixed_texts(context, model, stop_ids(model, context.corpus.tokenizer))
    key = [made_from, list(source.taps)]
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
        record, steps = run.record("reference"), settings.eagle.steps
        assert record is not None
        with context.console.status("  the reference's cross-entropies"):
            reference = load_head(run.path("reference")).to(context.device())
            place = folder / f"{REFERENCE}_head.npy"
            train.tokens[REFERENCE] = keep_reference(
                reference, source, train, steps, place, fingerprint(*key, record.fingerprint, steps)
            )
    return source, train, validation
