"""Every setting of ``python -m distill``: typed, with the trade-off beside each key (``--help`` prints them)."""

from dataclasses import dataclass, field
from typing import Literal

from jsonargparse.typing import PositiveInt

from decode.errors import UserError
from decode.method_options import Seed, Temperature, check_numbers
from distill.config.data import DataSettings
from distill.config.drafts import DraftSettings, TeacherSettings
from distill.config.training import SHARDED, StudentSettings, TargetSettings, TrainerSettings, TrainingSettings


@dataclass
class ExportSettings:
    """How the exported draft is written."""

    choose: str = "best"
    """Name of the draft that is exported and leads the report, or best: the one with the highest acceptance rate on the
    validation examples, of heads with the largest accepted length. Reported figures are measured on the test examples
    in each case."""
    format: Literal["native", "speculators"] = "native"
    """Layout of an exported block head: native, which vLLM, SGLang and llama.cpp's converter read, or that of vLLM's
    speculators, which trains it further. All else is native."""
    dtype: Literal["keep", "float32", "bfloat16", "float16"] = "keep"
    """Number format of the exported weights; keep: as trained."""
    gguf: list[Literal["f32", "f16", "bf16", "q8_0"]] = field(default_factory=list)
    """Number formats in which target and draft are also written for llama.cpp, by its own converter (make engines)."""
    hub: str | None = None
    """Repository of the Hugging Face Hub, such as me/my-draft, made (private) if it is not there. It gets the draft,
    its card and its profile, with a token from `hf auth login` or HF_TOKEN; null: nothing is uploaded."""


@dataclass
class TrackerSettings:
    """Where settings, losses, tables and plots are recorded while a pipeline runs."""

    kind: Literal["wandb", "csv", "tensorboard", "none"] = "wandb"
    """Tracker: Weights & Biases, CSV files, TensorBoard, or none."""
    mode: Literal["auto", "online", "offline"] = "auto"
    """W&B only. auto: online when logged in and the server answers, else offline (upload: `wandb sync`). Project,
    entity and the rest are read from W&B's own environment variables."""
    log_draft: bool = False
    """W&B only: upload the exported draft's weights as an artifact; metrics and tables are logged in any case."""


@dataclass
class EvaluationSettings:
    """What is measured at the end, on test prompts."""

    prompts: PositiveInt = 128
    """Test prompts for offline alpha: the mean of sum_x min(p(x), q(x)) over responses that the target samples at
    temperature 1 (top-k and top-p as in its generation_config). Its standard error falls as 1/sqrt(prompts)."""
    accuracy_prompts: PositiveInt = 200
    """Prompts on which the target's answers are scored, where the task has a score."""
    decode_prompts: PositiveInt = 24
    """Prompts decoded for speeds: each once per draft, temperature, draft length and repeat."""
    max_new_tokens: PositiveInt = 128
    """Longest generated response."""
    temperatures: list[Temperature] = field(default_factory=lambda: [0.0, 1.0])
    """Decoding modes: 0 is greedy."""
    draft_lengths: list[PositiveInt] = field(default_factory=lambda: [2, 4, 6, 8])
    """Draft lengths tried with the exported draft."""
    trees: list[tuple[PositiveInt, PositiveInt]] = field(default_factory=lambda: [(4, 8)])
    """Trees tried with a feature head: nodes expanded a level, and nodes of the whole tree (EAGLE-2: 10 and 60, for a
    machine on which checking 60 tokens costs little more than one)."""
    repeats: PositiveInt = 1
    """Times each speed is measured; the median counts."""
    batch_size: PositiveInt = 32
    """Test prompts that the target answers at a time, before anything is timed."""
    threads: PositiveInt | None = 1
    """CPU threads while decoding one text; small models are faster with one. null: leave as it is."""


@dataclass
class Settings:
    """All settings of a run: target, student, teacher -> drafts -> measurement, report and export."""

    name: str = "run"
    """Name of the run, and of its folder."""
    seed: Seed = 0
    """Seed of the data, the initial weights and the order of examples."""
    output_dir: str = "runs"
    """Folder of all runs."""
    threads: PositiveInt | None = None
    """CPU threads for training; null: PyTorch's choice (all cores)."""
    stages_at_once: PositiveInt = 1
    """Number of drafts that are trained at the same time on a CPU, each in a process with its share of the threads. On
    GPUs, and where several processes train one model, stages follow one after another."""
    data: DataSettings = field(default_factory=DataSettings)
    """The corpus."""
    target: TargetSettings = field(default_factory=TargetSettings)
    """The model whose decoding is to become faster."""
    student: StudentSettings = field(default_factory=StudentSettings)
    """Shape and start of every draft."""
    teacher: TeacherSettings = field(default_factory=TeacherSettings)
    """What the target gives to every draft."""
    training: TrainingSettings = field(default_factory=TrainingSettings)
    """Distillation of every draft that does not say otherwise."""
    drafts: list[DraftSettings] = field(default_factory=list)
    """The drafts, in the order in which they are trained."""
    evaluation: EvaluationSettings = field(default_factory=EvaluationSettings)
    """Measurements."""
    export: ExportSettings = field(default_factory=ExportSettings)
    """The exported draft."""
    tracker: TrackerSettings = field(default_factory=TrackerSettings)
    """Experiment tracking."""
    trainer: TrainerSettings = field(default_factory=TrainerSettings)
    """The machine."""

    def draft(self, name: str) -> DraftSettings:
        """The draft of this name."""
        return next(draft for draft in self.drafts if draft.name == name)

    @property
    def on_policy(self) -> bool:
        """Whether a draft writes training texts of its own."""
        return any(draft.on_policy for draft in self.drafts)

    def validate(self) -> None:
        """Check everything that can be judged without loading a model or data."""
        self.validate_run()
        self.data.validate()
        self.target.validate("target")
        self.student.validate("student")
        self.teacher.responses.validate("teacher.responses")
        if not self.drafts:
            raise UserError("drafts is empty: give at least one, such as drafts: [{name: distillspec}]")
        earlier: list[str] = []
        for index, draft in enumerate(self.drafts):
            draft.validate(f"drafts[{index}]", self.training, earlier)
            earlier.append(draft.name)
        if self.export.choose not in ("best", *earlier):
            raise UserError(
                f"export.choose is {self.export.choose!r}, expected best or one of the drafts: {', '.join(earlier)}"
            )
        if self.student.kind == "mtp" and (self.target.kind != "as_is" or self.target.round_to):
            raise UserError(
                f"student.kind is mtp, the layers in a given target's files, and target.kind is {self.target.kind}, "
                f"target.round_to {self.target.round_to}, whose files have none: set them to as_is and null"
            )
        unrolled = self.student.steps > 1 and not self.student.is_block
        if not unrolled and any(draft.accepted_only for draft in self.drafts):
            raise UserError(
                f"drafts[].accepted_only needs an EAGLE head of two drafting steps or more, and student.kind is "
                f"{self.student.kind}, student.unroll {self.student.unroll}"
            )
        measured = self.evaluation
        if not (measured.temperatures and measured.draft_lengths):
            raise UserError("evaluation.temperatures or evaluation.draft_lengths is empty: give at least one")
        self.trainer.validate()
        self.check_unanswered()
        self._check_places()

    def validate_run(self) -> None:
        """Check what every command uses: the name, and every number against its range."""
        check_numbers(self, nested=True)
        if not self.name or "/" in self.name or self.name.startswith("."):
            raise UserError(f"name is {self.name!r}, expected a plain folder name")

    def check_unanswered(self) -> None:
        """Refuse to train on prompts that nobody answers, or not yet."""
        if not self.data.from_target:
            return
        if self.drafts and not self.teacher.responses.from_target:
            raise UserError(
                "data.source is target, whose prompts have no answers, and teacher.responses.source is "
                f"{self.teacher.responses.source}: set it to target"
            )
        if self.target.trained and not self.target.layerskip.own_answers:
            raise UserError(
                f"data.source is target and target.kind is {self.target.kind}, which would train the target on answers "
                "that it has yet to write: set target.kind to as_is (or, under layerskip, target.layerskip.own_answers)"
            )

    def _check_places(self) -> None:
        """Refuse what needs the weights of a model in one place where they are spread."""
        target, responses = self.target, self.teacher.responses
        if target.sharded:
            writes = responses.from_target and not responses.server.answers
            if writes or (self.data.from_target and self.data.prompts.writes) or self.on_policy:
                raise UserError(
                    "target.sharded is set, and a sharded target writes neither prompts nor responses, nor does a "
                    "draft beside it (drafts[].on_policy): use teacher.responses.server and data.prompts.file with "
                    "file_share 1, or set target.devices or target.quantization instead"
                )
        if self.on_policy and target.placed and self.student.is_head:
            raise UserError(
                "drafts[].on_policy is set, which for feature heads needs the target on the draft's device: set "
                "target.devices to [] and target.quantization to null"
            )
        if self.trainer.strategy not in SHARDED:
            return
        models = {"target": target, "student": self.student}
        trainings = {f"{name}.training": model.training for name, model in models.items() if model.trained}
        trainings |= {f"drafts.{draft.name}.training": draft.training_of(self.training) for draft in self.drafts}
        problems = [f"{name}.optimizer {each.optimizer}" for name, each in trainings.items() if each.uses_muon]
        problems += [f"{name}.kind {model.kind}" for name, model in models.items() if model.kind == "lora"]
        problems += ["drafts[].on_policy"] * self.on_policy + ["target.layerskip"] * target.layerskip.enabled
        problems += [f"student.kind {self.student.kind}"] * self.student.is_head
        if problems:
            raise UserError(
                f"trainer.strategy is {self.trainer.strategy}, which shards the weights and does not support "
                f"{', '.join(problems)}: set trainer.strategy to ddp, or change these settings"
            )
