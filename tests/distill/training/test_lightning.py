"""What a user of Lightning finds: logged metrics, callbacks and Trainer arguments from the YAML, its own resume."""

import copy
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import CSVLogger
from rich.console import Console
from safetensors.torch import load_file
from some_rows import TRAINING, some_rows
from tiny_run import killed, run_tiny, tiny_settings
from transformers import PreTrainedModel

from decode.core.errors import UserError
from distill.config.training import TrainerSettings
from distill.data.batches.batch_schedule import Schedule
from distill.data.batches.datamodule import DistillDataModule
from distill.losses.objective import Objective
from distill.losses.token_selection import Selection
from distill.teacher import hidden_state_store as signals
from distill.teacher.target_distribution import TargetSource
from distill.training.causal_lm import CausalLMModule
from distill.training.checkpoints import BestWeights
from distill.training.distillation import DistillModule
from distill.training.lightning_trainer import fit

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
    data = DistillDataModule(rows, some_rows(4), Schedule(rows.lengths, 4), steps, pad_id=0)
    chosen = TrainerSettings(**{"accelerator": "cpu", "validate_every": 3, "log_every": 2} | settings)
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


def test_early_stopping_from_the_settings_ends_a_training(tiny: Tiny, tmp_path: Path) -> None:
    stop = {"class_path": "EarlyStopping", "init_args": {"monitor": "validation_loss", "patience": 1, "min_delta": 9.0}}
    module = train(tiny("llama"), tmp_path, steps=30, callbacks=[stop])
    assert [row["step"] for row in module.history] == [0, 3, 6]


@pytest.mark.parametrize(
    ("change", "facts"),
    [
        ({"callbacks": [{"class_path": "EarlyStoping"}]}, "trainer.callbacks.*EarlyStoping"),
        (
            {"callbacks": [{"class_path": "EarlyStopping", "init_args": {"paticence": 1}}]},
            "trainer.callbacks.*paticence",
        ),
        ({"profiler": "simpel"}, "trainer.profiler.*simple"),
        ({"extra": {"limit_val_batch": 2}}, "limit_val_batch .*limit_val_batches"),
        ({"extra": {"max_steps": 2}}, "training.steps"),
    ],
)
def test_what_lightning_cannot_take_is_refused_before_anything_runs(change: dict[str, Any], facts: str) -> None:
    with pytest.raises(UserError) as error:
        TrainerSettings(**change).validate()
    assert re.search(facts, str(error.value), re.DOTALL)


def test_further_trainer_arguments_and_profilers_are_passed_on(tiny: Tiny, tmp_path: Path) -> None:
    seen = Seen()
    profiler = {"class_path": "SimpleProfiler", "init_args": {"dirpath": str(tmp_path), "filename": "times"}}
    train(tiny("llama"), tmp_path, seen, steps=3, extra={"limit_val_batches": 1}, profiler=profiler)
    assert len(seen.validated) == len(seen.metrics)  # one batch each
    assert "run_training_batch" in next(tmp_path.glob("fit-times*")).read_text()


def test_validation_has_the_size_of_the_micro_batches(tiny: Tiny, tmp_path: Path) -> None:
    seen = Seen()
    train(tiny("llama"), tmp_path, seen, steps=3, accumulate=2)
    assert set(seen.validated) == {2}


@pytest.mark.parametrize(("accumulate", "background"), [(1, True), (2, False)])
def test_a_kill_between_validations_costs_no_more_than_checkpoint_every(
    tmp_path: Path, accumulate: int, background: bool
) -> None:
    def weights(name: str, *kills: int) -> tuple[dict[str, torch.Tensor], Any]:
        settings = tiny_settings(tmp_path / name)
        settings.trainer.checkpoint_every, settings.trainer.accumulate = 3, accumulate
        settings.trainer.checkpoint_background = background
        for step in kills:
            with killed("target", step):
                run_tiny(settings)
            kept = sorted((tmp_path / name / "tiny/work/checkpoints-target").glob("step-*.ckpt"))
            assert 0 <= step - int(kept[-1].stem.removeprefix("step-")) <= 3
        with killed("initial", 1):
            run_tiny(settings)
        run = tmp_path / name / "tiny"
        return load_file(run / "target/model.safetensors"), run

    whole, _ = weights("whole")
    again, run = weights("again", 4, 8)
    assert all(torch.equal(whole[name], again[name]) for name in whole)
    assert not (run / "work/checkpoints-target").exists()


def test_missing_weights_are_not_passed_over(tmp_path: Path) -> None:
    best = BestWeights(tmp_path, "validation_loss", "min")
    best.best_model_path = str(tmp_path / "best.ckpt")
    torch.save({"state_dict": {"model.weight": torch.zeros(1, 2)}}, best.best_model_path)
    with pytest.raises(RuntimeError, match="bias"):
        best.restore(torch.nn.Linear(2, 1))


def test_a_target_that_is_run_every_step_is_on_the_device_before_the_first_validation(
    tiny: Tiny, tmp_path: Path
) -> None:
    events: list[str] = []

    class Watched(TargetSource):
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
    data = DistillDataModule(rows, some_rows(2), Schedule(rows.lengths, 2), 1, pad_id=0)
    fit(module, data, TrainerSettings(accelerator="cpu"), tmp_path, name="x", console=Console(quiet=True))
    assert events[:2] == ["moved to cpu", "used"]


@pytest.mark.parametrize("precision", ["bf16-mixed", "32-true"])
def test_a_draft_equal_to_its_reference_has_no_loss_difference(tiny: Tiny, tmp_path: Path, precision: str) -> None:
    rows, model = some_rows(), tiny("llama", seed=5)
    target = TargetSource(tiny("llama", seed=4))
    rows.signals["reference_loss"] = signals.reference_loss(
        copy.deepcopy(model), target, rows, tmp_path / "r.npy", "", batch_size=3, precision=precision
    )
    deltas: list[torch.Tensor] = []

    class Noting(Selection):
        def choose(self, delta: torch.Tensor, sequence: torch.Tensor) -> torch.Tensor:
            deltas.append(delta)
            return super().choose(delta, sequence)

    module = DistillModule(copy.deepcopy(model), TRAINING, 1, target=target, objective=Objective(selection=Noting(0.4)))
    data = DistillDataModule(rows, some_rows(2), Schedule(rows.lengths, 5), 1, pad_id=0)
    chosen = TrainerSettings(accelerator="cpu", precision=precision)
    fit(module, data, chosen, tmp_path / "work", name="x", console=Console(quiet=True))
    scale = float(np.abs(rows.signals["reference_loss"]).max())
    assert deltas[0].abs().max() <= 1e-6 * scale
