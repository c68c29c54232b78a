"""Cached signals: the right values, and never a file that is stale, cut short or altered."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from plain_losses import token_loss
from transformers import PreTrainedModel

from decode.errors import UserError
from distill.data.batches import TokenDataset, label_mask
from distill.data.chat import IGNORE
from distill.losses.divergences import Divergence, TokenDistributions
from distill.models.lm_head import LMHead, last_hidden
from distill.teacher import store
from distill.teacher.signals import TargetSignal, Teacher
from distill.teacher.store import Kept, Shards, cached, keep_signal, mean_tail, reference_loss

Tiny = Callable[..., PreTrainedModel]


@pytest.fixture
def rows() -> TokenDataset:
    rng = np.random.default_rng(0)
    lengths = np.array([7, 5, 9, 6])
    ids = rng.integers(2, 48, lengths.sum()).astype(np.int32)
    offsets = np.concatenate([[0], lengths.cumsum()])
    labels = ids.copy()
    for start in offsets[:-1]:
        labels[start : start + 2] = IGNORE
    return TokenDataset(ids, labels, offsets, np.concatenate([[0], (lengths - 2).cumsum()]))


def one_by_one(model: PreTrainedModel, rows: TokenDataset) -> torch.Tensor:
    """Hidden states at label positions, every example alone."""
    parts = []
    for example in range(len(rows)):
        ids = torch.from_numpy(rows.ids[rows.offsets[example] : rows.offsets[example + 1]]).long()[None]
        mask = torch.zeros_like(ids, dtype=torch.bool)
        mask[:, 1:-1] = True
        with torch.no_grad():
            parts.append(last_hidden(model, ids, mask))
    return torch.cat(parts)


def kept_in(
    model: PreTrainedModel, signal: TargetSignal, rows: TokenDataset, folder: Path, key: str = "key"
) -> np.ndarray:
    """The values of a signal, kept in a folder."""
    some = TokenDataset(rows.ids, rows.labels, rows.offsets, rows.label_offsets)
    keep_signal(Teacher(model, signal), model, some, folder, "x", key)
    return some.signals[signal.name]


def bytes_of(model: PreTrainedModel, signal: TargetSignal, rows: TokenDataset) -> int:
    (shape, dtype), *_ = Teacher(model, signal).layout(rows).values()
    return int(np.prod(shape)) * np.dtype(dtype).itemsize


def test_hidden_states_are_those_of_every_example_alone(tiny: Tiny, rows: TokenDataset, tmp_path: Path) -> None:
    model, signal = tiny("gpt_neox"), TargetSignal("hidden")
    got = kept_in(model, signal, rows, tmp_path / "h")
    assert got.shape == (rows.label_count, 32)
    assert bytes_of(model, signal, rows) == got.nbytes
    assert np.allclose(got, one_by_one(model, rows), atol=1e-5)


def log_probs_of(
    model: PreTrainedModel, signal: TargetSignal, rows: TokenDataset, path: Path, log_q: torch.Tensor
) -> Any:
    """What batches of the kept signal say of all label rows, in the order of the examples."""
    kept = TokenDataset(rows.ids, rows.labels, rows.offsets, rows.label_offsets)
    kept.signals[signal.name] = kept_in(model, signal, rows, path)
    batch = kept.batch(np.arange(len(rows)), 0)
    target = Teacher(model, signal).rows(batch, label_mask(batch["labels"]))
    return target.log_probs(slice(None), log_q, signal.temperature)


def test_hidden_states_in_bfloat16_take_half_the_room_and_are_exact_for_a_model_in_bfloat16(
    tiny: Tiny, rows: TokenDataset, tmp_path: Path
) -> None:
    model = tiny("llama", seed=3, dtype=torch.bfloat16)
    signal, log_q = TargetSignal("hidden", bfloat16=True), torch.zeros(rows.label_count, 48)
    wide = TargetSignal("hidden")
    assert 2 * bytes_of(model, signal, rows) == bytes_of(model, wide, rows)
    got = log_probs_of(model, signal, rows, tmp_path / "a", log_q)
    assert torch.equal(got, log_probs_of(model, wide, rows, tmp_path / "b", log_q))


def test_a_signal_under_autocast_is_that_of_the_forward_in_bfloat16_and_kept_apart_from_the_exact_one(
    tiny: Tiny, rows: TokenDataset, tmp_path: Path
) -> None:
    model, half = tiny("llama", seed=3), TargetSignal("hidden", autocast=True)
    exact = kept_in(model, TargetSignal("hidden"), rows, tmp_path / "a")
    got = kept_in(model, half, rows, tmp_path / "b")
    with torch.autocast("cpu", torch.bfloat16):
        plain = one_by_one(model, rows)
    assert np.allclose(got, plain, atol=0.02)
    assert 1e-4 < np.abs(got - exact).max() < 0.2
    assert half.key != TargetSignal("hidden").key


@pytest.mark.parametrize("temperature", [1.0, 1.5])
def test_top_log_probabilities_are_the_targets_own_and_the_tail_has_the_drafts_shape(
    tiny: Tiny, rows: TokenDataset, tmp_path: Path, temperature: float
) -> None:
    model = tiny("llama", seed=2)
    signal = TargetSignal("topk", k=5, vocab=40, temperature=temperature)
    log_q = torch.randn(rows.label_count, 40, generator=torch.Generator().manual_seed(0)).log_softmax(-1)
    got = log_probs_of(model, signal, rows, tmp_path, log_q)
    exact = (LMHead(model)(one_by_one(model, rows))[:, :40] / temperature).log_softmax(-1)
    top = exact.topk(5).indices
    assert torch.allclose(got.gather(1, top), exact.gather(1, top), atol=1e-4)
    assert torch.allclose(got.exp().sum(-1), torch.ones(len(got)), atol=1e-5)
    apart = (got - log_q).scatter(1, top, torch.nan)  # one number a row outside the top
    assert torch.allclose(apart.nan_to_num(-torch.inf).amax(-1), apart.nan_to_num(torch.inf).amin(-1), atol=1e-5)
    tail = 1 - exact.gather(1, top).exp().sum(-1)
    kept = np.load(tmp_path / f"{signal.name}_x.npy")
    assert mean_tail(kept, block=4) == pytest.approx(tail.mean().item(), abs=1e-6)
    assert bytes_of(model, signal, rows) == kept.nbytes
    true, known = TokenDistributions(exact, log_q), TokenDistributions(got, log_q)
    assert ((true.alpha - known.alpha).abs() <= tail + 1e-6).all()
    for name in ("forward_kl", "reverse_kl", "jsd", "tv"):  # lumping outcomes together cannot raise a divergence
        divergence = Divergence(name)  # type: ignore[arg-type]
        assert (divergence.loss(known) <= divergence.loss(true) + 1e-5).all()


@pytest.mark.parametrize("temperature", [1.0, 1.5])
@pytest.mark.parametrize("vocab", [48, 40])
@pytest.mark.parametrize("kind", ["log_probs", "topk"])
def test_keeping_every_id_is_exact(
    tiny: Tiny, rows: TokenDataset, tmp_path: Path, kind: Any, vocab: int, temperature: float
) -> None:
    model, log_q = tiny("llama", seed=2), torch.zeros(rows.label_count, vocab).log_softmax(-1)
    signal = TargetSignal(kind, k=99, vocab=vocab, temperature=temperature)
    got = log_probs_of(model, signal, rows, tmp_path, log_q)
    exact = (LMHead(model)(one_by_one(model, rows))[:, :vocab] / temperature).log_softmax(-1)
    assert torch.allclose(got, exact, atol=1e-5 if kind == "log_probs" else 1e-4)
    assert bytes_of(model, signal, rows) == np.load(tmp_path / f"{signal.name}_x.npy").nbytes


@pytest.mark.parametrize("name", ["forward_kl", "tv"])
def test_the_references_loss_is_that_of_every_token(tiny: Tiny, rows: TokenDataset, tmp_path: Path, name: str) -> None:
    target, reference, divergence = tiny("llama"), tiny("llama", seed=9), Divergence(name)  # type: ignore[arg-type]
    got = reference_loss(reference, Teacher(target), rows, divergence, folder=tmp_path, name="c")
    p, r = (LMHead(model)(one_by_one(model, rows)) for model in (target, reference))
    assert np.allclose(got, token_loss(p, r, divergence).divergence.detach(), atol=1e-4)


def values(count: int = 6) -> Iterator[tuple[slice, np.ndarray]]:
    yield slice(0, count // 2), np.arange(count // 2, dtype=np.float32)
    yield slice(count // 2, count), np.arange(count // 2, count, dtype=np.float32)


def never() -> Iterator[tuple[slice, np.ndarray]]:
    pytest.fail("a sound cache was made again")
    yield slice(0), np.empty(0)


def one(path: Path, key: str, count: int, parts: Iterator[tuple[slice, np.ndarray]]) -> np.ndarray:
    return cached([Kept(path, key, (count,))], ([part] for part in parts))[0]


def test_a_sound_cache_is_used_and_not_made_again(tmp_path: Path) -> None:
    path = tmp_path / "x.npy"
    assert one(path, "a", 6, values()).tolist() == [0, 1, 2, 3, 4, 5]
    assert one(path, "a", 6, never()).tolist() == [0, 1, 2, 3, 4, 5]
    assert isinstance(one(path, "a", 6, never()), np.memmap)


@pytest.mark.parametrize("damage", ["cut", "altered", "no note", "other fingerprint", "other shape"])
def test_a_cache_that_does_not_agree_is_made_again(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "x.npy"
    one(path, "a", 6, values())
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
    assert one(path, key, count, values(count)).tolist() == list(range(count))


def test_a_kill_while_it_is_made_leaves_nothing_that_would_be_used(tmp_path: Path) -> None:
    path = tmp_path / "x.npy"

    def half() -> Iterator[tuple[slice, np.ndarray]]:
        yield slice(0, 3), np.ones(3, dtype=np.float32)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        one(path, "a", 6, half())
    assert list(tmp_path.iterdir()) == []
    assert one(path, "a", 6, values()).tolist() == [0, 1, 2, 3, 4, 5]


def test_a_disk_without_room_is_noticed_before_it_starts(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"x.npy\) need .* GB and .* GB are free .* to online"):
        one(tmp_path / "x.npy", "a", 1 << 50, never())


# -- several files ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("signal", ["hidden", "topk"])
def test_files_of_several_processes_hold_what_one_file_does(
    tiny: Tiny, rows: TokenDataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, signal: Any
) -> None:
    model, kind = tiny("llama"), TargetSignal(signal, k=8, vocab=48)
    whole = kept_in(model, kind, rows, tmp_path / "whole")
    monkeypatch.setattr(store, "TOKENS", 10)
    monkeypatch.setattr("distill.ranks.started", lambda: 2)
    monkeypatch.setattr("distill.ranks.rank", lambda: 1)
    monkeypatch.setattr("distill.ranks.wait_for", lambda look, what: pytest.fail(what))  # the other process's
    with pytest.raises(pytest.fail.Exception, match=r"x.0000-of-0003.npy \(process 0 makes it\)"):
        kept_in(model, kind, rows, tmp_path)
    assert [path.name for path in tmp_path.glob("*_x.*.npy")] == [f"{kind.name}_x.0001-of-0003.npy"]
    monkeypatch.setattr("distill.ranks.rank", lambda: 0)
    found = kept_in(model, kind, rows, tmp_path)
    assert len(list(tmp_path.glob("*_x.*.npy"))) == 3
    assert (found.shape, found.dtype, len(found)) == (whole.shape, whole.dtype, len(whole))
    rows.signals["kept"] = found
    for example in range(len(rows)):
        place = slice(rows.label_offsets[example], rows.label_offsets[example + 1])
        values = np.ascontiguousarray(found[place]).view(np.float32)
        assert np.allclose(values, np.ascontiguousarray(whole[place]).view(np.float32), atol=1e-5)
        assert isinstance(found[place], np.memmap)  # read where it lies
    assert torch.equal(rows.batch(np.arange(4), 0)["kept"], torch.from_numpy(found[0 : len(found)]))
    monkeypatch.setattr("distill.ranks.started", lambda: 1)  # another number of processes makes nothing again
    before = [path.stat().st_mtime_ns for path in sorted(tmp_path.glob("*_x.*"))]
    assert np.array_equal(kept_in(model, kind, rows, tmp_path)[:], found[:])
    assert [path.stat().st_mtime_ns for path in sorted(tmp_path.glob("*_x.*"))] == before


def test_a_damaged_file_alone_is_made_again(
    tiny: Tiny, rows: TokenDataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "TOKENS", 10)
    model, kind = tiny("llama"), TargetSignal("hidden")
    before = np.array(kept_in(model, kind, rows, tmp_path)[:])
    files = {path: path.stat().st_mtime_ns for path in sorted(tmp_path.glob("*_x.*.npy"))}
    damaged = list(files)[1]
    damaged.write_bytes(damaged.read_bytes()[:-4] + b"????")
    assert np.array_equal(kept_in(model, kind, rows, tmp_path)[:], before)
    assert [path for path in files if path.stat().st_mtime_ns != files[path]] == [damaged]


def test_slices_of_several_arrays_are_those_of_one() -> None:
    whole = np.arange(20).reshape(10, 2)
    made = Shards([whole[:3], whole[3:3], whole[3:4], whole[4:]])
    for start in range(11):
        for stop in range(start, 12):
            assert np.array_equal(made[start:stop], whole[start:stop]), (start, stop)
