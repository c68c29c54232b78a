"""Models for training: built from a shape, or loaded from a folder or the Hub; adapters; number formats."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from transformers import (
    AutoModelForCausalLM,
    GenerationConfig,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.quantizers import AutoHfQuantizer, AutoQuantizationConfig

from decode.errors import UserError
from decode.models.loading import config_for, load_config, load_model, unreadable
from decode.models.wrapped import pinned
from distill.config.run import Settings
from distill.config.training import Architecture, Attention, LoraSettings, ModelSettings

HUB_FILES = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja", "*.py"]
"""Files of a Hub repository that a model and its tokenizer need."""


def build_model(
    shape: Architecture, vocab: int, tokenizer: PreTrainedTokenizerBase | None, seed: int
) -> PreTrainedModel:
    """Returns a model with random float32 weights that depend on the seed alone."""
    config = config_for(**vars(shape), vocab=vocab, tokenizer=tokenizer)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        try:
            model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(f"{shape.model_type} has no causal language model: {error}") from error
    return model


def load_or_build(
    settings: ModelSettings, tokenizer: PreTrainedTokenizerBase, vocab: int, seed: int
) -> PreTrainedModel:
    """Returns the model that a stage trains, in float32, with random weights or those of a folder or Hub repository."""
    if settings.model is None:
        return build_model(settings.architecture, vocab, tokenizer, seed)
    return load_model(settings.model, device="cpu", dtype="float32", trust_remote_code=settings.trust_remote_code)


def source_folder(model: str) -> Path:
    """Returns the folder of a model that is used unchanged; a Hub repository is downloaded to the Hub's cache.

    Raises:
        UserError: The model does not exist, or the Hub cannot be reached.
    """
    if Path(model).is_dir():
        return Path(model)
    name, revision = pinned(model)
    try:
        return Path(snapshot_download(name, allow_patterns=HUB_FILES, revision=revision.get("revision")))
    except (OSError, ValueError) as error:  # those of the Hub's client among them
        raise unreadable(model, "model", error) from error


def count_parameters(settings: ModelSettings, vocab: int) -> int:
    """Returns the number of parameters of a model without allocating it."""
    config = config_of(settings, vocab)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=settings.trust_remote_code)
    return sum(parameter.numel() for parameter in model.parameters())


def config_of(settings: ModelSettings, vocab: int) -> PretrainedConfig:
    """Returns the configuration of a model that is not loaded; ``vocab`` is for one from scratch."""
    if settings.model is None:
        return config_for(**vars(settings.architecture), vocab=vocab, tokenizer=None)
    return load_config(settings.model, trust_remote_code=settings.trust_remote_code)


def checkpoint_layers(model: PreTrainedModel) -> None:
    """Makes the model recompute its layers' activations in the backward pass.

    Raises:
        UserError: Its architecture does not support it.
    """
    if not model.supports_gradient_checkpointing:
        raise UserError(
            f"{type(model).__name__} has no gradient checkpointing: set trainer.gradient_checkpointing to false"
        )
    if hasattr(model, "activation_checkpointing_enable"):  # its name from transformers 5.23 on
        model.activation_checkpointing_enable({"use_reentrant": False})
    else:
        model.gradient_checkpointing_enable({"use_reentrant": False})


def ready_to_save(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    """Returns the model in evaluation mode on the CPU, with the special tokens that generation needs."""
    model = model.eval().requires_grad_(True).cpu()
    if model.generation_config is None or model.generation_config.eos_token_id is None:
        model.generation_config = GenerationConfig(
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
            bos_token_id=tokenizer.bos_token_id,
        )
    return model


def use_attention(model: PreTrainedModel, name: Attention) -> None:
    """Sets the implementation of attention; ``auto`` leaves the one that the model was loaded with.

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


def check_attention(config: PretrainedConfig, name: Attention) -> None:
    """Raises the same error for a model that is not loaded."""
    with torch.device("meta"):
        use_attention(AutoModelForCausalLM.from_config(config), name)


def quantization_config(wanted: dict[str, Any], device: str | torch.device, key: str, instead: str) -> Any:
    """Returns the quantisation configuration for ``from_pretrained``.

    Args:
        wanted: The setting, such as ``{quant_method: bitsandbytes, load_in_4bit: true}``.
        device: Device of the weights.
        key: Name of the setting.
        instead: What to set in its place.

    Raises:
        UserError: The method is unknown, its package is not installed, or the device does not support it.
    """
    try:
        config = AutoQuantizationConfig.from_dict(wanted)
        made = AutoHfQuantizer.from_config(config, pre_quantized=False)
        made.validate_environment(device_map={"": device})
    except (ImportError, ValueError, TypeError, KeyError, AssertionError, RuntimeError) as error:
        why = f"{type(error).__name__}: {error}".strip().splitlines()[0]
        raise UserError(
            f"{key} is {wanted}, which cannot be used here ({why}): install what is missing, or leave it out and set "
            f"{instead}"
        ) from error
    return config


# -- low-rank adapters (LoRA), on frozen weights that may be in bfloat16 or quantised (QLoRA) -------------------------


def check_base(lora: LoraSettings, precision: str, device: torch.device) -> Any:
    """Returns transformers' configuration of the frozen weights' quantisation, or None.

    Raises:
        UserError: The frozen weights cannot have this format with this precision, or on this device.
    """
    if lora.narrow and precision != "bf16-mixed":
        raise UserError(
            f"lora.base is {lora.base}, lora.quantization {lora.quantization}, and the training's precision is "
            f"{precision}: products with such weights need bf16-mixed (trainer.precision)"
        )
    if lora.quantization is None:
        return None
    return quantization_config(lora.quantization, device, "lora.quantization", "lora.base to bfloat16")


class Adapter:
    """A model of which only a low-rank adapter is trained. The adapter's initial weights depend on the seed.

    Args:
        whole: The model in float32, into which the adapter is merged at the end.
        lora: Settings of the adapter.
        seed: Seed of its initial weights.
        precision: Lightning's name of the training's precision.
        device: Device of the training.
        load: Loads the same model there, with further options of ``from_pretrained``.

    Attributes:
        model: The model to train: ``whole``, or a copy whose adapted layers are in bfloat16 or quantised.

    Raises:
        UserError: The frozen weights cannot have this format (see `check_base`).
    """

    def __init__(
        self,
        whole: PreTrainedModel,
        lora: LoraSettings,
        seed: int,
        precision: str,
        device: torch.device,
        load: Callable[..., PreTrainedModel],
    ) -> None:
        from peft import LoraConfig, get_peft_model
        from peft.tuners.lora import LoraLayer

        quantized = check_base(lora, precision, device)
        self.whole = self.model = whole
        if quantized is not None:
            self.model = load(quantization_config=quantized).train()
        elif lora.narrow:
            self.model = copy.deepcopy(whole)
        if lora.narrow:
            whole.cpu()
        config = LoraConfig(
            r=lora.rank,
            lora_alpha=2 * lora.rank,
            target_modules="all-linear",
            task_type="CAUSAL_LM",
        )
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.adapted = get_peft_model(self.model, config)
        named = self.model.named_modules()
        self.layers: dict[str, Any] = {name: layer for name, layer in named if isinstance(layer, LoraLayer)}
        if lora.base == "bfloat16" and quantized is None:
            for layer in self.layers.values():
                layer.get_base_layer().to(torch.bfloat16)

    @torch.no_grad()
    def merged(self) -> PreTrainedModel:
        """Returns the float32 model with the adapter merged into its weights."""
        if self.model is self.whole:
            merged: PreTrainedModel = self.adapted.merge_and_unload()
            return merged
        for name, layer in self.layers.items():
            weight = self.whole.get_submodule(name).weight
            weight += layer.get_delta_weight("default").to(weight)
        return self.whole


# -- number formats ---------------------------------------------------------------------------------------------------

AUTOCAST = {"bf16": torch.bfloat16, "bf16-mixed": torch.bfloat16, "16": torch.float16, "16-mixed": torch.float16}
WEIGHTS = {"bf16-true": "bfloat16", "16-true": "float16", "64": "float64", "64-true": "float64"}


def weights_dtype(precision: str) -> str:
    """Returns the number format that Lightning gives a model's weights."""
    return WEIGHTS.get(str(precision), "float32")


def multiplies_bfloat16(device: torch.device) -> bool:
    """Returns whether the device has instructions for products in bfloat16; without them they are many times slower."""
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    return device.type == "cpu" and (torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())


def choose_number_formats(settings: Settings, device: torch.device) -> None:
    """Replaces ``auto`` in a run's settings: bfloat16 where the device multiplies in it, elsewhere float32."""
    fast, teacher = multiplies_bfloat16(device), settings.teacher
    if settings.trainer.precision == "auto":
        settings.trainer.precision = "bf16-mixed" if fast else "32-true"
    if teacher.responses.dtype == "auto":
        teacher.responses.dtype = "bfloat16" if fast else None
    if teacher.signal_autocast == "auto":
        teacher.signal_autocast = fast


@contextmanager
def forward_precision(precision: str, device: torch.device) -> Iterator[None]:
    """Makes forward passes inside compute as a training step of this precision does."""
    dtype = AUTOCAST.get(str(precision))
    with torch.autocast(device.type, dtype, enabled=dtype is not None):
        yield


def autocast_to_bfloat16(device: torch.device) -> bool:
    """Returns whether matrix products are computed in bfloat16, so that the gradients of the output head may be, too.

    This does not hold for float16, where gradients are scaled into its range only after the loss.
    """
    return torch.is_autocast_enabled(device.type) and torch.get_autocast_dtype(device.type) == torch.bfloat16


@contextmanager
def loss_precision(device: torch.device) -> Iterator[None]:
    """Disables autocast inside, so that logits and losses are float32 if the weights are.

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
