"""A transformers cache that never copies what it holds and rolls back in O(1)."""

from typing import Any

import torch
from torch import Tensor
from transformers import Cache
from transformers.cache_utils import CacheLayerMixin


class RollbackLayer(CacheLayerMixin):
    """Keys and values of one layer, ``[batch, heads, capacity, width]``, of which the first `length` are held.

    Sliding-window layers are held whole too: the mask hides what lies outside the window, so that any rollback stays
    possible.
    """

    is_croppable = True
    is_sliding = False

    def __init__(self, capacity: int) -> None:
        super().__init__()
        self.capacity = capacity
        self.length = 0

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocate from the first states' shape, dtype and device."""
        batch, heads, _, width = key_states.shape
        self.keys = key_states.new_empty(batch, heads, self.capacity, width)
        self.values = value_states.new_empty(batch, heads, self.capacity, value_states.shape[-1])
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append, and return views of all that is held."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        start, end = self.length, self.length + key_states.shape[2]
        if end > self.keys.shape[2]:
            self._grow(end)
        self.keys[:, :, start:end] = key_states
        self.values[:, :, start:end] = value_states
        self.length = end
        return self.keys[:, :, :end], self.values[:, :, :end]

    def _grow(self, needed: int) -> None:
        extra = max(needed, self.capacity, 2 * self.keys.shape[2]) - self.keys.shape[2]
        shape = (*self.keys.shape[:2], extra)
        self.keys = torch.cat([self.keys, self.keys.new_empty(*shape, self.keys.shape[3])], 2)
        self.values = torch.cat([self.values, self.values.new_empty(*shape, self.values.shape[3])], 2)

    def get_seq_length(self) -> int:
        """Positions held."""
        return self.length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """(key length, offset) that the mask of the next forward needs."""
        return self.length + query_length, 0

    def get_max_length(self) -> int:
        """No maximum."""
        return -1

    def crop(self, tokens_to_remove: int) -> None:
        """Drop the last ``-tokens_to_remove`` positions (transformers' sign convention)."""
        assert -self.length <= tokens_to_remove <= 0, (tokens_to_remove, self.length)
        self.length += tokens_to_remove

    def reset(self) -> None:
        """Forget everything, keep the memory."""
        self.length = 0

    def keep(self, base: int, slots: Tensor) -> None:
        """Move positions ``slots`` (ascending, at or after `base`) to `base`, `base` + 1, … and drop the rest."""
        end = base + len(slots)
        if self.is_initialized:
            for states in (self.keys, self.values):
                states[:, :, base:end] = states.index_select(2, slots.to(states.device))
        self.length = end


class RollbackCache(Cache):
    """One `RollbackLayer` a layer of the model."""

    def __init__(self, layers: int, capacity: int = 256) -> None:
        super().__init__(layers=[RollbackLayer(capacity) for _ in range(layers)])

    def truncate(self, length: int) -> None:
        """Hold the first `length` positions only."""
        for layer in self.layers:
            layer.crop(min(0, length - layer.length))

    def keep(self, base: int, slots: Tensor) -> None:
        """See `RollbackLayer.keep`."""
        for layer in self.layers:
            layer.keep(base, slots)

    def reserve(self, capacity: int) -> None:
        """Allocate for so many positions when a layer is first written or next grows."""
        for layer in self.layers:
            layer.capacity = max(layer.capacity, capacity)
