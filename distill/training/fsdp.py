"""FSDP: a model's weights, gradients and optimiser state spread over the ranks, layer by layer."""

from pathlib import Path
from typing import Any

from lightning.pytorch.strategies import ModelParallelStrategy
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedModel

from decode.models.layer_locations import decoder_layers
from distill.core.file_fingerprints import remove


class Fsdp(ModelParallelStrategy):
    """PyTorch's second FSDP under Lightning, all ranks along one axis; runs on CPUs too.

    Every rank writes its share of a checkpoint, a folder of `torch.distributed.checkpoint`, from which any number of
    ranks can go on.
    """

    def __init__(self) -> None:
        super().__init__(save_distributed_checkpoint=True)

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
        self._data_parallel_size, self._tensor_parallel_size = self.world_size, 1


def shard(root: nn.Module, model: PreTrainedModel, mesh: DeviceMesh) -> Any:
    """Spreads the weights of ``root``: each layer of the model by itself, everything else together.

    Args:
        root: The module whose forward everything runs in.
        model: The model in it.
        mesh: The ranks, one-dimensional.
    """
    from torch.distributed.fsdp import fully_shard

    for layer in decoder_layers(model):
        fully_shard(layer, mesh=mesh)
    return fully_shard(root, mesh=mesh)
