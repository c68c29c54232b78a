"""Settings of training: Lightning's trainer, and the length, batches and optimiser of each stage."""

import copy
import difflib
from dataclasses import dataclass, field
from typing import Any, Literal, cast

from jsonargparse.typing import NonNegativeFloat, NonNegativeInt, OpenUnitInterval, PositiveFloat, PositiveInt

from decode.core.errors import UserError

Attention = Literal["auto", "eager", "sdpa", "flex_attention", "flash_attention_2", "flash_attention_3"]
Compile = Literal["none", "default", "reduce-overhead", "max-autotune"]
CompileLoss = Literal["auto", "on", "off"]
Precision = Literal[
    "auto", "32-true", "bf16-mixed", "16-mixed", "bf16-true", "16-true", "64-true", "32", "bf16", "16", "64",
    "transformer-engine", "transformer-engine-float16",
]  # fmt: skip

SHARDED = ("fsdp", "hsdp")
"""Strategies that spread a model's weights over devices."""
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
    num_nodes: PositiveInt = 1
    """Machines."""
    strategy: str = "auto"
    """auto; ddp: a copy of the model on every device; fsdp: weights, gradients and optimiser state spread over the
    devices, for models too large for one; hsdp: over those of a machine, a copy on each of num_nodes, where the network
    between machines is slow; or another name that Lightning knows."""
    accumulate: PositiveInt = 1
    """Micro-batches per optimiser step: batch_size / accumulate examples at a time, over all devices, in less memory.
    The result is the same, except that with draft.scope microbatch AdaSPEC selects the top k within each
    micro-batch; draft.scope global makes the selection independent of it."""
    packing: PositiveInt | None = None
    """Several training examples in a row of about so many tokens, which do not see each other: the same losses and
    gradients, but for rounding, with little padding where a row holds eight examples or more. Attention over a row
    costs its length squared; FlashAttention, which does not look between examples, takes a batch as one row.
    null: batches of examples of similar length, as for feature heads, LayerSkip and models whose attention cannot tell
    examples apart."""
    attention: Attention = "auto"
    """How draft, target and reference compute attention, by transformers' name; auto: sdpa where the model has it.
    flash_attention_2 reads packed rows without a mask, and needs a GPU, the package flash-attn and bf16 precision."""
    compile: Compile = "none"
    """torch.compile's mode for the layers of the model that is trained. Worth its minute on a GPU; feature heads are
    not compiled."""
    tf32: bool = False
    """Let float32 products of a GPU round their inputs to TF32 (10 bits of mantissa): several times faster."""
    precision: Precision = "32-true"
    """Lightning's precision: 32-true; bf16-mixed on GPUs and CPUs that multiply in bfloat16 (losses stay in float32);
    auto: bf16-mixed there, elsewhere 32-true."""
    fused_loss: bool = True
    """Compute the distillation loss in chunks of rows, with its gradient in closed form and only for the selected
    tokens: several times faster, and memory of a chunk instead of all tokens times the vocabulary. false: the plain
    form, by autograd on whole logits, to check it against."""
    compile_loss: CompileLoss = "auto"
    """Compile the kernels of the fused loss (fused_loss) with torch.compile: fewer reads and writes of logits. auto: on
    a GPU only. on: on a CPU too, which needs a C++ compiler and about a minute; worthwhile for large
    vocabularies. The result is equal up to rounding."""
    gradient_checkpointing: bool = False
    """Keep of each layer's activations only its input, and compute the others again in the backward pass: the same
    gradients in a fraction of the memory, for about a third more time. For targets of billions of parameters and long
    texts; feature heads, of one layer, are trained without."""
    gradient_clip: NonNegativeFloat = 1.0
    """Largest norm of the gradient; 0: not clipped."""
    validate_every: PositiveInt = 100
    """Steps between validations. The best validated weights are kept: largest alpha for drafts, smallest loss for
    models trained on next tokens."""
    checkpoint_every: PositiveInt | None = None
    """Steps between the checkpoints that a killed run continues from, so what a kill costs at most; null: one after
    every validation. The two newest are kept."""
    checkpoint_background: bool = False
    """Write checkpoints in a background thread, from a copy of the weights and the optimiser state. The copy is on the
    device; under fsdp and hsdp each process copies its shard to CPU memory."""
    validation_examples: PositiveInt = 128
    """Validation examples used at each validation during training (see validate_every)."""
    log_every: PositiveInt = 20
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
        """Check strategy, callbacks, profiler and further arguments; a `UserError` names the key."""
        if self.strategy == "hsdp" and self.num_nodes < 2:
            raise UserError(
                "trainer.strategy is hsdp, a copy on each of several machines, and trainer.num_nodes is 1: set it, or "
                "choose fsdp"
            )
        self.callback_instances()
        self.profiler_instance()
        if self.extra:
            self._check_extra()

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
    """Objects from ``class_path`` and ``init_args``, as LightningCLI makes them."""
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
    prompt_loss: bool = False
    """Loss on the prompt as well: on its next tokens, or in a distillation on the target's distributions there, which
    cost nothing where the target reads the prompt anyway. Validation is of the responses in any case."""

    @property
    def uses_muon(self) -> bool:
        """Whether muon updates the weight matrices."""
        return self.optimizer.startswith("muon")

    def validate(self, where: str) -> None:
        """Check that the length of the training is given exactly once."""
        if (self.steps is None) == (self.epochs is None):
            both = "both are set" if self.steps is not None else "neither is set"
            raise UserError(f"{where}.steps and {where}.epochs: {both}; give exactly one of them")
