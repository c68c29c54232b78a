"""What each stage does: prepare a language model, or distil the target into a draft.

Both return a finished model with what is known of it; `distill.pipeline.runner` decides which stages have to run and puts
the results in their folders.
"""  # noqa: E501

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from lightning.pytorch.loggers import Logger
from rich.console import Console
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from decode.core.errors import UserError
from decode.models.open import check_tokenizers, load_model, load_tokenizer
from distill.config.settings import (
    AdaSpecSettings,
    InitialDraftSettings,
    ModelSettings,
    Settings,
    TargetSettings,
    TrainingSettings,
)
from distill.core.run_dir import RunDir, StageRecord, account_of
from distill.data import Corpus, load_corpus
from distill.data.batch_schedule import Schedule
from distill.data.token_dataset import TokenDataset
from distill.generation.on_policy import OnPolicy
from distill.losses.objective import Objective, divergence_of, objective_of
from distill.models.layer_pruning import cut, kept_layers
from distill.models.layerskip import LayerSkip
from distill.models.lm_head import LMHead, check_head
from distill.models.loading import count_layers, count_parameters, load_or_build, ready_to_save, source_folder
from distill.models.lora import add_adapter
from distill.pipeline.training_budget import Plan, account, label_tokens, plan_draft, plan_reference
from distill.teacher.prepare import prepare
from distill.tracking.logger import for_stage
from distill.training.base_module import TrainingModule
from distill.training.causal_lm import CausalLMModule
from distill.training.distillation import DistillModule, token_counts
from distill.training.trainer import Segments, fit

MOST_SELECTED = 100
"""Entries of the list of tokens that AdaSPEC selects most."""


@dataclass
class StageResult:
    """A finished stage: a model to be saved with its tokenizer, or a folder that is linked to as it is."""

    record: StageRecord
    model: PreTrainedModel | None = None
    tokenizer: PreTrainedTokenizerBase | None = None
    source: Path | None = None

    def save(self, folder: Path) -> None:
        """Writes the Hugging Face folder, or the link."""
        if self.source is not None:
            folder.symlink_to(self.source.resolve(), target_is_directory=True)
            return
        assert self.model is not None
        assert self.tokenizer is not None
        self.model.save_pretrained(folder)
        self.tokenizer.save_pretrained(folder)


@dataclass
class StageContext:
    """What the stages work with: settings, data, the run's folder, where to show and log progress."""

    settings: Settings
    run: RunDir
    console: Console
    logger: Logger | None = None

    @cached_property
    def corpus(self) -> Corpus:
        """The examples, tokenised as the target does."""
        target, tokenizer = self.settings.target, None
        if target.model is not None and self.settings.data.tokenizer is None:
            tokenizer = load_tokenizer(target.model, trust_remote_code=target.trust_remote_code)
        with self.console.status("  reading the data"):
            corpus = load_corpus(self.settings.data, seed=self.settings.seed, tokenizer=tokenizer)
        for note in corpus.notes:
            self.console.print(f"  {note}", highlight=False)
        return corpus

    @cached_property
    def validation(self) -> TokenDataset:
        """The examples by which checkpoints are compared."""
        return TokenDataset.of(self.corpus.validation, self.settings.trainer.validation_examples)

    @cached_property
    def examples(self) -> TokenDataset:
        """The examples for distillation."""
        return TokenDataset.of(self.corpus.train, self.settings.reference.examples)

    @property
    def pad_id(self) -> int:
        """Fills up batches; no loss is taken there, so any id would do."""
        pad = self.corpus.tokenizer.pad_token_id
        return pad if isinstance(pad, int) else 0

    def check_sizes(self) -> None:
        """Refuses a draft that is not smaller than its target, before anything is trained.

        Raises:
            UserError: with both sizes.
        """
        vocab = len(self.corpus.tokenizer)
        if self.settings.initial.kind == "cut":
            kept_layers(self.settings.initial.layers, count_layers(self.settings.target, vocab))
            return
        target = count_parameters(self.settings.target, vocab)
        draft = count_parameters(self.settings.initial, vocab)
        if draft >= target:
            raise UserError(
                f"the draft has {draft:,} parameters and the target {target:,}: a draft has to be smaller, or there is "
                "nothing to gain. Make initial.architecture smaller, or choose a smaller initial.model"
            )

    # -- language models ------------------------------------------------------------------------------------------

    def language_model(self, stage: str, key: str) -> StageResult:
        """The target or the initial draft: taken as it is, or trained on next tokens."""
        settings: ModelSettings = getattr(self.settings, stage)
        if settings.kind == "as_is":
            assert settings.model is not None
            source = source_folder(settings.model)
            self._check_tokenizer(settings)
            parameters = count_parameters(settings, len(self.corpus.tokenizer))
            return StageResult(StageRecord(key, parameters=parameters), source=source)
        offset = ("target", "initial").index(stage)
        vocab = len(self.corpus.tokenizer) if stage == "target" else self._target_vocab()
        self._check_tokenizer(settings)
        if isinstance(settings, InitialDraftSettings) and settings.kind == "cut":
            model = cut(load_model(self.run.target), settings.layers)
        else:
            model = load_or_build(settings, self.corpus.tokenizer, vocab, self.settings.seed + offset)
        parameters = model.num_parameters()
        check_head(model.train(), LMHead(model))
        self._say_size(model, parameters)
        if not settings.trained:
            record = StageRecord(key, parameters=parameters)
            return StageResult(record, ready_to_save(model, self.corpus.tokenizer), self.corpus.tokenizer)
        adapted = add_adapter(model, settings.lora, self.settings.seed) if settings.kind == "lora" else None
        rows = TokenDataset.of(self.corpus.train)
        module = CausalLMModule(
            model,
            settings.training,
            (plan := plan_reference(settings.training, len(rows))).steps,
            seed=self.settings.seed,
            log_every=self.settings.trainer.log_every,
        )
        if isinstance(settings, TargetSettings) and settings.layerskip.enabled:
            scratch = settings.kind == "scratch"
            module.layerskip = LayerSkip(model, settings.layerskip, plan.steps, scratch=scratch)
        schedule = self.schedule(rows, plan, settings.training, self.settings.seed * 10 + offset)
        history, seconds = self.fit(stage, key, module, rows, self.validation, schedule, plan, settings.training)
        if module.layerskip is not None:
            module.layerskip.remove()
        model = module.model if adapted is None else adapted.merge_and_unload()
        return StageResult(
            StageRecord(key, parameters=parameters, seconds=seconds, history=history),
            ready_to_save(model, self.corpus.tokenizer),
            self.corpus.tokenizer,
        )

    # -- drafts ---------------------------------------------------------------------------------------------------

    def distil(self, stage: str, key: str, adaspec: AdaSpecSettings | None) -> StageResult:
        """A draft, from the initial one: by DistillSpec (``adaspec`` is None), by AdaSPEC, or for comparison."""
        started = time.monotonic()
        settings, seed = self.settings.reference, self.seed_of(adaspec)
        training, plan = self.plan(adaspec)
        objective = (
            Objective(divergence_of(settings)) if adaspec is None else objective_of(adaspec, settings, plan.steps)
        )
        reference = None if adaspec is None else self.run.record("reference")
        model = load_model(self.run.path("initial"), dtype="float32").train()
        check_head(model, LMHead(model))
        parameters = model.num_parameters()
        adapted = add_adapter(model, settings.lora, self.settings.seed) if settings.lora is not None else None
        share = settings.responses.from_draft if adaspec is None or adaspec.on_policy is None else adaspec.on_policy
        data = prepare(self, objective, share)
        train = data.train
        self._say_size(model, parameters)
        module = DistillModule(
            model,
            training,
            plan.steps,
            target=data.target,
            objective=objective,
            fused=self.settings.trainer.fused_loss,
            seed=seed,
            log_every=self.settings.trainer.log_every,
        )
        schedule = self.schedule(train, plan, training, seed * 10 + 2)
        own = data.on_policy(self, model, schedule, plan.steps, seed)
        prepared = time.monotonic() - started
        history, seconds = self.fit(stage, key, module, train, data.validation, schedule, plan, training, own)
        chosen = None if module.selected is None else int(module.selected.sum())
        before = account_of(reference) if reference is not None and objective.selection is not None else None
        tokens = label_tokens(plan, train, schedule) if own is None else own.label_tokens
        used = account(plan, tokens, chosen, before)
        record = StageRecord(
            key,
            parameters=parameters,
            seconds=prepared + seconds,
            account=used.row(),
            history=history,
            selected=self.most_selected(module.selected),
        )
        model = module.model if adapted is None else adapted.merge_and_unload()
        return StageResult(record, ready_to_save(model, self.corpus.tokenizer), self.corpus.tokenizer)

    def plan(self, adaspec: AdaSpecSettings | None) -> tuple[TrainingSettings, Plan]:
        """How a draft is trained, and how long: as the reference is (``adaspec`` is None), or with what differs."""
        training = self.settings.reference.training
        if adaspec is None:
            return training, plan_reference(training, len(self.examples))
        if adaspec.epochs is not None:
            training = replace(training, steps=None, epochs=adaspec.epochs)
        plan = plan_draft(plan_reference(training, len(self.examples)), adaspec.k, adaspec.iso)
        return replace(training, lr=adaspec.lr or training.lr), plan

    # -- helpers --------------------------------------------------------------------------------------------------

    def fit(
        self,
        stage: str,
        key: str,
        module: TrainingModule,
        train: TokenDataset,
        validation: TokenDataset,
        schedule: Schedule,
        plan: Plan,
        training: TrainingSettings,
        own: OnPolicy | None = None,
    ) -> tuple[list[dict[str, float]], float]:
        """Trains; returns the learning curve and the seconds it took, those before an interruption included."""
        trainer = self.settings.trainer
        segments = Segments(
            train,
            validation,
            schedule,
            plan.steps,
            trainer.validate_every,
            self.pad_id,
            all_tokens=training.prompt_loss and isinstance(module, CausalLMModule),
            texts=own,
            micros=trainer.accumulate,
            look_ahead=self._looks_ahead(module),
        )
        return fit(
            module,
            segments,
            trainer,
            self.run.checkpoints(stage, key),
            name=stage,
            logger=for_stage(self.logger, stage),
            console=self.console,
        )

    def _looks_ahead(self, module: TrainingModule) -> bool:
        """Whether a step's micro-batches are needed at once: to select among all their tokens."""
        selection = module.objective.selection if isinstance(module, DistillModule) else None
        return selection is not None and selection.scope == "global"

    def seed_of(self, draft: AdaSpecSettings | None) -> int:
        """The seed of a draft's training: of the order of examples, and of what it writes itself."""
        return self.settings.seed if draft is None or draft.seed is None else draft.seed

    def schedule(self, rows: TokenDataset, plan: Plan, training: TrainingSettings, seed: int) -> Schedule:
        """Which examples make which step."""
        return Schedule(rows.lengths, plan.batch_size, training.length_bucket, seed)

    def _target_vocab(self) -> int:
        """Rows of the target's embedding: a draft of the same size can be served without padding."""
        from transformers import AutoConfig

        return int(AutoConfig.from_pretrained(self.run.target).get_text_config().vocab_size)

    def _check_tokenizer(self, settings: ModelSettings) -> None:
        """A model that comes with a tokenizer of its own has to mean the same by every id."""
        if settings.model is not None:
            own = load_tokenizer(settings.model, trust_remote_code=settings.trust_remote_code)
            check_tokenizers(self.corpus.tokenizer, own)

    def device(self) -> str:
        """Where frozen models compute caches."""
        import torch

        wanted = self.settings.trainer.accelerator
        return "cuda" if torch.cuda.is_available() and wanted in ("auto", "gpu", "cuda") else "cpu"

    def _say_size(self, model: PreTrainedModel, parameters: int) -> None:
        self.console.print(f"  {type(model).__name__}, {parameters:,} parameters", highlight=False)

    def most_selected(self, selected: Tensor | None) -> list[tuple[str, int]]:
        """Texts of the tokens selected most, with how often."""
        if selected is None:
            return []
        counts = token_counts(selected)[:MOST_SELECTED]
        return [(self.corpus.tokenizer.decode([token]), count) for token, count in counts]
