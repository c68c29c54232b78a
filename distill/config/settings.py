"""Every setting of ``python -m distill``: typed, with the trade-off beside each key (``--help`` prints them)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from decode.core.errors import UserError
from distill.config.data import DataSettings
from distill.config.drafts import AdaSpecSettings, ComparisonSettings, check_names
from distill.config.eagle import EagleSettings
from distill.config.models import (
    Architecture,
    InitialDraftSettings,
    LoraSettings,
    ModelSettings,
    TargetSettings,
    TrainingSettings,
)
from distill.config.responses import ResponseSettings, ServerSettings
from distill.export.draft import ExportSettings
from distill.losses.divergences import LOSSES, Divergence, DivergenceName
from distill.tracking.logger import TrackerSettings

__all__ = [
    "AdaSpecSettings",
    "Architecture",
    "ComparisonSettings",
    "DistillSettings",
    "EagleSettings",
    "EvaluationSettings",
    "InitialDraftSettings",
    "LoraSettings",
    "ModelSettings",
    "ResponseSettings",
    "ServerSettings",
    "Settings",
    "TargetSettings",
    "TrainerSettings",
    "TrainingSettings",
]

Signal = Literal["hidden", "topk", "log_probs", "recompute"]


@dataclass
class DistillSettings:
    """DistillSpec: the draft learns the target's next-token distributions on response tokens.

    Its result is the baseline, and the reference by which AdaSPEC selects tokens.
    """

    examples: int | None = None
    """Training examples used for distillation (the first ones); null: all. The target reads each once, whatever the
    number of passes. More examples can gain more than any loss: at equal steps, a draft learns few of them by heart."""
    divergence: DivergenceName = "forward_kl"
    """Loss per token between target p and draft q. forward_kl: KL(p || q), the papers' and the safe choice.
    reverse_kl: KL(q || p). jsd: between the two (jsd_beta). tv: 1 - alpha, the acceptance itself, which learns little
    from a cold start. neg_log_alpha: -log alpha. lk_hybrid: KL while far apart, tv when near. kl_tv: KL + tv_weight*tv.
    AdaSPEC measures its loss differences in the same."""
    jsd_beta: float = 0.5
    """Of jsd: the target's share in the mixture it compares both with; near 0 it behaves as forward_kl."""
    tv_weight: float = 2.0
    """Of kl_tv: how much total variation counts beside the KL."""
    temperature: float = 1.0
    """Both models' logits are divided by it in the loss: the temperature at which the draft will be used. Training
    and validation alpha are those at this temperature."""
    signal: Signal = "hidden"
    """What is kept of the target on disk, so that it runs over the examples once. hidden: its last hidden states at
    label positions (exact; hidden_size x 4 bytes a token). topk: its signal_k largest log-probabilities (8 bytes each a
    token; for targets whose hidden states would be larger, and exact but for the tail, which is printed). log_probs:
    all of them (exact; vocabulary x 4 bytes a token; for vocabularies of some thousand ids, where the product with the
    target's head takes longer than reading them). recompute: nothing, and a forward pass of the target every step."""
    signal_dtype: Literal["float32", "bfloat16"] = "float32"
    """Of hidden. bfloat16 halves the file; nothing is lost where the target itself runs in bfloat16 (target.dtype)."""
    signal_k: int = 64
    """Of topk: log-probabilities kept of each token. More of them leave less to the tail."""
    signal_limit_gb: float = 100.0
    """Largest size of the kept signal in GB. What it needs is told before it is made."""
    responses: ResponseSettings = field(default_factory=ResponseSettings)
    """Who writes the responses, for the reference and for AdaSPEC alike (but see draft.on_policy). What frozen models
    say of the draft's own texts, the reference's loss too, is computed anew each time they are written."""
    lora: LoraSettings | None = None
    """Train a low-rank adapter instead of all weights of the drafts, and merge it at the end: less memory for the
    optimiser, less forgetting, less to learn with. null: all weights."""
    training: TrainingSettings = field(default_factory=TrainingSettings)
    """Length, batches and optimiser of the reference; AdaSPEC's follow from them and draft.iso."""

    def loss(self, name: DivergenceName | None = None) -> Divergence:
        """The divergence of this name (None: the one set) with the parameters set."""
        return Divergence(name or self.divergence, self.jsd_beta, self.tv_weight, self.temperature)

    def validate(self) -> None:
        """Check the divergence with its parameters, and the counts."""
        self.training.validate("reference.training")
        self.responses.validate("reference.responses")
        if self.lora is not None:
            self.lora.validate("reference.lora")
        if self.divergence not in LOSSES:
            raise UserError(f"reference.divergence is {self.divergence!r}; known are {', '.join(LOSSES)}")
        if not 0 < self.jsd_beta < 1:
            raise UserError(
                f"reference.jsd_beta is {self.jsd_beta}, wanted a number between 0 and 1, such as 0.5; the ends are "
                "the divergences forward_kl and reverse_kl"
            )
        if self.tv_weight < 0 or self.temperature <= 0:
            raise UserError(
                f"reference.tv_weight is {self.tv_weight} and reference.temperature {self.temperature}: wanted 0 or "
                "more, and a number above 0"
            )
        if self.signal_k < 1 or self.signal_limit_gb <= 0:
            raise UserError(
                f"reference.signal_k is {self.signal_k} and reference.signal_limit_gb {self.signal_limit_gb}: wanted "
                "1 or more, and a number above 0"
            )
        if self.examples is not None and self.examples < 1:
            raise UserError(f"reference.examples is {self.examples}, wanted 1 or more, or null for all")


@dataclass
class EvaluationSettings:
    """What is measured at the end, on test prompts."""

    prompts: int = 128
    """Prompts for offline alpha. The standard error falls with the root of it."""
    accuracy_prompts: int = 200
    """Prompts on which the target's answers are scored, where the task has a score."""
    decode_prompts: int = 24
    """Prompts decoded for speeds: each once per draft, temperature, draft length and repeat."""
    max_new_tokens: int = 128
    """Longest generated response."""
    temperatures: list[float] = field(default_factory=lambda: [0.0, 1.0])
    """Decoding modes: 0 is greedy."""
    draft_lengths: list[int] = field(default_factory=lambda: [2, 4, 6, 8])
    """Draft lengths tried with the final draft."""
    repeats: int = 1
    """Times each speed is measured; the median counts."""
    threads: int | None = 1
    """CPU threads while decoding one text; small models are faster with one. null: leave as it is."""

    def validate(self) -> None:
        """Check counts and ranges."""
        for key in ("prompts", "accuracy_prompts", "decode_prompts", "max_new_tokens", "repeats"):
            if getattr(self, key) < 1:
                raise UserError(f"evaluation.{key} is {getattr(self, key)}, wanted 1 or more")
        if not self.temperatures or min(self.temperatures) < 0:
            raise UserError(f"evaluation.temperatures is {self.temperatures}, wanted numbers of 0 (greedy) or more")
        if not self.draft_lengths or min(self.draft_lengths) < 1:
            raise UserError(f"evaluation.draft_lengths is {self.draft_lengths}, wanted numbers of 1 or more")


@dataclass
class TrainerSettings:
    """How training runs on the machine; Lightning's trainer takes most of these as they are."""

    accelerator: str = "auto"
    """cpu, gpu, or auto: the best there is."""
    devices: int | str = "auto"
    """Devices per machine. auto: one CPU process, or every GPU of the machine."""
    num_nodes: int = 1
    """Machines."""
    strategy: str = "auto"
    """auto; ddp: a copy of the model on every device; fsdp: weights, gradients and optimiser state spread over the
    devices, for models too large for one; or another name that Lightning knows."""
    accumulate: int = 1
    """Batches whose gradients are summed up to one optimiser step: batch_size / accumulate examples at a time, over
    all devices, for the same result in less memory."""
    precision: str = "32-true"
    """Lightning's precision: 32-true; bf16-mixed on GPUs that have bfloat16 (losses stay in float32)."""
    fused_loss: bool = True
    """Compute the distillation loss in chunks of rows, with its gradient in closed form and only for the selected
    tokens: several times faster, and memory of a chunk instead of all tokens times the vocabulary. false: the plain
    form, by autograd on whole logits, to check it against."""
    gradient_checkpointing: bool = False
    """Keep of each layer's activations only its input, and compute the others again in the backward pass: the same
    gradients in a fraction of the memory, for about a third more time. For targets of billions of parameters and long
    texts; feature heads, of one layer, are trained without."""
    gradient_clip: float = 1.0
    """Largest norm of the gradient; 0: not clipped."""
    validate_every: int = 100
    """Steps between validations. Each is followed by a checkpoint, so this is what a kill costs at most. The best
    validated weights are kept: largest alpha for drafts, smallest loss for models trained on next tokens."""
    validation_examples: int = 128
    """Validation examples used for it."""
    log_every: int = 20
    """Steps between logged values. Reading a value waits for the device, so small models want it rare."""

    def validate(self) -> None:
        """Check counts."""
        for key in (
            "validate_every",
            "validation_examples",
            "log_every",
            "num_nodes",
            "accumulate",
        ):
            if getattr(self, key) < 1:
                raise UserError(f"trainer.{key} is {getattr(self, key)}, wanted 1 or more")
        if self.gradient_clip < 0:
            raise UserError(f"trainer.gradient_clip is {self.gradient_clip}, wanted 0 (off) or more")


@dataclass
class Settings:
    """All settings of a run: target -> initial draft -> reference (DistillSpec) -> draft (AdaSPEC) -> report."""

    name: str = "run"
    """Name of the run, and of its folder."""
    seed: int = 0
    """Seed of the data, the initial weights and the order of examples."""
    output_dir: str = "runs"
    """Folder of all runs."""
    threads: int | None = None
    """CPU threads for training; null: PyTorch's choice (all cores)."""
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
        """Check everything that can be judged without loading a model or data.

        Raises:
            UserError: naming the key, the value seen and the values wanted.
        """
        if not self.name or "/" in self.name or self.name.startswith("."):
            raise UserError(f"name is {self.name!r}, wanted a plain folder name")
        if self.threads is not None and self.threads < 1:
            raise UserError(f"threads is {self.threads}, wanted 1 or more, or null for all cores")
        self.data.validate()
        self.target.validate("target")
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
        if self.eagle.enabled:
            self.eagle.check_drafts([self.draft, *self.comparisons])
        self.evaluation.validate()
        self.trainer.validate()
        if self.trainer.strategy == "fsdp":
            self._check_sharding()

    def _check_sharding(self) -> None:
        """Refuses what needs a model's weights in one place."""
        trainings = {"target": self.target, "initial": self.initial}
        muon = [name for name, model in trainings.items() if model.trained and model.training.optimizer == "muon"]
        muon += ["reference"] if self.reference.training.optimizer == "muon" else []
        adapters = [name for name, model in trainings.items() if model.kind == "lora"]
        adapters += ["reference"] if self.reference.lora is not None else []
        problems = [f"{name}.training.optimizer muon" for name in muon] + [f"{name} with lora" for name in adapters]
        if self.reference.responses.from_draft:
            problems.append(f"reference.responses.source {self.reference.responses.source}")
        problems += [f"on_policy of {draft.name}" for draft in (self.draft, *self.comparisons) if draft.on_policy]
        if self.target.layerskip.enabled:
            problems.append("target.layerskip")
        if self.eagle.enabled:
            problems.append("feature heads (eagle.kind), which are small,")
        if problems:
            raise UserError(
                f"trainer.strategy is fsdp, which spreads every weight over the devices; {', '.join(problems)} need "
                "whole ones: choose ddp, or change them"
            )
