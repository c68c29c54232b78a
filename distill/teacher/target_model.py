"""The frozen target as a model: opened, and put where it computes."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from transformers import PreTrainedModel
from transformers.quantizers import AutoHfQuantizer, AutoQuantizationConfig

from decode.core.errors import UserError
from decode.models.loading.open_model import choose_device, load_model
from distill.data.stage_context import StageContext
from distill.teacher.sharded_target import check_several, shard_layers

Item = TypeVar("Item")


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
    own = share_of(wanted.devices, int(os.environ.get("LOCAL_RANK") or 0), int(os.environ.get("LOCAL_WORLD_SIZE") or 1))
    more: dict[str, Any] = {}
    if len(own) > 1:
        more = {"device_map": "balanced", "max_memory": _room(own)}
    if wanted.quantization:
        more["quantization_config"] = AutoQuantizationConfig.from_dict(wanted.quantization)
    place = own[0] if own else context.device if wanted.quantization else "cpu"
    format, trust = dtype or wanted.dtype, wanted.trust_remote_code
    model = load_model(path or context.run.target, device=place, dtype=format, trust_remote_code=trust, **more)
    if wanted.sharded:
        shard_layers(model, context.device)
    return model


def check_place(context: StageContext) -> None:
    """Refuses before the first step a place or a format that the machine does not have.

    Raises:
        UserError: with what is missing.
    """
    wanted = context.settings.target
    for name in wanted.devices:
        choose_device(name)
    if wanted.sharded:
        check_several()
    if not wanted.quantization:
        return
    try:
        made = AutoHfQuantizer.from_config(AutoQuantizationConfig.from_dict(wanted.quantization), pre_quantized=False)
        made.validate_environment(device_map={"": wanted.devices[0] if wanted.devices else context.device})
    except (ImportError, ValueError, TypeError, KeyError, AssertionError, RuntimeError) as error:
        why = f"{type(error).__name__}: {error}".strip().splitlines()[0]
        raise UserError(
            f"target.quantization is {wanted.quantization}, which cannot be used here ({why}): install what is "
            "missing, or leave it out and set target.dtype to bfloat16, target.devices or target.sharded"
        ) from error


def at_work(context: StageContext, model: PreTrainedModel) -> PreTrainedModel:
    """The target where it computes: its own place, or the draft's device."""
    return model if context.settings.target.placed else model.to(context.device)


def share_of(items: Sequence[Item], rank: int, world: int) -> list[Item]:
    """One process's part of what a machine has: a run of them, or one that several processes share."""
    if len(items) < world:
        return [items[rank % len(items)]] if items else []
    return list(items[rank * len(items) // world : (rank + 1) * len(items) // world])


def _room(devices: Sequence[str]) -> dict[int | str, int]:
    """Free bytes of each of the devices, by the numbers by which accelerate knows them."""
    places = [torch.device(name) for name in devices]
    return {place.index or 0: torch.cuda.mem_get_info(place)[0] for place in places if place.type == "cuda"}
