"""A frozen target whose layers are spread over all processes (FSDP2): each is gathered when it computes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from decode.core.errors import UserError
from decode.models.layer_locations import decoder_layers
from distill.core import ranks


def check_several() -> None:
    """Refuses to spread weights over one process."""
    if ranks.started() < 2 or "MASTER_ADDR" not in os.environ:
        raise UserError(
            f"target.sharded spreads the target over processes, and {ranks.started()} was started: start several by "
            "torchrun --nproc-per-node N -m distill ... --trainer.devices N, or leave it out"
        )


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
    """Inside, each process runs a sharded model as often as it likes: a forward pass of one is one of all.

    One that has no more to compute takes part in the others' with a single token, until they are ready too.
    """
    if model is None or not any(isinstance(weight, DTensor) for weight in model.parameters()):
        yield
        return
    base, ids = model.base_model, torch.zeros(1, 1, dtype=torch.long, device=model.device)
    hook = base.register_forward_pre_hook(lambda *_: _busy(True, ids.device) and None, prepend=True)
    try:
        yield
    finally:
        hook.remove()
    with torch.no_grad():
        while _busy(False, ids.device):
            base(input_ids=ids, use_cache=False)


def _busy(here: bool, device: torch.device) -> bool:
    """Whether any process is about to run the model."""
    flag = torch.tensor(int(here), device=device)
    dist.all_reduce(flag, dist.ReduceOp.MAX)
    return bool(flag)
