"""What a user of Lightning finds: logged metrics, callbacks and arguments from the YAML, the best weights, no NaN."""

import copy
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import CSVLogger
from rich.console import Console
from some_rows import TRAINING, some_rows

from decode.errors import UserError
from distill.config import DraftSettings, TrainerSettings
from distill.data.dataset import DistillDataModule, Examples, Schedule, TrainingBatches
from distill.drafts.language_model import LanguageModelDraft
from distill.drafts.reference import keep_reference
from distill.losses.divergences import Divergence
from distill.signal.target import Signal
from distill.training.modules import CausalLMModule, DistillModule, TrainingModule
from distill.training.trainer import fit


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


def fitted(module: TrainingModule, folder: Path, *callbacks: Callback, size: int=4, workers: int=0, logger: Any=None, examples: Examples | None=None, **settings: Any) -> list[dict[str, float]]:  # fmt: skip
    """The learning curve; the module's model ends with the best weights."""
    examples = examples or some_rows()
    batches = TrainingBatches(examples, Schedule(examples.lengths, size), module.steps, workers=workers)
    chosen = TrainerSettings(**{"accelerator": "cpu", "validate_every": 3} | settings)
    return fit(
        module, DistillDataModule(batches, some_rows(4)), chosen, folder / "work", name="x",
        console=Console(quiet=True), callbacks=callbacks, logger=logger,
    )[0]  # fmt: skip


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
    with pytest.raises(UserError, match=r"begun with trainer.accumulate 1 and is continued with 2"):
        fitted(next_tokens(tiny, 12), tmp_path, accumulate=2)


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


def test_a_target_is_on_the_device_before_validation(tiny, tmp_path, monkeypatch) -> None:
    events = []
    for name in ("to", "rows"):
        usual = getattr(Signal, name)
        monkeypatch.setattr(Signal, name, lambda *a, name=name, usual=usual: events.append(name) or usual(*a))
    draft = LanguageModelDraft(copy.deepcopy(tiny("llama")).requires_grad_(True), 5)
    fitted(DistillModule(draft, Signal(tiny("llama", seed=4)), TRAINING, 1), tmp_path)
    assert events[:2] == ["to", "rows"]


@pytest.mark.parametrize("precision", ["bf16-mixed", "32-true"])
def test_a_draft_equal_to_its_reference(tiny, tmp_path, precision, monkeypatch) -> None:
    examples, model = some_rows(), copy.deepcopy(tiny("llama", seed=5)).requires_grad_(True)
    model.set_attn_implementation("eager")  # SDPA in bfloat16 depends on the padding on some CPUs
    draft, signal, deltas = LanguageModelDraft(model.train(), 5), Signal(tiny("llama", seed=4)), []
    keep_reference(draft, signal, examples, Divergence(), precision)
    module = DistillModule(draft, signal, TRAINING, 1, settings=DraftSettings(name="x", reference="y"))
    choose = module.choose

    def seen(rows: Any, compared: Any) -> Any:
        deltas.append(compared.losses - rows.reference)
        return choose(rows, compared)

    monkeypatch.setattr(module, "choose", seen)
    fitted(module, tmp_path, examples=examples, size=5, precision=precision, attention="eager")
    largest = max(abs(examples.columns["reference_loss"][number]).max() for number in range(6))
    assert deltas[0].abs().max() <= 1e-6 * largest


def full(*_: Any) -> None:
    raise RuntimeError("unable to allocate shared memory(shm): No space left on device (28)")


@pytest.mark.parametrize(
    ("act", "words"),
    [
        (full, "No space left on device"),
        (lambda _: os._exit(1), "exited unexpectedly|timed out after 9 s"),  # the latter where it died at once
        (lambda _: threading.Event().wait(), "timed out after 1 s"),
    ],
)
def test_a_loader_s_process_that_dies_or_stalls_ends_the_training_with_its_words(
    act, words: str, tiny, monkeypatch, tmp_path
) -> None:
    monkeypatch.setattr("distill.data.dataset.STALL", 9 if "exited" in words else 1 if "timed" in words else 600)
    monkeypatch.setattr(torch.Tensor, "share_memory_", act)
    with pytest.raises(
        UserError, match=rf"data.loader_workers failed \(.*({words}).*set it to 0, or make /dev/shm larger"
    ):
        fitted(next_tokens(tiny), tmp_path, workers=2)


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
