"""What the target says of a batch, computed beside the draft or kept on disk: the right values, never stale ones."""

import resource
import shutil
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
from distill.losses.divergences import TokenDistributions
from distill.networks.lm_head import LMHead
from distill.signal.disk import keep_columns, size_of
from distill.signal.target import HIDDEN, Signal
from distill.stages import mean_tail


def alone(model: PreTrainedModel, examples: Examples) -> Tensor:
    parts = []
    for number in range(len(examples)):
        batch = examples.batch(np.array([number]))
        with torch.no_grad():
            parts.append(model(batch["input_ids"]).logits[label_mask(batch["labels"])])
    return torch.cat(parts).float()


def keep(signal: Signal, examples: Examples, folder: Path | None = None, key: str = "") -> None:
    keep_columns(examples, signal.kept, signal.columns, folder, "target-train", key)


def column(examples: Examples, name: str) -> np.ndarray:
    return np.concatenate([examples.columns[name][number] for number in range(len(examples))])


@pytest.mark.parametrize("kind", ["hidden", "topk", "online"])
@pytest.mark.parametrize("vocab", [48, 40])
def test_the_target_s_distributions_are_those_of_every_example_alone(tiny, kind, vocab: int) -> None:
    model, examples = tiny("gemma2", seed=2), some_rows(5, empty=[1])  # tied and soft-capped
    signal = Signal(model, kind, vocab=vocab, k=99)
    if kind != "online":
        keep(signal, examples)
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


def test_kept_states_take_the_bytes_that_are_announced_and_bfloat16_keeps_a_model_s_own(tiny) -> None:
    model, made = tiny("llama", seed=3, dtype=torch.bfloat16), []
    for narrow in (False, True):
        examples = some_rows(5)
        signal = Signal(model, "hidden", dtype="bfloat16" if narrow else "float32")
        keep(signal, examples)
        assert size_of(examples, signal.columns) == column(examples, HIDDEN).nbytes
        target = signal.rows(everything(examples))[0]
        made.append(target.log_probs(48))
    assert torch.equal(*made)


def test_the_top_ids_are_exact_and_all_others_one_outcome(tiny) -> None:
    model, examples = tiny("llama", seed=2), some_rows(4)
    signal = Signal(model, "topk", vocab=40, k=5)
    keep(signal, examples)
    rows = signal.rows(everything(examples))[0]
    logits = torch.randn(examples.label_count, 40, generator=torch.Generator().manual_seed(0))
    exact = alone(model, examples)[:, :40].log_softmax(-1)
    top = exact.topk(5)
    assert torch.equal(rows.ids.long(), top.indices)
    assert torch.allclose(rows.values, top.values, atol=1e-4)
    tail = 1 - top.values.exp().sum(-1)
    assert mean_tail(examples) == pytest.approx(tail.mean().item(), abs=1e-6)
    true, known = TokenDistributions(exact, logits.log_softmax(-1)), rows.compare(logits)
    assert ((true.alpha - known.alpha).abs() <= tail + 1e-6).all()
    assert torch.allclose(known.alpha, distributions(rows, logits).alpha, atol=1e-6)


def test_a_sound_file_is_used_and_one_that_does_not_fit_is_made_again(tiny, tmp_path) -> None:
    model, calls = tiny("llama"), []
    signal = Signal(model, "hidden")

    def made(key: str, count: int = 5) -> int:
        def computed(batch: dict[str, Any]) -> dict[str, Tensor]:
            calls.append(len(batch["input_ids"]))
            return signal.kept(batch)

        calls.clear()
        examples = some_rows(count)
        keep_columns(examples, computed, signal.columns, tmp_path, "target-train", key)
        wanted = LMHead(model)(torch.from_numpy(column(examples, HIDDEN).copy())).detach()
        assert torch.allclose(wanted, alone(model, examples), atol=1e-4)
        return sum(calls)

    assert (made("a"), made("a"), made("b")) == (5, 0, 5)
    (file,) = tmp_path.iterdir()  # of other inputs: the old file goes
    five = file.read_bytes()
    assert made("b", 4) == 4
    (path,) = tmp_path.iterdir()
    four = path.read_bytes()
    for content in (five, four[:-40], four[:17], b""):  # a whole file with another number of rows, or cut short
        path.write_bytes(content)
        assert made("b", 4) == 4
    assert made("b", 4) == 0


def test_a_failure_leaves_nothing_that_would_be_used(tiny, tmp_path, monkeypatch) -> None:
    signal, examples = Signal(tiny("llama"), "hidden"), some_rows(40)

    def killed(batch: dict[str, Any]) -> dict[str, Tensor]:
        if len(list(tmp_path.iterdir())) > 0:
            raise KeyboardInterrupt
        return signal.kept(batch)

    def infinite(batch: dict[str, Any]) -> dict[str, Tensor]:
        return {name: values * torch.inf for name, values in signal.kept(batch).items()}

    words = r"target_hidden is not finite in a batch of examples \[\d+, "
    for computed, error, match in ((killed, KeyboardInterrupt, None), (infinite, UserError, words)):
        with pytest.raises(error, match=match):
            keep_columns(examples, computed, signal.columns, tmp_path, "target-train", "a")
        assert not list(tmp_path.glob("*.arrow"))
    unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (16_000, unlimited[1]))  # as a disk that another one fills meanwhile
        with pytest.raises(OSError, match=r"'.*/target-train-\w+-0.arrow'"):
            keep(signal, examples, tmp_path, "a")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)
    assert not list(tmp_path.iterdir())
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda path: usage)
        with pytest.raises(UserError, match=r"target-train needs .* GB and 0.00 GB are free in"):
            keep(signal, examples, tmp_path, "a")
    keep(signal, examples, tmp_path, "a")
    assert [path.suffix for path in tmp_path.iterdir()] == [".arrow"]
    monkeypatch.setattr(ranks, "world", lambda: 2)
    monkeypatch.setattr(ranks, "barrier", lambda: None)
    with pytest.raises(UserError, match="is not seen alike by all processes"):  # the other one's file is not there
        keep(signal, examples, tmp_path)
