"""The fast forward through torch.compile: fixed shapes, so that on a GPU each one is a CUDA graph.

A chain of n tokens is padded to the next width of `WIDTHS` and attends to the whole cache behind a mask; what the
padding writes lies past the text, where it is overwritten before it is read. Everything else (longer inputs, trees,
early exits, hidden states of inner layers) takes the ordinary fast forward on the same cache.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import sysconfig
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.exc import TorchDynamoException
from transformers import PreTrainedModel

from decode.core.errors import UserError
from decode.core.proposal import Draft
from decode.models.fast import supports
from decode.models.huggingface import LARGEST, Runner, difference
from decode.models.partial import FAMILIES, PartialRunner

MODES = ("none", "default", "reduce-overhead")
"""``none``, or the mode of torch.compile; ``reduce-overhead`` replays CUDA graphs."""
WIDTHS = (1, 2, 4, 8, 16, 32)
"""Tokens of a compiled forward."""
ROOM = 1024
"""Positions that the cache begins with, unless the model's context is shorter."""


def check_compile(mode: str, device: str) -> None:
    """Refuse a mode that cannot work here.

    Raises:
        UserError: an unknown mode, CUDA graphs without CUDA, or no compiler.
    """
    if mode not in MODES:
        raise UserError(f"compile is {mode!r}; choose one of {', '.join(MODES)}")
    if mode == "none":
        return
    kind = torch.device(device).type
    if kind not in ("cpu", "cuda"):
        raise UserError(f"compile is {mode!r} and the device {device}; torch.compile is used on cpu and cuda only")
    if mode == "reduce-overhead" and kind != "cuda":
        raise UserError(f"compile is reduce-overhead, which replays CUDA graphs, and the device {device}; take default")
    names = [os.environ["CXX"]] if os.environ.get("CXX") else ["g++", "c++", "clang++"]
    if not any(map(shutil.which, names)):
        raise UserError(
            f"compile is {mode!r}, but there is no C++ compiler here ({', '.join(names)}); install one "
            "(apt install g++), name it in CXX, or leave compile at none"
        )
    header = Path(sysconfig.get_path("include")) / "Python.h"
    if not header.exists():
        raise UserError(
            f"compile is {mode!r}, but Python's headers are not here ({header}); install them (apt install "
            "python3-dev), or leave compile at none"
        )
    if kind == "cuda" and importlib.util.find_spec("triton") is None:
        raise UserError(f"compile is {mode!r}, which on cuda needs triton; pip install triton, or leave it at none")


def open_compiled(model: PreTrainedModel, mode: str) -> Runner:
    """A runner that compiles, after it has reproduced the model's logits on a few tokens.

    Raises:
        UserError: the model is of another family than the fast forward's, its logits are not reproduced, or the
            compiler fails.
    """
    name = f"{type(model).__name__} ({model.config.model_type})"
    if not supports(model):
        raise UserError(
            f"{name} cannot be compiled here: only {', '.join(FAMILIES)} on one device, with plain weights; leave "
            "compile at none"
        )
    check_compile(mode, str(model.device))
    runner = CompiledRunner(model, mode)
    try:
        gap = difference(model, runner)
    except TorchDynamoException as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise UserError(f"torch.compile failed for {name}: {reason}; leave compile at none") from error
    if gap >= LARGEST.get(model.dtype, 0.1):
        raise UserError(f"compiled, {name} differs from itself by {gap:.2g} in its logits; leave compile at none")
    return runner


class CompiledRunner(PartialRunner):
    """See the module's docstring. A width is compiled when it is first read, again once the cache has grown."""

    def __init__(self, model: Any, mode: str = "default") -> None:
        self.mode = mode
        super().__init__(model)

    def _open(self) -> None:
        super()._open()
        limit = "recompile_limit" if hasattr(torch._dynamo.config, "recompile_limit") else "cache_size_limit"
        # every runner and every size of its cache has its own graphs of each width
        setattr(torch._dynamo.config, limit, max(256, getattr(torch._dynamo.config, limit)))
        self._compiled = torch.compile(self._step, mode=self.mode, dynamic=False, fullgraph=True)
        for tensor in _tensors([self.layers, self.final_norm, self.embedding, self.head, self.head_bias]):
            torch._dynamo.mark_static_address(tensor)

    def _tunes(self) -> bool:
        return False  # a compiler has no complex numbers, and lays weights out itself

    def reserve(self, capacity: int) -> None:
        """See `Runner.reserve`; in powers of two, since every capacity is compiled for."""
        if capacity <= self.capacity:
            return
        capacity = max(capacity, min(ROOM, self.limit))
        super().reserve(1 << (capacity - 1).bit_length())
        self._slabs = [self.kv[i] for i in range(len(self.layers))]
        for tensor in (*self._slabs, self.turns):
            torch._dynamo.mark_static_address(tensor)

    def _forward(self, tokens: Tensor, tree: Draft | None, head: int | None) -> Tensor:
        n = tokens.shape[0]
        width = next((w for w in WIDTHS if w >= n), 0)
        if not width or tree is not None or self.taps or self.ahead or head == 0:
            return super()._forward(tokens, tree, head)
        self.reserve(self.length + width)
        if self.device.type == "cuda":
            torch.compiler.cudagraph_mark_step_begin()
        start = torch.full((1,), self.length, device=self.device)
        logits, hidden = self._compiled(F.pad(tokens, (0, width - n)), start)
        first = 0 if head is None else max(0, n - head)
        if self.device.type == "cuda":  # the next replay of the graph writes there again
            logits, hidden = logits[:n].clone(), hidden[:n].clone()
        self.hidden = hidden[first:n]
        return logits[first:n]

    def _step(self, tokens: Tensor, start: Tensor) -> tuple[Tensor, Tensor]:
        """Logits and last hidden states of a chain.

        Args:
            tokens: long ``[width]``.
            start: long ``[1]``, the cache slot of the first; a tensor, so that no value is compiled in.
        """
        at = start + torch.arange(tokens.shape[0], device=self.device)
        slots = torch.arange(self.capacity, device=self.device)
        seen = slots[None] <= at[:, None]
        if self.window is not None:
            seen = seen & (at[:, None] - slots[None] < self.window)
        mask = torch.zeros(seen.shape, dtype=self.dtype, device=self.device).masked_fill(~seen, -torch.inf)
        mask = mask.repeat(self.shape.heads // self.shape.kv_heads, 1)
        x = self.embedding.index_select(0, tokens)
        x = self.run_layers(x, 0, len(self.layers), at, self.turns.index_select(0, at), mask)
        hidden = self.final_norm(x)
        return F.linear(hidden, self.head, self.head_bias), hidden

    def _room(self, first: int, last: int, start: Any, n: int) -> list[tuple[Any, Tensor, Tensor]]:
        """As the fast runner's; positions instead of a first slot stand for the whole cache."""
        if not isinstance(start, Tensor):
            return super()._room(first, last, start, n)
        heads = self.shape.kv_heads
        return [(_Slots(kv, start), kv[:, :heads], kv[:, heads:]) for kv in self._slabs[first:last]]


class _Slots:
    """Cache slots at positions that are known when the graph runs, written as a view of them would be."""

    def __init__(self, kv: Tensor, at: Tensor) -> None:
        self.kv, self.at = kv, at

    def copy_(self, states: Tensor) -> None:
        self.kv.index_copy_(2, self.at, states)


def _tensors(part: Any) -> list[Tensor]:
    """All tensors that parts of a model hold."""
    if isinstance(part, Tensor):
        return [part]
    inner = part if isinstance(part, list) else list(getattr(part, "__dict__", {}).values())
    return [tensor for one in inner for tensor in _tensors(one)]
