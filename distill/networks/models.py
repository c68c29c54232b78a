"""Models for training: built or loaded, whole or in parts; where they are; adapters, optimisers, number formats."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LRScheduler
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GenerationConfig,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    get_scheduler,
)

from decode.errors import UserError
from decode.measure.machine import describe
from decode.models.open import load_config, load_model, stop_ids
from distill.config.base import Attention, Values
from distill.config.models import Architecture, LoraSettings, ModelSettings, TrainingSettings

# -- built or loaded ---------------------------------------------------------------------------------------------------


def config_for(shape: Architecture, vocab: int, tokenizer: PreTrainedTokenizerBase | None = None) -> PretrainedConfig:
    """Return the configuration of a model of this shape, with the tokenizer's special tokens.

    Raises:
        UserError: A family that transformers does not know, or fields that it refuses.
    """
    family, width, heads = shape.model_type, shape.hidden_size, shape.heads
    values: Values = {
        "hidden_size": width,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "intermediate_size": shape.intermediate_size or -(-width * 8 // 96) * 32,
        "max_position_embeddings": shape.positions,
        "tie_word_embeddings": True,
        "vocab_size": vocab,
        **{name: getattr(tokenizer, name, None) for name in ("bos_token_id", "eos_token_id", "pad_token_id")},
    }
    if family in ("gpt2", "codegen", "gptj"):  # the other names are mapped by transformers
        values["n_inner"] = values.pop("intermediate_size")
        del values["num_key_value_heads"]
        if family != "gpt2":
            values["rotary_dim"] = width // heads
    elif family.startswith(("qwen3", "gemma")):
        values["head_dim"] = width // heads
    try:
        return AutoConfig.for_model(family, **(values | shape.extra))
    except (ValueError, TypeError, StrictDataclassError) as error:
        first = str(error.__cause__ or error).strip().splitlines()[0]
        raise UserError(f"architecture.model_type {family!r} cannot be built: {first}") from error


@cache
def room(device: torch.device) -> int:
    """Return the bytes that a buffer which saves computing something twice may take: of a GPU an eighth of its rest."""
    return torch.cuda.mem_get_info(device)[0] // 8 if device.type == "cuda" else 1 << 28


def rows_at_once(vocab: int, device: torch.device) -> int:
    """Return of how many rows float32 logits of all ids, and a few results of theirs, may be in memory."""
    return max(64, room(device) // (16 * vocab))


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Draw random weights inside from the seed alone."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield


def build_model(
    shape: Architecture, vocab: int, tokenizer: PreTrainedTokenizerBase | None, seed: int
) -> PreTrainedModel:
    """Return a model with random float32 weights that depend on the seed alone."""
    config = config_for(shape, vocab, tokenizer)
    with seeded(seed):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    return model


def load_or_build(
    settings: ModelSettings, tokenizer: PreTrainedTokenizerBase, vocab: int, seed: int
) -> PreTrainedModel:
    """Return the model that a stage trains, in float32, with random weights or those of a folder or Hub repository."""
    if settings.model is None:
        return build_model(settings.architecture, vocab, tokenizer, seed)
    return load_model(settings.model, device="cpu", dtype="float32", trust_remote_code=settings.trust_remote_code)


def config_of(settings: ModelSettings, vocab: int) -> PretrainedConfig:
    """Return the configuration of a model that is not loaded; ``vocab`` is for one from scratch."""
    if settings.model is None:
        return config_for(settings.architecture, vocab)
    return load_config(settings.model, trust_remote_code=settings.trust_remote_code)


def empty_model(settings: ModelSettings, vocab: int) -> PreTrainedModel:
    """Return a model of which nothing is read or allocated; ``vocab`` is for one from scratch."""
    config, trust = config_of(settings, vocab), settings.trust_remote_code
    with torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, trust_remote_code=trust)
    return model


def checkpoint_layers(model: PreTrainedModel) -> None:
    """Make the model recompute its layers' activations in the backward pass.

    Raises:
        UserError: Its architecture does not support it.
    """
    if not model.supports_gradient_checkpointing:
        raise UserError(
            f"{type(model).__name__} has no gradient checkpointing: set trainer.gradient_checkpointing to false"
        )
    enable = getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)  # from 5.23 on
    enable({"use_reentrant": False})


def ready_to_save(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    """Return the model in evaluation mode on the CPU, with the special tokens that generation needs."""
    model = model.eval().requires_grad_(True).cpu()
    if model.generation_config is None or model.generation_config.eos_token_id is None:
        model.generation_config = GenerationConfig(
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
            bos_token_id=tokenizer.bos_token_id,
        )
    if len(ends := stop_ids(model, tokenizer)) > 1:
        model.generation_config.eos_token_id = ends
    return model


def use_attention(model: PreTrainedModel, name: Attention) -> None:
    """Set the implementation of attention; ``auto`` leaves the one that the model was loaded with.

    Raises:
        UserError: The model does not support it, or its package is not installed.
    """
    if name == "auto":
        return
    before, why = model.config._attn_implementation, ""
    try:
        model.set_attn_implementation(name)
    except (ImportError, ValueError) as error:
        why = str(error).strip().splitlines()[0]
    if why or model.config._attn_implementation == before != name:  # some models only warn
        raise UserError(
            f"trainer.attention is {name}, which {type(model).__name__} cannot use here "
            f"({why or f'it stays with {before}'}): choose auto or sdpa"
        )


# -- parts of a target -------------------------------------------------------------------------------------------------


@torch.no_grad()
def hollow_target(folder: str | Path, *, last: int = 1, trust_remote_code: bool = False) -> PreTrainedModel:
    """Return a target of which the first layer, the last ones and what is outside of the layers are read alone.

    The other weights are on the meta device, as are quantised ones. A target whose embedding or output head is
    quantised is loaded as a whole.

    Args:
        folder: Folder, Hub name or GGUF file of the target.
        last: Number of last layers that are read.
        trust_remote_code: Run model code that comes with it.

    Returns:
        The model in evaluation mode, in float32, on the CPU.

    Raises:
        UserError: It cannot be read.
    """
    trust: Values = {"trust_remote_code": trust_remote_code}
    depth = load_config(folder, **trust).num_hidden_layers
    layers = "|".join(map(str, (0, *range(depth - last, depth))))
    wanted = rf"^((?!\b\d+\.).)*($|\b({layers})\.)"  # no number in the name, or the first one is such a layer's
    model = load_model(folder, device="cpu", dtype="float32", wanted=wanted, **trust)
    if not any(part.weight.is_meta for part in (model.get_input_embeddings(), model.get_output_embeddings())):
        return model
    return load_model(folder, device="cpu", dtype="float32", **trust)


# -- training: low-rank adapters, optimisers ---------------------------------------------------------------------------


def adapted(model: PreTrainedModel, lora: LoraSettings, seed: int) -> Any:
    """Put a low-rank adapter into every linear layer of a model but its head, and freeze everything else.

    Args:
        model: Is changed in place.
        lora: Settings of the adapter.
        seed: Seed of its initial weights.

    Returns:
        peft's model around it, whose ``merge_and_unload`` gives the plain one.
    """
    from peft import LoraConfig, get_peft_model

    rank = lora.rank
    config = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear", task_type="CAUSAL_LM")
    with seeded(seed):
        return get_peft_model(model, config)


MOMENTUM, ITERATIONS = 0.95, 5  # of Muon
QUINTIC = 3.4445, -4.7750, 2.0315
"""Coefficients of x, x³ and x⁵, which bring singular values between 0.7 and 1.2 in five iterations."""
SCALE = 0.8
"""Root mean square of a step's elements at a learning rate of 1: heads learned more with it than with 0.2."""


class Muon(AdamW):
    """Muon (Jordan et al. 2024; scaled as in 2502.16982): matrices take orthogonal steps, others those of AdamW.

    The former are the parameters of groups with ``muon`` set.
    """

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Takes a step; ``closure`` computes the loss and its gradients."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        groups = self.param_groups
        for group in groups:
            for weight in group["params"] if group["muon"] else ():
                if weight.grad is not None:
                    self._move(weight, group)
        self.param_groups = [group for group in groups if not group["muon"]]
        super().step()
        self.param_groups = groups
        return loss

    def _move(self, weight: Tensor, group: dict[str, Any]) -> None:
        state, grad = self.state[weight], weight.grad
        assert grad is not None
        if not state:  # AdamW asks for the step of every state that it loads
            state |= {"step": torch.zeros(()), "momentum": torch.zeros_like(weight)}
        momentum = state["momentum"].mul_(MOMENTUM).add_(grad)  # Nesterov's
        weight.mul_(1 - group["lr"] * group["weight_decay"])
        step = orthogonal(grad + MOMENTUM * momentum)
        weight.sub_(step.to(weight.dtype), alpha=group["lr"] * SCALE * max(weight.shape) ** 0.5)


def orthogonal(matrix: Tensor) -> Tensor:
    """Returns about U·Vᵀ of a matrix U·Σ·Vᵀ, by Newton–Schulz iterations."""
    x = matrix.float() if matrix.shape[0] <= matrix.shape[1] else matrix.float().T
    x, (linear, cubic, fifth) = x / (x.norm() + 1e-7), QUINTIC
    for _ in range(ITERATIONS):
        gram = x @ x.T
        x = linear * x + (cubic * gram + fifth * gram @ gram) @ x
    return x if matrix.shape[0] <= matrix.shape[1] else x.T


def make_optimizer(model: nn.Module, settings: TrainingSettings, *, precision: str = "32-true") -> Optimizer:
    """Return the optimiser of the trainable parameters, with weight decay on the matrices inside the layers only.

    A language model's embeddings and output head are not decayed; a feature head's output head is. Muon moves neither
    of the two. AdamW is PyTorch's fused one, except under a mixed precision, where Lightning clips no gradients of it.
    ``precision`` is Lightning's name of the training's.
    """
    tables = [module.weight for module in model.modules() if isinstance(module, nn.Embedding)]
    if isinstance(model, PreTrainedModel):
        tables.append(model.get_output_embeddings().weight)
    undecayed, outputs = {id(table) for table in tables}, ("lm_head.weight", "markov_w2.weight")
    decay = settings.weight_decay
    groups: dict[tuple[float, bool], list[nn.Parameter]] = {(decay, False): [], (0.0, False): []}
    for name, weight in model.named_parameters():
        if weight.requires_grad:
            matrix = weight.ndim > 1 and id(weight) not in undecayed
            muon = settings.optimizer == "muon" and matrix and weight.ndim == 2 and not name.endswith(outputs)
            groups.setdefault((decay if matrix else 0.0, muon), []).append(weight)
    groups = {key: weights for key, weights in groups.items() if weights}
    given: list[Values] = [{"params": weights, "weight_decay": rate} for (rate, _), weights in groups.items()]
    if settings.optimizer in ("adamw", "muon"):
        kind, fused = AdamW if settings.optimizer == "adamw" else Muon, None if precision in AUTOCAST else True
        for group, (_, muon) in zip(given, groups):
            group |= {"muon": muon} if kind is Muon else {}
        return kind(given, lr=settings.lr, betas=(0.9, settings.beta2), fused=fused)
    kind, arguments = settings.optimizer_class()
    optimizer: Optimizer = kind(given, lr=settings.lr, **arguments)
    return optimizer


def make_schedule(optimizer: Optimizer, settings: TrainingSettings, steps: int) -> LRScheduler:
    """Return transformers' learning-rate schedule, which is stepped once per optimiser step.

    A constant one depends on the step alone; linear and cosine ones end at 0 after ``steps`` steps.
    """
    name = "constant_with_warmup" if settings.schedule == "constant" else settings.schedule
    schedule: LRScheduler = get_scheduler(name, optimizer, settings.warmup_steps, steps)
    return schedule


# -- number formats ----------------------------------------------------------------------------------------------------

AUTOCAST = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}
WEIGHTS = {"bf16-true": "bfloat16", "16-true": "float16", "64-true": "float64"}


def weights_dtype(precision: str) -> str:
    """Return the number format that Lightning gives a model's weights."""
    return WEIGHTS.get(precision, "float32")


def multiplies_bfloat16(device: torch.device) -> bool:
    """Return whether products in bfloat16 are faster than in float32 on the device.

    Without instructions for them they are many times slower. Those of AVX-512 took twice float32's time on a Xeon
    (Emerald Rapids): Intel's fast ones are those of AMX, which virtual machines often hide.
    """
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    fast_avx512 = torch.cpu._is_avx512_bf16_supported() and "Intel" not in describe()["cpu"]
    return device.type == "cpu" and (fast_avx512 or torch.cpu._is_amx_tile_supported())


def forward_precision(precision: str, device: torch.device) -> torch.autocast:
    """Return a context in which forward passes compute as a training step of this precision does."""
    return torch.autocast(device.type, AUTOCAST.get(precision), enabled=precision in AUTOCAST)


def autocast_to_bfloat16(device: torch.device) -> bool:
    """Return whether matrix products are computed in bfloat16, so that the gradients of the output head may be, too.

    This does not hold for float16, where gradients are scaled into its range only after the loss.
    """
    return torch.is_autocast_enabled(device.type) and torch.get_autocast_dtype(device.type) == torch.bfloat16


@contextmanager
def loss_precision(device: torch.device) -> Iterator[None]:
    """Disable autocast inside, so that logits and losses are float32 if the weights are.

    The products that give logits may round their inputs, not their sums or results: on a GPU to TF32, whose mantissa is
    longer than that of the hidden states' half precision; on a CPU to bfloat16.
    """
    if not torch.is_autocast_enabled(device.type):
        yield
        return
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium" if device.type == "cpu" else "high")
    try:
        with torch.autocast(device.type, enabled=False):
            yield
    finally:
        torch.set_float32_matmul_precision(before)
