"""The rolling cache: append, grow, roll back, keep a path of a tree."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import LlamaConfig

from decode.models.rollback_cache import RollbackCache, RollbackLayer


def states(*values: float) -> Tensor:
    """``[batch 1, heads 2, positions, width 3]``, each position filled with its value."""
    return torch.tensor(values)[None, None, :, None].expand(1, 2, -1, 3).clone()


def append(cache: RollbackCache, *values: float, layer: int = 0) -> list[float]:
    """Append to a layer and return what it holds, checked to be the same in keys and values."""
    keys, seen = cache.update(states(*values), -states(*values), layer)
    assert torch.equal(seen, -keys)
    assert (keys == keys[:, :1, :, :1]).all()
    return keys[0, 0, :, 0].tolist()


def test_appending_copies_nothing_while_there_is_room_and_growing_keeps_what_is_held() -> None:
    layer = RollbackLayer(4)
    assert layer.get_seq_length() == 0
    memory = set()
    for value in range(4):
        keys, _ = layer.update(states(value), -states(value))
        memory.add(keys.data_ptr())
    assert len(memory) == 1
    assert layer.get_mask_sizes(2) == (6, 0)
    keys, _ = layer.update(states(4, 5), -states(4, 5))
    assert keys[0, 0, :, 0].tolist() == [0, 1, 2, 3, 4, 5]
    assert layer.capacity == 8


def test_layers_roll_back_together_whatever_they_hold_and_later_positions_replace_the_end() -> None:
    cache = RollbackCache(LlamaConfig(num_hidden_layers=2), capacity=4)
    cache.truncate(0)
    cache.end(torch.tensor([7]))
    append(cache, 1, 2, 3)
    append(cache, 1, 2, layer=1)  # as after an interrupted forward
    cache.truncate(1)
    assert [layer.get_seq_length() for layer in cache.layers] == [1, 1]
    cache.truncate(5)  # nothing to drop
    assert append(cache, 9) == [1, 9]
