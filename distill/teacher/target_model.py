"""The frozen target as a model: opened, and put where it computes."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

import torch
from transformers import PreTrainedModel

from decode.models.open import load_model
from distill.data.stage_context import StageContext

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
    spread = {} if len(own) < 2 else {"device_map": "balanced", "max_memory": _room(own)}
    return load_model(
        path or context.run.target,
        device=own[0] if own else "cpu",
        dtype=dtype or wanted.dtype,
        trust_remote_code=wanted.trust_remote_code,
        **spread,
    )


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
