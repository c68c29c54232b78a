"""What every stage of a run is made from: one table of settings, and the fingerprints of stages that follow from it.

A stage is made again where a setting that it reads, a file that such a setting names, or a stage before it has changed.
"""

from collections.abc import Callable, Iterable
from dataclasses import asdict, is_dataclass
from itertools import chain
from operator import attrgetter
from typing import Any

from distill import ranks
from distill.config import Settings
from distill.config.base import Values
from distill.data.sources import data_files, source_files
from distill.files import files_state, fingerprint
from distill.losses.divergences import Divergence

VERSION = 7
"""Raised when a change of the code changes what a stage produces."""
MEASURES = 1
"""Raised when a change of the code changes what a report holds."""

READ: dict[str, tuple[str, ...]] = {
    "chat": ("data.chat_template", "data.tokenizer", "data.chat", "data.system", "data.template_args"),
    "seed": ("seed",),
    "data": (
        "seed", "data.source", "data.files", "data.prompts", "data.prompt_template", "data.response_template",
        "data.chat_template", "data.chat", "data.system", "data.template_args", "data.train_examples",
        "data.validation_examples", "data.test_examples", "data.max_length", "data.overlong", "data.tokenizer",
    ),
    "fit": ("trainer.precision", "trainer.attention", "trainer.callbacks", "trainer.extra"),
    "target": (
        "target.kind", "target.model", "target.architecture", "target.training", "target.lora", "target.layerskip",
    ),
    "rounding": ("target.dtype", "target.round_to"),
    "student": (
        "student.kind", "student.model", "student.architecture", "student.training", "student.lora", "student.layers",
        "student.dtype", "student.unroll", "student.draft_vocab",
    ),
    "head": (
        "student.kind", "student.model", "student.draft_vocab", "student.unroll", "student.norms", "student.block",
    ),
    "frozen": ("target.dtype", "teacher.engine.arguments"),
    "answers": ("teacher.examples", "teacher.responses.source"),
    "written": (
        "teacher.responses.temperature", "teacher.responses.top_p", "teacher.responses.max_new_tokens",
        "teacher.responses.batch_size",
    ),
    "signal": ("teacher.signal", "teacher.signal_k", "teacher.engine.keep"),
    "draft": (
        "training", "drafts.NAME.training", "drafts.NAME.k", "drafts.NAME.divergence", "drafts.NAME.kl_first",
        "drafts.NAME.on_policy", "drafts.NAME.accepted_only", "drafts.NAME.seeds",
    ),
    "own texts": ("teacher.responses.refresh_every",),
    "selection": ("drafts.NAME.reference", "trainer.accumulate", "trainer.devices", "trainer.num_nodes"),
    "measurement": ("evaluation", "export", "threads", "trainer.accelerator"),
}  # fmt: skip
"""The settings that are read together. ``NAME`` is the draft; a section stands for all that is in it."""
UNREAD = (
    "name", "output_dir", "tracker", "upload", "overwrite", "data.loader_workers", "target.trust_remote_code",
    "student.trust_remote_code", "teacher.engine.in_flight", "teacher.engine.urls", "trainer.strategy",
    "trainer.gradient_checkpointing", "trainer.validate_every", "trainer.validation_examples",
)  # fmt: skip
"""Settings that change no result, or by no more than rounding; and by how many validations and examples a checkpoint
was chosen, for which what is finished is not made again."""
PLANNED = ("drafts.NAME.kl_first", "drafts.NAME.on_policy", "target.layerskip")
"""Settings with which steps depend on how many there will be, as they do where the learning rate falls."""
OBSERVING = ("LearningRateMonitor", "DeviceStatsMonitor", "ThroughputMonitor", "ModelSummary", "RichModelSummary")
"""Callbacks that change no weight, as do all progress bars."""
SHOWING = (
    "log_every_n_steps", "profiler", "enable_progress_bar", "enable_model_summary", "default_root_dir",
    "detect_anomaly",
)  # fmt: skip
"""Arguments of Lightning's trainer that change no weight."""


def _kinds(model: str, *kinds: str) -> Callable[[Settings], bool]:
    return lambda settings: getattr(settings, model).kind in kinds


def _samples(settings: Settings) -> bool:
    """Whether the number of test examples decides which rows are left to train on."""
    own = "train" in settings.data.files or settings.data.source == "arithmetic" or source_files(settings.data)
    return settings.data.from_target or not own


WHEN: dict[str, Callable[[Settings], object]] = {
    "data.prompts": lambda settings: settings.data.from_target,
    "data.test_examples": _samples,
    **{f"{model}.architecture": _kinds(model, "scratch") for model in ("target", "student")},
    **{f"{model}.lora": _kinds(model, "lora") for model in ("target", "student")},
    **{f"{model}.training": _kinds(model, "scratch", "finetune", "lora", "cut") for model in ("target", "student")},
    "target.layerskip": lambda settings: settings.target.layerskip.enabled,
    "student.dtype": _kinds("student", "as_is"),
    "student.layers": _kinds("student", "cut"),
    "student.norms": _kinds("student", "eagle3"),
    "student.unroll": lambda settings: "unroll" in settings.student.draft.settings and settings.student.steps > 1,
    "student.block": lambda settings: "block" in settings.student.draft.settings,
    "teacher.signal_k": lambda settings: settings.teacher.kept == "topk",
    "teacher.engine.keep": lambda settings: settings.teacher.in_engine,
}
"""The settings that are read under a condition only, as far as it does not follow from the stage."""


def parts_of(settings: Settings, stage: str) -> tuple[set[str], set[str]]:
    """Return the keys of `READ` that a stage reads, and the stages before it whose results it reads."""
    target, student, teacher = settings.target, settings.student, settings.teacher
    answers = {"answers", "frozen"} | ({"written"} if teacher.responses.from_target else set())
    if stage == "target":
        if not target.trained:
            return {"target", "rounding", "chat"}, set()
        itself = target.layerskip.enabled and target.kind != "scratch" and teacher.responses.from_target
        return {"target", "fit", "data"} | ({"written", "frozen"} if itself else set()), set()
    if stage == "initial":
        head = student.draft.head
        counts = student.draft_vocab is not None and not (head and student.model)  # the labels that are most frequent
        counted = {"data", *answers} if counts else set()
        if head:
            return {"head", "chat", "seed"} | counted, {"target"}
        if not student.trained:
            return {"student", "chat"} | counted, set() if student.kind == "as_is" and not counts else {"target"}
        return {"student", "fit", "data"} | counted | (answers if settings.data.from_target else set()), {"target"}
    draft, before = settings.drafts[stage], {"target", "initial"}
    parts = {"draft", "fit", "data", "signal", *answers} | ({"written", "own texts"} if draft.on_policy else set())
    if draft.selects and draft.reference is not None:
        return parts | {"selection"}, before | {draft.reference}
    return parts, before


def inputs(settings: Settings, parts: Iterable[str], stage: str = "") -> Values:
    """Return the values of what these keys of `READ` stand for, and the state of the files that they name."""
    names = dict.fromkeys(chain(*(READ[part] for part in sorted(parts))))
    read = (name for name in names if name not in WHEN or WHEN[name](settings))
    return {name: _value(settings, name, stage) for name in read}


def stage_fingerprints(settings: Settings, going_on: str = "") -> dict[str, str]:
    """Return the fingerprint of every stage, in order.

    Of the stage ``going_on`` it is that of its checkpoints: whatever the number of steps, where none depends on it.
    """
    keys: dict[str, str] = {}
    for stage in ("target", "initial", *settings.drafts):
        parts, before = parts_of(settings, stage)
        read = inputs(settings, parts, stage)
        if stage == going_on:
            read["trainer.accumulate"] = settings.trainer.accumulate  # batches are counted in these parts
            for value in () if any(map(read.get, PLANNED)) else read.values():
                if isinstance(value, dict) and value.get("schedule") == "constant":
                    value |= {"steps": None, "epochs": None}
        stages = [keys[name] for name in keys if name in before]  # a draft's name is no input
        keys[stage] = fingerprint(VERSION, read, stages)
    return keys


def measurement_fingerprint(settings: Settings) -> str:
    """Return the fingerprint of everything that evaluation, export and report depend on."""
    names = list(stage_fingerprints(settings).values())
    return fingerprint(VERSION, MEASURES, names, settings.data.test_examples, inputs(settings, ["measurement"]))


def _value(settings: Settings, name: str, stage: str) -> Any:
    """Return what a fingerprint holds of a setting."""
    trainer, data, draft = settings.trainer, settings.data, settings.drafts.get(stage)
    of_draft = name.startswith("drafts.")
    value: Any = getattr(draft, name.rpartition(".")[2]) if of_draft else attrgetter(name)(settings)
    match name:
        case "training":
            return {} if draft is None else asdict(draft.training_of(settings.training))
        case "drafts.NAME.training" | "drafts.NAME.reference":
            return None  # in the section training; and its stage is before this one
        case "drafts.NAME.k":
            return value if draft is not None and draft.selects else None
        case "drafts.NAME.divergence":
            return Divergence(value).key
        case "trainer.callbacks":
            kinds = [str(each.get("class_path", "")).rpartition(".")[2] for each in value]
            return [each for each, kind in zip(value, kinds) if not (kind in OBSERVING or kind.endswith("ProgressBar"))]
        case "trainer.extra":
            return {key: each for key, each in value.items() if key not in SHOWING}
        case "trainer.devices" | "trainer.num_nodes":
            return ranks.process_count(trainer)
        case "teacher.engine.arguments":
            return settings.teacher.arguments
        case "data.chat_template":
            return data.template()
        case "data.source":
            return value, files_state(source_files(settings.data))
        case "data.files":
            return value, files_state(data_files(settings.data))
        case "data.prompts":
            return asdict(value), files_state([value.file])
        case "data.tokenizer" | "target.model" | "student.model":
            return files_state([value]) or value
    return asdict(value) if is_dataclass(value) and not isinstance(value, type) else value
