"""All settings of ``draftsmith distill``: typed, with the trade-off beside each key (``--help`` prints the texts)."""

import copy
import re
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, Literal

from jsonargparse.typing import ClosedUnitInterval, NonNegativeInt, PositiveInt

from decode.errors import UserError
from decode.options import Seed, Share, Temperature, build
from distill.config.base import RESERVED, SHARDED, Attention, Precision, Values, refuse
from distill.config.data import DataSettings
from distill.config.kinds import KINDS, TARGETS
from distill.config.models import ModelSettings, StudentSettings, TargetSettings, TrainingSettings
from distill.config.teacher import TeacherSettings

OF_STEPS = {"logger", "max_epochs", "max_steps", "plugins", "val_check_interval", "accumulate_grad_batches"}
"""Arguments of Lightning's trainer that the run decides."""


@dataclass
class DraftSettings:
    """A draft: the student, distilled from the target. With a reference it is AdaSPEC, without one DistillSpec."""

    reference: str | None = None
    """Name of an earlier draft: train tokens where its loss is lower by most (AdaSPEC). null: all (DistillSpec)."""
    k: Share = 0.4
    """With a reference: share of the response tokens of a device's batch that are selected. Paper: 0.2 to 0.4."""
    divergence: str = "forward_kl"
    """Loss per token between target p and draft q, also that of the reference; alpha = sum_x min(p(x), q(x)).
    forward_kl: KL(p || q), as in the papers. reverse_kl: KL(q || p). jsd: Jensen-Shannon. tv: 1 - alpha (slow from a
    cold start: see kl_first). neg_log_alpha: -log alpha. lk_hybrid: w·KL + (1 - w)·tv, w = exp(-3·alpha). kl_tv: KL +
    2·tv. cross_entropy: of the next token (DFlash). dspark: 0.1·cross_entropy + 1.8·tv. Or module.function of your
    own."""
    kl_first: ClosedUnitInterval = 0.0
    """Share of the steps, from the first, that use forward KL before divergence takes over."""
    on_policy: ClosedUnitInterval = 0.0
    """Share of training examples whose response the draft writes, rewritten every refresh_every steps (DistillSpec)."""
    accepted_only: bool = False
    """With two steps (unroll) or more: a further step is trained only after tokens that would be accepted."""
    seeds: list[Seed] = field(default_factory=list)
    """Seeds of the order of examples; none: the run's seed. With several, the draft NAME is trained once with each, as
    NAME-seed1 and so on, and once more with the run's seed where it is a reference."""
    training: Values = field(default_factory=dict)
    """Keys of the section training whose values differ for this draft, such as {epochs: 3}."""

    @property
    def selects(self) -> bool:
        """Whether a reference selects tokens."""
        return self.reference is not None and self.k < 1

    def training_of(self, shared: TrainingSettings, where: str = "") -> TrainingSettings:
        """Return the section ``training`` with this draft's values; steps replace epochs, and epochs steps.

        Values out of range are refused under the name ``where``.
        """
        if not self.training:
            return shared
        length: Values = {"steps": None, "epochs": None} if self.training.keys() & {"steps", "epochs"} else {}
        return build(TrainingSettings, asdict(shared) | length | self.training, f"{where}training")


def seeded(drafts: dict[str, DraftSettings]) -> dict[str, DraftSettings]:
    """Return drafts of which each has one seed at most, in order."""
    single: dict[str, DraftSettings] = {}
    references = {draft.reference for draft in drafts.values() if draft.selects}
    for name, draft in drafts.items():
        several = draft.seeds if len(draft.seeds) > 1 else []
        if not several or name in references:
            single[name] = replace(draft, seeds=[] if several else draft.seeds)
        single |= {f"{name}-seed{seed}": replace(draft, seeds=[seed]) for seed in several}
    return single


@dataclass
class EvaluationSettings:
    """What is measured at the end, on test prompts."""

    prompts: PositiveInt = 128
    """Test prompts for offline alpha: the mean of sum_x min(p(x), q(x)) over responses sampled at temperature 1."""
    accuracy_prompts: PositiveInt = 200
    """Prompts on which the target's answers are scored, where the task has a score."""
    decode_prompts: NonNegativeInt = 24
    """Prompts decoded for speeds: each once per draft, temperature and draft length. 0: nothing is decoded."""
    max_new_tokens: PositiveInt = 128
    """Longest generated response."""
    temperatures: list[Temperature] = field(default_factory=lambda: [0.0, 1.0])
    """Decoding modes: 0 is greedy."""
    draft_lengths: list[PositiveInt] = field(default_factory=lambda: [2, 4, 6, 8])
    """Draft lengths tried with every draft."""


@dataclass
class ExportSettings:
    """How the exported draft is written."""

    choose: str = "best"
    """Name of the exported draft, or best: by alpha (heads: accepted length) on the validation examples."""
    dtype: Literal["keep", "float32", "bfloat16", "float16"] = "keep"
    """Number format of the exported weights; keep: as trained."""
    gguf: list[Literal["f32", "f16", "bf16", "q8_0"]] = field(default_factory=list)
    """Number formats in which target and draft are also written for llama.cpp, by its converter (make engines)."""


@dataclass
class TrainerSettings:
    """How training runs on the machine; Lightning's trainer takes most of these as they are."""

    accelerator: Literal["auto", "cpu", "gpu", "cuda"] = "auto"
    """auto: CUDA where PyTorch finds it, else the CPU. Apple's GPUs, which have no float64, are refused."""
    devices: int | str | list[int] = "auto"
    """Devices per machine: a number, or the GPUs, such as [4, 5, 6, 7]. auto: one CPU process, or all GPUs."""
    num_nodes: PositiveInt = 1
    """Machines. The processes of several machines are started by torchrun or srun."""
    strategy: str = "auto"
    """auto; ddp: a model on every device; fsdp: weights and optimiser states spread; or a name of Lightning."""
    accumulate: PositiveInt = 1
    """Micro-batches per optimiser step, in less memory, with the same result but that AdaSPEC selects, and
    accepted_only draws, within each."""
    attention: Attention = "auto"
    """Attention by transformers' name. auto: sdpa where the model has it. flash_attention_2 needs bf16 on a GPU."""
    precision: Precision = "32-true"
    """Lightning's precision. auto: bf16-mixed where products in bfloat16 are faster, else 32-true."""
    gradient_checkpointing: bool = False
    """Compute activations again in the backward pass: a fraction of the memory, a third more time. Not for heads."""
    validate_every: PositiveInt = 100
    """Steps between validations, each with a checkpoint, from which a killed run goes on; the best weights are kept."""
    validation_examples: PositiveInt = 128
    """Validation examples used at each validation during training."""
    callbacks: list[Values] = field(default_factory=list)
    """Further Lightning callbacks: [{class_path: EarlyStopping, init_args: {monitor: validation_loss}}]. Also logged:
    loss, validation_accuracy, and in distillation validation_alpha, _likeliest, _agreement and _accepted_length."""
    extra: Values = field(default_factory=dict)
    """Further arguments of lightning.Trainer, such as {gradient_clip_val: 0.5} (1.0 without it)."""

    def callback_instances(self) -> list[Any]:
        """Return new instances of the callbacks: a stage must not see what another one left in them."""
        from jsonargparse import ArgumentError, ArgumentParser
        from lightning.pytorch.callbacks import Callback

        parser = ArgumentParser(exit_on_error=False)
        parser.add_argument("--value", type=list[Callback])
        try:
            made = parser.instantiate_classes(parser.parse_object({"value": copy.deepcopy(self.callbacks)}))
        except (ArgumentError, ValueError, TypeError, ImportError) as error:
            raise UserError(f"trainer.callbacks is {self.callbacks}: {error}") from error
        return list(made.value)


@dataclass
class Settings:
    """All settings of a run: target, student, teacher -> drafts -> export, measurement and report."""

    name: str = "run"
    """Name of the run, and of its folder."""
    seed: Seed = 0
    """Seed of the data, the initial weights and the order of examples."""
    output_dir: str = "runs"
    """Folder of all runs."""
    threads: PositiveInt | None = None
    """CPU threads of everything; null: all cores, and where speed is measured one or all, whichever is faster."""
    tracker: Literal["wandb", "none"] = "wandb"
    """Where settings, losses and the report are recorded. W&B, a run for each stage in a group of the run's name, is
    offline unless you are logged in and it answers."""
    overwrite: bool = False
    """Remove an export, a stage or checkpoints made from other settings or files. Without it they are kept, as
    export.old-1 and so on, and taken again with the settings of before."""
    upload: bool = False
    """Upload the export to W&B, as an artifact of the run's report."""
    data: DataSettings = field(default_factory=DataSettings)
    target: TargetSettings = field(default_factory=TargetSettings)
    student: StudentSettings = field(default_factory=StudentSettings)
    """Shape and start of every draft."""
    teacher: TeacherSettings = field(default_factory=TeacherSettings)
    training: TrainingSettings = field(default_factory=TrainingSettings)
    """Distillation of every draft that does not say otherwise."""
    drafts: dict[str, DraftSettings] = field(default_factory=dict)
    """The drafts by name, as in the report and the run's folder, in the order in which they are trained."""
    evaluation: EvaluationSettings | Literal[False] = field(default_factory=EvaluationSettings)
    """Measurements after the export; false: none."""
    export: ExportSettings = field(default_factory=ExportSettings)
    trainer: TrainerSettings = field(default_factory=TrainerSettings)

    def __post_init__(self) -> None:
        """Make a draft of each of its seeds."""
        self.drafts = seeded(self.drafts)

    @property
    def language_models(self) -> dict[str, ModelSettings]:
        """The target, and the student where it is no head."""
        return {"target": self.target} | ({} if self.student.draft.head else {"student": self.student})

    def validate(self, *, drafts: bool = True) -> None:
        """Refuse contradictions that would pass in silence or cost hours; without ``drafts`` those of their training.

        Everything else is refused by what reads it, which a rehearsal shows.
        """
        refuse(self, (self.student.kind not in KINDS, "student.kind", f"expected one of {', '.join(KINDS)}"))
        self.data.validate()
        self.trainer.callback_instances()
        target, student, answers = self.target, self.student, self.teacher.responses.from_target
        prompts, stands, engine = self.data.from_target, self.teacher.in_engine, self.teacher.engine
        decided = OF_STEPS | {each.name for each in fields(TrainerSettings)}
        early = target.trained and not (target.layerskip.enabled and target.kind != "scratch")
        whole = stands and (student.draft.head or student.draft_vocab) and engine.keep == "topk"
        refuse(
            self,
            (not re.match(r"[^/.][^/]*$", self.name), "name", "expected a plain folder name"),
            (target.kind not in TARGETS, "target.kind", f"expected one of {', '.join(TARGETS)}"),
            (target.round_to and target.kind != "as_is", "target.round_to", f"for kind as_is, not {target.kind}"),
            (self.teacher.responses.temperature == [], "teacher.responses.temperature", "expected at least one"),
            (whole, "teacher.engine.keep", "and heads and a draft_vocab learn from whole distributions here: set it "
             "to bfloat16 or float8"),
            (prompts and self.drafts and not answers, "data.source", "whose prompts have no answers: set "
             "teacher.responses.source to target"),
            (prompts and early, "target.kind", "which trains it on answers to data.source target that it has yet to "
             "write: set target.kind to as_is (or enable target.layerskip on a given target)"),
            (decided & self.trainer.extra.keys(), "trainer.extra", "of which the run or the section trainer itself "
             f"decides {', '.join(sorted(decided))}: leave those keys out"),
            (engine.urls and not (answers or stands), "teacher.engine.urls", "which is asked for nothing: set "
             "teacher.responses.source to target, or teacher.signal to vllm"),
            (engine.local and self.trainer.num_nodes > 1, "teacher.engine.urls", "where each of the trainer.num_nodes "
             "machines would ask itself: give addresses that all of them reach"),
            (engine.arguments and not (stands or engine.urls), "teacher.engine.arguments", "for servers of the target, "
             "with teacher.engine.urls"),
        )  # fmt: skip
        for name, model in self.language_models.items():
            if name == "target" or drafts:
                given = model.kind not in ("scratch", "cut")
                expected = f"and kind is {model.kind}: scratch and cut take no model, other kinds a folder, a Hub name"
                refuse(model, (given == (model.model is None), "model", f"{expected} or a GGUF file"), where=f"{name}.")
                if model.trained:
                    model.training.validate(f"{name}.training")
        if drafts:
            self._validate_drafts()

    def _validate_drafts(self) -> None:
        """Check the drafts, what they start from, and that no part needs weights in a single place that are spread."""
        target, student, measured = self.target, self.student, self.evaluation
        names = list(self.drafts)
        for index, (name, draft) in enumerate(self.drafts.items()):
            earlier, where = names[:index], f"drafts.{name}."
            if not re.sub("[-_]", "", name).isalnum():
                raise UserError(f"drafts has the name {name!r}, expected letters, digits, '-' and '_'")
            if name in RESERVED or name.startswith("checkpoints-"):
                raise UserError(f"drafts has the name {name!r}, which is a file or folder of every run: choose another")
            refuse(
                draft,
                (draft.reference not in (None, *earlier), "reference", f"expected an earlier draft, one of {earlier}"),
                (draft.kl_first == 1, "kl_first", f"which leaves no step for {draft.divergence}: lower it"),
                (draft.accepted_only and draft.selects, "accepted_only", "and its reference selects too: remove one"),
                where=where,
            )
            draft.training_of(self.training, where).validate(f"{where}training" if draft.training else "training")
        drafts, head = self.drafts.values(), student.draft.head
        on_policy, accepted = any(draft.on_policy for draft in drafts), any(draft.accepted_only for draft in drafts)
        whole = head or on_policy or target.layerskip.enabled or "lora" in (target.kind, student.kind)
        refuse(
            self,
            (not names, "drafts", "expected at least one, such as drafts: {distillspec: {}}"),
            (self.upload and not (measured and self.tracker == "wandb"), "upload", "which needs tracker wandb and an "
             "evaluation"),
            (self.export.choose not in ("best", *names), "export.choose", f"expected best or one of {names}"),
            *student.draft.rules(self),
            (accepted and (student.steps == 1 or "unroll" not in student.draft.settings), "student.kind", "and "
             "accepted_only needs two drafting steps (unroll) or more, and no block head"),
            (measured and not (measured.temperatures and measured.draft_lengths), "evaluation", "expected at least one "
             "of temperatures and of draft_lengths"),
            (on_policy and head, "student.kind", "and heads learn from texts of the target, not of their own: set "
             "drafts.NAME.on_policy to 0, or teacher.responses.source to target"),
            (on_policy and student.draft_vocab, "student.draft_vocab", "and on_policy has the draft write texts of all "
             "tokens: set one of them to null"),
            (self.trainer.strategy in SHARDED and whole, "trainer.strategy", "which shards the weights and supports no "
             "heads, on_policy, layerskip and lora: set it to ddp"),
        )  # fmt: skip


@dataclass
class AblationSettings:
    """The seeds of an ablation, and the kinds of drafts."""

    seeds: list[Seed] = field(default_factory=lambda: [1, 2, 3])
    """Seeds of the order of the training examples. Every draft is trained once with each."""
    kinds: list[str] = field(default_factory=list)
    """Kinds of drafts (student.kind) to compare, with as many drafted tokens as blocks have. Empty: student.kind."""
    against: str | None = None
    """Draft over which the others gain, as the table names it, such as distillspec or eagle3 distillspec; null: the
    first."""


@dataclass
class AblateSettings(Settings):
    """A run's settings, whose `drafts` are compared."""

    ablation: AblationSettings = field(default_factory=AblationSettings)
    """The seeds."""

    def validate(self, *, drafts: bool = True) -> None:
        """Refuse a comparison of the same seed or kind, and a target that each kind would train anew."""
        super().validate(drafts=drafts)
        seeds, kinds, against = self.ablation.seeds, self.ablation.kinds, self.ablation.against
        lines = [f"{kind} {name}".strip() for kind in kinds or [""] for name in self.drafts]
        refuse(
            self,
            (not seeds or len(set(seeds)) < len(seeds), "ablation.seeds", "expected different numbers from 0 up"),
            (len(set(kinds)) < len(kinds), "ablation.kinds", "expected different kinds"),
            (against not in (None, *lines), "ablation.against", f"expected one of {', '.join(lines)}"),
            (
                kinds and self.target.trained,
                "target.kind",
                "and kinds are compared for a finished one: take as_is",
            ),
        )
