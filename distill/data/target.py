"""The frozen target: on which devices, in which number format, and over how many processes it is."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers.quantizers import AutoQuantizationConfig

from decode.models.families import decoder_layers
from decode.models.loading import load_model
from distill.config.training import TargetSettings

Item = TypeVar("Item")


def open_placed(
    settings: TargetSettings, path: str | Path, device: torch.device, dtype: str | None = None
) -> PreTrainedModel:
    """The frozen target in evaluation mode: on its own devices and quantised if the settings say so, else on the CPU.

    Args:
        settings: The target's.
        path: Its folder, Hub name or file.
        device: The draft's, to which a quantised target without devices of its own is loaded.
        dtype: Another number format than ``target.dtype``.

    Raises:
        UserError: It cannot be read or placed.
    """
    local, world = (int(os.environ.get(name) or other) for name, other in (("LOCAL_RANK", 0), ("LOCAL_WORLD_SIZE", 1)))
    own, more = share_of(settings.devices, local, world), dict[str, Any]()
    if len(own) > 1:
        places = [place for place in map(torch.device, own) if place.type == "cuda"]
        room = {place.index or 0: torch.cuda.mem_get_info(place)[0] for place in places}
        more = {"device_map": "balanced", "max_memory": room}
    if settings.quantization:
        more["quantization_config"] = AutoQuantizationConfig.from_dict(settings.quantization)
    place = own[0] if own else device if settings.quantization else "cpu"
    trust = settings.trust_remote_code
    return load_model(path, device=place, dtype=dtype or settings.dtype, trust_remote_code=trust, **more)


def share_of(items: Sequence[Item], rank: int, world: int) -> list[Item]:
    """One process's part of the devices of a machine: several, or one that several processes share."""
    if len(items) < world:
        return [items[rank % len(items)]] if items else []
    return list(items[rank * len(items) // world : (rank + 1) * len(items) // world])


def shard_layers(model: PreTrainedModel, device: torch.device) -> None:
    """Spreads the layers over all processes; embedding and output head, which may be one, stay whole on ``device``."""
    from torch.distributed.fsdp import fully_shard

    if device.type == "cuda":
        torch.cuda.set_device(device)
    if not dist.is_initialized():
        dist.init_process_group()
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    for part in (model.get_input_embeddings(), model.get_output_embeddings()):
        part.to(device)
    for layer in decoder_layers(model):
        fully_shard(layer, mesh=mesh)
    fully_shard(model.base_model, mesh=mesh, ignored_params=set(model.get_input_embeddings().parameters()))


@contextmanager
def in_step(model: PreTrainedModel | None) -> Iterator[None]:
    """Inside, each process runs a sharded model as often as it likes, though a forward pass of one is one of all.

    A process that has nothing more to compute takes part in the others' passes with a single token, until they finish.
    """
    if model is None or not any(isinstance(weight, DTensor) for weight in model.parameters()):
        yield
        return
    base, ids = model.base_model, torch.zeros(1, 1, dtype=torch.long, device=model.device)

    def any_busy(here: bool) -> bool:
        flag = torch.tensor(int(here), device=ids.device)
        dist.all_reduce(flag, dist.ReduceOp.MAX)
        return bool(flag)

    hook = base.register_forward_pre_hook(lambda *_: any_busy(True) and None, prepend=True)
    try:
        yield
    finally:
        hook.remove()
    with torch.no_grad():
        while any_busy(False):
            base(input_ids=ids, use_cache=False)
