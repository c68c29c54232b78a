"""What a user of Lightning finds: logged metrics, callbacks and Trainer arguments from the YAML, its own resume."""

import copy
import csv
import re
import threading
import time
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from types import SimpleNamespace
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
from torch.distributed.checkpoint import FileSystemWriter, load
from transformers import PreTrainedModel

from decode.commands.parsing import writing_error
from decode.errors import UserError
from distill import trainer as training_speed
from distill.checkpoints import BestWeights, SafeCheckpointIO
from distill.config.training import TrainerSettings
from distill.data.batches import DistillDataModule, Schedule
from distill.losses.divergences import Divergence
from distill.losses.objective import Objective
from distill.losses.selection import Selection
from distill.modules import CausalLMModule, DistillModule
from distill.teacher.signals import Teacher
from distill.teacher.store import reference_loss
from distill.trainer import Speed, fit, operations, peak_operations

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


@pytest.mark.parametrize("peak", [None, 10**9])
def test_tokens_a_second_padding_memory_and_share_of_the_peak_are_as_counted_by_hand(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, peak: int | None
) -> None:
    """By a clock on which a batch takes one second."""
    ticks = count()
    monkeypatch.setattr(training_speed, "time", SimpleNamespace(perf_counter=lambda: float(next(ticks))))
    begin = Speed.on_train_start

    def begin_on_a_gpu(self: Speed, trainer: Any, pl_module: Any) -> None:
        begin(self, trainer, pl_module)
        self._peak = peak

    monkeypatch.setattr(Speed, "on_train_start", begin_on_a_gpu)
    train(tiny("llama"), tmp_path, steps=4)  # logged every two steps of four examples
    rows = list(csv.DictReader(next(tmp_path.glob("csv/**/metrics.csv")).open()))
    logged = [row for row in rows if row["tokens_per_second"]]
    lengths = some_rows().lengths
    steps = [[int(lengths[i]) for i in Schedule(lengths, 4).batch(step)] for step in range(4)]
    tokens, places = sum(map(sum, steps)), sum(4 * max(step) for step in steps)
    assert [float(row["tokens_per_second"]) for row in logged] == [
        pytest.approx(sum(map(sum, pair)) / 2) for pair in (steps[:2], steps[2:])
    ]
    assert float(logged[-1]["padding"]) == pytest.approx(1 - tokens / places)
    assert 0.05 < float(logged[-1]["memory_gb"]) < 100
    if peak is None:
        assert "mfu" not in rows[0]
        return
    config = tiny("llama").config  # a layer: q and o, k and v, three matrices of the MLP, two norms
    width, shared = config.hidden_size, config.num_key_value_heads * config.head_dim
    layer = 2 * width * width + 2 * width * shared + 3 * width * config.intermediate_size + 2 * width
    weights = config.num_hidden_layers * layer + width + config.vocab_size * width  # the last norm, the head
    wanted = [6 * weights * sum(map(sum, pair)) / 2 / peak for pair in (steps[:2], steps[2:])]
    assert [float(row["mfu"]) for row in logged] == pytest.approx(wanted)


def test_operations_of_frozen_weights_and_of_tied_embeddings(tiny: Tiny) -> None:
    model = copy.deepcopy(tiny("llama")).requires_grad_(True)
    table = model.get_input_embeddings().weight.numel()
    whole = operations(model)
    assert whole == 6 * (sum(p.numel() for p in model.parameters()) - table)
    model.lm_head.weight = model.get_input_embeddings().weight
    assert operations(model) == whole  # looked up and multiplied with
    model.requires_grad_(False)
    assert operations(model) == whole // 6 * 4


@pytest.mark.parametrize(("precision", "wanted"), [("bf16-mixed", 989e12), ("16-mixed", 989e12), ("32-true", 67e12)])
def test_the_peak_of_a_gpu_is_that_of_the_number_format(
    monkeypatch: pytest.MonkeyPatch, precision: str, wanted: float
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA H100 80GB HBM3")
    monkeypatch.setattr("lightning.fabric.accelerators.cuda._is_ampere_or_later", lambda: True)
    assert peak_operations(torch.device("cuda"), precision) == pytest.approx(wanted, rel=0.01)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "some other one")
    with pytest.warns(UserWarning, match="FLOPs not found"):
        assert peak_operations(torch.device("cuda"), precision) is None


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


@pytest.fixture
def alone() -> Iterator[None]:
    """Afterwards this process is in no group of processes any more."""
    yield
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("alone")
def test_shares_written_in_the_background_are_of_their_step_and_have_their_name_once_they_are_whole(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    work, stepped = tmp_path / "work", threading.Event()
    write = FileSystemWriter.write_data
    seen: list[list[str]] = []

    def late(self: FileSystemWriter, *given: Any) -> Any:
        assert stepped.wait(60)
        return write(self, *given)

    class Watch(Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
            if trainer.global_step == 2:
                state = trainer.strategy.lightning_module_state_dict()
                self.then: dict[str, Any] = {name: value.clone() for name, value in state.items()}
            if trainer.global_step == 3:
                seen.append([path.name for path in work.iterdir() if "step" in path.name])
                stepped.set()

    monkeypatch.setattr(FileSystemWriter, "write_data", late)
    watch = Watch()
    chosen = {"strategy": "fsdp", "checkpoint_background": True, "checkpoint_every": 2, "validate_every": 4}
    train(tiny("llama"), tmp_path, watch, steps=4, **chosen)
    assert seen == [[".tmp-step-00000002.ckpt"]]
    found = {name: torch.zeros_like(value) for name, value in watch.then.items()}
    load({"state_dict": found}, checkpoint_id=work / "step-00000002.ckpt")
    assert all(torch.equal(found[name].full_tensor(), value.full_tensor()) for name, value in watch.then.items())


@pytest.mark.usefixtures("alone")
def test_a_training_ends_when_older_checkpoints_are_removed(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    remove = SafeCheckpointIO.remove_checkpoint

    def late(self: SafeCheckpointIO, path: Any) -> None:
        time.sleep(0.3)
        remove(self, path)

    monkeypatch.setattr(SafeCheckpointIO, "remove_checkpoint", late)
    chosen = {"strategy": "fsdp", "checkpoint_background": True, "checkpoint_every": 1, "validate_every": 4}
    train(tiny("llama"), tmp_path, steps=4, **chosen)
    assert sorted(path.name[-9:] for path in tmp_path.rglob("step-*.ckpt")) == ["0003.ckpt", "0004.ckpt"]


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("background", [False, True])
def test_a_share_that_cannot_be_written_ends_the_training_and_says_why(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, background: bool
) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(FileSystemWriter, "write_data", full)
    with pytest.raises(OSError, match="No space left") as failed:
        train(tiny("llama"), tmp_path, steps=2, strategy="fsdp", checkpoint_background=background)
    assert "No space left on device" in str(writing_error(failed.value))
    assert not list(tmp_path.rglob("step-*.ckpt"))


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
    data = DistillDataModule(rows, some_rows(2), Schedule(rows.lengths, 2), 1, pad_id=0)
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
        def choose(self, delta: torch.Tensor, sequence: torch.Tensor) -> torch.Tensor:
            deltas.append(delta)
            return super().choose(delta, sequence)

    module = DistillModule(copy.deepcopy(model), TRAINING, 1, target=target, objective=Objective(selection=Noting(0.4)))
    data = DistillDataModule(rows, some_rows(2), Schedule(rows.lengths, 5), 1, pad_id=0)
    chosen = TrainerSettings(accelerator="cpu", precision=precision)
    fit(module, data, chosen, tmp_path / "work", name="x", console=Console(quiet=True))
    scale = float(np.abs(rows.signals["reference_loss"]).max())
    assert deltas[0].abs().max() <= 1e-6 * scale


def test_a_training_that_is_continued_with_other_parts_of_a_step_is_refused(tiny: Tiny, tmp_path: Path) -> None:
    train(tiny("llama"), tmp_path, steps=6)
    with pytest.raises(UserError, match=r"begun with trainer.accumulate 1 and is continued with 2"):
        train(tiny("llama"), tmp_path, steps=9, accumulate=2)


def test_a_strategy_that_lightning_does_not_know_is_told_in_a_sentence(tiny: Tiny, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"Lightning refuses the settings of the section trainer: .*dpp"):
        train(tiny("llama"), tmp_path, strategy="dpp")
