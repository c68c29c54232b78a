"""EAGLE-1, EAGLE-3 and next-token layers in training: rows and their plain twin, losses, selections, how heads begin."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from drafts import draft_of
from families import in_double
from mtp_targets import NEEDED, with_layers
from plain_logits import head_logits
from some_rows import TRAINING, attached, everything, from_lists, some_rows
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedModel

from decode.models.heads import FeatureHead, head_config
from decode.models.mtp import load_mtp
from distill.config import DraftSettings, StudentSettings
from distill.data.dataset import label_mask
from distill.drafts.eagle import FeatureDraft
from distill.drafts.reference import keep_reference
from distill.drafts.start import frequent, start_from_target
from distill.losses.chunked import Rows, compare
from distill.losses.divergences import Divergence
from distill.modules import DistillModule
from distill.signal.disk import keep_columns
from distill.signal.target import Signal

KINDS = ["eagle", "eagle3", pytest.param("mtp", marks=NEEDED), pytest.param("mtp of two layers", marks=NEEDED)]
Made = tuple[PreTrainedModel, FeatureDraft, Signal]


@pytest.fixture
def make(tiny: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes a head of a kind, of half of the ids where it has an output head of its own, on a target in float64."""

    def made(kind: str, steps: int = 3, *, target: PreTrainedModel | None = None) -> Made:
        settings: Any = StudentSettings(kind=kind.split()[0], unroll=steps)  # type: ignore[arg-type]
        if kind.startswith("mtp"):
            layers = 2 if "two" in kind else 1
            opened = with_layers(tmp_path, monkeypatch, "DeepSeek-V3" if layers > 1 else "Mellum", layers)
            head: Any = load_mtp(opened)
        else:
            opened = target or in_double(tiny("llama", num_hidden_layers=4, dtype=torch.float64))
            return opened, *draft_of(kind, opened, steps)
        return opened, FeatureDraft(head.train(), settings, 5, settings.decay), Signal(opened, reader=head)

    return made


@pytest.mark.parametrize("kind", KINDS)
def test_rows_are_what_the_head_drafts_when_each_step_is_read_after_the_other(make: Any, kind: str) -> None:
    """Of each text alone, with the target's true features: states, the target's distribution, and what both give."""
    target, draft, signal = make(kind)
    head, examples = draft.model, some_rows(4, empty=[2])
    batch = everything(examples)
    rows, mask = draft.rows(batch, signal), label_mask(batch["labels"])
    assert rows.count == int(mask.sum())
    if kind == "eagle":
        assert rows.weight is not None
        rows.weight = rows.weight / 0.1
    close = {"rtol": 1e-6, "atol": 1e-8} if rows.hidden.dtype == torch.float64 else {"rtol": 1e-4, "atol": 1e-5}
    measured, starts = compare(rows, Divergence()), (mask.sum(1).cumsum(0) - mask.sum(1)).tolist()
    steps = min(3, head.drafts or 3)
    assert set(rows.step.tolist()) == set(range(steps))  # type: ignore[union-attr]
    seen = 0
    for step in range(steps):
        mine = (rows.step == step).nonzero()[:, 0]
        for text, (ids, places) in enumerate(zip(batch["input_ids"].tolist(), mask)):
            positions = [at for at in places.nonzero()[:, 0].tolist() if at > step]
            if not positions:
                continue
            logits = head_logits(head, target, ids, positions[0] + 1, step + 1)
            q, p = logits.softmax(-1), target(input_ids=torch.tensor([ids])).logits[0].softmax(-1).detach()
            for at in positions:
                number = starts[text] + int(places[:at].sum())
                (row,) = mine[rows.at[mine] == number].tolist()  # type: ignore[index]
                same = q[at - positions[0]]
                torch.testing.assert_close(measured.alpha[row], torch.minimum(p[at], same).sum(), **close)
                own = rows.head(rows.hidden[row : row + 1]).softmax(-1)[0]
                drafted = same if head.draft_ids() is None else same[head.draft_ids()]
                torch.testing.assert_close(own.detach(), drafted, **close)
                if rows.learnable is not None:
                    assert bool(rows.learnable[row]) == bool((head.draft_ids() == p[at].argmax()).any())
                assert rows.weight is not None
                wanted = signal_decay(kind) ** step * (1.0 if rows.learnable is None else float(rows.learnable[row]))
                assert float(rows.weight[row]) == pytest.approx(wanted)
                seen += 1
    assert seen == len(rows) > 20


def signal_decay(kind: str) -> float:
    return 0.6 if kind.startswith("mtp") else 0.8


def test_eagle_1_learns_the_target_s_states_and_a_tenth_of_the_divergence(make: Any) -> None:
    target, draft, signal = make("eagle")
    batch = everything(some_rows(3))
    module = attached(DistillModule(draft, signal, TRAINING, 1, settings=DraftSettings(name="x")))
    loss, rows, _ = module(batch, training=True)
    mask = label_mask(batch["labels"])
    states = target(input_ids=batch["input_ids"], output_hidden_states=True).hidden_states[-1].detach()
    wanted = torch.zeros(())
    for row, (at, step) in enumerate(zip(rows.at.tolist(), rows.step.tolist())):
        distance = functional.smooth_l1_loss(rows.hidden[row], states[mask][at])  # the state that the next step reads
        divergence = 0.1 * compare(rows, Divergence(), torch.tensor([row])).losses[0] * rows.learnable[row]
        wanted = wanted + 0.8**step * (distance + divergence)
    assert loss.item() == pytest.approx(wanted.item() / int(mask.sum()), rel=1e-5)


def test_noise_is_a_function_of_the_seed_and_absent_without_one(make: Any) -> None:
    """ΔL is ranked under the noise that is trained: the rows are made once."""
    _, draft, signal = make("eagle")
    draft.noise = 0.2
    batch = everything(some_rows(3))
    torch.manual_seed(1)
    first = draft.rows(batch, signal, 7)
    torch.manual_seed(1)
    assert torch.equal(draft.rows(batch, signal, 7).hidden, first.hidden)
    plain = draft.rows(batch, signal).hidden
    assert torch.equal(plain, draft.rows(batch, signal).hidden)
    assert not torch.equal(first.hidden, plain)
    settings = DraftSettings(name="x", reference="y", k=0.4)
    module = attached(DistillModule(draft, signal, TRAINING, 1, settings=settings))
    batch["reference_loss"] = torch.zeros(first.count, 3)
    made, choose = list[tuple[Rows, Tensor]](), module.choose
    module.choose = lambda rows, compared: made.append((rows, compared.losses)) or choose(rows, compared)  # type: ignore[method-assign,func-returns-value]
    _, rows, _ = module(batch, training=True)
    ((ranked, losses),) = made
    assert ranked is rows
    assert torch.equal(losses, compare(rows, Divergence()).losses)


@pytest.mark.parametrize("kind", KINDS)
def test_every_weight_learns_and_one_gradient_of_the_output_head_is_kept_for_all_steps(make: Any, kind: str) -> None:
    """Seven copies of it are 17 GB for a vocabulary of 150,000 ids. The target learns nothing."""
    batch, eagle3 = everything(some_rows(8)), kind == "eagle3"
    for steps in (1, 4):
        target, draft, signal = make(kind, steps)
        module = attached(DistillModule(draft, signal, TRAINING, 1))
        weight, sizes = draft.rows(batch, signal).head.linear.weight, dict[int, torch.Size]()

        def keep(values: Tensor, sizes: Any = sizes) -> Tensor:
            sizes[values.data_ptr()] = values.shape
            return values

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda values: values):
            loss = module(batch, training=True)[0]
        assert sum(shape == weight.shape for at, shape in sizes.items() if at != weight.data_ptr()) == int(eagle3)
        loss.backward()
        assert weight.requires_grad == eagle3
        assert dict(module.named_parameters()).keys() == {f"model.{n}" for n, _ in draft.model.named_parameters()}
        idle = [name for name, w in draft.model.named_parameters() if w.grad is None or not w.grad.any()]
        assert all(any(part in name for part in ("experts", "gate.", "bias")) for name in idle)
        assert not any(w.grad is not None or w.requires_grad for w in target.parameters())


@pytest.mark.parametrize("kind", ["language model", "dspark", *KINDS])
@pytest.mark.parametrize("selects", [False, True])
def test_a_part_without_a_label_leaves_a_zero_and_a_whole_graph(make: Any, kind: str, selects: bool) -> None:
    """DDP waits for a gradient of every weight from every process."""
    _, draft, signal = make(kind)
    settings = DraftSettings(name="x", reference="y" if selects else None)
    module = attached(DistillModule(draft, signal, TRAINING, 1, settings=settings), 2)
    batch = everything(some_rows(2, empty=[0, 1]))
    batch["reference_loss"] = torch.zeros(0, 1 if kind == "language model" else 3)
    loss = module.training_step(batch, 0)
    assert loss.item() == 0.0
    loss.backward()
    assert all(weight.grad is not None and not weight.grad.any() for weight in module.parameters())
    module(batch, training=False)


@pytest.mark.parametrize("kind", ["eagle", "eagle3"])
@pytest.mark.parametrize("form", ["hidden", "topk"])
def test_kept_signals_give_the_rows_of_the_target_beside_the_head(make: Any, kind: str, form: Any, tiny: Any) -> None:
    target = tiny("llama", num_hidden_layers=4)
    _, draft, online = make(kind, target=target)
    batches = []
    for examples in (some_rows(5), some_rows(5)):
        keep_reference(draft, online, examples, Divergence("tv"), "32-true")
        batches.append(examples)
    signal = Signal(target, form, draft.model, k=99)
    model = target
    keep_columns(batches[0], lambda batch: signal.kept(model, batch), signal.columns)
    found, wanted = (draft.rows(everything(e), s) for e, s in zip(batches, (signal, online)))
    for name in ("hidden", "at", "step", "weight", "reference", "mass", "learnable", "distance"):
        ours, theirs = getattr(found, name), getattr(wanted, name)
        assert (ours is None and theirs is None) or torch.allclose(ours, theirs, atol=1e-5), name
    ours, theirs = (compare(rows, Divergence("tv")) for rows in (found, wanted))
    assert torch.allclose(ours.losses, theirs.losses, atol=1e-5)
    assert torch.allclose(ours.alpha, theirs.alpha, atol=1e-5)
    assert torch.allclose(wanted.reference, theirs.losses, atol=1e-5)  # type: ignore[arg-type]


# -- the network ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", [1, 3])
def test_rows_drafted_together_are_those_drafted_alone(tiny: Any, version: int) -> None:
    """Only the rows that are asked for, packed, of texts of several lengths: states and gradients of one at a time."""
    target = tiny("llama", num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2)
    head = FeatureHead(head_config(target.config, version)).double()
    generator = torch.Generator().manual_seed(0)
    rows = torch.tensor([[0, 0, 1, 1, 1, 0, 0, 0], [0, 1, 0, 0, 0, 1, 0, 0], [0] * 8]).bool()
    embeds = torch.randn(3, 8, 32, generator=generator, dtype=torch.float64)
    features = torch.randn(3, 8, head.feature_width, generator=generator, dtype=torch.float64, requires_grad=True)
    weights = torch.randn(3, int(rows.sum()), 32, generator=generator, dtype=torch.float64)
    together = torch.stack(list(head.unroll(embeds, features, 3, rows)))
    (gradient,) = torch.autograd.grad((together * weights).sum(), features, retain_graph=True)
    alone = []
    for text, place in rows.nonzero().tolist():  # everything behind the chain's last token is cut off
        end = place + 3
        unrolled = head.unroll(embeds[text : text + 1, :end], features[text : text + 1, :end], 3)
        alone.append(torch.stack([states[0, place] for states in unrolled]))
    wanted = torch.stack(alone, 1)
    torch.testing.assert_close(together, wanted)
    torch.testing.assert_close(gradient, torch.autograd.grad((wanted * weights).sum(), features)[0])


# -- how a head begins ------------------------------------------------------------------------------------------------

WIDE = {  # the width of a head is not the model's width over its heads
    "qwen3": {"hidden_size": 60, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32},
    "llama": {"hidden_size": 90, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 64},
    "gpt2": {"n_embd": 30, "n_head": 2},  # 15, which cannot be rotated
}


@pytest.mark.parametrize(("family", "head_dim"), [("qwen3", 32), ("llama", 64), ("gpt2", 16)])
def test_a_head_starts_from_its_target_s_last_layer(family: str, head_dim: int, tiny: Any) -> None:
    target = tiny(family, **WIDE[family], **({"n_layer": 4} if family == "gpt2" else {"num_hidden_layers": 4}))
    head = FeatureHead(head_config(target.config, 3, draft_vocab=24)).eval()
    head.set_vocabulary(torch.arange(0, 48, 2))
    assert head.config.head_dim == head_dim
    left, width = start_from_target(head, target), head.config.hidden_size
    assert torch.equal(head.lm_head.weight, target.get_output_embeddings().weight[::2])
    assert torch.equal(head.fc.weight[:, -width:], torch.eye(width))
    assert not head.fc.weight[:, :-width].any()
    if family == "gpt2":
        assert left
        return
    assert left == []
    last = target.model.layers[-1]
    assert torch.equal(head.norm.weight, target.model.norm.weight)
    assert torch.equal(head.layer.mlp.down_proj.weight, last.mlp.down_proj.weight)
    for name in ("q_proj", "k_proj", "v_proj"):  # attention reads the embedding before the state
        weight, own = (getattr(layer.self_attn, name).weight for layer in (last, head.layer))
        assert torch.equal(own[:, weight.shape[1] :], weight)


def test_the_reduced_vocabulary_is_the_most_frequent_label_tokens() -> None:
    rows = from_lists([[1, 2, 3, 3], [4, 3, 2, 9]], [[-100, 2, 3, 3], [-100, 3, 2, 9]])
    ids, covered = frequent(rows, 3, 12)
    assert (ids.tolist(), covered) == ([2, 3, 9], 1.0)
    assert frequent(rows, 2, 12)[1] == 5 / 6
    assert frequent(rows, 5, 12)[0].tolist() == [0, 1, 2, 3, 9]  # never seen: the lowest ids
