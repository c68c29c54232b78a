"""Settings of training: Lightning's trainer, and the length, batches and optimiser of each stage."""

from __future__ import annotations

import copy
import difflib
from dataclasses import dataclass, field
from typing import Any, Literal, cast

from decode.core.errors import UserError

PROFILERS = ("simple", "advanced", "pytorch")

OWN = {
    "accelerator": "trainer.accelerator",
    "accumulate_grad_batches": "trainer.accumulate",
    "callbacks": "trainer.callbacks",
    "devices": "trainer.devices",
    "gradient_clip_val": "trainer.gradient_clip",
    "log_every_n_steps": "trainer.log_every",
    "logger": "tracker.kind",
    "max_epochs": "the stage's training.epochs",
    "max_steps": "the stage's training.steps",
    "num_nodes": "trainer.num_nodes",
    "plugins": "trainer.precision or trainer.strategy",
    "precision": "trainer.precision",
    "profiler": "trainer.profiler",
    "strategy": "trainer.strategy",
    "val_check_interval": "trainer.validate_every",
}
"""Arguments of Lightning's trainer that have settings of their own."""


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
    """Steps between validations. The best validated weights are kept: largest alpha for drafts, smallest loss for
    models trained on next tokens."""
    checkpoint_every: int | None = None
    """Steps between the checkpoints that a killed run continues from, so what a kill costs at most; null: one after
    every validation. The two newest are kept."""
    validation_examples: int = 128
    """Validation examples used for it."""
    log_every: int = 20
    """Steps between logged values. Reading a value waits for the device, so small models want it rare."""
    callbacks: list[dict[str, Any]] = field(default_factory=list)
    """Further Lightning callbacks of every stage, as in LightningCLI: [{class_path: EarlyStopping, init_args: {monitor:
    validation_loss, patience: 3}}]. What can be monitored: validation_loss, validation_accuracy (next tokens),
    validation_alpha, validation_agreement (distillation), loss."""
    profiler: str | dict[str, Any] | None = None
    """Lightning's profiler: simple, advanced, pytorch, or a class_path with init_args."""
    extra: dict[str, Any] = field(default_factory=dict)
    """Further arguments of lightning.Trainer, passed on as they are, such as {deterministic: true}."""

    def validate(self) -> None:
        """Check counts, and that callbacks, profiler and further arguments can be made.

        Raises:
            UserError: Naming the key, the value seen and the values expected.
        """
        if self.checkpoint_every is not None and self.checkpoint_every < 1:
            raise UserError(f"trainer.checkpoint_every is {self.checkpoint_every}, expected 1 or more, or null")
        self.callback_instances()
        self.profiler_instance()
        if self.extra:
            self._check_extra()
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

    def callback_instances(self) -> list[Any]:
        """New instances of the callbacks: a stage must not see what another one left in them."""
        if not self.callbacks:
            return []
        from lightning.pytorch.callbacks import Callback

        return cast("list[Any]", _instances("trainer.callbacks", list[Callback], self.callbacks))

    def profiler_instance(self) -> Any:
        """The profiler, or its name, which Lightning's trainer knows."""
        if not isinstance(self.profiler, dict):
            if self.profiler not in (None, *PROFILERS):
                raise UserError(
                    f"trainer.profiler is {self.profiler!r}, expected {', '.join(PROFILERS)}, or a class_path with "
                    "init_args"
                )
            return self.profiler
        from lightning.pytorch.profilers import Profiler

        return _instances("trainer.profiler", Profiler, self.profiler)

    def _check_extra(self) -> None:
        import inspect

        from lightning import Trainer

        known = set(inspect.signature(Trainer.__init__).parameters) - {"self"}
        for key in self.extra:
            if key in OWN:
                raise UserError(f"trainer.extra.{key}: set {OWN[key]} instead")
            if key not in known:
                near = difflib.get_close_matches(key, known - OWN.keys(), 1)
                hint = f"; did you mean {near[0]}?" if near else ""
                raise UserError(f"trainer.extra.{key} is no argument of lightning.Trainer{hint}")


def _instances(where: str, kind: Any, value: Any) -> Any:
    """Objects from ``class_path`` and ``init_args``, as LightningCLI makes them.

    Raises:
        UserError: No such class, or arguments that it does not take.
    """
    from jsonargparse import ArgumentError, ArgumentParser

    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--value", type=kind)
    try:
        return parser.instantiate_classes(parser.parse_object({"value": copy.deepcopy(value)})).value
    except (ArgumentError, ValueError, TypeError, ImportError) as error:
        raise UserError(f"{where} is {value}: {error}") from error


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
    """Loss on the prompt as well: on its next tokens, or in a distillation on the target's distributions there, which
    cost nothing where the target reads the prompt anyway. Validation is of the responses in any case."""

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
