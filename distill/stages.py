"""What a stage is: its inputs make a fingerprint, its result a folder, and a record in ``work/`` ties both together.

A run has the stages target, initial (the student before distillation), and one for each draft. A stage whose folder was
made from the same inputs, and is as it was written, is not made again. Stages of all runs under an output folder are
listed in ``cache/`` there by their fingerprints, from where another run takes them over.
"""

import os
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from decode.errors import read_json
from distill import ranks
from distill.config.drafts import START
from distill.config.run import Settings
from distill.config.training import ModelSettings
from distill.files import checksum, files_state, fingerprint, remove, write_json

VERSION = 2
"""Raised when a change of the code changes what a stage produces."""


ACCOUNT = ("optimiser_steps", "examples", "teacher_tokens", "selected_tokens", "cumulative_teacher_tokens")
"""What a draft's training used: steps; examples and label tokens, counted every time they are seen; tokens that entered
the loss; label tokens with those of the reference, where the training needs one."""


@dataclass
class StageRecord:
    """What is known of a finished stage."""

    fingerprint: str  # of everything that the folder was made from
    made_from: dict[str, Any] = field(default_factory=dict)  # the same, readable
    parameters: int = 0
    seconds: float = 0.0  # without interruptions
    account: dict[str, int] = field(default_factory=lambda: dict.fromkeys(ACCOUNT, 0))
    history: list[dict[str, float]] = field(default_factory=list)  # ``{"step", "loss", ...}`` of every validation
    files: dict[str, list[int]] = field(default_factory=dict)  # size and CRC-32 of each; 0 of a linked folder's


@dataclass
class RunDir:
    """The folder ``<output_dir>/<name>`` of a run, with a folder for every stage: target, initial, and each draft.

    Attributes:
        folder: The folder.
        trained: Names of the drafts, in order.
        start: Name of the student before distillation in reports.
    """

    folder: Path
    trained: list[str] = field(default_factory=list)
    start: str = START[0]

    def __post_init__(self) -> None:
        self.work = self.folder / "work"  # checkpoints, cached signals, and the records of the stages
        self.target, self.export = self.folder / "target", self.folder / "export"
        self.drafts = {self.start: self.path("initial"), **{name: self.path(name) for name in self.trained}}

    def path(self, stage: str) -> Path:
        """Return the folder of a stage."""
        return self.folder / stage

    def draft_record(self, name: str) -> StageRecord:
        """Return the record of a draft, by its name in reports.

        Raises:
            FileNotFoundError: The draft is not finished.
        """
        found = self.record("initial" if name == self.start else name)
        if found is None:
            raise FileNotFoundError(f"{self.drafts[name]} is not finished")
        return found

    def chosen(self, choose: str) -> str:
        """Return the name of the draft that is exported: see `distill.config.run.ExportSettings.choose`."""
        return max(self.trained, key=lambda name: self.best(name)[1]) if choose == "best" else choose

    def best(self, name: str) -> tuple[dict[str, float], float]:
        """Return a draft's best validation, whose weights were kept, and its value: α, or a head's accepted length."""
        by = "alpha" if self.start == START[0] else "accepted_length"
        found = [(at, at.get(by, at["alpha"])) for at in self.draft_record(name).history if "alpha" in at]
        return max(found, key=lambda one: one[1], default=({}, 0.0))

    def record(self, stage: str, key: str | None = None) -> StageRecord | None:
        """Return the record of a finished stage whose folder is as it was written; None otherwise.

        Args:
            stage: Name of the stage.
            key: Fingerprint that its inputs have to have. None: any.
        """
        try:
            found = StageRecord(**read_json(self.work / f"{stage}.json"))
        except TypeError:
            return None
        folder = self.path(stage)
        if key not in (None, found.fingerprint) or not found.files or set(found.files) != set(_files(folder)):
            return None
        for name, (size, crc) in found.files.items():
            path = folder / name
            if path.stat().st_size != size or (crc and checksum(path) != crc):
                return None
        return found

    def put(self, stage: str, record: StageRecord, make: Callable[[Path], None]) -> None:
        """Have ``make`` fill a new folder, then put it in the stage's place together with its record.

        The first process of a distributed run does so, the others wait.
        """
        if not ranks.is_first():
            ranks.wait_for(lambda: self.record(stage, record.fingerprint), f"the stage {stage}")
            return
        path, temporary, note = self.path(stage), self.work / f".tmp-{stage}", self.work / f"{stage}.json"
        self.work.mkdir(parents=True, exist_ok=True)
        remove(temporary)
        try:
            make(temporary)
            record.files = {
                name: [(temporary / name).stat().st_size, 0 if temporary.is_symlink() else checksum(temporary / name)]
                for name in _files(temporary)
            }
            note.unlink(missing_ok=True)
            remove(path)
            temporary.rename(path)
            write_json(note, vars(record))
            remove(self.work / f"checkpoints-{stage}")
        finally:
            remove(temporary)
        entry = self.folder.parent / "cache" / record.fingerprint
        entry.parent.mkdir(exist_ok=True)
        remove(entry)
        entry.symlink_to(Path("..", self.folder.name, stage))

    def take_over(self, stage: str, key: str) -> Path | None:
        """Take a stage that another run under the same output folder made from the same inputs; return its folder.

        Files are linked where the file system allows it: they are never changed in place.
        """
        source = (self.folder.parent / "cache" / key).resolve()
        donor = RunDir(source.parent)
        found = donor.record(source.name, key) if donor.folder != self.folder.resolve() else None
        if found is None:
            return None

        def link(path: Path) -> None:
            try:
                shutil.copytree(source, path, copy_function=os.link)
            except OSError:  # another file system, or one without links
                remove(path)
                shutil.copytree(source, path)

        self.put(stage, found, link)
        return source

    def checkpoints(self, stage: str, key: str) -> Path:
        """Return the folder for a stage's checkpoints, emptied of those that were made under another fingerprint."""
        folder = self.work / f"checkpoints-{stage}"
        note = folder / "fingerprint.json"
        if not ranks.is_first():
            ranks.wait_for(lambda: read_json(note).get("stage") == key or None, f"the checkpoints' folder of {stage}")
        elif read_json(note).get("stage") != key:
            remove(folder)
            folder.mkdir(parents=True)
            write_json(note, {"stage": key})
        return folder


def _files(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def run_of(settings: Settings) -> RunDir:
    """Return the folder of the run that the settings describe."""
    names = [draft.name for draft in settings.drafts]
    start = 2 if settings.student.kind == "mtp" else int(settings.student.is_head)
    return RunDir(Path(settings.output_dir) / settings.name, names, START[start])


# -- fingerprints -----------------------------------------------------------------------------------------------------

Key = tuple[str, dict[str, Any]]
UNUSED = ("log_every_n_steps", "profiler")
"""Arguments of Lightning's trainer that change no weight."""


def stage_fingerprints(settings: Settings) -> dict[str, Key]:
    """Return the fingerprint of every stage, in order, with what it is made from."""
    trainer, teacher, student = settings.trainer, settings.teacher, settings.student
    responses = teacher.responses
    names = ("precision", "tf32", "validate_every", "validation_examples", "callbacks")
    common = {"version": VERSION, **{name: getattr(trainer, name) for name in names}}
    common["extra"] = {name: value for name, value in trainer.extra.items() if name not in UNUSED}
    data, keys = data_key(settings), dict[str, Key]()
    frozen = {"target_dtype": settings.target.dtype, "target_quantization": settings.target.quantization}
    texts = {"examples": teacher.examples, "responses": responses.key(), **frozen}

    def add(stage: str, **parts: Any) -> str:
        keys[stage] = fingerprint(parts), parts
        return keys[stage][0]

    if settings.target.kind == "as_is":
        made_from: dict[str, Any] = {"version": VERSION, "chat": settings.data.template()}
        made_from["tokenizer"] = files_state([settings.data.tokenizer])
    else:
        answers = responses.written() | frozen if settings.target.layerskip.own_answers else None
        made_from = common | data | {"answers": answers}
    target = add("target", **made_from, model=_model_key(settings.target))
    if student.is_head:
        named = ("kind", "draft_vocab", "block") if student.is_block else ("kind", "draft_vocab", "unroll", "noise")
        head = {name: value for name, value in asdict(student).items() if name in named}
        of_texts = texts if student.draft_vocab is not None else {}  # the vocabulary is that of the texts
        initial = add("initial", version=VERSION, **data, head=head, **of_texts, target=target)
    else:
        of_texts = texts if settings.data.from_target and student.trained else {}  # it is trained on these answers
        initial = add("initial", **common, **data, model=_model_key(student), **of_texts, target=target)
    signal = {name: getattr(teacher, name) for name in ("signal", "signal_autocast", "signal_k")}
    for draft in settings.drafts:
        training = draft.training_of(settings.training)
        made_from = common | data | texts | signal | {"draft": draft.key(), "training": asdict(training)}
        if draft.on_policy:
            made_from["own_texts"] = responses.written() | {"refresh_every": responses.refresh_every}
        if draft.selects:
            assert draft.reference is not None
            made_from["reference"] = keys[draft.reference][0]
            if draft.scope == "microbatch":  # each part selects its own tokens
                processes = ranks.process_count(trainer)
                made_from["parts_of_a_step"] = [trainer.accumulate, processes]
        add(draft.name, **made_from, target=target, initial=initial)
    return keys


def data_key(settings: Settings) -> dict[str, Any]:
    """Return what the training examples come from: settings, seed, and the files."""
    data = settings.data.key()
    del data["test_examples"]  # no stage sees a test example, but without a file they are split off the others
    data["test_file"] = data["test_file"] is not None
    paths = [data[name] for name in ("source", "train_file", "validation_file", "tokenizer")]
    if settings.data.from_target:  # the target's files are in its own fingerprint
        paths = [settings.data.prompts.file, settings.data.tokenizer]
    else:
        del data["prompts"]
    return {"data": data, "seed": settings.seed, "files": files_state(paths)}


def measurement_fingerprint(settings: Settings) -> str:
    """Return the fingerprint of everything that evaluation, export and report depend on."""
    stages = [key for key, _ in stage_fingerprints(settings).values()]
    test = settings.data.test_examples, settings.data.test_file, files_state([settings.data.test_file])
    export = asdict(settings.export) | {"hub": None}  # where it is uploaded changes nothing
    return fingerprint(VERSION, stages, *test, asdict(settings.evaluation), export, settings.trainer.accelerator)


def _model_key(settings: ModelSettings) -> dict[str, Any]:
    """Return what a language model is made from, without the settings that its kind does not use."""
    used = {
        "scratch": ("architecture", "training", "layerskip", "stacking"),
        "finetune": ("training", "layerskip"),
        "lora": ("lora", "training", "layerskip"),
        "as_is": ("dtype", "round_to"),
        "cut": ("layers", "training"),
    }
    values = asdict(settings)
    key = {name: values[name] for name in used[settings.kind] if name in values}
    if "layerskip" in key and not key["layerskip"]["enabled"]:
        key["layerskip"] = None
    if settings.package is not None:
        return key | {"kind": settings.kind, "sha256": settings.package.sha256}
    return key | {"kind": settings.kind, "model": settings.model, "files": files_state([settings.model])}
