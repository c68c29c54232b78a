"""Cached signals: the right values, and never a file that is stale, cut short or altered."""

from collections.abc import Callable, Sequence
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
from distill.teacher.store import Array, Shards, cached, keep_signal, mean_tail, reference_loss, size_of

Tiny = Callable[..., PreTrainedModel]


@pytest.fixture
def rows() -> TokenDataset:
    rng = np.random.default_rng(0)
    texts = [rng.integers(2, 48, length) for length in (7, 5, 9, 6)]
    return TokenDataset.from_lists(texts, [[IGNORE, IGNORE, *text[2:]] for text in texts])


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


def kept_in(model: PreTrainedModel, signal: TargetSignal, rows: TokenDataset, folder: Path) -> np.ndarray:
    """The values of a signal, kept in a folder."""
    some, teacher = rows.part(0, len(rows)), Teacher(model, signal)
    keep_signal(teacher, model, some, folder, "x", "key")
    return some.signals[signal.name]


def log_probs_of(
    model: PreTrainedModel, signal: TargetSignal, rows: TokenDataset, path: Path, log_q: torch.Tensor
) -> Any:
    """What batches of the kept signal say of all label rows, in the order of the examples."""
    kept = rows.part(0, len(rows))
    kept.signals[signal.name] = kept_in(model, signal, rows, path)
    batch = kept.batch(np.arange(len(rows)))
    target = Teacher(model, signal).rows(batch, label_mask(batch["labels"]))
    return target.log_probs(log_q)


def test_hidden_states_are_those_of_every_example_alone(tiny: Tiny, rows: TokenDataset, tmp_path: Path) -> None:
    model = tiny("gpt_neox")
    got = kept_in(model, TargetSignal("hidden"), rows, tmp_path)
    assert size_of([(got.shape, "float32")]) == got.nbytes == rows.label_count * 32 * 4
    assert np.allclose(got, one_by_one(model, rows), atol=1e-5)


def test_hidden_states_in_bfloat16_are_exact_for_a_model_in_bfloat16(
    tiny: Tiny, rows: TokenDataset, tmp_path: Path
) -> None:
    model, log_q = tiny("llama", seed=3, dtype=torch.bfloat16), torch.zeros(rows.label_count, 48)
    got = log_probs_of(model, TargetSignal("hidden", bfloat16=True), rows, tmp_path / "a", log_q)
    assert torch.equal(got, log_probs_of(model, TargetSignal("hidden"), rows, tmp_path / "b", log_q))


def test_a_signal_under_autocast_is_that_of_the_forward_in_bfloat16_and_kept_apart_from_the_exact_one(
    tiny: Tiny, rows: TokenDataset, tmp_path: Path
) -> None:
    model, half = tiny("llama", seed=3), TargetSignal("hidden", autocast=True)
    exact = np.array(kept_in(model, TargetSignal("hidden"), rows, tmp_path))
    got = kept_in(model, half, rows, tmp_path)
    with torch.autocast("cpu", torch.bfloat16):
        plain = one_by_one(model, rows).numpy()
    assert np.abs(got - exact).mean() > 3 * np.abs(got - plain).mean()


def test_top_log_probabilities_are_the_targets_own_and_the_tail_has_the_drafts_shape(
    tiny: Tiny, rows: TokenDataset, tmp_path: Path
) -> None:
    model = tiny("llama", seed=2)
    signal = TargetSignal("topk", k=5, vocab=40)
    log_q = torch.randn(rows.label_count, 40, generator=torch.Generator().manual_seed(0)).log_softmax(-1)
    got = log_probs_of(model, signal, rows, tmp_path, log_q)
    exact = LMHead(model)(one_by_one(model, rows))[:, :40].log_softmax(-1)
    top = exact.topk(5).indices
    assert torch.allclose(got.gather(1, top), exact.gather(1, top), atol=1e-4)
    assert torch.allclose(got.exp().sum(-1), torch.ones(len(got)), atol=1e-5)
    apart = (got - log_q).scatter(1, top, torch.nan)  # one number a row outside the top
    assert torch.allclose(apart.nan_to_num(-torch.inf).amax(-1), apart.nan_to_num(torch.inf).amin(-1), atol=1e-5)
    tail = 1 - exact.gather(1, top).exp().sum(-1)
    assert mean_tail(np.load(tmp_path / f"{signal.name}_x.npy")) == pytest.approx(tail.mean().item(), abs=1e-6)
    true, known = TokenDistributions(exact, log_q), TokenDistributions(got, log_q)
    assert ((true.alpha - known.alpha).abs() <= tail + 1e-6).all()
    for name in ("forward_kl", "reverse_kl", "jsd", "tv"):  # lumping outcomes together cannot raise a divergence
        divergence = Divergence(name)  # type: ignore[arg-type]
        assert (divergence.loss(known) <= divergence.loss(true) + 1e-5).all()


@pytest.mark.parametrize("vocab", [48, 40])
@pytest.mark.parametrize("kind", ["log_probs", "topk"])
def test_keeping_every_id_is_exact(tiny: Tiny, rows: TokenDataset, tmp_path: Path, kind: Any, vocab: int) -> None:
    model, log_q = tiny("llama", seed=2), torch.zeros(rows.label_count, vocab).log_softmax(-1)
    signal = TargetSignal(kind, k=99, vocab=vocab)
    got = log_probs_of(model, signal, rows, tmp_path, log_q)
    exact = LMHead(model)(one_by_one(model, rows))[:, :vocab].log_softmax(-1)
    assert torch.allclose(got, exact, atol=1e-5 if kind == "log_probs" else 1e-4)


@pytest.mark.parametrize("name", ["forward_kl", "tv"])
def test_the_references_loss_is_that_of_every_token(tiny: Tiny, rows: TokenDataset, tmp_path: Path, name: str) -> None:
    target, reference, divergence = tiny("llama"), tiny("llama", seed=9), Divergence(name)  # type: ignore[arg-type]
    got = reference_loss(reference, Teacher(target), rows, divergence, folder=tmp_path, name="c")
    p, r = (LMHead(model)(one_by_one(model, rows)) for model in (target, reference))
    assert np.allclose(got, token_loss(p, r, divergence).divergence.detach(), atol=1e-4)


# -- files ------------------------------------------------------------------------------------------------------------


def numbered(arrays: Sequence[Array]) -> None:
    arrays[0][:] = np.arange(len(arrays[0]))


def never(arrays: Sequence[Array]) -> None:
    pytest.fail("a sound cache was made again")


def one(path: Path, key: str, count: int, make: Callable[[Sequence[Array]], None]) -> np.ndarray:
    return cached({path: ((count,), "float32")}, key, make)[0]


@pytest.mark.parametrize("damage", ["cut", "altered", "no note", "other fingerprint", "other shape"])
def test_a_sound_cache_is_used_and_one_that_does_not_agree_is_made_again(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "x.npy"
    one(path, "a", 6, numbered)
    assert isinstance(one(path, "a", 6, never), np.memmap)
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
    assert one(path, key, count, numbered).tolist() == list(range(count))


def test_a_kill_while_it_is_made_leaves_nothing_that_would_be_used(tmp_path: Path) -> None:
    def half(arrays: Sequence[Array]) -> None:
        arrays[0][:3] = 1
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        one(tmp_path / "x.npy", "a", 6, half)
    assert list(tmp_path.iterdir()) == []


def test_a_disk_without_room_is_noticed_before_it_starts(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"x.npy\) need .* GB and .* GB are free .* to online"):
        one(tmp_path / "x.npy", "a", 1 << 50, never)


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
    files = {path: path.stat().st_mtime_ns for path in sorted(tmp_path.glob("*_x.*.npy"))}
    assert len(files) == 3
    assert (found.shape, found.dtype, len(found)) == (whole.shape, whole.dtype, len(whole))
    values = np.array(found[:])
    assert np.allclose(values.view(np.float32), whole.view(np.float32), atol=1e-5)
    rows.signals["kept"] = found
    assert torch.equal(rows.batch(np.arange(4))["kept"], torch.from_numpy(values))
    assert isinstance(found[int(rows.label_offsets[1]) : int(rows.label_offsets[2])], np.memmap)  # read where it lies
    monkeypatch.setattr("distill.ranks.started", lambda: 1)  # another number of processes makes nothing again
    damaged = list(files)[1]  # but what is damaged
    damaged.write_bytes(damaged.read_bytes()[:-4] + b"????")
    assert np.array_equal(kept_in(model, kind, rows, tmp_path)[:], values)
    assert [path for path in files if path.stat().st_mtime_ns != files[path]] == [damaged]


def test_slices_of_several_arrays_are_those_of_one() -> None:
    whole = np.arange(20).reshape(10, 2)
    made = Shards([whole[:3], whole[3:3], whole[3:4], whole[4:]])
    for start in range(11):
        for stop in range(start, 12):
            assert np.array_equal(made[start:stop], whole[start:stop]), (start, stop)
