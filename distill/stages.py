"""What each stage does: prepare a language model, or distil the target into a draft.

Both return a finished model with what is known of it; `run_pipeline` decides which stages have to run and
puts the results in their folders. What differs between draft models and feature heads is a `Distillation`, made by
`distill.run_stages` or `distill.run_stages`.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from transformers import AutoConfig, PreTrainedModel, PreTrainedTokenizerBase

from decode.models.heads import FeatureHead, save_head
from decode.models.loading import DTYPES, check_tokenizers, gguf_file, load_model, load_tokenizer
from distill import ranks
from distill.checks import Plan, account, label_tokens, plan_draft, plan_reference
from distill.config.data import decisive
from distill.config.drafts import AdaSpecSettings, ComparisonSettings
from distill.config.run import Settings
from distill.config.training import (
    InitialDraftSettings,
    ModelSettings,
    TargetSettings,
    TrainerSettings,
    TrainingSettings,
)
from distill.data.batches import DistillDataModule, Schedule, TokenDataset, keeps_apart
from distill.data.chat import IGNORE
from distill.data.context import StageContext
from distill.files import StageRecord, account_of, files_state, fingerprint, save_tokenizer
from distill.losses.objective import Objective, divergence_of, objective_of
from distill.models.layers import LayerSkip, ProgressiveStacking, cut
from distill.models.lm_head import LMHead, check_head
from distill.models.loading import count_parameters, load_or_build, ready_to_save, source_folder
from distill.models.lora import Adapter
from distill.modules import CausalLMModule, DistillModule, TrainingModule, token_counts
from distill.responses.on_policy import OnPolicy
from distill.responses.texts import answered_by_original, answered_by_target
from distill.tracking import for_stage
from distill.trainer import fit

MOST_SELECTED = 100  # entries of the list of tokens that AdaSPEC selects most


ONE_ROW = 1 << 30
"""Tokens of a row that every batch fits into."""


@dataclass
class StageResult:
    """A finished stage: a model to be saved with its tokenizer, or a folder that is linked to as it is."""

    record: StageRecord
    model: PreTrainedModel | FeatureHead | None = None
    tokenizer: PreTrainedTokenizerBase | None = None
    source: Path | None = None

    def save(self, folder: Path) -> None:
        """Writes config.json, model.safetensors and the tokenizer, or the link."""
        if self.source is not None:
            folder.symlink_to(self.source.resolve(), target_is_directory=True)
            return
        assert self.model is not None
        assert self.tokenizer is not None
        if isinstance(self.model, FeatureHead):
            folder.mkdir(parents=True)
            save_head(self.model, folder)
        else:
            self.model.save_pretrained(folder)
        save_tokenizer(self.tokenizer, folder)


@dataclass
class Distillation:
    """What differs between kinds of drafts: the module that trains one, the examples, and the trained draft."""

    module: TrainingModule  # of the training
    train: TokenDataset  # examples with the signals of frozen models
    validation: TokenDataset  # the same, for comparing checkpoints
    parameters: int  # of the draft
    trained: Callable[[], PreTrainedModel | FeatureHead]  # the draft to be saved, after the training
    # given the schedule, the texts that the draft writes itself; None: it writes none
    own_texts: Callable[[Schedule], OnPolicy | None] | None = None


Begin = Callable[[StageContext, Objective, float, TrainingSettings, int, int], Distillation]
"""Makes the `Distillation` of a draft that starts from the initial one: of its objective, the share of the examples
that it writes itself, its training, steps and seed."""


def language_model(context: StageContext, stage: str, key: str) -> StageResult:
    """The target or the initial draft: taken as it is, or trained on next tokens."""
    full, tokenizer = context.settings, context.corpus.tokenizer
    settings: ModelSettings = getattr(full, stage)
    own = stage == "target" and full.data.tokenizer is None  # the examples' tokenizer is the target's
    if settings.model is not None and not own:  # its tokenizer has to mean the same by every id
        check_tokenizers(tokenizer, load_tokenizer(settings.model, trust_remote_code=settings.trust_remote_code))
    if settings.kind == "as_is":
        assert settings.model is not None
        round_to = settings.round_to if isinstance(settings, TargetSettings) else None
        if gguf_file(settings.model) is None and round_to is None:
            record = StageRecord(key, parameters=count_parameters(settings, len(tokenizer)))
            return StageResult(record, source=source_folder(settings.model))
        model = load_model(settings.model, device="cpu", dtype=settings.dtype)
        if round_to is not None:
            model = model.to(DTYPES[round_to])
        say_size(context, model, model.num_parameters())
        record = StageRecord(key, parameters=model.num_parameters())
        return StageResult(record, ready_to_save(model, tokenizer), tokenizer)
    offset = ("target", "initial").index(stage)
    if isinstance(settings, InitialDraftSettings) and settings.kind == "cut":
        model = cut(context.load_target("float32", "cpu"), settings.layers)
    else:  # a draft with as many ids as the target's embedding can be served without padding
        vocab = len(tokenizer)
        if stage != "target":
            trust = full.target.trust_remote_code
            config = AutoConfig.from_pretrained(context.run.target, trust_remote_code=trust)
            vocab = int(config.get_text_config().vocab_size)
        model = load_or_build(settings, tokenizer, vocab, full.seed + offset)
    record = StageRecord(key, parameters=model.num_parameters())
    check_head(model.train(), LMHead(model))
    say_size(context, model, record.parameters)
    if not settings.trained:
        return StageResult(record, ready_to_save(model, tokenizer), tokenizer)
    rows, validation = TokenDataset.of(context.corpus.train), context.validation
    if isinstance(settings, TargetSettings) and settings.layerskip.own_answers:
        rows, validation = answered_by_original(context, model.to(context.device))
    elif not context.corpus.answered:
        rows, validation = answered_by_target(context)
    trainer, adapter = _trainer_of(context, settings), None
    if settings.kind == "lora":
        assert settings.model is not None
        trust = settings.trust_remote_code
        load = partial(load_model, settings.model, device=context.device, dtype="float32", trust_remote_code=trust)
        adapter = Adapter(model, settings.lora, full.seed, trainer.precision, context.device, load)
        model = adapter.model
    plan = plan_reference(settings.training, len(rows))
    module = CausalLMModule(model, settings.training, plan.steps, seed=full.seed)
    if isinstance(settings, TargetSettings) and settings.stacking is not None:  # from scratch
        module.stacking = ProgressiveStacking(model, settings.stacking, plan.steps)
    if isinstance(settings, TargetSettings) and settings.layerskip.enabled:
        module.layerskip = LayerSkip(model, settings.layerskip, plan.steps, scratch=settings.kind == "scratch")
    schedule = Schedule(rows.lengths, plan.batch_size, settings.training.length_bucket, full.seed * 10 + offset)
    data = Distillation(module, rows, validation, record.parameters, lambda: model)
    record.history, record.seconds = _fit(context, stage, key, data, schedule, plan, settings.training, trainer)
    if module.layerskip is not None:
        module.layerskip.remove()
    model = module.model if adapter is None else adapter.merged()
    return StageResult(record, ready_to_save(model, tokenizer), tokenizer)


def _trainer_of(context: StageContext, settings: ModelSettings) -> TrainerSettings:
    """The trainer of a language model, with the model's own precision.

    In bfloat16 on a CPU the gradient of PyTorch's fused attention takes several times as long as of the plain one.
    """
    trainer = context.settings.trainer
    precision = settings.precision or trainer.precision
    slow = trainer.attention == "auto" and "bf16" in precision and context.device.type == "cpu"
    return replace(trainer, precision=precision, attention="eager" if slow else trainer.attention)


def distil(
    context: StageContext, stage: str, key: str, begin: Begin, adaspec: AdaSpecSettings | None = None
) -> StageResult:
    """A draft, from the initial one: by DistillSpec or EAGLE (``adaspec`` is None), by AdaSPEC, or for comparison."""
    started = time.monotonic()
    training, plan = plan_of(context, adaspec)
    seed = context.settings.seed if adaspec is None or adaspec.seed is None else adaspec.seed
    settings = context.settings.reference
    objective = Objective(divergence_of(settings)) if adaspec is None else objective_of(adaspec, settings, plan.steps)
    share = settings.responses.from_draft if adaspec is None or adaspec.on_policy is None else adaspec.on_policy
    draft = begin(context, objective, share, training, plan.steps, seed)
    schedule = Schedule(draft.train.lengths, plan.batch_size, training.length_bucket, seed * 10 + 2)
    own = draft.own_texts(schedule) if draft.own_texts is not None else None
    prepared = time.monotonic() - started
    history, seconds = _fit(context, stage, key, draft, schedule, plan, training, context.settings.trainer, own)
    plan = replace(plan, steps=int(history[-1]["step"]))  # a callback may have ended it early
    selected = draft.module.selected
    reference = context.run.record("reference") if selected is not None else None
    used = account(
        plan,
        label_tokens(plan, draft.train, schedule) if own is None else own.label_tokens,
        None if selected is None else int(selected.sum()),
        account_of(reference) if reference is not None else None,
    )
    tokenizer = context.corpus.tokenizer
    most = [] if selected is None else token_counts(selected)[:MOST_SELECTED]
    labels = draft.train.labels[draft.train.labels != IGNORE]
    record = StageRecord(
        key,
        parameters=draft.parameters,
        seconds=prepared + seconds,
        account=vars(used),
        history=history,
        selected=[(tokenizer.decode([token]), count) for token, count in most],
        label_shares=[float((labels == token).mean()) for token, _ in most],
    )
    return StageResult(record, draft.trained(), tokenizer)


def plan_of(context: StageContext, adaspec: AdaSpecSettings | None) -> tuple[TrainingSettings, Plan]:
    """How a draft is trained, and how long: as the reference is (``adaspec`` is None), or with what differs."""
    training, examples = context.settings.reference.training, len(context.examples)
    if adaspec is None:
        return training, plan_reference(training, examples)
    if adaspec.epochs is not None:
        training = replace(training, steps=None, epochs=adaspec.epochs)
    plan = plan_draft(plan_reference(training, examples), adaspec.k, adaspec.iso)
    return replace(training, lr=adaspec.lr or training.lr), plan


def _fit(
    context: StageContext,
    stage: str,
    key: str,
    data: Distillation,
    schedule: Schedule,
    plan: Plan,
    training: TrainingSettings,
    trainer: TrainerSettings,
    own: OnPolicy | None = None,
) -> tuple[list[dict[str, float]], float]:
    """Trains; returns the learning curve and the seconds it took, those before an interruption included."""
    module = data.module
    selection = module.objective.selection if isinstance(module, DistillModule) else None
    batches = DistillDataModule(
        data.train.all_labelled() if training.prompt_loss and isinstance(module, CausalLMModule) else data.train,
        data.validation,
        schedule,
        plan.steps,
        context.pad_id,
        texts=own,
        look_ahead=selection is not None and selection.scope == "global",  # all tokens of a step are needed at once
        row_length=_row_length(context, module),
        workers=context.settings.data.loader_workers,
    )
    history, seconds = fit(
        module,
        batches,
        trainer,
        context.run.checkpoints(stage, key),
        name=stage,
        logger=for_stage(context.logger, stage),
        console=context.console,
    )
    seen = batches.seen
    if seen.batches == plan.steps * trainer.accumulate:  # not continued from a checkpoint
        context.seen[stage] = seen
    context.console.print(
        f"  {seen.tokens:,} tokens read, {seen.speed:,.0f} a second, {seen.padding:.1%} padding", highlight=False
    )
    return history, seconds


def _row_length(context: StageContext, module: TrainingModule) -> int | None:
    """Tokens of the rows that examples are packed into; None, with the reason, where they cannot be."""
    wanted = context.settings.trainer.packing
    if wanted is None:
        return None
    models = [module.model, getattr(getattr(module, "target", None), "model", None)]
    if isinstance(module.model, FeatureHead):
        reason = "feature heads read one text a row"
    elif isinstance(module, CausalLMModule) and module.layerskip is not None:
        reason = "LayerSkip drops layers of whole rows"
    elif not all(model is None or keeps_apart(model) for model in models):
        reason = f"the attention of {type(module.model).__name__} does not keep the examples of a row apart"
    else:
        return ONE_ROW if context.settings.trainer.attention.startswith("flash") else wanted
    context.console.print(f"  not packed: {reason}; batches are of similar lengths instead", highlight=False)
    return None


def say_size(context: StageContext, model: PreTrainedModel | FeatureHead, parameters: int) -> None:
    """Prints a model's class and size."""
    context.console.print(f"  {type(model).__name__}, {parameters:,} parameters", highlight=False)


VERSION = 1  # raised when a change of the code changes what a stage produces: folders made before are then made again

Key = tuple[str, dict[str, Any]]


def stage_fingerprints(settings: Settings) -> dict[str, Key]:
    """Fingerprint of every stage, in order, with what it is made from."""
    trainer = settings.trainer
    common = {
        "version": VERSION,
        "precision": trainer.precision,
        "gradient_clip": trainer.gradient_clip,
        "validate_every": trainer.validate_every,
        "validation_examples": trainer.validation_examples,
        **{key: value for key in ("extra", "callbacks") if (value := getattr(trainer, key))},
    }
    data = data_key(settings)
    keys: dict[str, Key] = {}

    def add(stage: str, **parts: Any) -> str:
        keys[stage] = fingerprint(parts), parts
        return keys[stage][0]

    responses, made_from = settings.reference.responses, common | data
    if settings.target.layerskip.own_answers:
        made_from["answers"] = responses.written()
    if settings.target.kind == "as_is":  # whatever it will be used for
        tokenizer = {"tokenizer": files_state(_paths(settings.data.tokenizer)), "chat": settings.data.chat_template}
        made_from = {"version": VERSION, **tokenizer}
    target = add("target", **made_from, model=_model_key(settings.target))
    if settings.eagle.enabled:
        measured = ("tree_widths", "tree_nodes")  # these are of the evaluation
        head = {name: value for name, value in decisive(settings.eagle).items() if name not in measured}
        texts: dict[str, Any] = {"examples": settings.reference.examples}
        if settings.eagle.draft_vocab is not None:  # the most frequent tokens of the texts
            texts |= {"responses": responses.key(), "prompt_loss": settings.reference.training.prompt_loss}
        initial = add("initial", **common, **data, eagle=head, **texts, target=target)
    else:
        texts = {}
        if settings.data.from_target and settings.initial.trained:  # the data has no responses: it learns the target's
            texts = {"examples": settings.reference.examples, "responses": responses.written()}
            texts["prompt_loss"] = settings.reference.training.prompt_loss
            texts["target_quantization"] = settings.target.quantization
        initial = add("initial", **common, **data, model=_model_key(settings.initial), **texts, target=target)
    distillation = decisive(settings.reference) | {"responses": responses.key()}
    if settings.target.quantization:
        distillation["target_quantization"] = settings.target.quantization
    del distillation["signal_limit_gb"]  # whether it fits, not what it is
    if settings.target.kind != "as_is":  # whose dtype is in its own fingerprint
        distillation["target_dtype"] = settings.target.dtype
    reference = add("reference", **common, **data, reference=distillation, target=target, initial=initial)
    add("draft", **common, **_draft_key(settings.draft, settings), reference=reference)
    for other in settings.comparisons:
        add(other.name, **common, **_draft_key(other, settings), reference=reference)
    return keys


def data_key(settings: Settings) -> dict[str, Any]:
    """What the training examples come from: settings, seed, and the files."""
    data = settings.data.key()
    del data["test_examples"]  # no stage sees a test example, but without a file they are split off the others
    data["test_file"] = data["test_file"] is not None
    if data["chat_template"] is None:  # stages have been told apart without it, the tokenised data with it
        del data["chat_template"]
    paths = [data[name] for name in ("source", "train_file", "validation_file", "tokenizer") if data[name]]
    if settings.data.from_target:  # the target's files are in its own key
        paths = [path for path in (settings.data.prompts.file, settings.data.tokenizer) if path]
    else:
        del data["prompts"]
    return {"data": data, "seed": settings.seed, "files": files_state(paths)}


def measurement_fingerprint(settings: Settings) -> str:
    """Of everything that evaluation, export and report depend on."""
    stages = [key for key, _ in stage_fingerprints(settings).values()]
    test = settings.data.test_examples, settings.data.test_file, files_state(_paths(settings.data.test_file))
    sections = [decisive(section) for section in (settings.evaluation, settings.export, settings.eagle)]
    del sections[1]["hub"]  # where it goes, not what it is
    return fingerprint(VERSION, stages, *test, *sections, settings.trainer.accelerator)


def _paths(*paths: str | None) -> list[str]:
    return [path for path in paths if path]


def _draft_key(draft: AdaSpecSettings, settings: Settings) -> dict[str, Any]:
    """What a draft is made from beside the reference; how it writes texts of its own, if it alone does."""
    key: dict[str, Any] = {"adaspec": draft.key()}
    if draft.on_policy and not settings.reference.responses.from_draft:
        key["responses"] = decisive(settings.reference.responses)
    trainer, compared = settings.trainer, isinstance(draft, ComparisonSettings) and draft.method == "distillspec"
    parts = [trainer.accumulate, ranks.process_count(trainer.accelerator, trainer.devices, trainer.num_nodes)]
    selects = draft.scope == "microbatch" and draft.k < 1
    if selects and not compared and parts != [1, 1]:
        key["batches_of_a_step"] = parts  # each selects its own tokens
    return key


def _model_key(settings: ModelSettings) -> dict[str, Any]:
    """What a language model is made from, without the settings that its kind does not use."""
    unused = {
        "scratch": ("model", "lora", "dtype"),
        "finetune": ("architecture", "lora", "dtype"),
        "lora": ("architecture", "dtype"),
        "as_is": ("architecture", "lora", "training"),
        "cut": ("model", "architecture", "lora", "dtype"),
    }
    key = {name: value for name, value in decisive(settings).items() if name not in unused[settings.kind]}
    if settings.kind == "as_is" or not key.get("layerskip", {}).get("enabled"):
        key.pop("layerskip", None)
    if settings.kind != "cut":
        key.pop("layers", None)
    for name in ("devices", "sharded", "quantization"):  # where, and how it is read, not what
        key.pop(name, None)
    for name in ("precision", "stacking") if not settings.trained else ():
        key.pop(name, None)
    package = key.pop("package", None)
    if package is not None:  # wherever it came from
        return key | {"model": None, "files": {"sha256": package["sha256"]}}
    return key | {"files": files_state([settings.model] if settings.model else [])}
