"""The two Lightning modules: what a step computes, what validation counts; and what a user of Lightning finds."""

import copy
import io
import os
import re
import signal
import threading
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from families import build_tiny, in_double
from heads import draft_of, learned_head
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import CSVLogger
from plain_losses import plain_loss
from rich.console import Console
from some_rows import TRAINING, add_column, add_losses, attached, everything, from_lists, some_rows
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader
from transformers import PreTrainedModel

from decode.core.sampling import LogitsWarper
from decode.errors import UserError
from decode.loop import decode
from decode.methods import MethodInputs, build
from decode.models.check import open_draft_runner, open_runner
from decode.options import MethodOptions
from distill.config import DraftSettings, TrainerSettings
from distill.config.models import TrainingSettings
from distill.data.dataset import IGNORE, PLACES, DistillDataModule, Examples, Schedule, TrainingBatches, label_mask
from distill.kinds.eagle import FeatureDraft
from distill.kinds.language_model import LanguageModelDraft
from distill.losses.chunked import Compared, Rows, compare
from distill.losses.divergences import Divergence, TargetRows
from distill.losses.selection import share, top_k
from distill.networks.lm_head import LMHead, last_hidden
from distill.signal.target import Signal
from distill.training.modules import CausalLMModule, DistillModule, TrainingModule
from distill.training.trainer import fit, unmoved

FAMILIES = ["llama-tied", "gemma2", "phi", "gpt_neox", "gpt2", "opt"]


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
    chosen = DraftSettings(**settings)
    return attached(DistillModule(LanguageModelDraft(draft, 5), signal, TRAINING, 4, settings=chosen))


def differences(draft: PreTrainedModel, target: PreTrainedModel, batch: dict[str, Any]) -> Tensor:
    mask = label_mask(batch["labels"])
    p, q = (model(batch["input_ids"]).logits[mask].log_softmax(-1) for model in (target, draft))
    return functional.kl_div(q, p.detach(), reduction="none", log_target=True).sum(-1)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_head_on_label_rows_gives_the_models_own_logits_and_gradients(family: str) -> None:
    model = in_double(build_tiny(family, dtype=torch.float64))
    batch = everything(some_rows(4))
    mask = label_mask(batch["labels"])
    weights = torch.randn(int(mask.sum()), 48, generator=torch.Generator().manual_seed(0)).double()

    def gradients(logits: Tensor) -> list[Tensor]:
        return list(torch.autograd.grad((logits * weights).sum(), list(model.parameters()), allow_unused=True))

    logits = LMHead(model)(last_hidden(model, batch["input_ids"], batch[PLACES]))
    lengths = [int((ids != 0).sum()) for ids in batch["input_ids"]]  # alone, so that padding cannot have helped
    single = [model(ids[None, :n]).logits[0][at[:n]] for ids, n, at in zip(batch["input_ids"], lengths, mask)]
    wanted = torch.cat(single)
    assert torch.allclose(logits, wanted, atol=1e-5)
    assert close(gradients(logits), gradients(wanted), 1e-5)


@pytest.mark.parametrize("k", [1.0, 0.3])
@pytest.mark.parametrize(
    "kind", ["language model", "language model of some tokens", "parallel", "eagle", "eagle3", "dspark", "dflash2"]
)
def test_a_step_takes_loss_and_gradient_of_the_chosen_rows_alone(tiny, kind: str, k: float) -> None:
    """Of each drafting step of a feature head its share."""
    target = in_double(tiny("llama", num_hidden_layers=4, dtype=torch.float64))
    draft, signal = draft_of(kind, target, 3)
    examples = some_rows(5)
    noise = np.random.default_rng(0).random((examples.label_count, draft.steps))
    batch = draft.indexed(everything(add_column(examples, "reference_loss", noise)))
    settings = DraftSettings(reference="y" if k < 1 else None, k=k, divergence="tv")
    module = attached(DistillModule(draft, signal, TRAINING, 1, settings=settings))
    loss, rows, _ = module(batch, training=True)
    measured, chosen = compare(rows, Divergence("tv")), torch.arange(len(rows))
    if k < 1:
        step, learnable = rows.step, rows.target.learnable
        assert torch.equal(rows.reference, batch["reference_loss"][rows.at, step])
        delta = measured.losses - rows.reference
        delta = delta if learnable is None else delta.where(learnable[rows.at] > 0, -torch.inf)
        separate = kind in ("eagle", "eagle3", "parallel")
        groups = [step == n for n in range(3)] if separate else [torch.ones_like(delta).bool()]
        best = [group.nonzero()[:, 0][delta[group].argsort(descending=True)] for group in groups]
        chosen = torch.cat([order[: share(k, len(order))] for order in best])
        assert module.selected == len(chosen)
    wanted = plain_loss(rows, Divergence("tv"), chosen)[0] / rows.mass / (share(k, len(rows)) / len(rows))
    wanted = wanted + (0 if rows.distance is None else rows.distance.sum() / rows.mass)
    if rows.confidence is not None:
        factors = torch.exp(-rows.step / 4)
        assert rows.mass == pytest.approx(float(factors.sum()))
        wanted = wanted + functional.binary_cross_entropy_with_logits(
            rows.confidence, measured.alpha, factors, reduction="sum"
        ) / factors.sum()  # fmt: skip
    assert loss.item() == pytest.approx(wanted.item(), rel=1e-6)
    weights = [weight for weight in module.parameters() if weight.requires_grad]
    ours, plain = (torch.autograd.grad(x, weights, retain_graph=True, allow_unused=True) for x in (loss, wanted))
    assert close(ours, plain, 1e-6)


def test_the_loss_switches_after_the_share_of_forward_kl_and_the_ranking_does_not(tiny) -> None:
    target, draft, batch = tiny("llama", seed=4), tiny("llama", seed=5), everything(some_rows(5))
    batch["reference_loss"] = torch.rand(int(label_mask(batch["labels"]).sum()), 1)
    module = distilling(draft, target, divergence="tv", kl_first=0.5, reference="y", k=0.4)
    _, _, kept = distilling(draft, target, divergence="tv")(module.indexed(batch), training=False)
    chosen, kl = top_k(kept.losses - batch["reference_loss"][:, 0], 0.4), differences(draft, target, batch)
    for step, losses in enumerate((kl, kl, kept.losses, kept.losses)):  # of four
        module.trainer.global_step = step
        loss = module.training_step(batch, 0).item()
        assert loss == pytest.approx(losses[chosen].mean().item(), rel=1e-5)


@pytest.mark.parametrize("kind", ["next token", "language model", "parallel", "eagle3", "dspark", "dflash2"])
def test_the_parts_gradients_average_to_the_whole_step_s(kind: str) -> None:
    """Parts have different numbers of labels, one of them none, and blocks begin where they do in one batch."""
    world, micros, examples = 2, 2, some_rows(7, empty=[3, 5], prompt=2)
    schedule, index = Schedule(examples.lengths, 7, seed=1), None
    target = in_double(build_tiny("llama", num_hidden_layers=4, seed=4, dtype=torch.float64))
    if kind == "next token":
        module = attached(CausalLMModule(target, TRAINING, 4))
    else:
        index, beside = draft_of(kind, target, 3)
        index.anchors = 2  # of a text with up to nine labels
        module = attached(DistillModule(index, beside, TRAINING, 4))
    wanted_loss, wanted = loss_and_gradients(module, TrainingBatches(examples, schedule, 1, index=index)[0])
    given = {"world": world, "micros": micros, "index": index}
    ranks = [TrainingBatches(examples, schedule, 2, rank=rank, **given) for rank in range(world)]
    parts = [batches[micro] for batches in ranks for micro in range(micros)]
    assert sorted(batch["part"] for batch in parts) == list(range(world * micros))
    assert sum(batch["weight"] for batch in parts) == pytest.approx(world * micros)
    seeds = [module.on_train_batch_start(batch, 0) or torch.initial_seed() for batch in parts]
    assert len(set(seeds)) == len(parts)  # each draws dropout of its own
    nothing = some_rows(2, empty=[0, 1])
    empty = TrainingBatches(nothing, Schedule(nothing.lengths, 2, seed=1), 1, **given)[0]
    assert module.training_step(empty, 0).item() == 0  # no part of this step has a label
    loss, gradients = loss_and_gradients(module, *parts)
    gap = 1e-7 if kind.startswith("d") else 1e-9  # the weights of a block's slots are float32
    assert loss == pytest.approx(wanted_loss, rel=gap)
    assert close(gradients, wanted, gap)


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
    ("at", "values", "position_2"),
    [
        # one step: drafts from row i are accepted by row i, then row i + 1, …; a text's end and a gap cut them
        (None, [0.5, 0.4, 0.2, 1.0, 0.6], (0.5 * 0.4 + 0.4 * 0.2 + 1.0 * 0.6) / (0.5 + 0.4 + 1.0)),
        # a head: its second step accepts other rows, of the first row none follows it, and further steps have no rows
        ([1, 4], [0.5, 0.4, 0.2, 1.0, 0.6, 0.9, 0.3], (0.5 * 0.9 + 1.0 * 0.3) / (0.5 + 1.0)),
    ],
)
def test_the_accepted_length_in_validation_is_the_product_of_acceptances_along_each_draft(
    at, values: list[float], position_2: float, tiny, monkeypatch
) -> None:
    labels = torch.full((2, 6), IGNORE)
    labels[0, 2:5], labels[1, 1:3] = 7, 7  # three label rows, then two of another text
    alpha, module = torch.tensor(values), distilling(tiny("llama"), tiny("llama"))
    rows = Rows(torch.zeros(len(alpha), 1), LMHead.of(nn.Linear(1, 1)), TargetRows(None, 1), 5)
    if at is not None:
        rows.at, rows.step = torch.tensor([0, 1, 2, 3, 4, *at]), torch.tensor([0] * 5 + [1] * len(at))
        rows.groups = [5, len(at)]
    measured = Compared(alpha, alpha, alpha, alpha)
    monkeypatch.setattr(module, "forward", lambda *_, **__: (torch.zeros(()), rows, measured))
    (history,) = validated(module, [{"labels": labels, "input_ids": labels}])
    assert history["alpha"] == pytest.approx(sum(values[:5]) / 5)
    assert history["alpha_2"] == history["agreement_2"] == pytest.approx(position_2)
    reached = np.cumprod([history[name] for name in ("alpha", "alpha_2", "alpha_3", "alpha_4", "alpha_5")])
    assert history["accepted_length"] == pytest.approx(1 + sum(reached), abs=1e-6)
    assert (history["alpha_3"] == 0) == (at is not None)


def test_every_position_that_validation_shows_is_that_of_decoding_also_beyond_the_trained_steps(tiny) -> None:
    """A head that learned three drafting steps drafts five tokens after each token of the target's greedy texts."""
    target, warp = tiny("llama", num_hidden_layers=4), LogitsWarper()
    prompts, steps = [[3, 7, 1, 9], [12, 40, 2, 5, 8], [6, 6, 21]], range(5)
    head = learned_head(target, prompts, captured_layers=(0, 1, 2), steps=60)
    runner, texts, reached = open_runner(target), [], np.zeros((len(steps) + 1, 2))
    drafter = open_draft_runner(head, target)
    inputs = MethodInputs(runner, warp, drafter, options=MethodOptions(draft_length=len(steps)))
    for prompt in prompts:
        ids = decode(runner, build("autoregressive", inputs), warp, prompt, max_new_tokens=20).ids
        texts.append((ids, [IGNORE] * len(prompt) + ids[len(prompt) :]))
        for start in range(len(prompt), len(ids)):
            drafted = decode(runner, build("eagle", inputs), warp, ids[:start], max_new_tokens=len(steps) + 1)
            first = drafted.rounds[0]
            for i in steps[: len(ids) - start]:
                reached[i] += first.accepted >= i, first.accepted > i
    module = DistillModule(FeatureDraft(head, 3, len(steps), 0.8), Signal(target, reader=head), TRAINING, 4)
    (history,) = validated(attached(module).eval(), [everything(from_lists(*zip(*texts)))])
    shown = [history["agreement" + f"_{i + 1}" * (i > 0)] for i in steps]
    assert shown == pytest.approx([accepted / n for n, accepted in reached[:-1]], abs=1e-6)
    assert min(shown[:3]) > max(shown[3:]) > 0


def test_validation_means_are_over_label_tokens_whatever_the_batches(tiny) -> None:
    target, draft, examples = tiny("llama", seed=4), copy.deepcopy(tiny("llama", seed=5)), some_rows(7, empty=[6])
    histories, order = [], np.argsort(examples.lengths, kind="stable")
    for size in (1, 2, 7):
        for module in (distilling(draft, target), attached(CausalLMModule(draft, TRAINING, 4))):
            histories += validated(module.eval(), map(examples.batch, np.split(order, range(size, len(order), size))))
    for plain, same in zip(histories[:2] * 2, histories[2:]):
        assert same == pytest.approx(plain, rel=1e-5)
    batch = everything(examples)
    mask, labels = label_mask(batch["labels"]), batch["labels"].roll(-1, 1)
    p, q = (model(batch["input_ids"]).logits[mask].softmax(-1) for model in (target, draft))
    assert histories[0]["alpha"] == pytest.approx(torch.minimum(p, q).sum(-1).mean().item(), rel=1e-5)
    assert histories[0]["loss"] == pytest.approx(differences(draft, target, batch).mean().item(), rel=1e-5)
    own = draft(input_ids=batch["input_ids"], labels=batch["labels"]).loss.item()
    assert histories[1]["loss"] == pytest.approx(own, rel=1e-5)
    assert histories[1]["accuracy"] == pytest.approx(q.argmax(-1).eq(labels[mask]).float().mean().item())


# -- what a user of Lightning finds ------------------------------------------------------------------------------------


class Seen(Callback):
    """Notes what callbacks see after each validation, and does something to the module before a step."""

    def __init__(self, step: int = -1, act: Callable[[Any], object] = id) -> None:
        self.step, self.act, self.validated = step, act, []
        self.metrics, self.weights = [], {}

    def on_train_batch_start(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        if trainer.global_step == self.step:
            self.act(pl_module)

    def on_validation_batch_start(self, trainer: Any, pl_module: Any, batch: Any, *_: Any) -> None:
        self.validated.append(len(batch["labels"]))

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        self.metrics.append({name: float(value) for name, value in trainer.callback_metrics.items()})
        self.weights[trainer.global_step] = copy.deepcopy(pl_module.model.state_dict())


def poison(module: Any) -> None:
    next(module.parameters()).data.fill_(torch.nan)


def fitted(
    module: TrainingModule, folder: Path, *callbacks: Callback, size: int = 4, workers: int = 0, logger: Any = None,
    examples: Examples | None = None, told: Any = None, **settings: Any,
) -> list[dict[str, float]]:  # fmt: skip
    """The learning curve, with lines for `told`; the module's model ends with the best weights."""
    examples, console = examples or some_rows(), Console(file=told or io.StringIO(), width=300)
    batches = TrainingBatches(examples, Schedule(examples.lengths, size), module.steps, workers=workers)
    chosen = TrainerSettings(**{"accelerator": "cpu", "validate_every": 3} | settings)
    configured = chosen.callback_instances()
    chosen.callback_instances = lambda: [*configured, *callbacks]  # type: ignore[method-assign]
    data = DistillDataModule(batches, some_rows(4))
    return fit(module, data, chosen, folder / "work", name="x", console=console, logger=logger)[0]


def next_tokens(tiny: Any, steps: int = 9) -> CausalLMModule:
    return CausalLMModule(copy.deepcopy(tiny("llama")).requires_grad_(True), TRAINING, steps)


def test_metrics_reach_callbacks_and_loggers_and_further_arguments_the_trainer(tiny, tmp_path) -> None:
    seen = Seen()
    logger = CSVLogger(tmp_path / "csv")
    extra = {"log_every_n_steps": 2, "limit_val_batches": 1}
    history = fitted(next_tokens(tiny), tmp_path, seen, logger=logger, extra=extra)
    assert [row["step"] for row in history] == [0, 3, 6, 9]
    for metrics, row in zip(seen.metrics, history, strict=True):
        assert metrics["validation_loss"] == pytest.approx(row["loss"])
        assert "validation_accuracy" in metrics
    assert "loss" in seen.metrics[-1]
    assert len(seen.validated) == len(seen.metrics)  # one batch each
    text = next(tmp_path.glob("csv/**/metrics.csv")).read_text()
    assert {"loss", "lr", "validation_loss", "step"} <= set(text.splitlines()[0].split(","))


def test_the_best_validation_s_weights_are_kept_and_two_checkpoints(tiny, tmp_path) -> None:
    """Of a model with frozen weights the checkpoints hold the others alone."""
    module, seen = next_tokens(tiny), Seen(6, lambda pl_module: pl_module.model.lm_head.weight.data.mul_(20))
    module.model.model.embed_tokens.requires_grad_(False)
    module.strict_loading = False
    history = fitted(module, tmp_path, seen)
    best = min(history[1:], key=lambda row: row["loss"])["step"]
    assert best in (3, 6)
    assert history[-1]["loss"] > 2 * min(row["loss"] for row in history)
    weights = module.model.state_dict()
    assert all(torch.equal(weights[name], value) for name, value in seen.weights[int(best)].items())
    kept = {path.name for path in (tmp_path / "work").glob("*.ckpt")}
    assert kept == {f"best-step={best}.ckpt", "last-step=9.ckpt"}
    saved = torch.load(tmp_path / "work" / "last-step=9.ckpt", weights_only=False)["state_dict"]
    assert saved.keys() == {f"model.{name}" for name in weights if name != "model.embed_tokens.weight"}


def test_a_line_says_which_share_of_the_weights_a_number_format_does_not_let_move(tiny, tmp_path) -> None:
    """Half a unit in the last of the 8 bits of weights from 2⁻⁸ to 2⁻⁷ is 2⁻¹⁶ = 1.5e-5, of smaller ones half of it."""
    model, generator = copy.deepcopy(tiny("llama")).requires_grad_(), torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in model.parameters():
            weight.uniform_(0, 2**-7, generator=generator)
    assert unmoved(model, 1e-5, "bf16-true") == pytest.approx(0.5, abs=0.05)
    assert unmoved(model, 1e-5, "bf16-mixed") == unmoved(model, 1e-3, "bf16-true") == 0
    module, told = CausalLMModule(model, TrainingSettings(steps=1, batch_size=4, lr=1e-5), 1), io.StringIO()
    fitted(module, tmp_path, told=told, precision="bf16-true")
    words = r"(4|5)\d% of the weights cannot move in bf16-true.* Set trainer.precision to bf16-mixed"
    assert re.search(words, told.getvalue())


def test_of_validations_that_are_equal_in_float32_the_first_is_the_best(tiny, tmp_path, monkeypatch) -> None:
    """Lightning keeps the weights of no other; where nothing is logged, nothing is computed for it."""
    losses = iter([9.0, 1.0, 1.0 - 1e-9, 2.0])
    monkeypatch.setattr(CausalLMModule, "further", lambda _, values: values | {"loss": next(losses)})
    seen = Seen(3)
    fitted(module := next_tokens(tiny), tmp_path, seen, extra={"log_every_n_steps": 0})
    weights = module.model.state_dict()
    assert all(torch.equal(weights[name], value) for name, value in seen.weights[3].items())


@pytest.mark.parametrize("precision", ["bf16-mixed", "32-true"])
def test_a_draft_equal_to_its_reference(tiny, tmp_path, precision, monkeypatch) -> None:
    examples, model = some_rows(), copy.deepcopy(tiny("llama", seed=5)).requires_grad_(True)
    model.set_attn_implementation("eager")  # SDPA in bfloat16 depends on the padding on some CPUs
    draft, signal, deltas = LanguageModelDraft(model.train(), 5), Signal(tiny("llama", seed=4)), []
    add_losses(draft, signal, examples, Divergence(), precision)
    module = DistillModule(draft, signal, TRAINING, 1, settings=DraftSettings(reference="y"))
    choose = draft.chosen

    def seen(rows: Any, compared: Any, k: float) -> Any:
        deltas.append(compared.losses - rows.reference)
        return choose(rows, compared, k)

    monkeypatch.setattr(draft, "chosen", seen)
    fitted(module, tmp_path, examples=examples, size=5, precision=precision, attention="eager")
    largest = max(abs(examples.values("reference_loss", number)).max() for number in range(6))
    assert deltas[0].abs().max() <= 1e-6 * largest


def full(*_: Any) -> None:
    raise RuntimeError("unable to allocate shared memory(shm): No space left on device (28)")


@pytest.mark.parametrize(
    ("act", "words"), [(full, "No space left on device"), (lambda _: threading.Event().wait(), "timed out after 1 s")]
)
def test_a_loader_s_process_that_fails_or_stalls_ends_the_training_with_its_words(
    act, words: str, tiny, monkeypatch, tmp_path
) -> None:
    monkeypatch.setattr("distill.data.dataset.STALL", 1 if "timed" in words else 600)
    monkeypatch.setattr(torch.Tensor, "share_memory_", act)
    told = rf"data.loader_workers failed \(.*{words}.*set it to 0, or make /dev/shm larger"
    with pytest.raises(UserError, match=told):
        fitted(next_tokens(tiny), tmp_path, workers=1)


def test_losses_that_are_no_numbers_end_the_training(tiny, tmp_path) -> None:
    """A step between logged ones is named with its examples and leaves no checkpoint; so is a model broken as loaded."""
    examples = ", ".join(map(str, sorted(Schedule(some_rows().lengths, 2).batch(4).tolist())))
    words = rf"NaN or infinite at step 4 \(training examples {examples}\), .*: lower the learn"
    with pytest.raises(UserError, match=words):
        fitted(next_tokens(tiny), tmp_path, Seen(4, poison), size=2, extra={"log_every_n_steps": 100})
    assert {path.name.split("=")[1] for path in (tmp_path / "work").glob("*.ckpt")} <= {"0.ckpt", "3.ckpt"}
    poison(module := next_tokens(tiny))
    with pytest.raises(UserError, match=r"validation at step 0 gave \{.*nan.*the model as loaded: try another dtype"):
        fitted(module, tmp_path / "broken")


# -- with a Trainer and a loader of one's own --------------------------------------------------------------------------


def padded_left(batch: dict[str, Any]) -> dict[str, Any]:
    """The texts of a batch as tokenizers of decoders pad them, of which nothing else is known."""
    real = batch["input_ids"] != 0
    order = real.int().sort(dim=1, stable=True).indices
    made = {name: batch[name].gather(1, order) for name in ("input_ids", "labels")}
    return made | {"attention_mask": real.gather(1, order).long()}


@pytest.mark.parametrize("kind", ["next token", "language model", "eagle3", "dspark"])
def test_a_batch_that_is_padded_on_the_left_gives_the_same_loss(tiny, kind: str) -> None:
    target, batch = in_double(tiny("llama", num_hidden_layers=4, dtype=torch.float64)), everything(some_rows(4))
    if kind == "next token":
        module = attached(CausalLMModule(target, TRAINING, 1))
    else:
        module = attached(DistillModule(*draft_of(kind, target), TRAINING, 1))
    other = padded_left(batch)
    assert not other["attention_mask"][:, 0].all()
    loss, wanted = (module.training_step(each, 0).item() for each in (other, batch))
    assert loss == pytest.approx(wanted, rel=1e-9)
    moved = module.on_before_batch_transfer(other, 0)
    assert torch.equal(moved["labels"], batch["labels"])
    module.validation_step(moved, 0)


def trainer_of_ones_own(folder: Path, **options: Any) -> L.Trainer:
    return L.Trainer(
        accelerator="cpu", max_epochs=1, logger=False, enable_progress_bar=False, enable_model_summary=False,
        default_root_dir=folder, log_every_n_steps=2, **options,
    )  # fmt: skip


def test_a_module_made_from_names_trains_with_any_loader_and_is_read_from_its_checkpoint(tiny, tmp_path) -> None:
    """AdaSPEC, whose reference runs beside it, as no batch has its losses."""
    for name, seed in (("draft", 5), ("target", 4), ("reference", 6)):
        tiny("llama", seed=seed).save_pretrained(tmp_path / name)
    names = [str(tmp_path / name) for name in ("draft", "target")]
    module = DistillModule.of(*names, reference=str(tmp_path / "reference"), k=0.4, steps=4, lr=1e-2, warmup_steps=1)
    batches = [padded_left(some_rows(4, seed=seed).batch(np.arange(4))) for seed in range(4)]
    loader = DataLoader(batches, batch_size=None)  # type: ignore[arg-type]
    before, trainer = copy.deepcopy(module.model.state_dict()), trainer_of_ones_own(tmp_path)
    trainer.fit(module, loader, loader)
    assert 0 < module.selected < 0.5 * sum(int((batch["labels"] >= 0).sum()) for batch in batches)
    assert module.history[-1]["step"] == 4
    trainer.save_checkpoint(tmp_path / "x.ckpt")
    weights = copy.deepcopy(module.model.state_dict())
    assert any(not torch.equal(before[name], weight) for name, weight in weights.items())
    poison(module)
    objects = {"draft": module.draft, "signal": module.signal, "reference": module.reference}
    for given in ({}, objects):
        again = DistillModule.load_from_checkpoint(tmp_path / "x.ckpt", **given)
        assert (again.steps, again.settings, again.training_settings) == (4, module.settings, module.training_settings)
        assert all(torch.equal(again.model.state_dict()[name], weight) for name, weight in weights.items())
    assert again.signal is module.signal
    poison(module)
    with pytest.raises(UserError, match=r"the loss is NaN or infinite at step \d, precision 32-true: lower the"):
        trainer_of_ones_own(tmp_path).fit(module, loader)


def test_sigterm_ends_after_the_step_and_the_training_goes_on_there(tiny, tmp_path) -> None:
    """Between two validations, in the first of two micro-batches; the weights are those of an undisturbed training."""
    wanted = next_tokens(tiny)
    fitted(wanted, tmp_path / "undisturbed", accumulate=2)
    sent = iter([signal.SIGTERM])  # once: a second one ends the process
    stop = Seen(4, lambda _: [os.kill(os.getpid(), number) for number in sent])
    with pytest.raises(KeyboardInterrupt) as ended:
        fitted(next_tokens(tiny), tmp_path / "stopped", stop, accumulate=2)
    assert ended.value.args == (signal.SIGTERM,)
    assert (tmp_path / "stopped" / "work" / "last-step=5.ckpt").is_file()
    steps, module = [], next_tokens(tiny)
    fitted(module, tmp_path / "stopped", Seen(5, lambda module: steps.append(module.global_step)), accumulate=2)
    assert steps == [5] * 2
    assert module.history == wanted.history
    for name, weight in wanted.model.state_dict().items():
        assert torch.equal(module.model.state_dict()[name], weight)
