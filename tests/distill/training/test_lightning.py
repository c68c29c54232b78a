"""What a user of Lightning finds: logged metrics, callbacks and Trainer arguments from the YAML, its own resume."""

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import CSVLogger
from rich.console import Console
from some_rows import TRAINING, some_rows
from torch.distributed.checkpoint import FileSystemWriter
from transformers import PreTrainedModel

from decode.errors import UserError
from distill.config.training import TrainerSettings
from distill.data.loader import DistillDataModule, Schedule, TrainLoader
from distill.losses.divergences import Divergence
from distill.losses.objective import Objective, Selection
from distill.modules import CausalLMModule, DistillModule
from distill.teacher.signals import Teacher
from distill.teacher.store import reference_loss
from distill.trainer import fit

Tiny = Callable[..., PreTrainedModel]


class Seen(Callback):
    """The metrics that other callbacks could monitor after each validation, and the sizes of batches."""

    def __init__(self) -> None:
        self.metrics: list[dict[str, float]] = []
        self.validated: list[int] = []

    def on_validation_batch_start(self, trainer: Any, pl_module: Any, batch: Any, *_: Any) -> None:
        self.validated.append(len(batch["labels"]))

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        self.metrics.append({name: float(value) for name, value in trainer.callback_metrics.items()})


def train(
    model: PreTrainedModel, folder: Path, *callbacks: Callback, steps: int = 9, **settings: Any
) -> CausalLMModule:
    rows = some_rows()
    module = CausalLMModule(copy.deepcopy(model).requires_grad_(True), TRAINING, steps)
    data = DistillDataModule(TrainLoader(rows, Schedule(rows.lengths, 4), steps), some_rows(4))
    settings["extra"] = {"log_every_n_steps": 2} | settings.get("extra", {})
    chosen = TrainerSettings(**{"accelerator": "cpu", "validate_every": 3} | settings)
    chosen.validate()
    fit(module, data, chosen, folder / "work", name="x", console=Console(quiet=True), callbacks=callbacks,
        logger=CSVLogger(folder / "csv"))  # fmt: skip
    return module


def test_metrics_reach_callbacks_and_loggers(tiny: Tiny, tmp_path: Path) -> None:
    seen = Seen()
    module = train(tiny("llama"), tmp_path, seen)
    assert [row["step"] for row in module.history] == [0, 3, 6, 9]
    for found, row in zip(seen.metrics, module.history, strict=True):
        assert found["validation_loss"] == pytest.approx(row["loss"])
        assert "validation_accuracy" in found
    assert "loss" in seen.metrics[-1]
    text = next(tmp_path.glob("csv/**/metrics.csv")).read_text()
    assert {"loss", "lr", "validation_loss", "step"} <= set(text.splitlines()[0].split(","))


def test_further_trainer_arguments_are_passed_on(tiny: Tiny, tmp_path: Path) -> None:
    seen = Seen()
    train(tiny("llama"), tmp_path, seen, steps=3, extra={"limit_val_batches": 1})
    assert len(seen.validated) == len(seen.metrics)  # one batch each


@pytest.fixture
def alone() -> Iterator[None]:
    """Afterwards this process is in no group of processes any more."""
    yield
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("alone")
def test_a_share_that_cannot_be_written_ends_the_training_and_says_why(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(FileSystemWriter, "write_data", full)
    with pytest.raises(OSError, match="No space left"):
        train(tiny("llama"), tmp_path, steps=2, strategy="fsdp")
    assert not list(tmp_path.rglob("step-*.ckpt"))


def test_a_target_that_is_run_every_step_is_on_the_device_before_the_first_validation(
    tiny: Tiny, tmp_path: Path
) -> None:
    events: list[str] = []

    class Watched(Teacher):
        def to(self, device: torch.device) -> None:
            events.append(f"moved to {device}")
            super().to(device)

        def rows(self, *args: Any) -> Any:
            events.append("used")
            return super().rows(*args)

    rows = some_rows()
    module = DistillModule(
        copy.deepcopy(tiny("llama")).requires_grad_(True), TRAINING, 1, target=Watched(tiny("llama", seed=4))
    )
    data = DistillDataModule(TrainLoader(rows, Schedule(rows.lengths, 2), 1), some_rows(2))
    fit(module, data, TrainerSettings(accelerator="cpu"), tmp_path, name="x", console=Console(quiet=True))
    assert events[:2] == ["moved to cpu", "used"]


@pytest.mark.parametrize("precision", ["bf16-mixed", "32-true"])
def test_a_draft_equal_to_its_reference_has_no_loss_difference(tiny: Tiny, tmp_path: Path, precision: str) -> None:
    rows, model = some_rows(), tiny("llama", seed=5)
    model.set_attn_implementation("eager")  # as runs set it: SDPA in bfloat16 depends on the padding on some CPUs
    target = Teacher(tiny("llama", seed=4))
    rows.signals["reference_loss"] = reference_loss(
        copy.deepcopy(model), target, rows, Divergence(), precision=precision
    )
    deltas: list[torch.Tensor] = []

    class Noting(Selection):
        def choose(self, delta: torch.Tensor) -> torch.Tensor:
            deltas.append(delta)
            return super().choose(delta)

    module = DistillModule(copy.deepcopy(model), TRAINING, 1, target=target, objective=Objective(selection=Noting(0.4)))
    data = DistillDataModule(TrainLoader(rows, Schedule(rows.lengths, 5), 1), some_rows(2))
    chosen = TrainerSettings(accelerator="cpu", precision=precision)
    fit(module, data, chosen, tmp_path / "work", name="x", console=Console(quiet=True))
    scale = float(np.abs(rows.signals["reference_loss"]).max())
    assert deltas[0].abs().max() <= 1e-6 * scale


def test_a_training_that_is_continued_with_other_parts_of_a_step_is_refused(tiny: Tiny, tmp_path: Path) -> None:
    train(tiny("llama"), tmp_path, steps=6)
    with pytest.raises(UserError, match=r"begun with trainer.accumulate 1 and is continued with 2"):
        train(tiny("llama"), tmp_path, steps=9, accumulate=2)
