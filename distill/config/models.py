"""Settings of target and student, and of their training."""

import inspect
import pkgutil
from dataclasses import dataclass, field
from typing import Any, Literal, cast

from jsonargparse.typing import ClosedUnitInterval, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from decode.errors import UserError
from distill.config.base import Values, refuse
from distill.config.kinds import kind_of


@dataclass
class TrainingSettings:
    """How long, on what batches and with which optimiser a model is trained."""

    steps: PositiveInt | None = None
    """Optimiser steps; null: epochs decides. Give one of the two."""
    epochs: PositiveFloat | None = None
    """Passes over the training examples; null: steps decides."""
    examples: PositiveInt | None = None
    """The first examples alone are trained on: drafts of several numbers show what more texts would give. null: all."""
    batch_size: PositiveInt = 16
    """Examples per optimiser step, over all devices. Small batches learn more per example, large ones are faster."""
    optimizer: str | Values = "adamw"
    """adamw; muon, which moves the matrices inside layers by orthogonal steps and learns more in few; or a class such
    as {class_path: bitsandbytes.optim.AdamW8bit, init_args: {percentile_clipping: 95}}."""
    lr: PositiveFloat = 1e-3
    """Peak learning rate."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Learning rate after the warm-up: constant, or falling to 0 at the last step (linear, cosine), to end lower."""
    warmup_steps: NonNegativeInt = 0
    """Steps over which the learning rate rises from 0."""
    weight_decay: NonNegativeFloat = 0.1
    """Weight decay of matrices; vectors and a language model's embeddings and output head are not decayed."""
    beta2: ClosedUnitInterval = 0.999
    """Decay of AdamW's second moment: 0.999 as usual; 0.95 adapts faster in short runs."""
    length_bucket: PositiveInt = 16
    """Batches that are drawn together and cut from a list sorted by length, for less padding. 1: all are random."""

    def steps_for(self, examples: int, where: str = "training.") -> int:
        """Return the optimiser steps of a training on a number of examples; a warm-up that takes all is refused."""
        steps = self.steps or max(1, round((self.epochs or 0) * examples / self.batch_size))
        told = f"and the training has {steps} steps, so that lr is never reached: lower it, or train for longer"
        refuse(self, (self.warmup_steps >= steps, "warmup_steps", told), where=where)
        return steps

    def optimizer_class(self) -> tuple[Any, Values]:
        """Return the class of an optimiser other than these two, and its arguments beside the learning rate."""
        chosen = cast(Values, self.optimizer)
        return pkgutil.resolve_name(chosen["class_path"]), chosen.get("init_args", {})

    def validate(self, where: str) -> None:
        """Check that the length of the training is given exactly once, and that the optimiser takes its arguments."""
        both = (self.steps is None) == (self.epochs is None)
        refuse(self, (both, "steps", f"and {where}.epochs {self.epochs}: give exactly one of them"), where=f"{where}.")
        if self.steps:
            self.steps_for(0, f"{where}.")
        try:
            if self.optimizer not in ("adamw", "muon"):
                kind, arguments = self.optimizer_class()
                inspect.signature(kind).bind([], lr=self.lr, **arguments)
        except (ImportError, AttributeError, TypeError, KeyError, ValueError) as error:
            expected = f"expected adamw, muon or {{class_path: torch.optim.Adafactor, init_args: {{d: 2.0}}}} ({error})"
            raise UserError(f"{where}.optimizer is {self.optimizer!r}, {expected}") from error


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
    """Attention heads; their number has to divide hidden_size."""
    intermediate_size: PositiveInt | None = None
    """Width inside the MLP. null: 8/3 of hidden_size, rounded up to a multiple of 32."""
    positions: PositiveInt = 512
    """Longest text that the model is made for, in tokens."""
    extra: Values = field(default_factory=dict)
    """Further fields of the family's configuration class, such as {num_key_value_heads: 2}."""


@dataclass
class LoraSettings:
    """Low-rank adaptation through peft; the adapter is merged into the weights at the end."""

    rank: PositiveInt = 16
    """Rank of the update of every linear layer but the head. Higher learns more and takes more memory."""


@dataclass
class LayerSkipSettings:
    """LayerSkip's recipe: it lets the model's first layers draft for the whole (see draftsmith probe)."""

    enabled: bool = False
    """Train the target with this recipe: a given one (finetune, lora) on its answers where it writes the responses."""
    dropout: ClosedUnitInterval = 0.1
    """Chance that a sample skips the last layer, falling exponentially to 0 at the first. The paper has 0.1 to 0.2."""
    early_exit_scale: NonNegativeFloat = 1.0
    """Weight of each early exit against the last layer. Higher makes drafts better and the model a little worse."""
    rotation: PositiveInt | None = None
    """Step t trains the exits t, t + rotation, ... null: the number of exits, so one a step. More costs less."""


@dataclass
class ModelSettings:
    """Where a model comes from and what is done to it before distillation."""

    kind: str = "scratch"
    """scratch (random weights, then trained), finetune, lora, as_is, or for the student cut: layers of the target."""
    model: str | None = None
    """Folder, GGUF file or Hub name (Qwen/Qwen3-8B@main: with a branch, tag or commit); not for scratch and cut."""
    architecture: Architecture = field(default_factory=Architecture)
    training: TrainingSettings = field(default_factory=TrainingSettings)
    """Next-token training of the model; ignored for as_is."""
    lora: LoraSettings = field(default_factory=LoraSettings)
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "float32"
    """Number format of a frozen model. auto: bfloat16 where products in it are faster, else float32."""
    trust_remote_code: bool = False
    """Run Python code that a Hub repository brings along. Only for repositories that you have read."""

    @property
    def trained(self) -> bool:
        """Whether it is trained on next tokens."""
        return bool(self.training.steps or self.training.epochs) if self.kind == "cut" else self.kind != "as_is"


@dataclass
class TargetSettings(ModelSettings):
    """The target: the large model whose decoding is to become faster."""

    layerskip: LayerSkipSettings = field(default_factory=LayerSkipSettings)
    round_to: Literal["float16", "bfloat16"] | None = None
    """Round the weights of a target with kind as_is to 16 bits (float16 changes a weight by 0.05 % at most)."""


@dataclass
class BlockSettings:
    """Shape and training of a block head (student.kind dflash, dspark or dflash2)."""

    layers: PositiveInt = 2
    """Decoder layers. Published heads have 5; they are read once a block, so that a few more cost little."""
    size: PositiveInt = 8
    """Slots of a block, the last verified token's included. Serve as many as were trained, or fewer."""
    target_layers: list[NonNegativeInt] = field(default_factory=list)
    """The target's layers, from 0, that the head reads. Empty: one for each of its layers, at least 3, as published."""
    anchors: PositiveInt = 32
    """Blocks of a text that are trained at a step, drawn anew each time. Published: 512 for long texts."""
    markov_rank: PositiveInt | None = None
    """Rank of what scores tokens by those before. null: 64. Published: 256."""
    window: PositiveInt | None = None
    """Tokens that a slot sees, itself included, at least a block. null: all. SGLang does not read it."""
    causal: bool = False
    """A slot sees those slots alone that stand before it (JetSpec). Published heads see the whole block."""


@dataclass
class StudentSettings(ModelSettings):
    """What every draft starts from: a language model of any kind, or a head on the target's hidden states.

    Of a head, model names one to start from, ours or a published one: of its kind, or dflash for dspark and dflash2.
    """

    kind: str = "scratch"
    """A language model (scratch to cut) or a head: eagle (on the target's last state), eagle3 (on three), dflash
    (drafts a block), dspark, dflash2 (a block whose tokens depend on each other: docs/heads.md), mtp (the target's
    next-token layers)."""
    layers: PositiveInt | list[NonNegativeInt] = 1
    """cut: number of the target's layers that are kept, spread evenly, or a list of layers, from 0."""
    draft_vocab: PositiveInt | None = None
    """Number of tokens that can be drafted, the most frequent labels (FR-Spec). null: all. Engines read it of heads."""
    unroll: PositiveInt | None = None
    """Drafting steps trained at once. Heads: null is as published, 1 for eagle, 7 for eagle3, 3 for mtp. Language
    models: null drafts token by token; 2 or more, such as 8, draft in one forward with mask tokens (PARD)."""
    norms: bool = False
    """true: a new eagle3 norms captured states, and those fed back (EAGLE-3.1). llama.cpp does not read such heads."""
    block: BlockSettings = field(default_factory=BlockSettings)

    @property
    def draft(self) -> Any:
        """The `distill.kinds.kind.Kind` of the draft."""
        return kind_of(self.kind)

    @property
    def steps(self) -> int:
        """Drafting steps trained at once, of a block head its drafted tokens; 1 of an ordinary language model."""
        return int(self.draft.steps(self))

    @property
    def trained(self) -> bool:
        """Whether it is trained on next tokens before it is distilled."""
        return not self.draft.head and super().trained
