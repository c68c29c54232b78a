"""A loss that is no number stops the run with the step, the examples and the likely cause, and leaves no checkpoint."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback
from rich.console import Console
from some_rows import TRAINING, some_rows
from transformers import PreTrainedModel

from decode.errors import UserError
from distill.config.training import TrainerSettings
from distill.data.batches import TokenDataset
from distill.data.loader import DistillDataModule, Schedule, TrainLoader
from distill.modules import CausalLMModule
from distill.teacher.signals import TargetSignal, Teacher
from distill.teacher.store import keep_signal
from distill.trainer import fit

Tiny = Callable[..., PreTrainedModel]


class Poison(Callback):
    """Ruins a weight before a step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_start(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        if trainer.global_step == self.step:
            next(pl_module.parameters()).data.fill_(torch.nan)


def train(module: Any, rows: TokenDataset, folder: Path, *callbacks: Callback, precision: Any = "32-true") -> Schedule:
    schedule = Schedule(rows.lengths, 2)
    data = DistillDataModule(TrainLoader(rows, schedule, steps=9), some_rows(2))
    settings = TrainerSettings(
        accelerator="cpu", precision=precision, validate_every=3, extra={"log_every_n_steps": 100}
    )
    fit(module, data, settings, folder, name="x", console=Console(quiet=True), callbacks=callbacks)
    return schedule


def tiny_module(tiny: Tiny, **options: Any) -> CausalLMModule:
    model = copy.deepcopy(tiny("llama")).requires_grad_(True)
    return CausalLMModule(model, TRAINING, 9, **options)


def test_a_step_between_logged_ones_is_named_with_its_examples_and_the_segment_leaves_no_checkpoint(
    tiny: Tiny, tmp_path: Path
) -> None:
    rows = some_rows()
    examples = ", ".join(str(i) for i in sorted(Schedule(rows.lengths, 2).batch(4).tolist()))
    with pytest.raises(
        UserError, match=rf"NaN or infinite at step 4 \(training examples {examples}\), .*: lower the learn"
    ):
        train(tiny_module(tiny), rows, tmp_path, Poison(4))
    assert [path.name for path in tmp_path.glob("step-*.ckpt")] == ["step-00000003.ckpt"]


def test_a_model_that_is_broken_from_the_start_is_found_by_the_first_validation(tiny: Tiny, tmp_path: Path) -> None:
    module = tiny_module(tiny)
    next(module.parameters()).data.fill_(torch.nan)
    with pytest.raises(UserError, match=r"validation at step 0 gave \[nan, .*the model as loaded: try another dtype"):
        train(module, some_rows(), tmp_path)


def test_a_target_whose_output_is_not_finite_is_refused_while_its_signal_is_made(tiny: Tiny, tmp_path: Path) -> None:
    model = copy.deepcopy(tiny("llama")).requires_grad_(True)
    model.model.norm.weight.data[0] = torch.inf
    rows = some_rows()
    with pytest.raises(UserError, match=r"target's hidden states are not finite in a batch of examples \[0, 1, 2, 3"):
        keep_signal(Teacher(model, TargetSignal("hidden")), model, rows, tmp_path)
    assert list(tmp_path.iterdir()) == []
