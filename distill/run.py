"""A run: its folder and stages, its data, and its target.

A run has the stages target, initial (the student before distillation), and one for each draft. Its inputs make a
stage's fingerprint, its result is a folder, and a record in ``work/`` ties both together: a stage whose folder was made
from the same inputs, and whose files have the sizes that they were written with, is not made again.
"""

import time
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cached_property, partial
from math import inf
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from lightning.pytorch.loggers import Logger
from rich.console import Console
from rich.markup import escape
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging as hf_logging

from decode.core.draft import foreign
from decode.core.sampling import LogitsWarper
from decode.errors import UserError
from decode.files import read_json, replaced, unused, write_json
from decode.measure.suites import quiet_datasets
from decode.models.heads.eagle import DraftHead
from decode.models.heads.files import load_head
from decode.models.open import DTYPES, files_of, load_model, load_tokenizer, stop_ids
from decode.models.sources import gguf_file, located
from decode.options import in_turn
from decode.progress import output_console, working
from distill import ranks
from distill.config import Settings
from distill.config.base import Values
from distill.data.corpus import Corpus, load_corpus
from distill.data.dataset import Examples
from distill.data.prompts import BATCH, SAMPLING, PromptWriter
from distill.data.writing import Served, Write, written_here
from distill.engine.check import EVERY, AnswerCheck, check_states, holds
from distill.engine.servers import Engine
from distill.engine.states import StateFiles
from distill.files import files_state, only_one, remove, saved_step, sizes
from distill.fingerprints import stage_fingerprints
from distill.networks.lm_head import LMHead, check_head
from distill.networks.models import config_of, hollow_target, use_attention

ACCOUNT = ("optimiser_steps", "examples", "teacher_tokens", "selected_tokens", "cumulative_teacher_tokens")
"""What a draft's training used: steps; examples and label tokens, counted every time they are seen; tokens that entered
the loss; label tokens with those of the reference, where the training needs one."""
RECORD = "record.json"
"""The file with the record of what is kept as PATH.old-N, which else is in ``work``."""


@dataclass
class StageRecord:
    """What is known of a finished stage."""

    fingerprint: str  # of everything that the folder was made from
    parameters: int = 0
    seconds: float = 0.0  # without interruptions
    account: dict[str, int] = field(default_factory=lambda: dict.fromkeys(ACCOUNT, 0))
    history: list[dict[str, float]] = field(default_factory=list)  # ``{"step", "loss", ...}`` of every validation
    files: dict[str, int] = field(default_factory=dict)  # bytes of each


class Run:
    """The folder ``<output_dir>/<name>``, and what every stage works with; data are read at their first use.

    Args:
        settings: Of the run, without any ``auto`` that `distill.pipeline.with_formats` resolves.
        console: Where the first process shows progress; None: on the standard output.

    Attributes:
        logger: Where losses and results are recorded; None: nowhere.
        folder: With a folder for every stage: target, initial, and each draft.
        work: Checkpoints, cached signals, and the records of the stages.
        trained: Names of the drafts, in order.
        start: Name of the student before distillation in reports.
        drafts: Folder of each draft, `start` first, by its name in reports.
        started: When the run began, in seconds of `time.monotonic`.
        prompts_together: Prompts that the target is asked for at a time; None: as many as are fastest.
    """

    def __init__(self, settings: Settings, console: Console | None = None) -> None:
        self.settings, self.started = settings, time.monotonic()
        self.logger: Logger | None = None
        self.console = (console or output_console()) if ranks.is_first() else Console(quiet=True)
        self.prompts_together: int | None = None
        self._opened = ExitStack()
        self.folder = Path(settings.output_dir) / settings.name
        self.work, self.target, self.export = self.path("work"), self.path("target"), self.path("export")
        self.trained = list(settings.drafts)
        self.start = settings.student.draft.start
        self.drafts = {self.start: self.path("initial"), **{name: self.path(name) for name in self.trained}}

    def line(self, text: str) -> None:
        """Print what happened."""
        self.console.print(f"  {text}", highlight=False, soft_wrap=True)

    def progress(self, stage: str | None = None) -> str:
        """Return the number of the stage that begins; None: export and evaluation."""
        stages = ["target", "initial", *self.trained, None]
        return f"stage {stages.index(stage) + 1} of {len(stages)}"

    # -- stages on disk -----------------------------------------------------------------------------------------------

    def path(self, stage: str) -> Path:
        """Return the folder of a stage."""
        return self.folder / stage

    def record(self, stage: str, key: str | None = None) -> StageRecord | None:
        """Return the record of a finished stage whose files have their sizes; None otherwise.

        ``key`` is the fingerprint that its inputs have to have; None: any.
        """
        folder = self.path(stage)
        try:
            record = StageRecord(**read_json(self.note(folder)))
        except TypeError:
            return None
        intact = record.files and record.files == sizes(folder)
        return record if intact and key in (None, record.fingerprint) else None

    def put(self, stage: str, record: StageRecord, make: Callable[[Path], None]) -> None:
        """Have ``make`` fill a new folder, then put it in the stage's place, which is kept, together with its record.

        The first process does so, the others wait.
        """
        if ranks.is_first():
            folder = self.path(stage)
            with replaced(folder, self.keep) as aside:
                make(aside)
                record.files = sizes(aside)
            write_json(self.note(folder), vars(record))
            checkpoints = self.work / f"checkpoints-{stage}"
            remove(self.note(checkpoints))
            remove(checkpoints)
        ranks.barrier()

    def checkpoints(self, stage: str, steps: int) -> Path:
        """Return the folder of the checkpoints from which a training of so many steps goes on, if there are any."""
        folder = self.work / f"checkpoints-{stage}"
        if ranks.is_first():
            record = {"fingerprint": stage_fingerprints(self.settings, stage)[stage]}

            def last(path: Path) -> int:
                step = max(map(saved_step, path.glob("last-*.ckpt")), default=0)
                return step * (step <= steps and read_json(self.note(path)) == record)

            if not self.bring(folder, last):
                self.keep(folder)
                write_json(self.note(folder), record)
        ranks.barrier()
        return folder

    def note(self, path: Path) -> Path:
        """Return the file with the record of what is at a path."""
        return path / RECORD if ".old-" in path.name else self.work / f"{path.name}.json"

    def keep(self, path: Path) -> Path | None:
        """Rename what is at a path to PATH.old-N, with its record; a link is removed, and all with ``overwrite``."""
        note = self.note(path)
        if path.is_symlink() or self.settings.overwrite or not any(path.glob("*")):
            remove(note)
            remove(path)
            return None
        if note.exists():
            note.replace(path / RECORD)
        path.rename(old := unused(path))
        self.line(f"{old} is the {path.name} that was there")
        return old

    def bring(self, path: Path, fits: Callable[[Path], int]) -> int:
        """Put at a path what fits best of what is there and what was kept of it; return how well."""
        if not path.is_symlink() and (path / RECORD).exists() and not self.note(path).exists():
            (path / RECORD).replace(self.note(path))  # a kill came between two renames
        best = max([path, *path.parent.glob(f"{path.name}.old-*")], key=fits)
        if best != path and fits(best):
            self.keep(path)
            best.rename(path)
            (path / RECORD).replace(self.note(path))
            self.line(f"{best} is of these settings and files, and {path} again")
        return fits(path)

    def draft_record(self, name: str) -> StageRecord:
        """Return the record of a finished draft, by its name in reports."""
        record = self.record("initial" if name == self.start else name)
        assert record is not None, f"{self.drafts[name]} is not finished"
        return record

    def chosen(self, choose: str) -> str:
        """Return the name of the draft that is exported: see `distill.config.ExportSettings.choose`."""
        return max(self.trained, key=lambda name: self.best(name)[1]) if choose == "best" else choose

    def best(self, name: str) -> tuple[dict[str, float], float]:
        """Return a draft's best validation after step 0, whose weights it has, and its value: accepted length, or α."""
        student = self.settings.student
        by = "accepted_length" if student.draft.head or student.steps > 1 else "alpha"
        history = (row for row in self.draft_record(name).history if "alpha" in row and row["step"])
        judged = ((row, row.get(by, row["alpha"])) for row in history)
        return max(judged, key=lambda pair: pair[1], default=({}, 0.0))

    # -- data ---------------------------------------------------------------------------------------------------------

    @cached_property
    def corpus(self) -> Corpus:
        """The examples, tokenised as the target does."""
        target, data = self.settings.target, self.settings.data
        model, trust, folder, seed = target.model, target.trust_remote_code, self.work / "corpus", self.settings.seed
        tokenizer, sampler, files = None, None, None
        with working(self.console, "reading the data"):
            if model is not None and data.tokenizer is None:
                tokenizer = load_tokenizer(model, trust_remote_code=trust)
                files = files_of(model, trust_remote_code=trust)
            if model is not None and data.from_target:
                made_from: Values = {"dtype": target.dtype, "target": files_state([model]) or model}
                sampler = PromptWriter(
                    made_from,
                    self.work / "prompts",
                    partial(self._prompt_writer, model),
                    self.line,
                    self.prompts_together,
                )
            corpus = load_corpus(data, seed=seed, folder=folder, tokenizer=tokenizer, sampler=sampler, files=files)
        for note in corpus.notes:
            self.line(escape(note))
        for name, given in self.settings.language_models.items():
            if given.model is not None:
                rows = int(config_of(given, 0).get_text_config().vocab_size)
                if unknown := foreign([corpus.highest], rows, "data: the examples hold", f"the {name} model's"):
                    raise UserError(unknown)
        return corpus

    def _prompt_writer(self, model: str, ends: Collection[int]) -> Write:
        seed = self.settings.seed
        if self.settings.teacher.served:
            tokenizer = load_tokenizer(model, trust_remote_code=self.settings.target.trust_remote_code)
            return partial(self.servers(tokenizer, ends, min(ends)).write, SAMPLING)
        # a target that is trained answers before it is
        target = self.frozen if self.as_it_is else self.load_target(path=model)
        return partial(written_here, target, SAMPLING, ends, (seed, 5), BATCH)

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer of the examples."""
        return self.corpus.tokenizer

    @cached_property
    def examples(self) -> Dataset:
        """The examples for distillation: the first ``teacher.examples``."""
        return _first(self.corpus.train, self.settings.teacher.examples)

    @cached_property
    def validation(self) -> Dataset:
        """The examples by which checkpoints are compared: the first ``trainer.validation_examples``."""
        return _first(self.corpus.validation, self.settings.trainer.validation_examples)

    # -- models -------------------------------------------------------------------------------------------------------

    @property
    def device(self) -> torch.device:
        """Where this process trains, and frozen models compute what is kept of them."""
        return ranks.local_device(self.settings.trainer)

    @cached_property
    def frozen(self) -> PreTrainedModel:
        """The target that answers, gives its signal and is measured: one for the run, read straight to its device."""
        model = self.load_target(path=self.served_folder)
        use_attention(model, self.settings.trainer.attention)
        check_head(model, LMHead(model))
        return model

    def release(self) -> None:
        """Let the target leave memory; it is read again where it is needed."""
        self.__dict__.pop("frozen", None)

    def decoding_target(self) -> PreTrainedModel:
        """The target as it decodes: in float32 on a CPU, with the attention that it is loaded with."""
        target = self.settings.target
        dtype = "float32" if self.device.type == "cpu" else target.dtype
        if dtype == target.dtype and self.settings.trainer.attention == "auto":
            return self.frozen
        self.release()
        return self.load_target(dtype)

    def load_target(
        self, dtype: str | None = None, device: str | torch.device | None = None, path: str | Path | None = None
    ) -> PreTrainedModel:
        """A target of one's own; None: that of the run, in its number format, where this process trains."""
        target = self.settings.target
        return load_model(
            path or self.target,
            device=device or self.device,
            dtype=dtype or target.dtype,
            trust_remote_code=target.trust_remote_code,
        )

    def target_parts(self) -> PreTrainedModel:
        """The target with no more weights than a head needs: embedding, output head, norm, first and last layers."""
        student, trust = self.settings.student, self.settings.target.trust_remote_code
        return hollow_target(self.served_folder, last=student.draft.layers(student), trust_remote_code=trust)

    @cached_property
    def captured_layers(self) -> list[int]:
        """The layers of the target whose entering states the student reads, which a language model does not."""
        student = self.settings.student
        return list(student.draft.captured(student, self.target_config))

    @cached_property
    def engine(self) -> Engine:
        """The engine that the target stands in."""
        settings = self.settings.teacher.engine
        if not settings.urls:
            raise UserError(
                "teacher.engine.urls is empty, and the target stands in an engine: start a server with the command "
                "that draftsmith distill check-engine prints for this configuration, and give its address"
            )
        named, length = self.settings.target.model or "", self.settings.data.max_length
        names = {named, Path(named).name, str(self.target), str(self.served_folder)}
        engine = Engine(settings.urls, settings, names, length, self.line)
        self._opened.callback(engine.close)
        return engine

    def servers(self, tokenizer: PreTrainedTokenizerBase, ends: Collection[int], end: int) -> Served:
        """The engine as a writer of texts that end with these ids: see `Served`."""
        vocab = self.served_files.config.get_text_config().vocab_size
        return Served(self.engine, tokenizer, ends, end, vocab, self.settings.seed)

    def answer_check(self, *, kept: bool, most: float = inf) -> AnswerCheck:
        """What looks at servers' answers: at the first ones, or at those that are ``kept``, of texts at ``most``."""
        how = self.settings.teacher.responses
        packed = getattr(self.served_files.config, "quantization_config", None)
        return AnswerCheck(
            LogitsWarper(in_turn(how.temperature, 0), top_p=how.top_p),
            stop_ids(self.served_files, self.tokenizer),
            quantised=bool(packed) or any("--quantization" in each for each in self.settings.teacher.arguments),
            every=EVERY if kept else 1,
            most=0 if isinstance(how.temperature, list) else most,  # no one temperature could be expected
            kept=kept,
            say=self.line,
        )

    @property
    def engine_layers(self) -> list[int]:
        """The layers whose states an engine gives away: those that a head reads, and the last one's output."""
        return sorted({*self.captured_layers, int(self.target_config.num_hidden_layers)})

    @property
    def as_it_is(self) -> bool:
        """Whether the target is the folder that the settings name, so that it is there before its stage."""
        target = self.settings.target
        return target.kind == "as_is" and not (target.round_to or gguf_file(str(target.model)))

    @cached_property
    def served_folder(self) -> Path:
        """The folder of the target, before its stage too where that takes it as it is."""
        return located(str(self.settings.target.model), weights=True) if self.as_it_is else self.target

    @cached_property
    def served_files(self) -> Any:
        """Configurations of the target in `served_folder`: see `decode.models.open.files_of`."""
        return files_of(self.served_folder, trust_remote_code=self.settings.target.trust_remote_code)

    @cached_property
    def target_config(self) -> Any:
        """The configuration of the target's language model, before it is trained too."""
        return config_of(self.settings.target, 2).get_text_config()

    @cached_property
    def states(self) -> StateFiles:
        """The target's states out of the engine, after a check on a few texts by the first process."""
        files = StateFiles(self.engine, self.engine_layers)
        self._opened.callback(files.close)
        if ranks.is_first():
            self.check_states(files)
        return files

    def check_states(self, files: StateFiles) -> None:
        """Compare the engine on eight texts with the target's files, and with transformers where it can be held."""
        rows, dtype = Examples.of(self.examples, 8), self.settings.target.dtype
        longest = min(128, self.settings.data.max_length - 1)  # a token is written after each
        texts = [rows.text(number)[0][:longest].tolist() for number in range(len(rows))]
        whole = (lambda: self.frozen) if holds(self.served_folder, self.device) else None
        parts = self.target_parts().to(DTYPES[dtype])
        check_states(files, parts, [ids for ids in texts if len(ids) > 1], dtype, whole, self.line)

    def close(self) -> None:
        """Close the connections to the engine."""
        self._opened.close()
        for name in ("engine", "states"):
            self.__dict__.pop(name, None)

    def load_head(self, path: str | Path) -> DraftHead:
        """A head in float32; next-token layers are built as the target's."""
        return load_head(path, self.target_parts() if self.settings.student.draft.of_target else None)


def _first(rows: Dataset, count: int | None) -> Dataset:
    return rows if count is None else rows.select(range(min(count, len(rows))))


@contextmanager
def alone_in(run: Run) -> Iterator[None]:
    """Hold the run's folder, clean what a killed run left, and set the threads.

    A folder in which a refusal leaves nothing is removed.

    Raises:
        decode.errors.UserError: Another process is working there, or not all processes of the run see it.
    """
    hf_logging.disable_progress_bar()  # a bar for every file read or written hides what matters
    quiet_datasets()
    if run.settings.threads is not None:
        torch.set_num_threads(run.settings.threads)
    with only_one(lock := run.work / "lock"):
        if ranks.is_first():
            for left in [*run.folder.glob(".tmp-*"), *run.work.rglob(".tmp-*")]:
                remove(left)
        try:
            ranks.check_seen(lock)  # and no other process may write while files are deleted
            yield
        except UserError:
            if ranks.is_first() and {f.name for f in run.folder.rglob("*") if f.is_file()} <= {"lock", "run.json"}:
                remove(run.folder)  # nothing was made before the refusal
            raise
