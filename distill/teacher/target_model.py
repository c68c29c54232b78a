"""The frozen target as a model: opened, and put where it computes."""

from __future__ import annotations

from pathlib import Path

from transformers import PreTrainedModel

from decode.models.loading.open_model import choose_device
from distill.data.placed_target import open_placed
from distill.data.stage_context import StageContext
from distill.models.quantization import quantization_config
from distill.teacher.sharded_target import check_several, shard_layers


def open_target(context: StageContext, path: str | Path | None = None, dtype: str | None = None) -> PreTrainedModel:
    """The run's target in evaluation mode: in its own place if the settings give it one, else on the CPU.

    Args:
        context: Settings and folder.
        path: Of another target; None: the run's.
        dtype: Another number format than ``target.dtype``.

    Raises:
        UserError: It cannot be read or placed.
    """
    wanted = context.settings.target
    model = open_placed(wanted, path or context.run.target, context.device, dtype)
    if wanted.sharded:
        shard_layers(model, context.device)
    return model


def check_place(context: StageContext) -> None:
    """Refuses before the first step a place or a format that the machine does not have."""
    wanted = context.settings.target
    for name in wanted.devices:
        choose_device(name)
    if wanted.sharded:
        check_several()
    if wanted.quantization:
        place = wanted.devices[0] if wanted.devices else context.device
        instead = "target.dtype to bfloat16, target.devices or target.sharded"
        quantization_config(wanted.quantization, place, "target.quantization", instead)


def at_work(context: StageContext, model: PreTrainedModel) -> PreTrainedModel:
    """The target where it computes: its own place, or the draft's device."""
    return model if context.settings.target.placed else model.to(context.device)
