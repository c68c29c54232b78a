"""Low-rank adapters (LoRA) by peft, on frozen weights that may be in bfloat16 or quantised (QLoRA)."""

import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
from transformers import PreTrainedModel

from decode.errors import UserError
from distill.config.training import LoraSettings
from distill.models.loading import quantization_config


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
            self._adapted = get_peft_model(self.model, config)
        if lora.base == "bfloat16" and lora.quantization is None:
            for _, layer in self._layers():
                layer.get_base_layer().to(torch.bfloat16)

    def _layers(self) -> Iterator[tuple[str, Any]]:
        from peft.tuners.lora import LoraLayer

        return ((name, layer) for name, layer in self.model.named_modules() if isinstance(layer, LoraLayer))

    @torch.no_grad()
    def merged(self) -> PreTrainedModel:
        """Returns the float32 model with the adapter merged into its weights."""
        if self.model is self.whole:
            merged: PreTrainedModel = self._adapted.merge_and_unload()
            return merged
        for name, layer in self._layers():
            weight = self.whole.get_submodule(name).weight
            weight += layer.get_delta_weight("default").to(weight)
        return self.whole
