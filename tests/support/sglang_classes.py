"""SGLang's EAGLE classes, as they stand in its wheel, on plain layers: its own import GPU kernels and need a GPU."""

import contextlib
import sys
import zipfile
from collections.abc import Iterator
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import torch
from torch import Tensor, nn

READ = ("sglang.srt.models.llama", "sglang.srt.models.llama_eagle", "sglang.srt.models.llama_eagle3")
"""Modules that are taken from the wheel; every other one of SGLang's is a `Rest`."""


def empty(*shape: int) -> nn.Parameter:
    """A parameter that a file fills."""
    return nn.Parameter(torch.empty(shape))


def load_whole(parameter: Tensor, tensor: Tensor) -> None:
    """Fill a parameter of the same shape."""
    assert parameter.shape == tensor.shape, (parameter.shape, tensor.shape)
    parameter.copy_(tensor)


class Linear(nn.Module):
    """Rows of one or several matrices that files hold one by one."""

    def __init__(self, inputs: int, outputs: int | list[int], bias: bool = False, **_: Any) -> None:
        super().__init__()
        rows = [outputs] if isinstance(outputs, int) else outputs
        self.parts = dict(enumerate(zip([sum(rows[:i]) for i in range(len(rows))], rows)))
        self.weight: Any = empty(sum(rows), inputs)
        self.weight.weight_loader = self.load
        if bias:
            self.bias: Any = empty(sum(rows))
            self.bias.weight_loader = self.load

    def load(self, parameter: Tensor, tensor: Tensor, part: Any = 0) -> None:
        load_whole(parameter.narrow(0, *self.parts[part]), tensor)


class QKVLinear(Linear):
    """Queries, keys and values in one."""

    def __init__(self, inputs: int, head_dim: int, heads: int, kv_heads: int, bias: bool = False, **_: Any) -> None:
        super().__init__(inputs, [heads * head_dim, kv_heads * head_dim, kv_heads * head_dim], bias)
        self.parts = {name: self.parts[i] for i, name in enumerate("qkv")}


class Rows(nn.Module):
    """An embedding, an output head, or (without a width) the weights of a norm."""

    def __init__(self, rows: int, width: int | None = None, **_: Any) -> None:
        super().__init__()
        self.weight = empty(rows) if width is None else empty(rows, width)
        self.fuse_input_quant = lambda *_: None


PLAIN: dict[str, Any] = {
    "QKVParallelLinear": QKVLinear,
    "MergedColumnParallelLinear": Linear,
    "RowParallelLinear": Linear,
    "VocabParallelEmbedding": Rows,
    "ParallelLMHead": Rows,
    "RMSNorm": Rows,
    "default_weight_loader": load_whole,
    "get_parallel": lambda: SimpleNamespace(tp_size=1, pp_group=SimpleNamespace(is_last_rank=True)),
    "get_spec": lambda: SimpleNamespace(speculative_draft_window_size=None),
    "get_layer_id": lambda name: None,
    "layer_stack": contextlib.nullcontext,
    "append_stages": lambda *_: (None, None),
    "is_npu": lambda: False,
    "is_xpu": lambda: False,
    "add_prefix": lambda name, prefix: f"{prefix}.{name}",
    "envs": SimpleNamespace(SGLANG_ENABLE_WEIGHT_LOADER_V2=SimpleNamespace(get=lambda: False)),
}


class Rest(ModuleType):
    """A module that is not read: plain layers where there are some, else things without parameters."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return PLAIN.get(name) or MagicMock(name=name)


class Finder:
    """Imports the modules of `READ` from the wheel and makes a `Rest` of the others."""

    def __init__(self, wheel: Path) -> None:
        self.wheel = wheel

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        return ModuleSpec(name, self, is_package=name not in READ) if name.split(".")[0] == "sglang" else None  # type: ignore[arg-type]

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return ModuleType(spec.name) if spec.name in READ else Rest(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        if module.__name__ in READ:
            path = module.__name__.replace(".", "/") + ".py"
            with zipfile.ZipFile(self.wheel) as wheel:
                exec(compile(wheel.read(path), path, "exec"), module.__dict__)


@contextlib.contextmanager
def sglang_classes(wheel: Path) -> Iterator[tuple[Any, Any, Any]]:
    """``LlamaForCausalLM``, ``LlamaForCausalLMEagle`` and ``LlamaForCausalLMEagle3`` of the wheel."""
    finder: Any = Finder(wheel)
    sys.meta_path.insert(0, finder)
    try:
        from sglang.srt.models.llama import LlamaForCausalLM
        from sglang.srt.models.llama_eagle import LlamaForCausalLMEagle
        from sglang.srt.models.llama_eagle3 import LlamaForCausalLMEagle3

        yield LlamaForCausalLM, LlamaForCausalLMEagle, LlamaForCausalLMEagle3
    finally:
        sys.meta_path.remove(finder)
        for name in [name for name in sys.modules if name.split(".")[0] == "sglang"]:
            del sys.modules[name]
