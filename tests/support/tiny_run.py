"""A whole run in seconds, for tests: arithmetic, models of a few thousand parameters, a few steps."""

import copy
import io
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from devices import ACCELERATOR
from families import build_tiny
from rich.console import Console
from safetensors.torch import load_file
from transformers import PreTrainedTokenizerBase

from decode.files import write_json
from distill.config import DraftSettings, Settings, TrainerSettings
from distill.config.base import change
from distill.config.data import DataSettings
from distill.config.models import Architecture, StudentSettings, TargetSettings, TrainingSettings
from distill.config.teacher import TeacherSettings
from distill.fingerprints import stage_fingerprints
from distill.run import Run
from distill.stages import run_stages
from distill.training.trainer import ProgressLines

STAGES = ["target", "initial", "distillspec", "adaspec"]


def tiny_settings(folder: Path, **changes: Any) -> Settings:
    """Settings of a run under ``folder``; ``changes`` are top-level fields."""
    training = [
        TrainingSettings(steps=12, batch_size=4, lr=3e-3, warmup_steps=2, schedule="cosine", length_bucket=4)
        for _ in range(3)
    ]
    large, small = (Architecture(hidden_size=n * 8, layers=n - 1, heads=2, positions=256) for n in (3, 2))
    trainer = TrainerSettings(
        accelerator=ACCELERATOR,
        devices=1 if ACCELERATOR == "gpu" else "auto",
        validate_every=5,
        validation_examples=8,
        extra={"log_every_n_steps": 3},
    )
    settings = Settings(
        name="tiny",
        output_dir=str(folder),
        data=DataSettings(train_examples=48, validation_examples=8, test_examples=8, max_length=256),
        target=TargetSettings(architecture=large, training=training[0]),
        student=StudentSettings(architecture=small, training=training[1]),
        teacher=TeacherSettings(examples=20, signal="hidden"),
        training=training[2],
        drafts={"distillspec": DraftSettings(), "adaspec": DraftSettings(reference="distillspec")},
        trainer=trainer,
        tracker="none",
    )
    for key, value in changes.items():
        setattr(settings, key, value)
    return settings


def altered(settings: Settings, **values: Any) -> Settings:
    """Return the settings after changes of keys, in which ``__`` is a dot; ``1__k`` is of the second draft."""
    for key, value in values.items():
        number, _, rest = key.partition("__")
        place, name = (list(settings.drafts.values())[int(number)], rest) if number.isdigit() else (settings, key)
        assert not rest or hasattr(place, name.partition("__")[0])
        change(place, **{name: value})
    return settings


def given(folder: Path, *parts: Any) -> TargetSettings:
    """The settings of a target whose model and tokenizer are laid into the folder."""
    for part in parts:
        part.save_pretrained(folder)
    return TargetSettings(kind="as_is", model=str(folder))


def random_target(folder: Path, tokenizer: PreTrainedTokenizerBase, **shape: Any) -> TargetSettings:
    """The settings of a random target with a row for each id of the tokenizer, laid into the folder."""
    shape = {"max_position_embeddings": 512, "eos_token_id": tokenizer.eos_token_id} | shape
    return given(folder, build_tiny("llama", vocab_size=len(tokenizer), **shape), tokenizer)


def bench(settings: Settings) -> tuple[Run, io.StringIO]:
    """A run of the settings, and what it prints."""
    text = io.StringIO()
    return Run(settings, Console(file=text, width=200)), text


def run_tiny(settings: Settings) -> tuple[list[str], Run, str]:
    """Runs what is not up to date; returns the names of those stages, the run, and what was printed."""
    run, text = bench(settings)
    made = run_stages(run)
    return made, run, text.getvalue()


@cache
def _usual() -> tuple[Run, TemporaryDirectory[str]]:
    """A run with the target and the undistilled draft of `tiny_settings`, made once in a process; its folder."""
    folder = TemporaryDirectory()
    run, _ = bench(tiny_settings(Path(folder.name)))
    run_stages(run, only=("target", "initial"), check=False)
    return run, folder


def begun(settings: Settings) -> Settings:
    """Return the settings; their run has the usual target and student already where they ask for these."""
    usual, run = _usual()[0], Run(settings)
    for stage in ("target", "initial"):
        record = usual.record(stage, stage_fingerprints(settings)[stage])
        if record is not None and not run.path(stage).exists():
            shutil.copytree(usual.path(stage), run.path(stage))
            run.work.mkdir(exist_ok=True)
            write_json(run.work / f"{stage}.json", vars(record))
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


def check_killed_ends_alike(
    settings: Settings, folder: Path, kills: dict[str, int], rtol: float = 0, atol: float = 0
) -> None:
    """Stages of a finished run that are made again and killed after these steps end with its weights and account."""
    again = copy.deepcopy(settings)
    again.output_dir = str(folder)
    runs = Run(settings), Run(again)
    shutil.copytree(runs[0].folder, runs[1].folder, symlinks=True, ignore=shutil.ignore_patterns("signals"))
    for stage in kills:
        shutil.rmtree(runs[1].path(stage))
    for stage, step in kills.items():
        with killed(stage, step):
            run_tiny(again)
    assert run_tiny(again)[0]
    for stage in kills:
        undisturbed, continued = (load_file(run.path(stage) / "model.safetensors") for run in runs)
        torch.testing.assert_close(continued, undisturbed, rtol=rtol, atol=atol)
        records = [run.record(stage) for run in runs]
        assert records[0].account == records[1].account, stage
