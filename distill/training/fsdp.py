"""FSDP: a model's weights, gradients and optimiser state spread over the ranks, layer by layer.

HSDP: over the ranks of a machine, a copy on every machine, so that between machines gradients alone travel.
"""

from pathlib import Path
from typing import Any

from lightning.pytorch.strategies import ModelParallelStrategy
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedModel

from decode.models.layer_locations import decoder_layers
from distill.core.file_fingerprints import remove


class Fsdp(ModelParallelStrategy):
    """PyTorch's second FSDP under Lightning; runs on CPUs too.

    Every rank writes its share of a checkpoint, a folder of `torch.distributed.checkpoint`, from which any number of
    ranks can go on.

    Args:
        hybrid: a copy on every machine (HSDP).
    """

    def __init__(self, *, hybrid: bool = False) -> None:
        super().__init__(save_distributed_checkpoint=True)
        self.hybrid = hybrid

    @property
    def sharding_mesh(self) -> DeviceMesh:
        """The ranks: along one axis, or ``[machines, ranks of a machine]``, the weights copied along the first."""
        return self.device_mesh if self.hybrid else self.device_mesh["data_parallel"]

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None) -> None:
        """Writes the folder aside, then renames it."""
        path = Path(self.broadcast(filepath))
        aside = path.with_name(f".tmp-{path.name}")
        if self.is_global_zero:
            remove(aside)
        self.barrier()
        super().save_checkpoint(checkpoint, aside, storage_options)
        self.barrier()
        if self.is_global_zero:
            remove(path)
            aside.rename(path)
        self.barrier()

    def _setup_distributed(self) -> None:
        super()._setup_distributed()
        machines = self.num_nodes if self.hybrid else self.world_size
        self._data_parallel_size, self._tensor_parallel_size = machines, self.world_size // machines


def shard(root: nn.Module, model: PreTrainedModel, mesh: DeviceMesh) -> Any:
    """Spreads the weights of ``root``: each layer of the model by itself, everything else together.

    Args:
        root: The module whose forward everything runs in.
        model: The model in it.
        mesh: The ranks, see `Fsdp.sharding_mesh`.
    """
    from torch.distributed.fsdp import fully_shard

    for layer in decoder_layers(model):
        fully_shard(layer, mesh=mesh)
    return fully_shard(root, mesh=mesh)
