"""A run's stages and folders; what a failure leaves behind; export without evaluation."""

import errno
import gc
import json
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file
from tiny_run import STAGES, begun, bench, run_tiny, tiny_settings
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from decode.errors import UserError
from distill import pipeline, stages
from distill.config import DraftSettings, TargetSettings
from distill.files import only_one
from distill.models import checkpoint_layers
from distill.pipeline import measure, run_pipeline
from distill.run import Run, StageRecord
from distill.stages import run_stages


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Run]:
    folder = tmp_path_factory.mktemp("finished")
    made, run, _ = run_tiny(tiny_settings(folder))
    assert made == STAGES
    return folder, run


def test_nothing_runs_again_but_a_folder_that_was_cut_short(finished: tuple[Path, Run]) -> None:
    folder, run = finished
    files = {stage: run.path(stage) / "model.safetensors" for stage in STAGES}
    times = {stage: file.stat().st_mtime_ns for stage, file in files.items()}
    made, _, printed = run_tiny(tiny_settings(folder))
    assert (made, printed.count("up to date"), "stage 1 of 5" in printed) == ([], len(STAGES), True)
    assert times == {stage: file.stat().st_mtime_ns for stage, file in files.items()}
    sound = files["adaspec"].read_bytes()
    files["adaspec"].write_bytes(sound[:-10])
    made, _, printed = run_tiny(tiny_settings(folder))
    assert made == ["adaspec"]
    assert f"{run.path('adaspec')} is not as it was written, and is made again" in printed
    assert files["adaspec"].read_bytes() == sound


def test_gradient_checkpointing_trains_the_same_draft(
    finished: tuple[Path, Run], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    changed: list[str] = []

    def checkpoint(model: PreTrainedModel) -> None:
        changed.append(type(model).__name__)
        checkpoint_layers(model)

    monkeypatch.setattr("distill.trainer.checkpoint_layers", checkpoint)
    settings = tiny_settings(tmp_path, drafts=[DraftSettings(name="distillspec")])
    settings.trainer.gradient_checkpointing = True
    _, run, _ = run_tiny(begun(settings))
    assert changed == ["LlamaForCausalLM"]
    ours, theirs = (load_file(each.path("distillspec") / "model.safetensors") for each in (run, finished[1]))
    assert all(torch.allclose(ours[name], theirs[name], atol=2e-3) for name in theirs)


def test_every_stage_is_a_plain_folder_that_transformers_loads(finished: tuple[Path, Run]) -> None:
    _, run = finished
    for stage in STAGES:
        folder = run.path(stage)
        model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
        ids = tokenizer("Mia has 3 pens.", return_tensors="pt")["input_ids"]
        written = model.generate(ids, max_new_tokens=3, min_new_tokens=3, do_sample=False)
        assert written.shape[1] == ids.shape[1] + 3
        assert model.generation_config.eos_token_id == tokenizer.eos_token_id
        assert not [path for path in folder.iterdir() if path.suffix in (".bin", ".pt", ".ckpt")]


def test_records_hold_the_account_of_every_draft_and_the_best_validation_is_chosen(finished: tuple[Path, Run]) -> None:
    _, run = finished
    assert run.chosen("adaspec") == "adaspec"
    curves = {name: [row["alpha"] for row in run.draft_record(name).history] for name in run.trained}
    assert run.chosen("best") == max(run.trained, key=lambda name: max(curves[name]))
    reference, selective = (run.draft_record(name).account for name in run.trained)
    assert reference["optimiser_steps"] == selective["optimiser_steps"] == 12
    assert selective["examples"] == 12 * 4
    tokens = selective["teacher_tokens"]
    assert 0.4 * tokens - 12 <= selective["selected_tokens"] <= 0.4 * tokens + 12
    assert selective["cumulative_teacher_tokens"] == tokens + reference["teacher_tokens"]
    assert list(run.drafts) == ["undistilled", "distillspec", "adaspec"]
    assert run.draft_record("undistilled").account["teacher_tokens"] == 0


def test_a_draft_may_have_its_own_training_texts_and_order(tmp_path: Path) -> None:
    drafts = [DraftSettings(name="own", on_policy=1.0), DraftSettings(name="seeded", seed=7)]
    drafts.append(DraftSettings(name="short", training={"epochs": 1.0}))
    settings = tiny_settings(tmp_path, drafts=drafts)
    settings.teacher.responses.max_new_tokens = 4
    _, run, _ = run_tiny(begun(settings))
    accounts = {name: run.draft_record(name).account for name in run.trained}
    assert accounts["own"]["teacher_tokens"] <= 4 * accounts["own"]["examples"] < accounts["seeded"]["teacher_tokens"]
    assert accounts["short"]["optimiser_steps"] == 5  # of 20 examples in batches of 4
    assert len({(run.path(name) / "model.safetensors").read_bytes() for name in run.trained}) == 3


def test_a_full_disk_leaves_no_half_written_folder(finished: tuple[Path, Run], tmp_path: Path) -> None:
    _, run = finished
    other = Run(tiny_settings(tmp_path))

    def fail(folder: Path) -> None:
        folder.mkdir()
        (folder / "model.safetensors").write_bytes(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        other.put("adaspec", StageRecord("key"), fail)
    assert other.record("adaspec") is None
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []
    kept = run.record("target")
    with pytest.raises(OSError, match="No space left"):
        run.put("target", StageRecord("other"), fail)
    assert run.record("target") == kept


def test_a_model_taken_as_it_is_becomes_a_link(finished: tuple[Path, Run], tmp_path: Path) -> None:
    _, run = finished
    settings = tiny_settings(tmp_path, target=TargetSettings(kind="as_is", model=str(run.target)))
    linked, _ = bench(settings)
    assert run_stages(linked, ("target",)) == ["target"]
    assert linked.target.is_symlink()
    assert linked.record("target") is not None
    linked.put("target", StageRecord("new"), lambda folder: folder.symlink_to(run.path("initial")))
    assert linked.record("target", "new") is not None
    assert (run.target / "model.safetensors").exists()  # replacing the link leaves what it points to


def test_two_processes_cannot_work_in_one_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lock = tmp_path / "run/work/lock"
    with only_one(lock), pytest.raises(UserError, match="another process is working in"), only_one(lock):
        pass
    with only_one(lock):
        pass  # free again
    refused = Mock(side_effect=OSError(errno.ENOLCK, "Function not implemented"))
    monkeypatch.setattr("fcntl.flock", refused)  # a file system without locks is no other process
    with only_one(lock):
        pass


@pytest.mark.parametrize("signal", ["hidden", "topk", "online"])
def test_every_signal_trains_and_a_target_whose_values_are_kept_leaves_memory(
    signal: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    opened: list[weakref.ref[Any]] = []
    original, present = Run.open_target, list[bool]()

    def open_target(run: Run, *arguments: Any) -> PreTrainedModel:
        model = original(run, *arguments)
        opened.append(weakref.ref(model))
        return model

    def fit(*arguments: Any, **options: Any) -> Any:
        gc.collect()
        present.append(any(reference() is not None for reference in opened))
        return train(*arguments, **options)

    settings = begun(tiny_settings(tmp_path))
    settings.teacher.signal, train = signal, stages.fit
    monkeypatch.setattr(Run, "open_target", open_target)
    monkeypatch.setattr(stages, "fit", fit)
    made, _, printed = run_tiny(settings)
    assert made == STAGES[2:]
    assert present == [signal == "online"] * 2
    assert ("alpha is off by at most" in printed) == (signal == "topk")


def test_a_training_that_a_callback_ended_is_accounted_as_long_as_it_was(tmp_path: Path) -> None:
    settings = tiny_settings(tmp_path, drafts=[DraftSettings(name="distillspec")])
    settings.training.steps = 40
    stop = {"class_path": "EarlyStopping", "init_args": {"monitor": "validation_loss", "patience": 1, "min_delta": 9.0}}
    settings.trainer.callbacks = [stop]
    record = run_tiny(settings)[1].draft_record("distillspec")
    assert record.account["optimiser_steps"] == record.history[-1]["step"] == 10
    assert record.account["examples"] == 40


def test_without_evaluation_the_draft_is_exported_and_once(tmp_path: Path) -> None:
    settings = tiny_settings(tmp_path, evaluation=False, drafts=[DraftSettings(name="distillspec")])
    console = Console(record=True, width=150)
    run = run_pipeline(begun(settings), console)
    assert not (run.folder / "report.json").exists()
    assert AutoModelForCausalLM.from_pretrained(run.export).num_parameters() > 0
    weights = run.export / "model.safetensors"
    assert measure(run) == {}
    assert "up to date" in console.export_text()
    weights.write_bytes(weights.read_bytes()[:-10])
    (run.export / "README.md").write_text("mine")
    measure(run)
    assert "is made again" in console.export_text()
    assert load_file(weights)
    assert json.loads((run.work / "report.json").read_text())["export"]["model.safetensors"] == weights.stat().st_size
    changed = replace(settings, evaluation=tiny_settings(tmp_path).evaluation)
    assert pipeline.measurement_fingerprint(changed) != pipeline.measurement_fingerprint(settings)
