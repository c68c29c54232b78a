"""What the target says of a batch, computed beside the draft or kept on disk: the right values, never stale ones."""

import copy
import weakref
from itertools import accumulate

import numpy as np
import pytest
import torch
from datasets import Dataset
from families import VOCAB, build_architecture
from plain_losses import distributions
from some_rows import everything, scratch, some_rows
from torch import Tensor
from transformers import PreTrainedModel

from distill.data.dataset import PLACES, Examples, label_mask
from distill.losses.divergences import TargetRows
from distill.networks.layers import decoder_layers, final_norm, state_of
from distill.networks.lm_head import last_hidden
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


@torch.no_grad()
@pytest.mark.parametrize(
    ("name", "field", "lengths"),
    [
        ("Phi-3, rope longrope", "original_max_position_embeddings", (40, 5, 16, 17, 18, 30)),
        ("Llama, rope dynamic", "max_position_embeddings", (40, 5, 16, 30)),
    ],
)
def test_states_of_a_text_do_not_depend_on_a_longer_neighbour(name: str, field: str, lengths: tuple[int, ...]) -> None:
    """LongRoPE and dynamic ropes choose their frequencies by the longest text of a batch."""
    model = build_architecture(name, **{field: 16})
    texts = [[(5 * i + length) % VOCAB for i in range(length)] for length in lengths]
    examples = Examples.of(Dataset.from_dict({"input_ids": texts, "labels": texts}))
    batch = examples.batch(np.arange(len(texts)))
    fresh, (hidden, features) = copy.deepcopy(model), read_states(model, [1], batch)
    ends = [0, *accumulate(len(text) - 1 for text in texts)]
    for i, (text, begin, end) in enumerate(zip(texts, ends, ends[1:])):
        alone = copy.deepcopy(fresh).model(torch.tensor([text[:-1]]), output_hidden_states=True)
        torch.testing.assert_close(hidden[begin:end], alone.last_hidden_state[0], atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(features[i, : len(text) - 1], alone.hidden_states[1][0], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(last_hidden(model, batch["input_ids"], batch[PLACES]), hidden)


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
