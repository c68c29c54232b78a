"""What the target says of a batch, computed beside the draft or kept on disk: the right values, never stale ones."""

import weakref

import numpy as np
import pytest
import torch
from plain_losses import distributions
from some_rows import everything, scratch, some_rows
from torch import Tensor
from transformers import PreTrainedModel

from distill.data.dataset import Examples, label_mask
from distill.losses.divergences import TargetRows
from distill.networks.layers import decoder_layers, final_norm, state_of
from distill.signal.kept import keep_columns, size_of
from distill.signal.target import HIDDEN, Signal, read_states
from distill.stages import mean_tail


def alone(model: PreTrainedModel, examples: Examples) -> Tensor:
    parts = []
    for number in range(len(examples)):
        batch = examples.batch(np.array([number]))
        with torch.no_grad():
            parts.append(model(batch["input_ids"]).logits[label_mask(batch["labels"])])
    return torch.cat(parts).float()


def keep(signal: Signal, examples: Examples) -> None:
    keep_columns(scratch(signal.columns), [examples], signal.kept)


def column(examples: Examples, name: str) -> np.ndarray:
    return np.concatenate([examples.values(name, number) for number in range(len(examples))])


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


def test_a_forward_holds_no_states_but_those_that_a_head_reads(tiny) -> None:
    model, batch, alive = tiny("llama", num_hidden_layers=8), everything(some_rows(4)), list[int]()
    outputs = list[weakref.ref[Tensor]]()
    for layer in decoder_layers(model):
        layer.register_forward_hook(lambda *call: outputs.append(weakref.ref(state_of(call[-1]))))
    final_norm(model).register_forward_pre_hook(lambda *_: alive.append(sum(ref() is not None for ref in outputs)))
    hidden, features = read_states(model, [2, 5], batch)
    assert alive == [2 + 1]  # and the last one's, which the norm reads
    with torch.no_grad():
        out = model.model(batch["input_ids"], output_hidden_states=True)
    assert torch.equal(features, torch.cat([out.hidden_states[2], out.hidden_states[5]], -1))
    assert torch.equal(hidden, out.last_hidden_state[label_mask(batch["labels"])])


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
    true, known = TargetRows(exact, 40).compare(logits), rows.compare(logits)
    assert ((true.alpha - known.alpha).abs() <= tail + 1e-6).all()
    assert torch.allclose(known.alpha, distributions(rows, logits).alpha, atol=1e-6)
