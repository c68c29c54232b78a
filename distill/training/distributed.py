"""FSDP: a model's weights, gradients and optimiser state spread over the ranks, layer by layer."""

from typing import Any

from lightning.pytorch.strategies import ModelParallelStrategy
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedModel

from decode.models.structure import decoder_layers


class Fsdp(ModelParallelStrategy):
    """PyTorch's second FSDP under Lightning, all ranks along one axis; runs on CPUs too.

    Checkpoints are gathered and written by the first rank as one file, like those of the other strategies.
    """

    def __init__(self) -> None:
        super().__init__(save_distributed_checkpoint=False)

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
