"""The two Lightning modules: what a step computes, what validation adds up, on tiny models."""

import copy
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from families import build_tiny, in_double
from plain_losses import token_loss
from some_rows import TRAINING, some_rows
from transformers import PreTrainedModel

from decode.errors import UserError
from decode.models.families import decoder_layers
from distill.checkpoints import BestWeights
from distill.config.drafts import Signal
from distill.data.batches import TokenDataset, label_mask
from distill.data.chat import IGNORE
from distill.data.loader import Schedule, TrainLoader
from distill.losses.chunked import LossRows
from distill.losses.objective import Objective, Selection
from distill.models.lm_head import LMHead, check_head, last_hidden
from distill.models.loading import checkpoint_layers
from distill.modules import CausalLMModule, DistillModule, HeadModule
from distill.teacher.signals import TargetSignal, Teacher
from distill.teacher.store import keep_signal

Tiny = Callable[..., PreTrainedModel]


def loss_and_gradients(module: L.LightningModule, batch: dict[str, torch.Tensor]) -> tuple[float, list[torch.Tensor]]:
    module.zero_grad()
    loss = module.training_step(batch, 0)
    loss.backward()
    return loss.item(), [p.grad.clone() for p in module.parameters() if p.grad is not None]


def logits_of(target: Teacher, batch: dict[str, torch.Tensor], mask: torch.Tensor) -> torch.Tensor:
    """The target's log-probabilities, which are logits of the same distribution."""
    rows = target.rows(batch, mask)
    return rows.log_probs(torch.zeros(int(mask.sum()), rows.vocab))


FAMILIES = ["llama", "llama-tied", "qwen3", "gemma2", "phi", "gpt_neox", "codegen", "gpt2", "opt", "mistral"]


@pytest.mark.parametrize("family", FAMILIES)
def test_head_on_gathered_rows_equals_the_models_own_logits(tiny: Tiny, family: str) -> None:
    model = tiny(family)
    check_head(model, LMHead(model))
    batch = some_rows().batch(np.arange(4))
    mask = label_mask(batch["labels"])
    with torch.no_grad():
        got = LMHead(model)(last_hidden(model, batch["input_ids"], mask))
        for row in range(4):  # alone, so that padding cannot have helped
            length = int((batch["input_ids"][row] != 0).sum())
            own = model(input_ids=batch["input_ids"][row : row + 1, :length]).logits[0]
            wanted = own[mask[row, :length]]
            start = int(mask[:row].sum())
            assert torch.allclose(got[start : start + len(wanted)], wanted, atol=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_last_mlp_sees_label_rows_only_and_the_gradients_stay_the_same(family: str) -> None:
    model = in_double(build_tiny(family, dtype=torch.float64))
    batch = some_rows().batch(np.arange(4))
    mask, seen = label_mask(batch["labels"]), []
    weights = torch.randn(int(mask.sum()), model.config.hidden_size, generator=torch.Generator().manual_seed(0))

    def gradients(hidden: torch.Tensor) -> list[torch.Tensor]:
        model.zero_grad()
        (hidden * weights.double()).sum().backward()
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    whole = model.base_model(input_ids=batch["input_ids"], use_cache=False).last_hidden_state[mask]
    wanted = gradients(whole)
    mlp = getattr(decoder_layers(model)[-1], "mlp", None)
    if mlp is not None:
        mlp.register_forward_hook(lambda module, args, made: seen.append(made[..., 0].numel()))
    hidden = last_hidden(model, batch["input_ids"], mask)
    assert torch.allclose(hidden, whole, atol=1e-9)
    for got, same in zip(gradients(hidden), wanted, strict=True):
        assert torch.allclose(got, same, atol=1e-9 * max(1.0, float(same.abs().max())))
    assert seen == ([] if mlp is None else [int(mask.sum())])
    assert family == "opt" or mlp is not None


@pytest.mark.parametrize("family", FAMILIES)
def test_gradient_checkpointing_computes_every_layer_again_and_the_gradients_stay_the_same(family: str) -> None:
    model = in_double(build_tiny(family, dtype=torch.float64)).train()
    batch = some_rows().batch(np.arange(4))
    calls: list[int] = []
    for part in model.modules():
        if isinstance(part, torch.nn.Dropout):
            part.p = 0.0  # an MLP of label rows only would draw other chances than one of all rows
    next(decoder_layers(model)[-1].children()).register_forward_pre_hook(lambda *_: calls.append(0))

    def gradients() -> tuple[float, list[torch.Tensor]]:
        calls.clear()
        torch.manual_seed(0)
        return loss_and_gradients(CausalLMModule(model, TRAINING, 4), batch)

    wanted_loss, wanted = gradients()
    assert len(calls) == 1
    checkpoint_layers(model)
    loss, got = gradients()
    assert len(calls) == 2
    assert loss == pytest.approx(wanted_loss, rel=1e-6)
    for one, other in zip(got, wanted, strict=True):
        assert torch.allclose(one, other, atol=1e-9 * max(1.0, float(other.abs().max())))


def test_a_model_with_another_kind_of_head_is_refused(tiny: Tiny) -> None:
    head = LMHead(tiny("llama"))
    head.scale = 2.0
    with pytest.raises(UserError, match="does not compute its logits"):
        check_head(tiny("llama"), head)


def test_next_token_loss_equals_the_models_own_loss(tiny: Tiny) -> None:
    model = tiny("llama", seed=3)
    batch = some_rows().batch(np.arange(4))
    got = CausalLMModule(model, TRAINING, 4).training_step(batch, 0)
    wanted = model(input_ids=batch["input_ids"], labels=batch["labels"]).loss
    assert got.item() == pytest.approx(wanted.item(), rel=1e-5)


def test_adaspec_with_k_one_is_distillspec_bit_by_bit(tiny: Tiny) -> None:
    rows = some_rows()
    rows.signals["reference_loss"] = np.random.default_rng(1).random(rows.label_count).astype(np.float32)
    batch = rows.batch(np.arange(5))
    target = Teacher(tiny("llama", seed=4))
    plain = loss_and_gradients(DistillModule(tiny("llama", seed=5), TRAINING, 4, target=target), batch)
    for normalisation in ("paper", "official"):
        selection = Selection(1.0, normalisation=normalisation)  # type: ignore[arg-type]
        module = DistillModule(
            tiny("llama", seed=5), TRAINING, 4, target=target, objective=Objective(selection=selection)
        )
        chosen = loss_and_gradients(module, batch)
        assert chosen[0] == plain[0]
        assert all(torch.equal(a, b) for a, b in zip(plain[1], chosen[1], strict=True))


def test_adaspec_takes_gradient_from_the_selected_tokens_only(tiny: Tiny) -> None:
    rows = some_rows()
    target, draft = Teacher(tiny("llama", seed=4)), tiny("llama", seed=5)
    batch = rows.batch(np.arange(5))
    mask = label_mask(batch["labels"])
    with torch.no_grad():
        logits = LMHead(draft)(last_hidden(draft, batch["input_ids"], mask))
        losses = token_loss(logits_of(target, batch, mask), logits).divergence
    wanted_rows = [1, 4, 7, 8]
    lead = torch.zeros(len(losses))
    lead[wanted_rows] = 1.0
    batch["reference_loss"] = losses - lead  # ΔL is 1 on four tokens and 0 elsewhere
    objective = Objective(selection=Selection(4 / len(lead), normalisation="paper"))
    module = DistillModule(draft, TRAINING, 4, target=target, objective=objective)
    loss, gradients = loss_and_gradients(module, batch)
    draft.zero_grad()
    own = token_loss(
        logits_of(target, batch, mask), LMHead(draft)(last_hidden(draft, batch["input_ids"], mask))
    ).divergence
    wanted = own[wanted_rows].mean()
    wanted.backward()
    assert loss == pytest.approx(wanted.item(), rel=1e-6)
    for got, parameter in zip(gradients, (p for p in draft.parameters() if p.grad is not None), strict=True):
        assert (got - parameter.grad).abs().max() <= 1e-5 * parameter.grad.abs().max()
    assert module.selected == 4


@pytest.mark.parametrize("selection", [None, Selection(0.4), Selection(0.4, "microbatch", "paper")])
def test_a_batch_without_labels_gives_zero_loss_connected_to_every_parameter(
    tiny: Tiny, selection: Selection | None
) -> None:
    batch = some_rows().batch(np.arange(2))
    batch["labels"].fill_(IGNORE)
    batch["reference_loss"] = torch.empty(0)
    target = Teacher(tiny("llama", seed=4))
    model = tiny("llama", seed=6)
    loss, gradients = loss_and_gradients(
        DistillModule(model, TRAINING, 4, target=target, objective=Objective(selection=selection)), batch
    )
    assert loss == 0.0
    assert len(gradients) == len(list(model.parameters()))
    assert all(not gradient.any() for gradient in gradients)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("kind", ["hidden", "log_probs"])
def test_a_target_beside_the_draft_gives_the_losses_and_gradients_of_its_kept_signal(
    tiny: Tiny, kind: Signal, packed: bool
) -> None:
    rows, target = some_rows(), tiny("llama", seed=4)
    rows.signals["reference_loss"] = np.random.default_rng(1).random(rows.label_count).astype(np.float32)
    kept, signal = copy.copy(rows), TargetSignal(kind, vocab=LMHead(target).vocab)
    kept.signals = dict(rows.signals)
    keep_signal(Teacher(target, signal), target, kept)
    schedule, length = Schedule(rows.lengths, 5), 64 if packed else None

    def trained(made: TokenDataset, source: Teacher) -> tuple[float, list[torch.Tensor]]:
        source.to(torch.device("cpu"))
        module = DistillModule(
            tiny("llama", seed=5), TRAINING, 4, target=source, objective=Objective(selection=Selection(0.4))
        )
        return loss_and_gradients(module, next(iter(TrainLoader(made, schedule, 1, row_length=length))))

    wanted = trained(kept, Teacher(target, signal))
    found = trained(rows, Teacher(target, TargetSignal("online"), stays=True))
    assert found[0] == pytest.approx(wanted[0], rel=1e-6)
    for ours, theirs in zip(found[1], wanted[1], strict=True):
        assert (ours - theirs).abs().max() <= 1e-5 * theirs.abs().max()


def test_the_draft_gets_a_copy_of_the_head_of_a_target_that_stays_on_its_own_device(tiny: Tiny) -> None:
    model = tiny("llama-tied", seed=4)  # its head is its embedding
    source = Teacher(model, TargetSignal("online"), stays=True)
    source.to(torch.device("meta"))
    assert source.head.linear.weight.device.type == "meta"
    assert {weight.device.type for weight in model.parameters()} == {"cpu"}


@pytest.mark.parametrize(
    ("steps", "position_2", "length"),
    [
        # one step: drafts from row i are accepted by row i, then row i + 1, …; a text's end and a gap cut them
        ([(None, [0.5, 0.4, 0.2, 1.0, 0.6])], (0.5 * 0.4 + 0.4 * 0.2 + 1.0 * 0.6) / (0.5 + 0.4 + 1.0), None),
        # a head: its second step accepts other rows, and of the first row none follows it
        ([(None, [0.5, 0.4, 0.2, 1.0, 0.6]), ([1, 4], [0.9, 0.3])], (0.5 * 0.9 + 1.0 * 0.3) / (0.5 + 1.0), None),
        # the same acceptance everywhere
        ([(None, [0.5] * 5), ([1, 2, 4], [0.5] * 3)], 0.5, 1 + 0.5 + 0.25 + 0.125),
    ],
)  # fmt: skip
def test_the_accepted_length_in_validation_is_the_product_of_acceptances_along_each_draft(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch, steps: Any, position_2: float, length: float | None
) -> None:
    labels = torch.full((2, 6), -100)
    labels[0, 2:5], labels[1, 1:3] = 7, 7  # three label rows, then two of another text
    module = DistillModule(tiny("llama"), TRAINING, 1, target=Teacher(tiny("llama")))
    module._trainer = SimpleNamespace(world_size=1, sanity_checking=False, global_step=0)
    logged: dict[str, float] = {}
    monkeypatch.setattr(module, "log", lambda name, value, **_: logged.update({name: value}))
    monkeypatch.setattr(DistillModule, "global_step", 0)
    found = []
    for rows, values in steps:
        alpha, chosen = torch.tensor(values), None if rows is None else torch.tensor(rows)
        draft = SimpleNamespace(rows=chosen, learnable=None, slots=None)
        found.append((draft, LossRows(alpha.sum(), alpha, None, alpha, alpha)))
    monkeypatch.setattr(module, "forward", lambda batch, training: found)
    module.validation_step({"labels": labels}, 0)
    module.on_validation_epoch_end()
    assert logged["validation_alpha"] == pytest.approx(sum(steps[0][1]) / 5)
    assert logged["validation_alpha_2"] == logged["validation_agreement_2"] == pytest.approx(position_2)
    reached, wanted = 1.0, 1.0
    for name in ("alpha", "alpha_2", "alpha_3", "alpha_4", "alpha_5"):
        reached *= logged[f"validation_{name}"]
        wanted += reached
    assert logged["validation_accepted_length"] == pytest.approx(wanted if length is None else length)
    assert module.history == [{"step": 0} | {name.removeprefix("validation_"): v for name, v in logged.items()}]


def test_the_best_weights_of_a_head_have_the_largest_accepted_length() -> None:
    best, model = BestWeights(HeadModule.monitor, HeadModule.mode), torch.nn.Linear(1, 1, bias=False)
    for alpha, length in ((0.7, 2.0), (0.6, 2.5), (0.8, 2.4)):
        metrics = {"validation_alpha": alpha, "validation_accepted_length": length}
        trainer = SimpleNamespace(callback_metrics=metrics, state=SimpleNamespace(fn="fit"), strategy=None)
        torch.nn.init.constant_(model.weight, alpha)
        best.on_validation_end(trainer, SimpleNamespace(model=model))  # type: ignore[arg-type]
    assert best.weights["weight"].item() == pytest.approx(0.6)
