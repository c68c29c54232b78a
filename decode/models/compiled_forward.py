"""The fast forward through torch.compile: fixed shapes, so that on a GPU each one is a CUDA graph.

A chain of n tokens is padded to the next width of `WIDTHS` and attends to the whole cache behind a mask; what the
padding writes lies past the text, where it is overwritten before it is read. Everything else (longer inputs, trees,
early exits, hidden states of inner layers) takes the ordinary fast forward on the same cache.
"""

import importlib.util
import os
import shutil
import sysconfig
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from decode.errors import UserError
from decode.models.fast_forward import FastForward

MODES = ("none", "default", "reduce-overhead")
"""``none``, or the mode of torch.compile; ``reduce-overhead`` replays CUDA graphs."""
WIDTHS = (1, 2, 4, 8, 16, 32)  # tokens of a compiled forward
INITIAL_CAPACITY = 1024  # positions that the cache begins with, unless the model's context is shorter


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


class CompiledChain:
    """Reads short chains with `FastForward`'s layers and cache by graphs of fixed shapes.

    A width is compiled when it is first read, again once the cache has grown.

    Args:
        forward: layers and cache; it shall grow to powers of two, since every capacity is compiled for.
        mode: of torch.compile.
        limit: positions of the model's context.
    """

    widest = WIDTHS[-1]  # longest chain it reads

    def __init__(self, forward: FastForward, mode: str, limit: int) -> None:
        self.forward, self.device, self.dtype = forward, forward.device, forward.dtype
        option = "recompile_limit" if hasattr(torch._dynamo.config, "recompile_limit") else "cache_size_limit"
        # every runner and every size of its cache has its own graphs of each width
        setattr(torch._dynamo.config, option, max(256, getattr(torch._dynamo.config, option)))
        self._compiled = torch.compile(self._step, mode=mode, dynamic=False, fullgraph=True)
        for tensor in _tensors([forward.weights, *forward.layers]):
            torch._dynamo.mark_static_address(tensor)
        forward.reserve(min(INITIAL_CAPACITY, limit))
        self._cache: Tensor | None = None

    def __call__(self, tokens: Tensor, start: int, head: int | None) -> tuple[Tensor, Tensor]:
        """Logits and last hidden states of the last `head` rows (None: all) of a chain of at most `widest` tokens."""
        n = tokens.shape[0]
        width = next(w for w in WIDTHS if w >= n)
        self.forward.reserve(start + width)
        if self._cache is not self.forward.cache:
            self._cache = self.forward.cache
            self._layers = list(self._cache.unbind(0))
            for tensor in (*self._layers, self.forward.rotary_factors):
                torch._dynamo.mark_static_address(tensor)
        if self.device.type == "cuda":
            torch.compiler.cudagraph_mark_step_begin()
        at = torch.full((1,), start, device=self.device)
        logits, hidden = self._compiled(F.pad(tokens, (0, width - n)), at)
        first = 0 if head is None else max(0, n - head)
        if self.device.type == "cuda":  # the next replay of the graph writes there again
            logits, hidden = logits[:n].clone(), hidden[:n].clone()
        return logits[first:n], hidden[first:n]

    def _step(self, tokens: Tensor, start: Tensor) -> tuple[Tensor, Tensor]:
        """Logits and last hidden states of a padded chain.

        Args:
            tokens: long ``[width]``.
            start: long ``[1]``, the cache slot of the first; a tensor, so that no value is compiled in.
        """
        forward, heads = self.forward, self.forward.shape.kv_heads
        at = start + torch.arange(tokens.shape[0], device=self.device)
        slots = torch.arange(forward.capacity, device=self.device)
        seen = slots[None] <= at[:, None]
        if forward.weights.window is not None:
            seen = seen & (at[:, None] - slots[None] < forward.weights.window)
        mask = torch.zeros(seen.shape, dtype=self.dtype, device=self.device).masked_fill(~seen, -torch.inf)
        mask = mask.repeat(forward.shape.heads // heads, 1)
        rotary = forward.rotary_factors.index_select(0, at)
        layers = [(_SlotsAt(layer, at), layer[:, :heads], layer[:, heads:]) for layer in self._layers]
        return forward.project(forward.run_layers(forward.embed(tokens), 0, len(layers), layers, rotary, mask))


class _SlotsAt:
    """Cache slots at positions that are known when the graph runs, written as a view of them would be."""

    def __init__(self, cache: Tensor, at: Tensor) -> None:
        self.cache, self.at = cache, at

    def copy_(self, states: Tensor) -> None:
        self.cache.index_copy_(2, self.at, states)


def _tensors(holder: Any) -> list[Tensor]:
    """All tensors in an object's attributes, or in a list of objects."""
    if isinstance(holder, Tensor):
        return [holder]
    inner = holder if isinstance(holder, list) else list(getattr(holder, "__dict__", {}).values())
    return [tensor for one in inner for tensor in _tensors(one)]
