"""Cached signals: the right values, and never a file that is stale, cut short or altered."""

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from decode.errors import UserError
from distill import signals
from distill.batches import Rows
from distill.divergences import Divergence
from distill.losses import IGNORE, token_loss
from distill.models import Head, last_hidden
from distill.teacher import Target

Tiny = Callable[..., PreTrainedModel]


@pytest.fixture
def rows() -> Rows:
    rng = np.random.default_rng(0)
    lengths = np.array([7, 5, 9, 6])
    ids = rng.integers(2, 48, lengths.sum()).astype(np.int32)
    offsets = np.concatenate([[0], lengths.cumsum()])
    labels = ids.copy()
    for start in offsets[:-1]:
        labels[start : start + 2] = IGNORE
    return Rows(ids, labels, offsets, np.concatenate([[0], (lengths - 2).cumsum()]))


def one_by_one(model: PreTrainedModel, rows: Rows) -> torch.Tensor:
    """Hidden states at label positions, every example alone."""
    parts = []
    for example in range(len(rows)):
        ids = torch.from_numpy(rows.ids[rows.offsets[example] : rows.offsets[example + 1]]).long()[None]
        mask = torch.zeros_like(ids, dtype=torch.bool)
        mask[:, 1:-1] = True
        with torch.no_grad():
            parts.append(last_hidden(model, ids, mask))
    return torch.cat(parts)


def test_hidden_states_are_those_of_every_example_alone(tiny: Tiny, rows: Rows, tmp_path: Path) -> None:
    model = tiny("gpt_neox")
    got = signals.target_hidden(model, rows, tmp_path / "h.npy", "key", batch_size=3)
    assert got.shape == (rows.label_count, 32)
    assert signals.hidden_bytes(model, rows) == got.nbytes
    assert np.allclose(got, one_by_one(model, rows), atol=1e-5)


@pytest.mark.parametrize("name", ["forward_kl", "tv"])
def test_the_references_loss_is_that_of_every_token(tiny: Tiny, rows: Rows, tmp_path: Path, name: str) -> None:
    target, reference, divergence = tiny("llama"), tiny("llama", seed=9), Divergence(name)  # type: ignore[arg-type]
    got = signals.reference_loss(
        reference, Target(target, cached=False), rows, tmp_path / "c.npy", "key", divergence, batch_size=3
    )
    p, r = (Head(model)(one_by_one(model, rows)) for model in (target, reference))
    assert np.allclose(got, token_loss(p, r, divergence).divergence.detach(), atol=1e-4)


def values(count: int = 6) -> Iterator[tuple[slice, np.ndarray]]:
    yield slice(0, count // 2), np.arange(count // 2, dtype=np.float32)
    yield slice(count // 2, count), np.arange(count // 2, count, dtype=np.float32)


def never() -> Iterator[tuple[slice, np.ndarray]]:
    pytest.fail("a sound cache was made again")
    yield slice(0), np.empty(0)


def test_a_sound_cache_is_used_and_not_made_again(tmp_path: Path) -> None:
    path = tmp_path / "x.npy"
    assert signals.cached(path, "a", (6,), values()).tolist() == [0, 1, 2, 3, 4, 5]
    assert signals.cached(path, "a", (6,), never()).tolist() == [0, 1, 2, 3, 4, 5]
    assert isinstance(signals.cached(path, "a", (6,), never()), np.memmap)


@pytest.mark.parametrize("damage", ["cut", "altered", "no note", "other fingerprint", "other shape"])
def test_a_cache_that_does_not_agree_is_made_again(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "x.npy"
    signals.cached(path, "a", (6,), values())
    data = bytearray(path.read_bytes())
    if damage == "cut":
        path.write_bytes(data[:-4])
    elif damage == "altered":
        data[-1] ^= 1
        path.write_bytes(data)
    elif damage == "no note":
        path.with_suffix(".json").unlink()
    count = 8 if damage == "other shape" else 6
    key = "b" if damage == "other fingerprint" else "a"
    assert signals.cached(path, key, (count,), values(count)).tolist() == list(range(count))


def test_a_kill_while_it_is_made_leaves_nothing_that_would_be_used(tmp_path: Path) -> None:
    path = tmp_path / "x.npy"

    def half() -> Iterator[tuple[slice, np.ndarray]]:
        yield slice(0, 3), np.ones(3, dtype=np.float32)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        signals.cached(path, "a", (6,), half())
    assert list(tmp_path.iterdir()) == []
    assert signals.cached(path, "a", (6,), values()).tolist() == [0, 1, 2, 3, 4, 5]


def test_a_disk_without_room_is_noticed_before_it_starts(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"x.npy needs .* GB and .* GB are free .* to recompute"):
        signals.cached(tmp_path / "x.npy", "a", (1 << 50,), never())
