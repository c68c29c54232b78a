"""A whole run in seconds, for tests: arithmetic, models of a few thousand parameters, a few steps."""

from __future__ import annotations

import copy
import io
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file

from distill.config.data import DataSettings
from distill.config.drafts import DraftSettings, TeacherSettings
from distill.config.run import Settings, TrackerSettings
from distill.config.training import (
    Architecture,
    StudentSettings,
    TargetSettings,
    TrainerSettings,
    TrainingSettings,
)
from distill.data.context import StageContext
from distill.run_stages import run_stages
from distill.stages import RunDir, run_of, stage_fingerprints
from distill.trainer import ProgressLines


def tiny_settings(folder: Path, **changes: Any) -> Settings:
    """Settings of a run under ``folder``; ``changes`` are top-level fields."""
    training = TrainingSettings(steps=12, batch_size=4, lr=3e-3, warmup_steps=2, schedule="cosine", length_bucket=4)
    settings = Settings(
        name="tiny",
        output_dir=str(folder),
        data=DataSettings(
            train_examples=48, validation_examples=8, test_examples=8, max_length=256, tokenizer_vocab_size=300
        ),
        target=TargetSettings(
            architecture=Architecture(hidden_size=24, layers=2, heads=2, positions=256),
            training=copy.copy(training),
        ),
        student=StudentSettings(
            architecture=Architecture(hidden_size=16, layers=1, heads=2, positions=256),
            training=copy.copy(training),
        ),
        teacher=TeacherSettings(examples=20),
        training=copy.copy(training),
        drafts=[
            DraftSettings(name="distillspec"),
            DraftSettings(name="adaspec", reference="distillspec"),
        ],
        trainer=TrainerSettings(
            accelerator="cpu", validate_every=5, validation_examples=8, extra={"log_every_n_steps": 3}
        ),
        tracker=TrackerSettings(kind="none"),
    )
    settings.target.training.optimizer = "muon"
    for key, value in changes.items():
        setattr(settings, key, value)
    return settings


def bench(settings: Settings) -> tuple[StageContext, io.StringIO]:
    """A context for the settings, and what it prints."""
    text = io.StringIO()
    return StageContext(settings, run_of(settings), Console(file=text, width=200)), text


def run_tiny(settings: Settings) -> tuple[list[str], RunDir, str]:
    """Runs what is not up to date; returns the names of those stages, the run, and what was printed."""
    made, text = bench(settings)
    ran = run_stages(made)
    return ran, made.run, text.getvalue()


@cache
def _usual() -> tuple[RunDir, TemporaryDirectory[str]]:
    """A run with the target and the undistilled draft of `tiny_settings`, made once in a process; its folder."""
    folder = TemporaryDirectory()
    made, _ = bench(tiny_settings(Path(folder.name)))
    run_stages(made, only=("target", "initial"), check=False)
    return made.run, folder


def begun(settings: Settings) -> Settings:
    """Return the settings; their run takes over the usual target and student where they ask for these."""
    usual, cache = _usual()[0], Path(settings.output_dir) / "cache"
    for stage in ("target", "initial"):
        key = stage_fingerprints(settings)[stage][0]
        if usual.record(stage, key) is not None and not (cache / key).is_symlink():
            cache.mkdir(parents=True, exist_ok=True)
            (cache / key).symlink_to(usual.path(stage))
    return settings


class Killed(Exception):
    """Stands for the end of the process."""


@contextmanager
def killed(stage: str, step: int) -> Iterator[None]:
    """Inside, training of the stage ends after the given step, as by a kill."""
    original = ProgressLines.on_train_batch_end

    def end(self: ProgressLines, trainer: Any, module: Any, *rest: Any) -> None:
        original(self, trainer, module, *rest)
        if self.name == stage and trainer.global_step == step:
            raise Killed

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ProgressLines, "on_train_batch_end", end)
        with pytest.raises(Killed):
            yield


def check_killed_ends_alike(settings: Settings, folder: Path, kills: dict[str, int]) -> None:
    """Stages that are killed after these steps end, once continued, with the weights of the finished run."""
    again = copy.deepcopy(settings)
    again.output_dir = str(folder)
    for stage, step in kills.items():
        with killed(stage, step):
            run_tiny(again)
    run_tiny(again)
    for stage in kills:
        one, two = (load_file(run_of(s).path(stage) / "model.safetensors") for s in (settings, again))
        assert all(torch.equal(one[name], two[name]) for name in one), stage
