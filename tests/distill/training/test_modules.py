"""The two Lightning modules: what a step computes, how parts of it add up, what validation counts, on tiny models."""

import copy
from collections.abc import Iterable, Sequence
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from families import build_tiny, in_double
from heads import draft_of
from plain_losses import plain_loss
from some_rows import TRAINING, add_column, attached, everything, some_rows
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel

from distill.config import DraftSettings
from distill.data.dataset import IGNORE, Schedule, TrainingBatches, label_mask
from distill.drafts.block import decay
from distill.drafts.language_model import LanguageModelDraft
from distill.losses.chunked import Compared, Rows, compare
from distill.losses.divergences import Divergence, TargetRows, TokenDistributions
from distill.losses.selection import by_reach, share, top_k
from distill.networks.layers import decoder_layers
from distill.networks.lm_head import LMHead, last_hidden
from distill.networks.models import checkpoint_layers
from distill.signal.target import Signal
from distill.training.modules import CausalLMModule, DistillModule

FAMILIES = ["llama", "llama-tied", "qwen3", "gemma2", "phi", "gpt_neox", "codegen", "gpt2", "opt", "mistral"]


def loss_and_gradients(module: L.LightningModule, *batches: dict[str, Any]) -> tuple[float, list[Tensor]]:
    """The mean over micro-batches, as Lightning takes it."""
    module.zero_grad()
    losses = [module.training_step(batch, 0) / len(batches) for batch in batches]
    torch.stack(losses).sum().backward()
    return sum(loss.item() for loss in losses), [p.grad.clone() for p in module.parameters() if p.grad is not None]


def close(found: Sequence[Any], wanted: Sequence[Any], gap: float) -> bool:
    """Whether gradients differ by no more than a share of the largest one, and those that are missing are the same."""
    largest = max(float(other.abs().max()) for other in wanted if other is not None)
    pairs = zip(found, wanted, strict=True)
    return all(a is b is None or (a - b).abs().max() <= gap * largest for a, b in pairs)


def distilling(draft: PreTrainedModel, target: PreTrainedModel | Signal, **settings: Any) -> DistillModule:
    signal = target if isinstance(target, Signal) else Signal(target)
    chosen = DraftSettings(name="x", **settings)
    return attached(DistillModule(LanguageModelDraft(draft, 5), signal, TRAINING, 4, settings=chosen))


def differences(draft: PreTrainedModel, target: PreTrainedModel, batch: dict[str, Any]) -> Tensor:
    mask = label_mask(batch["labels"])
    p, q = (model(batch["input_ids"]).logits[mask].log_softmax(-1) for model in (target, draft))
    return Divergence().loss(TokenDistributions(p.detach(), q))


@pytest.mark.parametrize("family", FAMILIES)
def test_the_head_on_label_rows_gives_the_models_own_logits_and_gradients(family: str) -> None:
    model = in_double(build_tiny(family, dtype=torch.float64))
    batch = everything(some_rows(4))
    mask = label_mask(batch["labels"])
    weights = torch.randn(int(mask.sum()), 48, generator=torch.Generator().manual_seed(0)).double()

    def gradients(logits: Tensor) -> list[Tensor]:
        return list(torch.autograd.grad((logits * weights).sum(), list(model.parameters()), allow_unused=True))

    logits = LMHead(model)(last_hidden(model, batch["input_ids"], mask))
    lengths = [int((ids != 0).sum()) for ids in batch["input_ids"]]  # alone, so that padding cannot have helped
    single = [model(ids[None, :n]).logits[0][at[:n]] for ids, n, at in zip(batch["input_ids"], lengths, mask)]
    wanted = torch.cat(single)
    assert torch.allclose(logits, wanted, atol=1e-5)
    assert close(gradients(logits), gradients(wanted), 1e-5)


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt2", "opt", "phi"])
def test_gradient_checkpointing_computes_every_layer_again_and_the_gradients_stay_the_same(family: str) -> None:
    model, calls, made = in_double(build_tiny(family, dtype=torch.float64)).train(), [], []
    next(decoder_layers(model)[-1].children()).register_forward_pre_hook(lambda *_: calls.append(0))
    for count in (1, 3):
        torch.manual_seed(0)
        made.append(loss_and_gradients(attached(CausalLMModule(model, TRAINING, 4)), everything(some_rows(4))))
        assert len(calls) == count
        checkpoint_layers(model)
    (wanted_loss, wanted), (loss, gradients) = made
    assert loss == pytest.approx(wanted_loss, rel=1e-9)
    assert close(gradients, wanted, 1e-9)


def test_next_token_loss_is_the_models_own(tiny) -> None:
    draft, batch = tiny("llama", seed=5), everything(some_rows(5))
    own = draft(input_ids=batch["input_ids"], labels=batch["labels"]).loss.item()
    assert attached(CausalLMModule(draft, TRAINING, 4)).training_step(batch, 0).item() == pytest.approx(own, rel=1e-5)


@pytest.mark.parametrize("k", [1.0, 0.3])
@pytest.mark.parametrize("kind", ["language model", "eagle", "eagle3", "dspark", "dflash2"])
def test_a_step_takes_loss_and_gradient_of_the_chosen_rows_alone(tiny, kind: str, k: float) -> None:
    """Of each drafting step of a feature head its share; of blocks the slots that are reached."""
    target = in_double(tiny("llama", num_hidden_layers=4, dtype=torch.float64))
    draft, signal = draft_of(kind, target, 3)
    examples = some_rows(5)
    shape = examples.label_count, getattr(draft, "steps", draft.depth)
    noise = np.random.default_rng(0).random(shape if kind != "language model" else (shape[0], 1))
    batch = everything(add_column(examples, "reference_loss", noise))
    settings = DraftSettings(name="x", reference="y" if k < 1 else None, k=k, divergence="tv")
    module = attached(DistillModule(draft, signal, TRAINING, 1, settings=settings))
    loss, rows, _ = module(batch, training=True)
    measured, chosen = compare(rows, Divergence("tv")), torch.arange(len(rows))
    if k < 1:
        step, learnable = rows.step, rows.target.learnable
        assert torch.equal(rows.reference, batch["reference_loss"][rows.at, step])
        delta = measured.losses - rows.reference
        delta = by_reach(delta, measured.alpha, step) if draft.blocks else delta
        delta = delta if learnable is None else delta.where(learnable[rows.at] > 0, -torch.inf)
        groups = [step == n for n in range(3)] if kind.startswith("eagle") else [torch.ones_like(delta).bool()]
        best = [group.nonzero()[:, 0][delta[group].argsort(descending=True)] for group in groups]
        most = share(k, rows.count) if draft.blocks else None
        chosen = torch.cat([order[: most or share(k, len(order))] for order in best])
        assert module.selected == len(chosen)
    wanted = plain_loss(rows, Divergence("tv"), chosen)[0] / share(k, rows.count)
    wanted = wanted + (0 if rows.distance is None else rows.distance.sum() / rows.count)
    if rows.confidence is not None:
        wanted = wanted + functional.binary_cross_entropy_with_logits(
            rows.confidence, measured.alpha, decay(rows.step, 3), reduction="sum"
        ) / decay(rows.step, 3).sum()  # fmt: skip
    assert loss.item() == pytest.approx(wanted.item(), rel=1e-6)
    weights = [weight for weight in module.parameters() if weight.requires_grad]
    ours, plain = (torch.autograd.grad(x, weights, retain_graph=True, allow_unused=True) for x in (loss, wanted))
    assert close(ours, plain, 1e-6)


def test_the_loss_switches_after_the_share_of_forward_kl_and_the_ranking_does_not(tiny) -> None:
    target, draft, batch = tiny("llama", seed=4), tiny("llama", seed=5), everything(some_rows(5))
    batch["reference_loss"] = torch.rand(int(label_mask(batch["labels"]).sum()), 1)
    module = distilling(draft, target, divergence="tv", kl_first=0.5, reference="y", k=0.4)
    _, _, kept = DistillModule.forward(distilling(draft, target, divergence="tv"), batch, training=False)
    chosen, kl = top_k(kept.losses - batch["reference_loss"][:, 0], 0.4), differences(draft, target, batch)
    for step, losses in enumerate((kl, kl, kept.losses, kept.losses)):  # of four
        module.trainer.global_step = step
        loss = module.training_step(batch, 0).item()
        assert loss == pytest.approx(losses[chosen].mean().item(), rel=1e-5)


@pytest.mark.parametrize(("world", "micros"), [(2, 1), (1, 3), (2, 2)])
@pytest.mark.parametrize("kind", ["next token", "distillspec"])
def test_the_parts_gradients_average_to_the_whole_step_s(world: int, micros: int, kind: str) -> None:
    """Parts have different numbers of labels, one of them none."""
    examples, model = some_rows(7, empty=[3, 5]), in_double(build_tiny("llama", seed=5, dtype=torch.float64))
    schedule, module = Schedule(examples.lengths, 7, seed=1), attached(CausalLMModule(model, TRAINING, 4))
    if kind == "distillspec":
        module = distilling(model, in_double(build_tiny("llama", seed=4, dtype=torch.float64)))
    wanted_loss, wanted = loss_and_gradients(module, TrainingBatches(examples, schedule, 1)[0])
    ranks = [TrainingBatches(examples, schedule, 2, rank=rank, world=world, micros=micros) for rank in range(world)]
    parts = [batches[micro] for batches in ranks for micro in range(micros)]
    assert sorted(batch["part"] for batch in parts) == list(range(world * micros))
    assert sum(batch["weight"] for batch in parts) == pytest.approx(world * micros)
    loss, gradients = loss_and_gradients(module, *parts)
    assert loss == pytest.approx(wanted_loss, rel=1e-9)
    assert close(gradients, wanted, 1e-9)


def validated(module: Any, batches: Iterable[dict[str, Any]]) -> list[dict[str, float]]:
    logged = {}
    module.log = lambda name, value, **_: logged.update({name.removeprefix("validation_"): float(value)})
    module.on_validation_epoch_start()
    for batch in batches:
        module.validation_step(batch, 0)
    module.on_validation_epoch_end()
    assert module.history == [{"step": 0} | logged]
    return module.history


@pytest.mark.parametrize(
    ("at", "values", "position_2", "length"),
    [
        # one step: drafts from row i are accepted by row i, then row i + 1, …; a text's end and a gap cut them
        (None, [0.5, 0.4, 0.2, 1.0, 0.6], (0.5 * 0.4 + 0.4 * 0.2 + 1.0 * 0.6) / (0.5 + 0.4 + 1.0), None),
        # a head: its second step accepts other rows, and of the first row none follows it
        ([1, 4], [0.5, 0.4, 0.2, 1.0, 0.6, 0.9, 0.3], (0.5 * 0.9 + 1.0 * 0.3) / (0.5 + 1.0), None),
        # the same acceptance everywhere
        ([1, 2, 4], [0.5] * 8, 0.5, 1 + 0.5 + 0.25 + 0.125),
    ],
)
def test_the_accepted_length_in_validation_is_the_product_of_acceptances_along_each_draft(
    at, values: list[float], position_2: float, length: float | None, tiny, monkeypatch
) -> None:
    labels = torch.full((2, 6), IGNORE)
    labels[0, 2:5], labels[1, 1:3] = 7, 7  # three label rows, then two of another text
    alpha, module = torch.tensor(values), distilling(tiny("llama"), tiny("llama"))
    rows = Rows(torch.zeros(len(alpha), 1), LMHead.of(nn.Linear(1, 1)), TargetRows(None, 1), 5)
    if at is not None:
        rows.at, rows.step = torch.tensor([0, 1, 2, 3, 4, *at]), torch.tensor([0] * 5 + [1] * len(at))
    monkeypatch.setattr(module, "forward", lambda *_, **__: (torch.zeros(()), rows, Compared(alpha, alpha, alpha)))
    (history,) = validated(module, [{"labels": labels}])
    assert history["alpha"] == pytest.approx(sum(values[:5]) / 5)
    assert history["alpha_2"] == history["agreement_2"] == pytest.approx(position_2)
    reached = np.cumprod([history[name] for name in ("alpha", "alpha_2", "alpha_3", "alpha_4", "alpha_5")])
    assert history["accepted_length"] == pytest.approx(length or 1 + sum(reached), abs=1e-6)


def test_validation_means_are_over_label_tokens_whatever_the_batches(tiny) -> None:
    target, draft, examples = tiny("llama", seed=4), copy.deepcopy(tiny("llama", seed=5)), some_rows(7, empty=[6])
    histories = []
    for size in (1, 2, 7):
        for module in (distilling(draft, target), attached(CausalLMModule(draft, TRAINING, 4))):
            histories += validated(module.eval(), map(examples.batch, examples.batches(size)))
    for plain, same in zip(histories[:2] * 2, histories[2:]):
        assert same == pytest.approx(plain, rel=1e-5)
    batch = everything(examples)
    mask, labels = label_mask(batch["labels"]), batch["labels"].roll(-1, 1)
    p, q = (model(batch["input_ids"]).logits[mask].softmax(-1) for model in (target, draft))
    assert histories[0]["alpha"] == pytest.approx(torch.minimum(p, q).sum(-1).mean().item(), rel=1e-5)
    assert histories[0]["loss"] == pytest.approx(differences(draft, target, batch).mean().item(), rel=1e-5)
    assert histories[1]["accuracy"] == pytest.approx(q.argmax(-1).eq(labels[mask]).float().mean().item())
