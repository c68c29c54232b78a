"""Tensors that say they are on a GPU, compute on the CPU, and refuse to meet one that is left on the CPU.

Values are real, so whole trainings and decoding run on them. What a GPU refuses is refused: an operation on tensors of
both devices, and numpy. Kernels, streams and number formats of a GPU are not here.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map
from torch.utils.backend_registration import _DummyBackendModule, _setup_privateuseone_for_python_backend


class _Module(_DummyBackendModule):
    """What PyTorch asks a device's module."""

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        """Formats of autocast."""
        return [torch.bfloat16, torch.float16]


_setup_privateuseone_for_python_backend("gpu", _Module())  # for the whole process
GPU = torch.device("gpu", 0)
torch.__future__.set_swap_module_params_on_conversion(True)  # a weight that two modules share stays one
# tensors of inference mode cannot be views of others that are wrapped
torch.inference_mode = lambda mode=True: torch.no_grad() if mode else torch.set_grad_enabled(torch.is_grad_enabled())  # type: ignore[assignment, misc]
aten = torch.ops.aten
MOVES = {aten._to_copy.default, aten.copy_.default}
INDEXED = {aten.index.Tensor, aten.index_put.default, aten.index_put_.default, aten._index_put_impl_.default}
"""Where a GPU's tensor takes indices from the CPU too."""


class OnGpu(Tensor):
    """A tensor that says it is on a GPU."""

    elem: Tensor

    def tolist(self) -> Any:
        """As numbers."""
        return self.elem.tolist()

    @staticmethod
    def __new__(cls, elem: Tensor) -> OnGpu:
        """Around a tensor of the CPU."""
        shape = torch.empty_strided(elem.shape, elem.stride(), dtype=elem.dtype, device="meta")
        made = torch.Tensor._make_subclass(cls, shape, elem.requires_grad, dispatch_device=True)
        made.elem = elem
        return made

    def new_tensor(self, data: Any, *, dtype: torch.dtype | None = None, **_: Any) -> Tensor:
        """Beside it."""
        return torch.tensor(data, dtype=dtype or self.dtype, device=GPU)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Everything is `_run`."""
        return _run(func, args, kwargs or {})

    def __reduce_ex__(self, protocol: Any) -> Any:
        """As the CPU's tensor: files are read to the CPU."""
        return self.elem.__reduce_ex__(protocol)

    def __repr__(self, **_: Any) -> str:
        """Of the values."""
        return f"OnGpu({self.elem!r})"


class _Factories(TorchDispatchMode):
    """Makes tensors on the GPU where that is asked for."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


def _run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """An operation on the CPU, its results on the device that a GPU's would be on."""
    if func == torch.ops.prim.device.default:
        return GPU
    there: list[OnGpu] = []
    here: list[Tensor] = []
    places: list[torch.device] = []

    def look(value: Any) -> Any:
        if isinstance(value, OnGpu):
            there.append(value)
            return value.elem
        if isinstance(value, Tensor) and value.ndim and value.device.type == "cpu":
            here.append(value)
        if isinstance(value, torch.device):
            places.append(value)
            return torch.device("cpu") if value.type == "gpu" else value
        return value

    plain_args, plain_kwargs = tree_map(look, args), tree_map(look, kwargs)
    wanted = places[0] if places else None
    mixed = there and here and func not in MOVES
    if mixed and not (
        func in INDEXED and isinstance(args[0], OnGpu) and all(any(one is index for index in args[1]) for one in here)
    ):
        raise RuntimeError(f"{func}: a tensor of {list(here[0].shape)} is on the CPU, others are on the GPU")
    if func == aten.histc.default:  # of integers on a GPU, which the CPU's is not
        plain_args = [plain_args[0].float(), *plain_args[1:]]
    found = func(*plain_args, **plain_kwargs)
    if wanted is not None:
        on_gpu = wanted.type == "gpu"
    elif func in MOVES:
        on_gpu = isinstance(args[0], OnGpu)
    else:
        on_gpu = bool(there)
    if func._schema.is_mutable and isinstance(found, Tensor):  # in place: the same object
        for value in (*args, *kwargs.values()):
            if value is found or (isinstance(value, OnGpu) and value.elem is found):
                return value
    return tree_map(lambda value: OnGpu(value) if isinstance(value, Tensor) else value, found) if on_gpu else found


@contextmanager
def pretended_gpu() -> Iterator[torch.device]:
    """Inside, ``gpu:0`` can be asked for."""
    before = torch._C._only_lift_cpu_tensors()
    torch._C._set_only_lift_cpu_tensors(True)  # torch.tensor moves what it has read, as it does for PyTorch's own
    try:
        with _Factories():
            yield GPU
    finally:
        torch._C._set_only_lift_cpu_tensors(before)
