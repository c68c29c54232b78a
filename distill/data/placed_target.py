"""The frozen target, opened where the settings put it: on devices of its own, in few bits, or with the draft."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from transformers import PreTrainedModel
from transformers.quantizers import AutoQuantizationConfig

from decode.models.loading.open_model import load_model
from distill.config.language_models import TargetSettings

Item = TypeVar("Item")


def open_placed(
    settings: TargetSettings, path: str | Path, device: torch.device, dtype: str | None = None
) -> PreTrainedModel:
    """The frozen target in evaluation mode: in its own place and bits if the settings give it some, else on the CPU.

    Args:
        settings: The target's.
        path: Its folder, Hub name or file.
        device: The draft's, where a quantised target without a place of its own is read to.
        dtype: Another number format than ``target.dtype``.

    Raises:
        UserError: It cannot be read or placed.
    """
    local, world = (int(os.environ.get(name) or other) for name, other in (("LOCAL_RANK", 0), ("LOCAL_WORLD_SIZE", 1)))
    own, more = share_of(settings.devices, local, world), dict[str, Any]()
    if len(own) > 1:
        more = {"device_map": "balanced", "max_memory": _room(own)}
    if settings.quantization:
        more["quantization_config"] = AutoQuantizationConfig.from_dict(settings.quantization)
    place = own[0] if own else device if settings.quantization else "cpu"
    trust, format = settings.trust_remote_code, dtype or settings.dtype
    return load_model(path, device=place, dtype=format, trust_remote_code=trust, **more)


def share_of(items: Sequence[Item], rank: int, world: int) -> list[Item]:
    """One process's part of what a machine has: a run of them, or one that several processes share."""
    if len(items) < world:
        return [items[rank % len(items)]] if items else []
    return list(items[rank * len(items) // world : (rank + 1) * len(items) // world])


def _room(devices: Sequence[str]) -> dict[int | str, int]:
    """Free bytes of each of the devices, by the numbers by which accelerate knows them."""
    places = [torch.device(name) for name in devices]
    return {place.index or 0: torch.cuda.mem_get_info(place)[0] for place in places if place.type == "cuda"}
