"""Settings of language models: where they come from, their shape, how they are trained on next tokens."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from decode.core.errors import UserError
from distill.models.layerskip import LayerSkipSettings

Kind = Literal["scratch", "finetune", "lora", "as_is", "cut"]


@dataclass
class Architecture:
    """Shape of a model that is trained from scratch, in terms that hold for every model family."""

    model_type: str = "llama"
    """Model family as transformers names it: llama, gpt_neox, phi, qwen3, ..."""
    hidden_size: int = 64
    """Width."""
    layers: int = 1
    """Depth. Decoding time grows with it, so a draft wants one or two and a target of a given size many."""
    heads: int = 2
    """Attention heads; has to divide hidden_size."""
    kv_heads: int | None = None
    """Key and value heads (grouped-query attention); null: as many as heads."""
    intermediate_size: int | None = None
    """Width inside the MLP; null: 8/3 of hidden_size, rounded up to a multiple of 32."""
    positions: int = 512
    """Longest text that the model is made for, in tokens."""
    tie_embeddings: bool = True
    """One matrix for embedding and head: fewer parameters, which is what small models with a vocabulary need."""
    extra: dict[str, Any] = field(default_factory=dict)
    """Further fields of the family's configuration class, passed on as they are."""


@dataclass
class TrainingSettings:
    """How long, on what batches and with which optimiser a model is trained."""

    steps: int | None = None
    """Optimiser steps; null: epochs decides. Give one of the two."""
    epochs: float | None = None
    """Passes over the training examples; null: steps decides."""
    batch_size: int = 16
    """Examples per optimiser step, over all devices. Small batches learn more per example, large ones use more of
    the machine."""
    optimizer: Literal["adamw", "muon"] = "adamw"
    """adamw; or muon for the weight matrices inside the layers with adamw for the rest: learns more per step when
    training from scratch, costs a few small matrix products per matrix and step."""
    lr: float = 1e-3
    """Peak learning rate (muon's updates are scaled to the size of adamw's, so one value serves both)."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Learning rate after the warm-up: constant, or falling to 0 at the last step (linear, cosine). Falling ones
    end lower, constant ones can be continued."""
    warmup_steps: int = 0
    """Steps over which the learning rate rises from 0."""
    weight_decay: float = 0.1
    """Decoupled weight decay of weight matrices; vectors and embeddings have none."""
    beta2: float = 0.999
    """Adam's second moment: 0.999 as usual; 0.95 adapts faster in short runs."""
    length_bucket: int = 16
    """Batches drawn together and cut from a list sorted by length: less padding. 1: none, every batch random."""
    prompt_loss: bool = False
    """Next-token loss on the prompt as well (for the cross-entropy stages only)."""

    def validate(self, where: str) -> None:
        """Check values and that the length of the training is given exactly once."""
        if (self.steps is None) == (self.epochs is None):
            both = "both are set" if self.steps is not None else "neither is set"
            raise UserError(f"{where}.steps and {where}.epochs: {both}; give exactly one of them")
        length = self.steps if self.steps is not None else self.epochs
        for key, value in (("steps or epochs", length), ("batch_size", self.batch_size), ("lr", self.lr)):
            if value is None or value <= 0:
                raise UserError(f"{where}.{key} is {value}, wanted a number above 0")
        if self.length_bucket < 1:
            raise UserError(f"{where}.length_bucket is {self.length_bucket}, wanted 1 (none) or more")
        if not 0 < self.beta2 < 1:
            raise UserError(f"{where}.beta2 is {self.beta2}, wanted a number between 0 and 1, such as 0.999")
        if self.warmup_steps < 0 or self.weight_decay < 0:
            raise UserError(f"{where}.warmup_steps and {where}.weight_decay must not be negative")


@dataclass
class LoraSettings:
    """Low-rank adaptation through peft; the adapter is merged into the weights at the end."""

    rank: int = 16
    """Rank of the update. Higher learns more and takes more memory."""
    alpha: int = 32
    """Scale of the update (alpha / rank)."""
    dropout: float = 0.0
    """Dropout on the adapter's input."""
    modules: list[str] = field(default_factory=list)
    """Names of the layers that get an adapter; empty: every linear layer but the head."""

    def validate(self, where: str) -> None:
        """Check the rank."""
        if self.rank < 1:
            raise UserError(f"{where}.rank is {self.rank}, wanted 1 or more")


@dataclass
class ModelSettings:
    """Where a model comes from and what is done to it before distillation."""

    kind: Kind = "scratch"
    """scratch (random weights, then trained), finetune (all weights), lora, as_is, or, for the draft, cut: some of the
    target's own layers, trained on next tokens only if training.steps or training.epochs is set."""
    model: str | None = None
    """Folder or Hub name to start from; not for scratch and cut."""
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
        origins = {"scratch": "no model (it starts from random weights)", "cut": "no model (it is cut from the target)"}
        if (self.kind in origins) != (self.model is None):
            wanted = origins.get(self.kind, "a folder or Hub name")
            raise UserError(f"{where}.kind is {self.kind} and {where}.model is {self.model!r}: wanted {wanted}")
        if self.trained:
            self.training.validate(f"{where}.training")
        shape = self.architecture
        if self.kind == "scratch" and (min(shape.hidden_size, shape.layers, shape.heads) < 1):
            raise UserError(f"{where}.architecture: hidden_size, layers and heads have to be 1 or more")
        if self.kind == "scratch" and shape.hidden_size % shape.heads:
            raise UserError(
                f"{where}.architecture.hidden_size is {shape.hidden_size}, which {shape.heads} heads do not divide"
            )
        if self.kind == "lora":
            self.lora.validate(f"{where}.lora")

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

    def validate(self, where: str) -> None:
        """Check the recipe, then as for `ModelSettings`."""
        if self.kind == "cut":
            raise UserError(f"{where}.kind is cut, which is for initial: a draft is cut from the target")
        super().validate(where)
        self.layerskip.validate(f"{where}.layerskip")


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
