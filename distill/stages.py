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


@dataclass(frozen=True)
class Account:
    """What a draft's training used."""

    optimiser_steps: int = 0
    examples: int = 0  # counted every time they are seen
    teacher_tokens: int = 0  # label tokens whose target distribution was used, counted every time
    selected_tokens: int = 0  # label tokens that entered the loss
    cumulative_teacher_tokens: int = 0  # with those of the reference, where the training needs one


@dataclass
class StageRecord:
    """What is known of a finished stage."""

    fingerprint: str  # of everything that the folder was made from
    made_from: dict[str, Any] = field(default_factory=dict)  # the same, readable
    parameters: int = 0
    seconds: float = 0.0  # without interruptions
    account: dict[str, int] = field(default_factory=dict)  # fields of `Account`, of a distillation
    history: list[dict[str, float]] = field(default_factory=list)  # ``{"step", "loss", ...}`` of every validation
    selected: list[tuple[str, int]] = field(default_factory=list)  # the tokens selected most: text, times
    label_shares: list[float] = field(default_factory=list)  # share of each of them in all label tokens
    files: dict[str, list[int]] = field(default_factory=dict)  # size and CRC-32 of each; 0 of a linked folder's


def account_of(record: StageRecord) -> Account:
    """Return the account of a distillation; zeros for a draft that was not distilled."""
    return Account(**record.account)


@dataclass
class RunDir:
    """The folder ``<output_dir>/<name>`` of a run, with a folder for every stage: target, initial, and each draft."""

    folder: Path
    trained: list[str] = field(default_factory=list)  # names of the drafts, in order
    start: str = START[0]  # how reports name the student before distillation

    @property
    def work(self) -> Path:
        """Checkpoints, cached signals, and the records of the stages."""
        return self.folder / "work"

    @property
    def target(self) -> Path:
        """The target's folder."""
        return self.folder / "target"

    @property
    def export(self) -> Path:
        """The chosen draft as exported for other engines."""
        return self.folder / "export"

    def path(self, stage: str) -> Path:
        """Folder of a stage."""
        return self.folder / stage

    @property
    def drafts(self) -> dict[str, Path]:
        """Every draft by its name in reports: the student before distillation, then the trained ones."""
        return {self.start: self.path("initial"), **{name: self.path(name) for name in self.trained}}

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
        return max(self.trained, key=self.validation_alpha) if choose == "best" else choose

    def validation_alpha(self, name: str) -> float:
        """Return the highest acceptance rate of a draft on the validation examples, which its weights are of."""
        return max((entry["alpha"] for entry in self.draft_record(name).history if "alpha" in entry), default=0.0)

    def noted(self, stage: str) -> StageRecord | None:
        """Return the record of a stage, whatever its folder looks like now; None without one."""
        try:
            return StageRecord(**read_json(self._note(stage)))
        except TypeError:
            return None

    def record(self, stage: str, key: str | None = None) -> StageRecord | None:
        """Return the record of a finished stage whose folder is as it was written; None otherwise.

        Args:
            stage: Name of the stage.
            key: Fingerprint that its inputs have to have. None: any.
        """
        found = self.noted(stage)
        if found is None or key not in (None, found.fingerprint) or not found.files:
            return None
        folder = self.path(stage)
        if set(found.files) != set(_files(folder)):
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
        path, temporary = self.path(stage), self.work / f".tmp-{stage}"
        self.work.mkdir(parents=True, exist_ok=True)
        remove(temporary)
        try:
            make(temporary)
            linked = temporary.is_symlink()
            record.files = {
                name: [(temporary / name).stat().st_size, 0 if linked else checksum(temporary / name)]
                for name in _files(temporary)
            }
            self._note(stage).unlink(missing_ok=True)
            remove(path)
            temporary.rename(path)
            write_json(self._note(stage), vars(record))
            remove(self.work / f"checkpoints-{stage}")
        finally:
            remove(temporary)
        entry = self._cached(record.fingerprint)
        entry.parent.mkdir(exist_ok=True)
        remove(entry)
        entry.symlink_to(Path("..", self.folder.name, stage))

    def take_over(self, stage: str, key: str) -> Path | None:
        """Take a stage that another run under the same output folder made from the same inputs; return its folder.

        Files are linked where the file system allows it: they are never changed in place.
        """
        source = self._cached(key).resolve()
        donor = RunDir(source.parent)
        found = donor.record(source.name, key) if donor.folder != self.folder.resolve() else None
        if found is None:
            return None

        def link(path: Path) -> None:
            if donor.path(source.name).is_symlink():
                path.symlink_to(source.resolve(), target_is_directory=True)
            else:
                shutil.copytree(source, path, copy_function=_link_file)

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

    def _note(self, stage: str) -> Path:
        return self.work / f"{stage}.json"

    def _cached(self, key: str) -> Path:
        return self.folder.parent / "cache" / key


def _files(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def _link_file(source: str, path: str) -> None:
    try:
        os.link(source, path)
    except OSError:  # another file system, or one without links
        shutil.copy2(source, path)


def run_of(settings: Settings) -> RunDir:
    """Return the folder of the run that the settings describe."""
    names = [draft.name for draft in settings.drafts]
    return RunDir(Path(settings.output_dir) / settings.name, names, START[settings.student.is_head])


# -- fingerprints -----------------------------------------------------------------------------------------------------

Key = tuple[str, dict[str, Any]]


def stage_fingerprints(settings: Settings) -> dict[str, Key]:
    """Return the fingerprint of every stage, in order, with what it is made from."""
    trainer, teacher, student = settings.trainer, settings.teacher, settings.student
    names = ("precision", "tf32", "validate_every", "validation_examples", "extra", "callbacks")
    common = {"version": VERSION, **{name: getattr(trainer, name) for name in names}}
    data, responses = data_key(settings), teacher.responses
    keys: dict[str, Key] = {}

    def add(stage: str, **parts: Any) -> str:
        keys[stage] = fingerprint(parts), parts
        return keys[stage][0]

    if settings.target.kind == "as_is":
        tokenizer = {"tokenizer": files_state(_paths(settings.data.tokenizer)), "chat": settings.data.chat_template}
        made_from: dict[str, Any] = {"version": VERSION, **tokenizer}
    else:
        answers = responses.written() if settings.target.layerskip.own_answers else None
        made_from = common | data | {"answers": answers}
    target = add("target", **made_from, model=_model_key(settings.target))
    texts = {
        "examples": teacher.examples,
        "responses": responses.key(),
        "target_dtype": settings.target.dtype,
        "target_quantization": settings.target.quantization,
    }
    if student.is_head:
        head = {name: getattr(student, name) for name in ("kind", "draft_vocab", "unroll", "noise")}
        of_texts = texts if student.draft_vocab is not None else {}  # the vocabulary is that of the texts
        initial = add("initial", version=VERSION, **data, head=head, **of_texts, target=target)
    else:
        of_texts = texts if settings.data.from_target and student.trained else {}  # it is trained on these answers
        initial = add("initial", **common, **data, model=_model_key(student), **of_texts, target=target)
    signal = {name: value for name, value in vars(teacher).items() if name.startswith(("signal", "temperature"))}
    del signal["signal_limit_gb"]  # decides whether the signal fits, not what it is
    parts_of_a_step = [trainer.accumulate, ranks.process_count(trainer.accelerator, trainer.devices, trainer.num_nodes)]
    for draft in settings.drafts:
        training = draft.training_of(settings.training)
        made_from = common | data | texts | signal | {"draft": draft.key(), "training": asdict(training)}
        if draft.on_policy:
            made_from["own_texts"] = responses.written() | {"refresh_every": responses.refresh_every}
        if draft.selects:
            assert draft.reference is not None
            made_from["reference"] = keys[draft.reference][0]
            if draft.scope == "microbatch":  # each part selects its own tokens
                made_from["parts_of_a_step"] = parts_of_a_step
        add(draft.name, **made_from, target=target, initial=initial)
    return keys


def data_key(settings: Settings) -> dict[str, Any]:
    """Return what the training examples come from: settings, seed, and the files."""
    data = settings.data.key()
    del data["test_examples"]  # no stage sees a test example, but without a file they are split off the others
    data["test_file"] = data["test_file"] is not None
    if settings.data.from_target:  # the target's files are in its own fingerprint
        paths = _paths(settings.data.prompts.file, settings.data.tokenizer)
    else:
        paths = _paths(*(data[name] for name in ("source", "train_file", "validation_file", "tokenizer")))
        del data["prompts"]
    return {"data": data, "seed": settings.seed, "files": files_state(paths)}


def measurement_fingerprint(settings: Settings) -> str:
    """Return the fingerprint of everything that evaluation, export and report depend on."""
    stages = [key for key, _ in stage_fingerprints(settings).values()]
    test = settings.data.test_examples, settings.data.test_file, files_state(_paths(settings.data.test_file))
    export = {name: value for name, value in asdict(settings.export).items() if name != "hub"}  # where it is uploaded
    return fingerprint(VERSION, stages, *test, asdict(settings.evaluation), export, settings.trainer.accelerator)


def _paths(*paths: str | None) -> list[str]:
    return [path for path in paths if path]


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
    files = {"sha256": settings.package.sha256} if settings.package else files_state(_paths(settings.model))
    return key | {"kind": settings.kind, "model": None if settings.package else settings.model, "files": files}
