"""Settings of training: Lightning's trainer, and the length, batches and optimiser of each stage."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from decode.core.errors import UserError


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
