"""Every setting of ``python -m distill``: typed, with the trade-off beside each key (``--help`` prints them)."""

from dataclasses import dataclass, field
from typing import Literal

from jsonargparse.typing import ClosedUnitInterval, PositiveInt

from decode.errors import UserError
from decode.method_options import Seed, Temperature, check_numbers
from distill.config.data import DataSettings
from distill.config.drafts import AdaSpecSettings, ComparisonSettings, DistillSettings, EagleSettings, check_names
from distill.config.training import SHARDED, InitialDraftSettings, TargetSettings, TrainerSettings


@dataclass
class HubSettings:
    """Where the export is uploaded at the end of a run."""

    repository: str | None = None
    """Repository of the Hugging Face Hub, such as me/my-draft, made if it is not there; null: none. It gets the draft,
    its card and its profile, with a token from `hf auth login` or HF_TOKEN."""
    private: bool = True
    """Whether a repository that is made is private."""
    revision: str | None = None
    """Branch, made if it is not there; null: main."""


@dataclass
class ExportSettings:
    """How the exported draft is written."""

    choose: str = "draft"
    """Draft that is exported and leads the report: draft (the section draft's), the name of a trained draft in the
    report's table (such as distillspec, or a comparison's), or best: the trained draft with the highest
    acceptance rate on the validation examples. Reported figures are measured on the test examples in each case."""
    dtype: Literal["keep", "float32", "bfloat16", "float16"] = "keep"
    """Number format of the exported weights; keep: as trained."""
    draft_length: PositiveInt | None = None
    """Tokens drafted per round, written to generation_config.json; null: the best length measured."""
    formats: list[Literal["hf", "gguf"]] = field(default_factory=lambda: ["hf"])
    """hf is always written; gguf adds target and draft for llama.cpp, by its own converter (make engines)."""
    gguf_types: list[Literal["f32", "f16", "bf16", "q8_0"]] = field(default_factory=lambda: ["f32"])
    """Number formats of the GGUF files."""
    hub: HubSettings = field(default_factory=HubSettings)
    """Upload to the Hugging Face Hub."""
    confidence_threshold: ClosedUnitInterval = 0.0
    """Transformers' assistant_confidence_threshold: drafting stops below it; 0 always drafts the full length."""


@dataclass
class TrackerSettings:
    """Where settings, losses, tables and plots are recorded while a pipeline runs."""

    kind: Literal["wandb", "csv", "tensorboard", "none"] = "wandb"
    """Tracker: Weights & Biases, CSV files, TensorBoard, or none."""
    mode: Literal["auto", "online", "offline"] = "auto"
    """W&B only. auto: online when logged in and the server answers, else offline (upload: `wandb sync`)."""
    project: str = "draftsmith"
    """W&B only: project name."""
    entity: str | None = None
    """W&B only: user or team; none means the account's default."""
    tags: list[str] = field(default_factory=list)
    """W&B only: tags of the run."""
    log_draft: bool = True
    """W&B only: record the exported draft as an artifact (its files are read in place, not copied)."""


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
    """Draft lengths tried with the final draft."""
    repeats: PositiveInt = 1
    """Times each speed is measured; the median counts."""
    batch_size: PositiveInt = 32
    """Test prompts that the target answers at a time, before anything is timed."""
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """Number format of target and drafts while they are measured, on the trainer's device; null: target.dtype."""
    threads: PositiveInt | None = 1
    """CPU threads while decoding one text; small models are faster with one. null: leave as it is."""

    def validate(self) -> None:
        """Check that something is measured."""
        for key in ("temperatures", "draft_lengths"):
            if not getattr(self, key):
                raise UserError(f"evaluation.{key} is empty: give at least one")


@dataclass
class Settings:
    """All settings of a run: target -> initial draft -> reference (DistillSpec) -> draft (AdaSPEC) -> report."""

    name: str = "run"
    """Name of the run, and of its folder."""
    seed: Seed = 0
    """Seed of the data, the initial weights and the order of examples."""
    output_dir: str = "runs"
    """Folder of all runs."""
    threads: PositiveInt | None = None
    """CPU threads for training; null: PyTorch's choice (all cores)."""
    stages_at_once: PositiveInt = 1
    """Stages at work at the same time on a CPU, where they do not need one another: each in a process of its own with
    its share of the threads, which small models use better than all of them together. The target and the reference
    have all threads. On GPUs, and where several processes train together, stages follow one after another."""
    data: DataSettings = field(default_factory=DataSettings)
    """The corpus."""
    target: TargetSettings = field(default_factory=TargetSettings)
    """The target."""
    initial: InitialDraftSettings = field(default_factory=InitialDraftSettings)
    """The undistilled draft."""
    eagle: EagleSettings = field(default_factory=EagleSettings)
    """Feature heads in place of draft models."""
    reference: DistillSettings = field(default_factory=DistillSettings)
    """DistillSpec."""
    draft: AdaSpecSettings = field(default_factory=AdaSpecSettings)
    """AdaSPEC."""
    comparisons: list[ComparisonSettings] = field(default_factory=list)
    """Further drafts for the report, such as AdaSPEC in another accounting."""
    evaluation: EvaluationSettings = field(default_factory=EvaluationSettings)
    """Measurements."""
    export: ExportSettings = field(default_factory=ExportSettings)
    """The exported draft."""
    tracker: TrackerSettings = field(default_factory=TrackerSettings)
    """Experiment tracking."""
    trainer: TrainerSettings = field(default_factory=TrainerSettings)
    """The machine."""

    def validate(self) -> None:
        """Check everything that can be judged without loading a model or data."""
        self.validate_run()
        self.data.validate()
        self.target.validate("target")
        if self.data.from_target:
            self._check_own_prompts()
        self.eagle.validate()
        if self.eagle.enabled:
            self.eagle.check_reference(self.reference)
        else:
            self.initial.validate("initial")
        self.reference.validate()
        self.draft.validate("draft")
        for index, comparison in enumerate(self.comparisons):
            comparison.validate(f"comparisons[{index}]")
        check_names(self.draft, self.comparisons)
        self._check_drafting_steps()
        self.evaluation.validate()
        self.trainer.validate()
        if self.trainer.strategy in SHARDED:
            self._check_sharding()
        self._check_placed_target()

    def validate_run(self) -> None:
        """Check what every command uses: the name, and every number against its range."""
        check_numbers(self, nested=True)
        if not self.name or "/" in self.name or self.name.startswith("."):
            raise UserError(f"name is {self.name!r}, expected a plain folder name")

    def _check_drafting_steps(self) -> None:
        """Refuses chains that end at a rejection where there is one drafting step."""
        names = [draft.name for draft in (self.draft, *self.comparisons) if draft.weigh_by == "accepted"]
        if names and not (self.eagle.enabled and self.eagle.steps > 1):
            raise UserError(
                f"weigh_by of {', '.join(names)} is accepted, which decides where a feature head's further drafting "
                f"steps go on, with eagle.kind {self.eagle.kind} and eagle.unroll {self.eagle.unroll}: train a head of "
                "at least two drafting steps, or set weigh_by to none"
            )

    def _check_own_prompts(self) -> None:
        """What has to be so where the data are prompts without answers."""
        responses = self.reference.responses
        if not responses.from_target and responses.from_draft < 1:
            raise UserError(
                f"data.source is target, whose prompts have no answers, and reference.responses.source is "
                f"{responses.source}: set it to target (or reference.responses.fixed to target)"
            )
        if responses.from_draft and responses.fixed != "target":
            raise UserError(
                "data.source is target, whose prompts have no answers, and reference.responses.fixed is dataset: set "
                "it to target, which then answers those that the draft does not, and those for validation"
            )
        self.check_unanswered()

    def check_unanswered(self) -> None:
        """Refuses to train a target on prompts without answers."""
        if self.data.from_target and self.target.trained and not self.target.layerskip.own_answers:
            raise UserError(
                f"data.source is target and target.kind is {self.target.kind}, which would train the target on answers "
                "that it has yet to write: set target.kind to as_is (or, under layerskip, target.layerskip.own_answers)"
            )

    def _check_placed_target(self) -> None:
        """Refuses what needs a target that is whole, or where the draft is."""
        responses, target = self.reference.responses, self.target
        if target.sharded and responses.from_target and not responses.server.answers:
            raise UserError(
                f"target.sharded is set and reference.responses.source is {responses.source}: a sharded target writes "
                "no answers; let others write them (reference.responses.server: urls or engine)"
            )
        if target.sharded and self.data.from_target and self.data.prompts.writes:
            raise UserError(
                "target.sharded is set and data.source is target: a sharded target writes no prompts; give them with "
                "data.prompts.file and data.prompts.file_share 1, or set target.devices or target.quantization instead"
            )
        own = responses.from_draft or any(draft.on_policy for draft in (self.draft, *self.comparisons))
        if own and (target.sharded or (target.placed and self.eagle.enabled)):
            raise UserError(
                "the draft writes its own training texts (reference.responses.source or on_policy), which needs an "
                "unsharded target: set target.sharded to false; for feature heads (eagle.kind), set target.devices to "
                "[] and target.quantization to null as well"
            )
        if own and self.reference.lora is not None and self.reference.lora.narrow:
            raise UserError(
                "the draft writes its own training texts (reference.responses.source or on_policy), which it cannot "
                "with low-precision frozen weights: set reference.lora.base to float32 and reference.lora.quantization "
                "to null"
            )

    def _check_sharding(self) -> None:
        """Refuses what needs a model's weights in one place."""
        trainings = {"target": self.target, "initial": self.initial}
        muon = [name for name, model in trainings.items() if model.trained and model.training.uses_muon]
        muon += ["reference"] if self.reference.training.uses_muon else []
        adapters = [name for name, model in trainings.items() if model.kind == "lora"]
        adapters += ["reference"] if self.reference.lora is not None else []
        problems = [f"{name}.training.optimizer muon" for name in muon] + [f"{name} with lora" for name in adapters]
        if self.reference.responses.from_draft:
            problems.append(f"reference.responses.source {self.reference.responses.source}")
        problems += [f"on_policy of {draft.name}" for draft in (self.draft, *self.comparisons) if draft.on_policy]
        if self.target.layerskip.enabled:
            problems.append("target.layerskip")
        if self.eagle.enabled:
            problems.append("feature heads (eagle.kind)")
        if problems:
            raise UserError(
                f"trainer.strategy is {self.trainer.strategy}, which shards the weights and does not support "
                f"{', '.join(problems)}: set trainer.strategy to ddp, or change these settings"
            )
