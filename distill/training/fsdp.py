"""FSDP: a model's weights, gradients and optimiser state spread over the ranks, layer by layer.

HSDP: over the ranks of a machine, a copy on every machine, so that between machines gradients alone travel.
"""

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import distributed, nn
from torch.distributed import checkpoint as sharded
from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedModel

from decode.models.layer_locations import decoder_layers
from distill.core.file_fingerprints import remove
from distill.training.checkpoints import REST


class Fsdp(ModelParallelStrategy):
    """PyTorch's second FSDP under Lightning; runs on CPUs too.

    Every rank writes its share of a checkpoint, a folder of `torch.distributed.checkpoint`, from which any number of
    ranks can go on.

    Args:
        hybrid: a copy on every machine (HSDP).
        background: Write checkpoints in a thread of every rank, from a copy on the CPU, one at a time.
    """

    def __init__(self, *, hybrid: bool = False, background: bool = False) -> None:
        super().__init__(save_distributed_checkpoint=True)
        self.hybrid = hybrid
        self._thread = ThreadPoolExecutor(1) if background else None
        self._jobs: list[Future[None]] = []
        self._group: distributed.ProcessGroup | None = None  # of the threads: training must not wait in theirs

    @property
    def sharding_mesh(self) -> DeviceMesh:
        """The ranks: along one axis, or ``[machines, ranks of a machine]``, the weights copied along the first."""
        return self.device_mesh if self.hybrid else self.device_mesh["data_parallel"]

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None) -> None:
        """Writes the folder aside, then renames it."""
        path = Path(self.broadcast(filepath))
        aside = path.with_name(f".tmp-{path.name}")
        self._wait()
        state = {"state_dict": checkpoint.pop("state_dict")}
        state |= {f"optimizer_{n}": own for n, own in enumerate(checkpoint.pop("optimizer_states", []))}
        if self.is_global_zero:
            remove(aside)
            aside.mkdir(parents=True)
            torch.save(checkpoint, aside / REST)  # at once: training changes what it refers to
        self.barrier()
        if self._thread:
            self._group = self._group or distributed.new_group(backend="gloo")
            saved = sharded.async_save(state, checkpoint_id=aside, process_group=self._group)
            assert isinstance(saved, Future)
            self._do(lambda: self._rename(aside, path, saved))
        else:
            with _cause_shown():
                sharded.save(state, checkpoint_id=aside)
            self._rename(aside, path)
            self.barrier()

    def remove_checkpoint(self, filepath: Any) -> None:
        """Removes one, once what is being written is there."""
        self._do(lambda: super(Fsdp, self).remove_checkpoint(filepath))

    def teardown(self) -> None:
        """Waits for what is being written."""
        self._wait()
        super().teardown()

    def _rename(self, aside: Path, path: Path, saved: Future[Any] | None = None) -> None:
        if saved:
            with _cause_shown():
                saved.result()  # in the first rank: that all have written
        if self.is_global_zero:
            remove(path)
            aside.rename(path)

    def _do(self, job: Callable[[], None]) -> None:
        if self._thread:
            self._jobs.append(self._thread.submit(job))
        else:
            job()

    def _wait(self) -> None:
        while self._jobs:
            self._jobs.pop(0).result()

    def _setup_distributed(self) -> None:
        super()._setup_distributed()
        machines = self.num_nodes if self.hybrid else self.world_size
        self._data_parallel_size, self._tensor_parallel_size = machines, self.world_size // machines


@contextmanager
def _cause_shown() -> Iterator[None]:
    """Inside, what kept a rank from writing is raised itself, such as its disk's being full."""
    try:
        yield
    except sharded.CheckpointException as error:
        raise next(iter(error.failures.values()))[0] from error


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
