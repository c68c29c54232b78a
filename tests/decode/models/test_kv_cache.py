"""The rolling cache: append, grow, roll back, keep a path of a tree."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from decode.models.huggingface_runner import RollbackCache, RollbackLayer


def states(*values: float) -> Tensor:
    """``[batch 1, heads 2, positions, width 3]``, each position filled with its value."""
    return torch.tensor(values)[None, None, :, None].expand(1, 2, -1, 3).clone()


def held(layer: RollbackLayer) -> list[float]:
    """What the layer holds, read as the next forward would read it, and checked to be the same in keys and values."""
    keys, values = layer.update(states(), states())
    assert torch.equal(values, -keys)
    assert (keys == keys[:, :1, :, :1]).all()
    return keys[0, 0, :, 0].tolist()


def filled(*values: float, capacity: int = 4) -> RollbackLayer:
    layer = RollbackLayer(capacity)
    layer.update(states(*values), -states(*values))
    return layer


def test_appending_returns_all_that_is_held() -> None:
    layer = RollbackLayer(8)
    assert layer.get_seq_length() == 0
    layer.update(states(1, 2), -states(1, 2))
    keys, values = layer.update(states(3), -states(3))
    assert keys[0, 1, :, 2].tolist() == [1, 2, 3]
    assert values[0, 0, :, 0].tolist() == [-1, -2, -3]
    assert layer.get_seq_length() == 3
    assert layer.get_mask_sizes(2) == (5, 0)


def test_nothing_is_copied_while_there_is_room() -> None:
    layer = filled(1, 2, capacity=8)
    memory = layer.keys.data_ptr()
    for value in range(6):
        keys, _ = layer.update(states(value), -states(value))
        assert keys.data_ptr() == memory


def test_growing_keeps_what_is_held_and_at_least_doubles() -> None:
    layer = filled(1, 2, 3, capacity=4)
    layer.update(states(4, 5), -states(4, 5))
    assert held(layer) == [1, 2, 3, 4, 5]
    assert layer.keys.shape[2] == 8
    many = [float(i) for i in range(30)]
    layer.update(states(*many), -states(*many))
    assert held(layer) == [1, 2, 3, 4, 5, *many]
    assert layer.keys.shape[2] == 35


def test_rolling_back_frees_the_end_and_later_positions_replace_it() -> None:
    layer = filled(1, 2, 3, 4)
    layer.crop(-2)
    assert held(layer) == [1, 2]
    layer.update(states(9), -states(9))
    assert held(layer) == [1, 2, 9]
    layer.crop(0)
    assert held(layer) == [1, 2, 9]
    layer.reset()
    assert held(layer) == []


@pytest.mark.parametrize("amount", [1, -4])
def test_rolling_back_more_than_is_held_or_forward_is_a_bug(amount: int) -> None:
    layer = filled(1, 2, 3)
    with pytest.raises(AssertionError):
        layer.crop(amount)


@pytest.mark.parametrize(
    ("base", "slots", "wanted"),
    [
        (2, [2, 4, 5], [1, 2, 3, 5, 6]),  # overlapping source and destination
        (2, [], [1, 2]),
        (0, [1, 2, 3], [2, 3, 4]),
        (3, [3, 4, 5], [1, 2, 3, 4, 5, 6]),
        (1, [5], [1, 6]),
    ],
)
def test_a_path_moves_down_to_the_base(base: int, slots: list[int], wanted: list[float]) -> None:
    layer = filled(1, 2, 3, 4, 5, 6, capacity=8)
    layer.keep(base, torch.tensor(slots, dtype=torch.long))
    assert held(layer) == wanted


def test_all_layers_roll_back_together_whatever_they_hold() -> None:
    cache = RollbackCache(2, capacity=4)
    cache.truncate(0)
    cache.update(states(1, 2, 3), -states(1, 2, 3), 0)
    cache.update(states(1, 2), -states(1, 2), 1)  # as after an interrupted forward
    cache.truncate(1)
    assert [layer.length for layer in cache.layers] == [1, 1]
    cache.truncate(5)  # nothing to drop
    assert [layer.length for layer in cache.layers] == [1, 1]
