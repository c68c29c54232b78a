"""What each stage is made from, as a fingerprint that is computed in moments: no data is parsed, no model loaded."""

from typing import Any

from distill.config.drafts import AdaSpecSettings, ComparisonSettings
from distill.config.language_models import ModelSettings
from distill.config.later_settings import decisive
from distill.config.run_settings import Settings
from distill.core import ranks
from distill.core.file_fingerprints import files_state, fingerprint

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
    selects = draft.scope == "microbatch" and (draft.k < 1 or draft.k_start is not None)
    weighs = draft.weigh_by in ("tested", "rounds")
    if ((selects and not compared) or weighs) and parts != [1, 1]:
        key["batches_of_a_step"] = parts  # each selects its own tokens, and its weights have a mean of 1
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
