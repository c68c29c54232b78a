"""What the target says of a batch, computed beside the draft or kept on disk: the right values, never stale ones."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from plain_losses import distributions
from some_rows import everything, some_rows
from torch import Tensor
from transformers import PreTrainedModel

from decode.errors import UserError
from distill import ranks
from distill.data.dataset import Examples, label_mask
from distill.drafts.language_model import LanguageModelDraft
from distill.drafts.reference import keep_reference
from distill.lm_head import LMHead
from distill.losses.divergences import Divergence, TokenDistributions
from distill.signal.disk import keep_columns, size_of
from distill.signal.target import HIDDEN, TOPK, Signal

Tiny = Callable[..., PreTrainedModel]


def alone(model: PreTrainedModel, examples: Examples) -> Tensor:
    """Logits at label positions, of every example by itself."""
    parts = []
    for number in range(len(examples)):
        batch = examples.batch(np.array([number]))
        with torch.no_grad():
            parts.append(model(batch["input_ids"]).logits[label_mask(batch["labels"])])
    return torch.cat(parts).float()


def keep(signal: Signal, model: PreTrainedModel, examples: Examples, folder: Path | None = None, key: str = "") -> None:
    keep_columns(examples, lambda batch: signal.kept(model, batch), signal.columns, None, folder, "target-train", key)


def column(examples: Examples, name: str) -> np.ndarray:
    return np.concatenate([examples.columns[name][number] for number in range(len(examples))])


@pytest.mark.parametrize("kind", ["hidden", "topk", "online"])
@pytest.mark.parametrize("vocab", [48, 40])
def test_the_target_s_distributions_are_those_of_every_example_alone(tiny: Tiny, kind: Any, vocab: int) -> None:
    model, examples = tiny("gemma2", seed=2), some_rows(5, empty=[1])  # tied and soft-capped
    signal = Signal(model, kind, vocab=vocab, k=99)
    if kind != "online":
        keep(signal, model, examples)
    batch = everything(examples)
    target, features = signal.rows(batch)
    wanted = alone(model, examples)[:, :vocab].log_softmax(-1)
    if kind == "topk":  # of hidden states the draft's ids are cut off where both are compared
        assert target.vocab == vocab
    log_p = target.values if kind == "topk" else target.log_probs(vocab)
    assert log_p is not None
    if target.ids is not None:
        log_p = torch.zeros_like(wanted).scatter(1, target.ids.long(), log_p)
    assert torch.allclose(log_p, wanted, atol=1e-4)
    following = batch["labels"].roll(-1, 1)[label_mask(batch["labels"])]
    assert target.labels is not None
    assert torch.equal(target.labels, following.where(following < target.vocab, -1))
    assert features is target.mass is target.learnable is None


def test_kept_states_take_the_bytes_that_are_announced_and_bfloat16_keeps_a_model_s_own(tiny: Tiny) -> None:
    model, made = tiny("llama", seed=3, dtype=torch.bfloat16), []
    for narrow in (False, True):
        examples = some_rows(5)
        signal = Signal(model, "hidden", bfloat16=narrow)
        keep(signal, model, examples)
        assert size_of(examples, signal.columns) == column(examples, HIDDEN).nbytes
        target = signal.rows(everything(examples))[0]
        made.append(target.log_probs(48))
    assert torch.equal(*made)


def test_the_top_ids_are_exact_and_all_others_one_outcome(tiny: Tiny) -> None:
    model, examples = tiny("llama", seed=2), some_rows(4)
    signal = Signal(model, "topk", vocab=40, k=5)
    keep(signal, model, examples)
    rows = signal.rows(everything(examples))[0]
    logits = torch.randn(examples.label_count, 40, generator=torch.Generator().manual_seed(0))
    log_q, exact = logits.log_softmax(-1), alone(model, examples)[:, :40].log_softmax(-1)
    top = exact.topk(5)
    assert torch.equal(rows.ids.long(), top.indices)  # type: ignore[union-attr]
    assert torch.allclose(rows.values, top.values, atol=1e-4)  # type: ignore[arg-type]
    tail = 1 - top.values.exp().sum(-1)
    from distill.stages import mean_tail

    assert mean_tail(examples) == pytest.approx(tail.mean().item(), abs=1e-6)
    true, known = TokenDistributions(exact, log_q), rows.compare(logits)
    assert ((true.alpha - known.alpha).abs() <= tail + 1e-6).all()
    assert torch.allclose(known.alpha, distributions(rows, logits).alpha, atol=1e-6)
    for name in ("forward_kl", "reverse_kl", "jsd", "tv"):  # joining outcomes cannot raise a divergence
        divergence = Divergence(name)  # type: ignore[arg-type]
        assert (divergence.loss(known) <= divergence.loss(true) + 1e-5).all()


@pytest.mark.parametrize("name", ["forward_kl", "tv"])
def test_the_references_loss_is_that_of_every_token(tiny: Tiny, tmp_path: Path, name: Any) -> None:
    target, reference, examples = tiny("llama"), tiny("llama", seed=9), some_rows(5)
    draft = LanguageModelDraft(reference, 5)
    keep_reference(draft, Signal(target), examples, Divergence(name), "32-true", tmp_path, "reference")
    p, r = (alone(model, examples).log_softmax(-1) for model in (target, reference))
    wanted = Divergence(name).loss(TokenDistributions(p, r))
    assert np.allclose(column(examples, "reference_loss")[:, 0], wanted, atol=1e-4)


def test_the_draft_gets_a_copy_of_the_head_of_a_target_that_stays_on_its_own_device(tiny: Tiny) -> None:
    model = tiny("llama-tied", seed=4)  # its head is its embedding
    signal = Signal(model, stays=True)
    signal.to(torch.device("meta"))
    assert signal.head.linear.weight.device.type == "meta"
    assert {weight.device.type for weight in model.parameters()} == {"cpu"}


# -- files ------------------------------------------------------------------------------------------------------------


def test_a_sound_file_is_used_and_one_that_does_not_fit_is_made_again(tiny: Tiny, tmp_path: Path) -> None:
    model, calls = tiny("llama"), list[int]()
    signal = Signal(model, "hidden")

    def computed(batch: dict[str, Any]) -> dict[str, Tensor]:
        calls.append(len(batch["input_ids"]))
        return signal.kept(model, batch)

    def made(key: str, count: int = 5) -> int:
        calls.clear()
        examples = some_rows(count)
        keep_columns(examples, computed, signal.columns, None, tmp_path, "target-train", key)
        wanted = LMHead(model)(torch.from_numpy(column(examples, HIDDEN).copy())).detach()
        assert torch.allclose(wanted, alone(model, examples), atol=1e-4)
        assert len(list(tmp_path.iterdir())) == 1
        return sum(calls)

    assert (made("a"), made("a")) == (5, 0)
    assert made("b") == 5  # of other inputs: the old file goes
    (five,) = (path.read_bytes() for path in tmp_path.iterdir())
    assert made("b", 4) == 4
    (path,) = tmp_path.iterdir()
    path.write_bytes(five)  # a whole file with another number of rows
    assert made("b", 4) == 4
    for length in (path.stat().st_size - 40, 17, 0):
        path.write_bytes(path.read_bytes()[:length])
        assert made("b", 4) == 4, length
    assert made("b", 4) == 0


def test_a_kill_or_a_disk_without_room_leaves_nothing_that_would_be_used(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, signal, examples = tiny("llama"), Signal(tiny("llama"), "hidden"), some_rows(40)

    def killed(batch: dict[str, Any]) -> dict[str, Tensor]:
        if len(list(tmp_path.iterdir())) > 0:
            raise KeyboardInterrupt
        return signal.kept(model, batch)

    with pytest.raises(KeyboardInterrupt):
        keep_columns(examples, killed, signal.columns, None, tmp_path, "target-train", "a")
    assert not list(tmp_path.glob("*.arrow"))
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda path: usage)
        with pytest.raises(UserError, match=r"target-train needs .* GB and 0.00 GB are free in"):
            keep(signal, model, examples, tmp_path, "a")
    keep(signal, model, examples, tmp_path, "a")
    assert [path.suffix for path in tmp_path.iterdir()] == [".arrow"]


def test_states_that_are_not_finite_are_refused_with_their_examples(tiny: Tiny, tmp_path: Path) -> None:
    signal = Signal(tiny("llama"), "hidden")

    def infinite(batch: dict[str, Any]) -> dict[str, Tensor]:
        return {HIDDEN: torch.full((int(label_mask(batch["labels"]).sum()), 32), torch.inf)}

    with pytest.raises(UserError, match=r"target_hidden is not finite in a batch of examples \[0, 1, 2, 3, 4, 5\]"):
        keep_columns(some_rows(6), infinite, signal.columns, None, tmp_path, "target-train")
    assert not list(tmp_path.glob("*.arrow"))


@pytest.mark.parametrize("kind", ["hidden", "topk"])
def test_files_of_several_processes_hold_what_one_file_does(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: Any
) -> None:
    model, name = tiny("llama"), TOPK if kind == "topk" else HIDDEN
    signal, whole = Signal(model, kind, k=8), some_rows(37)
    keep(signal, model, whole)
    monkeypatch.setattr(ranks, "world", lambda: 2)
    monkeypatch.setattr(ranks, "barrier", lambda: None)
    for rank, present in ((0, False), (1, True), (0, True)):  # the other process's file is there, or not
        monkeypatch.setattr(ranks, "rank", lambda rank=rank: rank)
        monkeypatch.setattr(ranks, "is_first", lambda rank=rank: rank == 0)
        parts = some_rows(37)
        if not present:
            with pytest.raises(UserError, match="is not seen alike by all processes"):
                keep(signal, model, parts, tmp_path)
            continue
        keep(signal, model, parts, tmp_path)
        values = [column(examples, name) for examples in (parts, whole)]
        batches = [examples.batch(np.array([3, 0, 36]))[name].numpy() for examples in (parts, whole)]
        for ours, wanted in (values, batches):
            assert ours.dtype == wanted.dtype
            assert np.allclose(ours.view(np.float32), wanted.view(np.float32), atol=1e-5, equal_nan=True)
    assert len(list(tmp_path.glob("*.arrow"))) == 2
